//! Mounting the file system of a device, and unmounting it.
//!
//! The kernel first makes the mount without attaching it (`fsmount(2)`). If podfs is killed before it attaches the mount, the
//! kernel drops the mount with its descriptor.

use std::fs::{self, DirBuilder};
use std::io::ErrorKind;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::DirBuilderExt;
use std::path::Path;
use std::time::{Duration, Instant};

use podfs_fuse::mount::table::mounts_at;
use rustix::fs::CWD;
use rustix::io::Errno;
use rustix::mount::{
    FsMountFlags, FsOpenFlags, MoveMountFlags, UnmountFlags, fsconfig_create, fsconfig_set_flag, fsconfig_set_string,
    fsmount, fsopen, move_mount, unmount as umount,
};
use tracing::warn;

use super::BlockDevice;
use super::options::DeviceMountOptions;
use crate::host::HostError;
use crate::host::global_mount::LockedGlobalMount;

/// How long a mount may stay busy after its last pod has ended: the pod's server has to close its files first.
const BUSY_TIMEOUT: Duration = Duration::from_secs(2);
/// The pause between two attempts to unmount.
const PAUSE: Duration = Duration::from_millis(10);

/// Mounts a device at `place`.
///
/// # Errors
/// When the kernel refuses an option, the file system or the mount point.
pub(super) fn mount(
    device: &BlockDevice,
    kind: &str,
    options: &DeviceMountOptions,
    read_only: bool,
    place: &Path,
) -> Result<(), HostError> {
    let mounted = make(device, kind, options, read_only)?;
    let failed = |cause: std::io::Error| HostError::system("mount at", place, cause);
    DirBuilder::new().recursive(true).mode(0o750).create(place).map_err(failed)?;
    move_mount(mounted.as_fd(), c"", CWD, place, MoveMountFlags::MOVE_MOUNT_F_EMPTY_PATH)
        .map_err(|errno| failed(errno.into()))
}

/// Makes the mount of a device, which is attached nowhere yet.
fn make(device: &BlockDevice, kind: &str, options: &DeviceMountOptions, read_only: bool) -> Result<OwnedFd, HostError> {
    let path = device.path();
    let refused = |problem: String| HostError::Refused(format!("cannot mount {}: {problem}", path.display()));
    let failed = |errno: Errno| HostError::failed(format!("cannot mount {}", path.display()), errno);
    let context = fsopen(kind, FsOpenFlags::FSOPEN_CLOEXEC).map_err(|errno| match errno {
        Errno::NODEV => refused(format!("this kernel has no file system {kind}; load its module")),
        errno => HostError::failed(format!("cannot mount {}: file system {kind}", path.display()), errno),
    })?;
    let context = context.as_fd();
    for (key, value) in &options.parameters {
        let set = match value {
            Some(value) => fsconfig_set_string(context, key.as_str(), value.as_str()),
            None => fsconfig_set_flag(context, key.as_str()),
        };
        set.map_err(|errno| {
            let option = value.as_ref().map_or(key.clone(), |value| format!("{key}={value}"));
            refused(format!("{kind} does not take the mount option {option:?} ({errno}); correct the PersistentVolume"))
        })?;
    }
    if read_only {
        fsconfig_set_flag(context, "ro").map_err(failed)?;
    }
    if !device.is_at_path() {
        return Err(refused("its path leads to another device by now; podfs tries again".to_owned()));
    }
    fsconfig_set_string(context, "source", path).map_err(failed)?;
    fsconfig_create(context).map_err(|errno| match errno {
        Errno::BUSY => refused("the node uses it already; give the volume another device".to_owned()),
        Errno::INVAL => refused(format!(
            "the kernel does not take these mount options, or finds no intact {kind} file system; see the kernel's log"
        )),
        // `UCLEAN` is EUCLEAN.
        Errno::UCLEAN | Errno::IO | Errno::BADMSG => {
            refused(format!("its {kind} file system is damaged ({errno}); repair it with fsck, see the kernel's log"))
        }
        Errno::ROFS | Errno::ACCESS => refused(format!(
            "its {kind} file system would have to be written to first, and the device is read-only; make it writable"
        )),
        errno => HostError::Failed {
            what: format!("cannot mount {}", path.display()),
            cause: errno.into(),
            advice: "; see the kernel's log",
        },
    })?;
    let mut attributes = options.attributes;
    attributes.set(rustix::mount::MountAttrFlags::MOUNT_ATTR_RDONLY, read_only);
    fsmount(context, FsMountFlags::FSMOUNT_CLOEXEC, attributes).map_err(failed)
}

/// Checks that the mount at `place` is of this device.
///
/// # Errors
/// When the mount is of another device.
pub(super) fn check_mounted(device: &BlockDevice, place: &Path) -> Result<(), HostError> {
    let found = fs::canonicalize(place)
        .and_then(|place| mounts_at(&place))
        .map_err(|cause| HostError::system("look at", place, cause))?;
    let Some(mounted) = found.last() else { return Ok(()) };
    let (major, minor) = device.number();
    // The mount table has a device number of btrfs itself, and the path of its device.
    let is_same = mounted.device == format!("{major}:{minor}") || Path::new(&mounted.source) == device.path();
    if is_same {
        return Ok(());
    }
    Err(HostError::Refused(format!(
        "{} is mounted at {}, and the volume's path leads to {} now; podfs mounts it when the pods that use the other device \
         have gone",
        mounted.source,
        place.display(),
        device.path().display()
    )))
}

/// Whether the mount at `place` is read-only.
pub(super) fn is_read_only(place: &Path) -> Result<bool, HostError> {
    let found = fs::canonicalize(place).and_then(|place| mounts_at(&place));
    let found = found.map_err(|cause| HostError::system("look at", place, cause))?;
    Ok(found.last().is_some_and(|mounted| mounted.read_only))
}

/// Unmounts a global mount, and removes the mount point with the empty directories above it up to `top`. If the mount stays busy,
/// unmounts it lazily: the device is free when the last process that uses the mount has closed its files.
///
/// # Errors
/// When the kernel does not unmount it.
pub fn unmount(held: &LockedGlobalMount<'_>, top: &Path) -> Result<(), HostError> {
    let place = held.mount_point();
    let failed = |cause: std::io::Error| HostError::system("unmount", place, cause);
    let deadline = Instant::now() + BUSY_TIMEOUT;
    while held.is_mounted().map_err(failed)? {
        match umount(place, UnmountFlags::NOFOLLOW) {
            Ok(()) => {}
            Err(Errno::BUSY) if Instant::now() < deadline => std::thread::sleep(PAUSE),
            Err(Errno::BUSY) => {
                warn!(
                    "a process of the node still uses {}; the kernel unmounts it when that process ends",
                    place.display()
                );
                umount(place, UnmountFlags::DETACH | UnmountFlags::NOFOLLOW).map_err(|errno| failed(errno.into()))?;
            }
            Err(errno) => return Err(failed(errno.into())),
        }
    }
    for directory in place.ancestors().take_while(|directory| *directory != top) {
        // A directory that is not empty stays, and so do its parents.
        if !is_removed(directory) {
            break;
        }
    }
    Ok(())
}

/// Removes an empty directory. Returns whether it is gone. For a moment after an unmount, the kernel may still treat the directory
/// as a mount point.
fn is_removed(directory: &Path) -> bool {
    for _ in 0..50 {
        match fs::remove_dir(directory) {
            Ok(()) => return true,
            Err(error) if error.kind() == ErrorKind::ResourceBusy => std::thread::sleep(PAUSE / 10),
            Err(error) => return error.kind() == ErrorKind::NotFound,
        }
    }
    false
}
