//! A volume that containers get as a block device (`volumeMode: Block`). Nothing is mounted: the device is held open, and
//! links lead to it.

use std::path::Path;

use podfs_fuse::mount::private::Shape;
use tracing::warn;

use super::growth::{Expansion, Growth};
use super::{Refresh, Setting, Shown, Trouble, driver};
use crate::binding::{self, BoundSource};
use crate::host::block::{self, BlockVolume};
use crate::host::device::BlockDevice;
use crate::host::{HostError, neighbours};
use crate::volume::{Claim, Volume, VolumeSource};

/// A block device of the pod, once its PersistentVolume was found.
pub(super) struct DeviceVolume {
    setting: Setting,
    group: Option<u32>,
    read_only: bool,
    /// Its links, as soon as it is known where they are. An earlier podfs of the pod may have made them.
    links: Option<BlockVolume>,
    /// The device that the pod has, held open.
    device: Option<BlockDevice>,
    growth: Growth,
    warned: Vec<String>,
}

impl DeviceVolume {
    /// Whether a volume is one that containers get as a block device.
    pub(super) fn is_for(spec: &Volume) -> bool {
        matches!(&spec.source, VolumeSource::Claim(claim) if claim.usage.device)
    }

    pub(super) fn new(setting: Setting) -> Self {
        Self {
            setting,
            group: None,
            read_only: false,
            links: None,
            device: None,
            growth: Growth::default(),
            warned: Vec::new(),
        }
    }

    pub(super) fn setting(&self) -> &Setting {
        &self.setting
    }

    /// The link to the device, once it is known where it is to be.
    pub(super) fn path(&self) -> Option<&Path> {
        self.links.as_ref().map(BlockVolume::link)
    }

    pub(super) fn group(&self) -> Option<u32> {
        self.group
    }

    pub(super) fn is_read_only(&self) -> bool {
        self.read_only
    }

    pub(super) fn expansion(&self) -> Option<&Expansion> {
        self.growth.outcome()
    }

    pub(super) fn shown(&self) -> Option<Shown> {
        self.device.as_ref().map(|device| Shown::Device(device.number()))
    }

    /// Finds the device and makes the links, unless that is done.
    pub(super) fn show(&mut self, spec: &Volume, refresh: &Refresh) -> Result<Shown, Trouble> {
        let VolumeSource::Claim(claim) = &spec.source else { unreachable!("only a claim is a block device") };
        if let Some(shown) = self.shown() {
            self.follow_capacity(spec, claim, refresh)?;
            return Ok(shown);
        }
        let device = self.map(spec, claim, refresh)?;
        let shown = Shown::Device(device.number());
        self.device = Some(device);
        self.follow_capacity(spec, claim, refresh)?;
        Ok(shown)
    }

    /// Has the CSI driver grow the device when its PersistentVolume has grown. A local device has the size that it has.
    fn follow_capacity(&mut self, spec: &Volume, claim: &Claim, refresh: &Refresh) -> Result<(), Trouble> {
        let bound = binding::resolve(spec.name.as_str(), claim, &refresh.identity, &refresh.facts, &refresh.objects);
        let Some(bound) = bound.ok().filter(|bound| self.growth.is_due(bound)) else { return Ok(()) };
        match &bound.source {
            BoundSource::Csi(csi) => driver::expand_csi(&self.setting, spec, csi, &bound, refresh, &mut self.growth),
            _ => {
                self.growth.succeed(&bound, false);
                Ok(())
            }
        }
    }

    fn map(&mut self, spec: &Volume, claim: &Claim, refresh: &Refresh) -> Result<BlockDevice, Trouble> {
        let name = spec.name.as_str();
        let bound = binding::resolve(name, claim, &refresh.identity, &refresh.facts, &refresh.objects);
        let bound = bound.map_err(|error| Trouble::Manifests(error.to_string()))?;
        for warning in bound.warnings.iter().filter(|warning| !self.warned.contains(warning)) {
            warn!("volume {name:?}: {warning}");
        }
        self.warned.clone_from(&bound.warnings);
        let (Some(root), Some(claim)) = (self.setting.site.root(), self.setting.mount_points().claim_file()) else {
            return Err(Trouble::Passing("podfs mount shows files, and no block devices; use podfs run".to_owned()));
        };
        let volume = BlockVolume::new(&root, &bound.source.directory(), &bound.name, refresh.identity.uid.as_str());
        if bound.exclusive && neighbours::have_device_of(volume.link()) {
            let text = "volume uses the ReadWriteOncePod access mode and is already in use by another pod";
            return Err(Trouble::Passing(text.to_owned()));
        }
        let device = match &bound.source {
            BoundSource::Local(local) => block::open(Path::new(&local.path))?,
            BoundSource::HostPath(host_path) => block::open(&host_path.path)?,
            BoundSource::Csi(csi) => driver::map_csi(&self.setting, spec, csi, &bound, refresh)?,
            BoundSource::Nfs(..) | BoundSource::Flex(_) => {
                return Err(Trouble::Manifests(format!(
                    "PersistentVolume {:?} has volumeMode Block, and only the kinds local, hostPath and csi have block devices",
                    bound.name
                )));
            }
        };
        self.group = bound.gid;
        self.read_only = bound.read_only || device.is_read_only();
        if let Some(directory) = volume.link().parent() {
            let expected = self.setting.mount_points().expect(directory, Shape::Directory);
            expected.map_err(|error| Trouble::Passing(error.to_string()))?;
        }
        self.links.insert(volume).map(&device, &claim)?;
        Ok(device)
    }

    /// Takes the device away from the pod: removes its links, then closes it.
    pub(super) fn take_down(self) -> Result<(), HostError> {
        let Self { links, device, .. } = self;
        let unmapped = links.map_or(Ok(()), |links| links.unmap());
        drop(device);
        unmapped
    }
}
