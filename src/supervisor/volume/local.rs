//! Local PersistentVolumes of a pod: a directory of the node, or the file system of a block device that the pods of the node
//! share.

use std::path::Path;

use podfs_fuse::mount::private::MountPointType;
use tracing::warn;

use super::growth::ExpansionState;
use super::{RefreshFailure, VolumeContext};
use crate::binding::{BoundSource, BoundVolume, Local};
use crate::host::global_mount::GlobalMountUser;
use crate::host::local::{self, LocalSource};
use crate::host::{HostError, HostSource, device};
use crate::manifest::PodView;
use crate::types::mount_options;

/// A local volume, open.
pub(super) struct OpenedLocal {
    pub(super) source: HostSource,
    /// Whether the source is read-only, whatever the claim allows.
    pub(super) read_only: bool,
    /// Warnings about the volume, for the user.
    pub(super) warnings: Vec<String>,
}

/// Opens a local volume for a mount at `path`. If the volume is a block device, mounts its file system first, unless that is
/// mounted for another pod already.
pub(super) fn open(
    setting: &VolumeContext,
    bound: &BoundVolume,
    source: &Local,
    path: &Path,
    pod: &PodView,
) -> Result<OpenedLocal, RefreshFailure> {
    let device = match local::open(&source.path)? {
        LocalSource::Directory(directory) => {
            return Ok(OpenedLocal { source: directory, read_only: false, warnings: ignored_options(source) });
        }
        LocalSource::Device(device) => device,
    };
    let (Some(root), Some(claim)) = (setting.site.root(), setting.mount_points().claim_file()) else {
        return Err(RefreshFailure::temporary(format!(
            "local volume {} is a block device, which the pods of a node share below their root directory; podfs mount has \
             none, so serve the volume with podfs run",
            source.path
        )));
    };
    // podfs records the directories for the mount before `local::mount` makes the root directory. So it removes them all with the
    // pod, even the root directory.
    let expected = setting.mount_points().expect(path, MountPointType::Directory);
    expected.map_err(RefreshFailure::temporary)?;
    let user = GlobalMountUser { uid: pod.identity.uid.as_str(), claim: &claim };
    let (source, read_only) = local::mount(&device, bound, source, &root, user)?;
    Ok(OpenedLocal { source, read_only, warnings: Vec::new() })
}

/// Warnings about mount options of a directory: podfs does not mount it, so only `ro` has an effect.
fn ignored_options(source: &Local) -> Vec<String> {
    let words = source.mount_options.iter().flat_map(|entry| mount_options(entry));
    let ignored = words.filter(|word| !matches!(*word, "" | "ro" | "rw" | "bind" | "defaults"));
    ignored.map(|word| format!("mount option {word:?} has no effect on a directory in podfs")).collect()
}

/// Grows the file system of a device to the size of the PersistentVolume. A directory needs no growth: it has the capacity of the
/// file system that it is in.
pub(super) fn grow(setting: &VolumeContext, bound: &BoundVolume, pod: &PodView, growth: &mut ExpansionState) {
    let (BoundSource::Local(source), Some(root)) = (&bound.source, setting.site.root()) else { return };
    let device = match local::open(&source.path) {
        Ok(LocalSource::Directory(_)) => return growth.succeed(bound, true),
        Ok(LocalSource::Device(device)) => device,
        Err(error) => {
            warn!("{error}; the volume keeps its size");
            return growth.give_up(bound, &error);
        }
    };
    let mount = local::global_mount(&root, &bound.name);
    let Some(claim) = setting.mount_points().claim_file().filter(|_| mount.has_user(pod.identity.uid.as_str())) else {
        return;
    };
    let user = GlobalMountUser { uid: pod.identity.uid.as_str(), claim: &claim };
    // `enter` holds the lock of the mount: several pods may notice the growth at the same moment.
    match mount.enter(user, |held| device::grow(&device, bound.capacity, held.mount_point())) {
        Ok(()) => growth.succeed(bound, true),
        Err(error) => {
            warn!("{error}; the volume keeps its size");
            growth.give_up(bound, &error);
        }
    }
}

/// Ends this pod's use of the device whose file system the pod has at `path`. Does nothing for volumes of other kinds.
pub(super) fn end_use(setting: &VolumeContext, path: &Path) -> Result<(), HostError> {
    let (Some(root), Some(uid)) = (setting.site.root(), setting.site.uid()) else { return Ok(()) };
    let is_local = path.parent().and_then(Path::file_name).is_some_and(|plugin| plugin == local::PLUGIN);
    match path.file_name().and_then(|name| name.to_str()).filter(|_| is_local) {
        Some(name) => local::end_use(&root, name, &uid),
        None => Ok(()),
    }
}
