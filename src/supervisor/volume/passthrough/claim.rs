//! The PersistentVolume to which a claim is bound. Its source is of another kind, and the rules of PersistentVolumes apply.

use std::path::Path;
use std::time::Duration;

use tracing::warn;

use super::host_path::{self, OpenedPath, PathFollower};
use super::{
    ContainerAccess, MountPlan, PassthroughParts, PassthroughSource, PodEnd, RefreshFailure, VolumeContext, access, nfs,
};
use crate::binding::{self, BoundSource, BoundVolume};
use crate::host::device::BlockDevice;
use crate::host::fs_group::{self, OwnershipObserver};
use crate::host::volume_users::{self, VolumeUsersLock};
use crate::host::{HostError, HostSource};
use crate::manifest::PodView;
use crate::supervisor::volume::driver::{self, Republication, expand_csi};
use crate::supervisor::volume::failure::RefreshCause;
use crate::supervisor::volume::growth::{Expansion, ExpansionState};
use crate::supervisor::volume::label::label;
use crate::supervisor::volume::local;
use crate::volume::{Claim, Volume};

/// The kubelet's text for a pod that has to wait, because another pod uses the volume.
pub(in crate::supervisor::volume) const IN_USE: &str =
    "volume uses the ReadWriteOncePod access mode and is already in use by another pod";
/// The file in the run directory that podfs locks while it mounts a volume that one pod alone may use.
const EXCLUSIVE: &str = "exclusive.lock";

/// A volume with a claim, `persistentVolumeClaim` or `ephemeral`.
pub(in crate::supervisor::volume) struct ClaimSource {
    claim: Claim,
    /// The last warnings about the PersistentVolume.
    warned: Vec<String>,
    growth: ExpansionState,
    /// The disk that the volume shows, if the path of a hostPath leads to one. While it is open, the kernel gives its number to no
    /// other disk.
    device: Option<BlockDevice>,
    follower: PathFollower,
    republication: Republication,
}

impl ClaimSource {
    pub(in crate::supervisor::volume) fn new(claim: Claim) -> Self {
        Self {
            claim,
            warned: Vec::new(),
            growth: ExpansionState::default(),
            device: None,
            follower: PathFollower::default(),
            republication: Republication::default(),
        }
    }

    /// Grows the file system of a block device, or makes a CSI driver do so, when the PersistentVolume has grown.
    fn follow_capacity(&mut self, setting: &VolumeContext, spec: &Volume, pod: &PodView) -> Result<(), RefreshFailure> {
        let bound = resolve(spec, &self.claim, pod);
        let Some(bound) = bound.ok().filter(|bound| self.growth.is_due(bound)) else { return Ok(()) };
        match &bound.source {
            BoundSource::Local(_) => local::grow(setting, &bound, pod, &mut self.growth),
            BoundSource::Csi(csi) => expand_csi(setting, spec, csi, &bound, pod, &mut self.growth)?,
            _ => self.growth.succeed(&bound, false),
        }
        Ok(())
    }

    /// Calls the CSI driver again, if it has `requiresRepublish`.
    fn publish_again(&mut self, setting: &VolumeContext, spec: &Volume, pod: &PodView) -> Result<(), RefreshFailure> {
        // If the claim is no longer bound, the mounted volume stays as it is.
        let Ok(bound) = resolve(spec, &self.claim, pod) else { return Ok(()) };
        let BoundSource::Csi(csi) = &bound.source else { return Ok(()) };
        self.republication.publish_again(setting, spec, csi, Some(&bound), pod)
    }
}

impl PassthroughSource for ClaimSource {
    fn find(
        &mut self,
        volume: &mut PassthroughParts,
        spec: &Volume,
        pod: &PodView,
    ) -> Result<MountPlan, RefreshFailure> {
        let name = spec.name.as_str();
        let bound = resolve(spec, &self.claim, pod)?;
        let path = volume.place(&bound.source.directory(), &bound.name);
        volume.group = bound.gid;
        let setting = &volume.setting;
        let lock = lock_exclusive(setting, &path, bound.exclusive)?;
        let shared = volume_users::another_pod_mounts(&path);
        if bound.exclusive && shared {
            return Err(RefreshFailure::temporary(IN_USE));
        }
        let mut access = access(bound.read_only);
        let mut warnings = bound.warnings.clone();
        let mut selinux_context = None;
        let source = match &bound.source {
            BoundSource::HostPath(source) => {
                let OpenedPath { source, device } = host_path::open(setting, spec, source, &path)?;
                self.device = device;
                source
            }
            BoundSource::Nfs(source, options) => {
                return Ok(MountPlan { lock, ..nfs::plan(setting, spec, path, source, options, access, pod)? });
            }
            BoundSource::Csi(csi) => {
                let (plan, republication) = driver::mount_csi(setting, spec, path, csi, Some(&bound), pod)?;
                self.republication = republication;
                return Ok(MountPlan { lock, ..plan });
            }
            BoundSource::Flex(flex) => {
                let plan = driver::mount_flex(setting, spec, path, flex, Some(&bound), pod)?;
                return Ok(MountPlan { lock, ..plan });
            }
            BoundSource::Local(local) => {
                let opened = local::open(setting, &bound, local, &path, pod)?;
                let source = opened.source;
                warnings.extend(opened.warnings);
                if opened.read_only {
                    access = ContainerAccess::ReadOnly;
                }
                if let (Some(group), ContainerAccess::ReadWrite) = (pod.facts.fs_group, access) {
                    give_to_group(&source, group, shared, spec, &bound, pod, &setting.ownership)?;
                }
                selinux_context = label(pod, &setting.site);
                source
            }
        };
        let is_path = matches!(bound.source, BoundSource::HostPath(_));
        for warning in warnings.iter().filter(|warning| !self.warned.contains(warning)) {
            warn!("volume {name:?}: {warning}");
        }
        self.warned = warnings;
        Ok(MountPlan { lock, selinux_context, ..MountPlan::of_host(spec, path, source, access, is_path)? })
    }

