//! A volume that containers get as a block device (`volumeMode: Block`). podfs mounts nothing: it holds the device
//! open, and makes symbolic links to it.

use std::path::Path;
use std::time::Instant;

use podfs_fuse::mount::MountError;
use podfs_fuse::mount::private::MountPointType;
use tracing::warn;

use super::growth::{Expansion, ExpansionState};
use super::mounter::Mounter;
use super::passthrough::claim::{IN_USE, lock_exclusive, resolve};
use super::{PodEnd, RefreshFailure, ShownContent, VolumeContext, driver};
use crate::binding::BoundSource;
use crate::host::block::{self, BlockVolume};
use crate::host::device::BlockDevice;
use crate::host::volume_users;
use crate::manifest::PodView;
use crate::supervisor::volume::adopted::KeptVolume;
use crate::volume::{Claim, Volume};

/// A block device for the pod.
pub(super) struct DeviceVolume {
    claim: Claim,
    setting: VolumeContext,
    group: Option<u32>,
    read_only: bool,
    /// The symbolic links, once their paths are known. An earlier podfs of the pod may have made them.
    links: Option<BlockVolume>,
    /// The device that the pod has, held open.
    device: Option<BlockDevice>,
    growth: ExpansionState,
    /// The last warnings about the PersistentVolume.
    warned: Vec<String>,
}

impl DeviceVolume {
    pub(super) fn new(claim: Claim, setting: VolumeContext) -> Self {
        Self {
            claim,
            setting,
            group: None,
            read_only: false,
            links: None,
            device: None,
            growth: ExpansionState::default(),
            warned: Vec::new(),
        }
    }

    /// Makes the CSI driver grow the device when its PersistentVolume has grown. The size of a local device does not
    /// change.
    fn follow_capacity(&mut self, spec: &Volume, pod: &PodView) -> Result<(), RefreshFailure> {
        let Some(bound) = resolve(spec, &self.claim, pod).ok().filter(|bound| self.growth.is_due(bound)) else {
            return Ok(());
        };
        match &bound.source {
            BoundSource::Csi(csi) => driver::expand_csi(&self.setting, spec, csi, &bound, pod, &mut self.growth),
            _ => {
                self.growth.succeed(&bound, false);
                Ok(())
            }
        }
    }

    /// Finds and opens the device, and makes the links.
    fn map(&mut self, spec: &Volume, pod: &PodView) -> Result<BlockDevice, RefreshFailure> {
        let name = spec.name.as_str();
        let bound = resolve(spec, &self.claim, pod)?;
        for warning in bound.warnings.iter().filter(|warning| !self.warned.contains(warning)) {
            warn!("volume {name:?}: {warning}");
        }
        self.warned.clone_from(&bound.warnings);
        let (Some(root), Some(claim)) = (self.setting.site.root(), self.setting.mount_points().claim_file()) else {
            return Err(RefreshFailure::temporary("podfs mount shows files, and no block devices; use podfs run"));
        };
        let volume = BlockVolume::new(&root, &bound.source.directory(), &bound.name, pod.identity.uid.as_str());
        let _until_the_links_are_made = lock_exclusive(&self.setting, volume.link(), bound.exclusive)?;
        if bound.exclusive && volume_users::another_pod_has_device(volume.link()) {
            return Err(RefreshFailure::temporary(IN_USE));
        }
        let device = match &bound.source {
            BoundSource::Local(local) => block::open(Path::new(&local.path))?,
            BoundSource::HostPath(host_path) => block::open(&host_path.path)?,
            BoundSource::Csi(csi) => driver::map_csi(&self.setting, spec, csi, &bound, pod)?,
            BoundSource::Nfs(..) | BoundSource::Flex(_) => {
                return Err(RefreshFailure::manifests(format!(
                    "PersistentVolume {:?} has volumeMode Block, and only the kinds local, hostPath and csi have block devices",
                    bound.name
                )));
            }
        };
        self.group = bound.gid;
        self.read_only = bound.read_only || device.is_read_only();
        if let Some(directory) = volume.link().parent() {
            let expected = self.setting.mount_points().expect(directory, MountPointType::Directory);
            expected.map_err(RefreshFailure::temporary)?;
        }
        self.links.insert(volume).map(&device, &claim)?;
        Ok(device)
    }
}

impl Mounter for DeviceVolume {
    fn setting(&self) -> &VolumeContext {
        &self.setting
    }

    /// The path of the link to the device, once it is known.
    fn path(&self) -> Option<&Path> {
        self.links.as_ref().map(BlockVolume::link)
    }

    fn group(&self) -> Option<u32> {
        self.group
    }

    fn is_read_only(&self) -> bool {
        self.read_only
    }

    fn expansion(&self) -> Option<&Expansion> {
        self.growth.outcome()
    }

    fn shown(&self) -> Option<ShownContent> {
        self.device.as_ref().map(|device| ShownContent::Device(device.number()))
    }

    /// Does nothing: a server does not serve block devices, so an adopted volume of this name is of another kind.
    fn adopt(&mut self, _: KeptVolume) {}

    /// Finds the device and makes the links, unless this process has done so already.
    fn show(&mut self, spec: &Volume, pod: &PodView, _: Option<Instant>) -> Result<ShownContent, RefreshFailure> {
        if let Some(shown) = self.shown() {
            self.follow_capacity(spec, pod)?;
            return Ok(shown);
        }
        let device = self.map(spec, pod)?;
        let shown = ShownContent::Device(device.number());
        self.device = Some(device);
        self.follow_capacity(spec, pod)?;
        Ok(shown)
    }

    /// Releases the device: removes the links, then closes the device.
    fn take_down(self: Box<Self>, volume: &str, _: PodEnd) -> Result<(), MountError> {
        let Self { links, device, .. } = *self;
        links.map_or(Ok(()), |links| links.unmap()).unwrap_or_else(|error| warn!("volume {volume:?}: {error}"));
        drop(device);
        Ok(())
    }
}
