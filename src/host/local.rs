//! Local PersistentVolumes: a directory of this node, or a block device of this node, whose file system the pods of the node share.

use std::path::{Component, Path, PathBuf};

use super::device::{self, BlockDevice};
use super::error::OpenFailure;
use super::global_mount::{GlobalMount, GlobalMountUser};
use super::{FileKind, HostError, HostSource};
use crate::binding::{BoundVolume, Local};

/// The kubelet's name for the plugin, as the name of a directory.
pub const PLUGIN: &str = "kubernetes.io~local-volume";
/// The directory for the mounts of devices' file systems, relative to the root directory. It is that of the kubelet.
const MOUNTS: &str = "plugins/kubernetes.io/local-volume/mounts";
/// The directory for the records of devices that podfs formats, relative to the root directory.
const FORMATTING: &str = "plugins/podfs/formatting";

/// The kind of a local volume.
#[derive(Debug)]
pub enum LocalSource {
    /// A directory.
    Directory(HostSource),
    /// A block device.
    Device(BlockDevice),
}

/// Opens the directory or block device at a path.
///
/// # Errors
/// When the path is empty or has `..`, or leads to neither a directory nor a block device (LP-01).
pub fn open(path: &str) -> Result<LocalSource, HostError> {
    if path.is_empty() {
        return Err(HostError::Refused("local volume source is nil or local path is not set".to_owned()));
    }
    let path = Path::new(path);
    if path.components().any(|part| part == Component::ParentDir) {
        return Err(HostError::Refused(format!("invalid path: {} must not contain '..'", path.display())));
    }
    let source = opened(path)?;
    match source.kind() {
        FileKind::Directory => Ok(LocalSource::Directory(source)),
        FileKind::BlockDevice => BlockDevice::open(&source).map(LocalSource::Device),
        _ => Err(HostError::Refused(format!(
            "only directory and block device are supported: {} is neither",
            path.display()
        ))),
    }
}

/// Opens the source at a path.
fn opened(path: &Path) -> Result<HostSource, HostError> {
    let failed = |obstacle: OpenFailure| HostError::Open { what: "local volume", path: path.to_owned(), obstacle };
    HostSource::open(path).map_err(failed)
}

/// The mount of the PersistentVolume `name`, which the pods below the root directory `root` share.
pub fn global_mount(root: &Path, name: &str) -> GlobalMount {
    GlobalMount::new(root, PLUGIN, name, root.join(MOUNTS).join(name))
}

/// Mounts the file system of a device for a pod, unless it is mounted for another pod already. Returns the root of the file system,
/// and whether it is mounted read-only.
///
/// # Errors
/// As [`device::mount`].
pub fn mount(
    device: &BlockDevice,
    bound: &BoundVolume,
    volume: &Local,
    root: &Path,
    user: GlobalMountUser<'_>,
) -> Result<(HostSource, bool), HostError> {
    let Local { fs_type, mount_options, .. } = volume;
    let name = &bound.name;
    let marker = root.join(FORMATTING).join(name);
    let (fs_type, options) = (fs_type.as_deref(), &mount_options[..]);
    let request = device::DeviceMountRequest { fs_type, options, marker: &marker };
    global_mount(root, name).enter(user, |held| {
        let read_only = device::mount(device, request, held)?;
        Ok((opened(held.mount_point())?, read_only))
    })
}

/// Ends the pod's use of a PersistentVolume. If no other pod uses the PersistentVolume, unmounts its file system.
///
/// # Errors
/// When the file system cannot be unmounted.
pub fn end_use(root: &Path, name: &str, uid: &str) -> Result<(), HostError> {
    let mount = global_mount(root, name);
    if !mount.has_user(uid) {
        return Ok(());
    }
    mount.leave(uid, |held| device::unmount(held, root))
}

/// Ends the use of all PersistentVolumes by a pod that has ended. Waits while another process works on one of them. Returns the
/// mount points that stay, each with the error.
pub fn leave_all(root: &Path, uid: &str) -> Vec<(PathBuf, HostError)> {
    for_each_mount(root, |mount| {
        if mount.has_user(uid) {
            mount.leave(uid, |held| device::unmount(held, root))
        } else {
            sweep_unused(mount, root)
        }
    })
}

/// As [`leave_all`], but does not wait: a mount on which another process works stays.
pub fn leave_all_at_once(root: &Path, uid: &str) -> Vec<(PathBuf, HostError)> {
    for_each_mount(root, |mount| {
        if mount.has_user(uid) {
            mount.leave_at_once(uid, |held| device::unmount(held, root))
        } else {
            sweep_unused(mount, root)
        }
    })
}

/// Unmounts the file systems that no pod uses any more. Returns the mount points that stay, and those on which another process
/// works, each with the error.
pub fn sweep(root: &Path) -> Vec<(PathBuf, HostError)> {
    for_each_mount(root, |mount| match mount.sweep(|held| device::unmount(held, root))? {
        true => Ok(()),
        false => Err(mount.in_use()),
    })
}

/// Unmounts the file system of a mount without recorded users: a process of any pod was killed while it removed the records. If
/// another process works on the mount, this is no leftover.
fn sweep_unused(mount: &GlobalMount, root: &Path) -> Result<(), HostError> {
    if mount.has_no_user() {
        mount.sweep(|held| device::unmount(held, root))?;
    }
    Ok(())
}

/// Does a step for each recorded mount. Returns the mount points for which the step failed, each with the error.
fn for_each_mount(root: &Path, step: impl Fn(&GlobalMount) -> Result<(), HostError>) -> Vec<(PathBuf, HostError)> {
    let mounts = GlobalMount::names(root, PLUGIN, None).into_iter().map(|name| global_mount(root, &name));
    let failures = mounts.filter_map(|mount| Some((mount.mount_point().to_owned(), step(&mount).err()?))).collect();
    // A process that was killed may have left this directory empty.
    let _ = std::fs::remove_dir(root.join(FORMATTING));
    GlobalMount::remove_empty(root, PLUGIN);
    failures
}

#[cfg(test)]
mod tests {
    use super::*;

    fn error(path: &str) -> String {
        open(path).expect_err(path).to_string()
    }

    #[test]
    fn lp_01_only_a_directory_or_a_device_will_do() {
        let base = tempfile::tempdir().expect("a directory");
        let file = base.path().join("file");
        std::fs::write(&file, "").expect("a file");
        assert!(open(base.path().to_str().expect("text")).is_ok());
        assert_eq!(error(""), "local volume source is nil or local path is not set");
        assert_eq!(error("/a/../b"), "invalid path: /a/../b must not contain '..'");
        let file = file.to_str().expect("text");
        assert_eq!(error(file), format!("only directory and block device are supported: {file} is neither"));
        assert!(error("/nowhere/at/all").ends_with("cannot be used: it does not exist"));
    }
}