    fn follow_path(
        &mut self,
        _: &PassthroughParts,
        spec: &Volume,
        pod: &PodView,
    ) -> Result<Option<HostSource>, RefreshFailure> {
        match &resolve(spec, &self.claim, pod)?.source {
            BoundSource::HostPath(source) if self.device.is_none() => self.follower.follow(source),
            _ => Ok(None),
        }
    }

    fn complete(&mut self, volume: &PassthroughParts, spec: &Volume, pod: &PodView) -> Result<(), RefreshFailure> {
        self.follow_capacity(&volume.setting, spec, pod)
    }

    fn follow(&mut self, volume: &PassthroughParts, spec: &Volume, pod: &PodView) -> Result<(), RefreshFailure> {
        let growth = self.follow_capacity(&volume.setting, spec, pod);
        self.publish_again(&volume.setting, spec, pod)?;
        growth
    }

    fn expansion(&self) -> Option<&Expansion> {
        self.growth.outcome()
    }

    fn republish_in(&self) -> Option<Duration> {
        self.republication.next()
    }

    fn take_down(self: Box<Self>, volume: &PassthroughParts, name: &str, end: PodEnd) {
        let released = volume.path.as_deref().map_or(Ok(()), |path| local::end_use(&volume.setting, path));
        released.unwrap_or_else(|error| warn!("volume {name:?}: {error}"));
        if self.device.is_some() && end == PodEnd::Stopped {
            host_path::forget_disk(&volume.setting, name);
        }
    }
}

/// The PersistentVolume to which a volume's claim is bound.
pub(in crate::supervisor::volume) fn resolve(
    spec: &Volume,
    claim: &Claim,
    pod: &PodView,
) -> Result<BoundVolume, RefreshFailure> {
    let bound = binding::resolve(spec.name.as_str(), claim, &pod.identity, &pod.facts, &pod.known.objects);
    bound.map_err(RefreshFailure::manifests)
}

/// The lock for a volume that one pod alone may use, while podfs mounts it at `path`, or makes a link to its device there; `None`
/// for other volumes.
pub(in crate::supervisor::volume) fn lock_exclusive(
    setting: &VolumeContext,
    path: &Path,
    is_exclusive: bool,
) -> Result<Option<VolumeUsersLock>, RefreshFailure> {
    let run_directory = setting.mount_points().run_directory().and_then(Path::parent).map(Path::to_owned);
    // A volume without a pod (`podfs mount`) needs no lock.
    let Some(run_directory) = run_directory.filter(|_| is_exclusive) else { return Ok(None) };
    let file = run_directory.join(EXCLUSIVE);
    match VolumeUsersLock::take(&file, path) {
        Ok(Some(turn)) => Ok(Some(turn)),
        Ok(None) => Err(RefreshFailure::temporary(IN_USE)),
        Err(cause) => Err(RefreshFailure::Temporary(RefreshCause::Lock { file, cause })),
    }
}

/// Gives a PersistentVolume to the fsGroup of the first pod on the node that uses it. For pods that use it at the same time
/// (`shared`), it stays as it is (LP-03).
fn give_to_group(
    source: &HostSource,
    group: u32,
    shared: bool,
    spec: &Volume,
    bound: &BoundVolume,
    pod: &PodView,
    observer: &OwnershipObserver,
) -> Result<(), HostError> {
    let volume = spec.name.as_str();
    if !shared {
        return fs_group::give_to_group(source, group, pod.facts.fs_group_policy, volume, observer);
    }
    match fs_group::group_of(source).filter(|other| *other != group) {
        Some(other) => observer.is_shared(volume, &bound.name, group, other),
        None => observer.agrees(volume),
    }
    Ok(())
}
