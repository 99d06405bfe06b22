//! The directories of the kubelet at which volumes appear. All calls here may block on a file system, except
//! [`KubeletRoot::mounted`], which reads only the mount table.
//!
//! 1. podfs opens a path from the kubelet's directory without following symbolic links, and uses the descriptor from then on. So
//!    a process that can write to a directory on the path cannot make podfs mount or unmount elsewhere.
//! 2. podfs makes and removes the target; the kubelet makes and removes the directories above it.
//! 3. The mount at a target is a clone of the volume's mount. After the supervisor has mounted the volume again, podfs mounts
//!    another clone on top. The clone propagates to containers whose mounts are slaves of the target's mount (`HostToContainer`).

use std::io::{self, ErrorKind};
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::path::{Path, PathBuf};

use podfs_fuse::mount::bind::{ClonePropagation, bind_alone};
use podfs_fuse::mount::private::ContainerAccess;
use podfs_fuse::mount::table::{FS_TYPE, MountTableEntry, mounts_at};
use rustix::fs::{
    AtFlags, CWD, FileType, Mode, OFlags, ResolveFlags, mkdirat, open, openat, openat2, statat, statfs, unlinkat,
};
use rustix::io::Errno;
use rustix::mount::{MoveMountFlags, UnmountFlags, move_mount, unmount};

/// The mode of a target before a volume is mounted on it, as the kubelet's own directories of volumes.
const MODE: u32 = 0o750;
/// How many mounts podfs unmounts at one target before it gives up.
const MAX_LAYERS: usize = 64;

/// The directory of a kubelet.
#[derive(Clone, Debug)]
pub struct KubeletRoot {
    path: PathBuf,
    /// The same without symbolic links, as mount tables have it.
    real: PathBuf,
}

/// Why a target cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum TargetError {
    /// The target, or a directory above it, is a symbolic link or another file that is no directory.
    #[error("target_path {}: it or a directory above it is a symbolic link or no directory; podfs follows no links there", .0.display())]
    NoDirectory(PathBuf),
    /// A system call failed.
    #[error("cannot {what} {}: {cause}", .path.display())]
    Failed {
        /// The step that failed.
        what: &'static str,
        /// The path of the step.
        path: PathBuf,
        /// The error of the system call.
        #[source]
        cause: io::Error,
    },
}

/// The usage of a file system.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TargetUsage {
    /// Bytes: available, total, used.
    pub bytes: [i64; 3],
    /// Inodes: available, total, used.
    pub inodes: [i64; 3],
}

/// Why a directory does not belong to a kubelet.
#[derive(Debug, thiserror::Error)]
#[error("{} is not the directory of a kubelet: {reason}; give its --root-dir with --kubelet-root", .path.display())]
pub struct NoKubelet {
    path: PathBuf,
    #[source]
    reason: NoKubeletReason,
}

#[derive(Debug, thiserror::Error)]
enum NoKubeletReason {
    #[error("{0}")]
    Path(#[source] io::Error),
    #[error("it has no directory pods")]
    NoPods,
}

impl KubeletRoot {
    /// The directory of a kubelet, which must have a directory `pods`.
    ///
    /// # Errors
    /// When the directory, or `pods` in it, is missing.
    pub fn open(path: &Path) -> Result<KubeletRoot, NoKubelet> {
        let absolute = std::path::absolute(path).unwrap_or_else(|_| path.to_owned());
        let wrong = |reason| NoKubelet { path: path.to_owned(), reason };
        let real = absolute.canonicalize().map_err(|error| wrong(NoKubeletReason::Path(error)))?;
        match real.join("pods").is_dir() {
            true => Ok(KubeletRoot { path: absolute, real }),
            false => Err(wrong(NoKubeletReason::NoPods)),
        }
    }

    /// Its path, as it was given: targets begin with it.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Whether the kubelet no longer has a directory of the pod that this target is in. False for a target outside of
    /// that directory.
    pub fn has_lost_pod(&self, target: &Path, uid: &str) -> bool {
        let pod = self.path.join("pods").join(uid);
        target.starts_with(&pod) && matches!(pod.symlink_metadata(), Err(error) if error.kind() == ErrorKind::NotFound)
    }

    /// The mounts at a target, the topmost last, from the mount table: this sends no request to a file system.
    ///
    /// # Errors
    /// When the table cannot be read.
    pub fn mounted(&self, target: &Path) -> io::Result<Vec<MountTableEntry>> {
        mounts_at(&self.real(target))
    }

    /// Checks that podfs can make or use a target.
    ///
    /// # Errors
    /// When it is no directory, or the directory above it cannot be opened.
    pub fn check(&self, target: &Path) -> Result<(), TargetError> {
        let (parent, name) = self.parent(target)?;
        match statat(&parent, &name, AtFlags::SYMLINK_NOFOLLOW) {
            Ok(found) if FileType::from_raw_mode(found.st_mode) != FileType::Directory => {
                Err(TargetError::NoDirectory(target.to_owned()))
            }
            // It does not exist, or is the mount of a dead file system.
            _ => Ok(()),
        }
    }

    /// Mounts the volume at `source` at the target, unless it is mounted there already.
    ///
    /// # Errors
    /// When the target cannot be made, or the kernel refuses.
    pub fn mount(&self, source: &Path, target: &Path, access: ContainerAccess) -> Result<(), TargetError> {
        let of_volume = device(source).map_err(failed("find the volume at", source))?;
        let layers = self.mounted(target).map_err(failed("look at", target))?;
        if of_volume.is_some() && layers.last().map(|top| &top.device) == of_volume.as_ref() {
            return Ok(());
        }
        let (parent, name) = self.parent(target)?;
        match mkdirat(&parent, &name, Mode::from_raw_mode(MODE)) {
            Ok(()) | Err(Errno::EXIST) => {}
            Err(errno) => return Err(failed("make", target)(errno.into())),
        }
        // `O_PATH` opens the mount at the target without a request to its server.
        let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let at = openat(&parent, &name, flags, Mode::empty()).map_err(|errno| match errno {
            Errno::LOOP | Errno::NOTDIR => TargetError::NoDirectory(target.to_owned()),
            errno => failed("open", target)(errno.into()),
        })?;
        let volume = open(source, flags, Mode::empty()).map_err(|errno| failed("open", source)(errno.into()))?;
        let clone = bind_alone(volume.as_fd(), access, ClonePropagation::Slave)
            .map_err(|error| failed("mount", target)(io::Error::other(error)))?;
        let move_flags = MoveMountFlags::MOVE_MOUNT_F_EMPTY_PATH | MoveMountFlags::MOVE_MOUNT_T_EMPTY_PATH;
        move_mount(&clone, c"", &at, c"", move_flags).map_err(|errno| failed("mount on", target)(errno.into()))
    }

    /// Unmounts the target, and removes it. At a target that podfs has not recorded, unmounts only mounts of podfs.
    ///
    /// # Errors
    /// When the target is not empty, is no directory, or the kernel refuses. A target that does not exist is no error.
    pub fn unmount(&self, target: &Path, is_known: bool) -> Result<(), TargetError> {
        let failed = |what| move |cause: io::Error| TargetError::Failed { what, path: target.to_owned(), cause };
        let (parent, name) = match self.parent(target) {
            Err(TargetError::Failed { cause, .. }) if cause.kind() == ErrorKind::NotFound => return Ok(()),
            opened => opened?,
        };
        let path = PathBuf::from(format!("/proc/self/fd/{}", parent.as_raw_fd())).join(&name);
        for _ in 0..MAX_LAYERS {
            let top = self.mounted(target).map_err(failed("look at"))?.pop();
            if top.is_none_or(|top| !is_known && top.fs_type != FS_TYPE) {
                break;
            }
            match unmount(&path, UnmountFlags::DETACH | UnmountFlags::NOFOLLOW) {
                Ok(()) => {}
                // Nothing is mounted there.
                Err(Errno::INVAL | Errno::NOENT) => break,
                Err(errno) => return Err(failed("unmount")(errno.into())),
            }
        }
        match unlinkat(&parent, &name, AtFlags::REMOVEDIR) {
            Ok(()) | Err(Errno::NOENT) => Ok(()),
            Err(Errno::NOTDIR) => Err(TargetError::NoDirectory(target.to_owned())),
            Err(errno) => Err(failed("remove")(errno.into())),
        }
    }

    /// The usage of the volume at the target. Blocks for as long as the volume does.
    ///
    /// # Errors
    /// When the file system does not report it.
    pub fn usage(&self, target: &Path) -> io::Result<TargetUsage> {
        let status = statfs(self.real(target))?;
        let number = |blocks: u64, size: i64| i64::try_from(blocks).unwrap_or(i64::MAX).saturating_mul(size);
        let size = status.f_bsize.max(1);
        let (free, total) = (number(status.f_bfree, size), number(status.f_blocks, size));
        let (free_inodes, inodes) = (number(status.f_ffree, 1), number(status.f_files, 1));
        Ok(TargetUsage {
            bytes: [number(status.f_bavail, size), total, total.saturating_sub(free).max(0)],
            inodes: [free_inodes, inodes, inodes.saturating_sub(free_inodes).max(0)],
        })
    }

    fn real(&self, target: &Path) -> PathBuf {
        target.strip_prefix(&self.path).map_or_else(|_| target.to_owned(), |below| self.real.join(below))
    }

    /// The directory above a target, opened without following a link, and the target's name in it.
    fn parent(&self, target: &Path) -> Result<(OwnedFd, PathBuf), TargetError> {
        let no_directory = || TargetError::NoDirectory(target.to_owned());
        let below = target.strip_prefix(&self.path).map_err(|_| no_directory())?;
        let (above, name) = (below.parent().ok_or_else(no_directory)?, below.file_name().ok_or_else(no_directory)?);
        let failed = |errno: Errno| match errno {
            Errno::LOOP | Errno::NOTDIR | Errno::XDEV => no_directory(),
            errno => {
                TargetError::Failed { what: "open the directory of", path: target.to_owned(), cause: errno.into() }
            }
        };
        let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let root = openat(CWD, &self.real, flags, Mode::empty()).map_err(failed)?;
        if above.as_os_str().is_empty() {
            return Ok((root, name.into()));
        }
        let resolve = ResolveFlags::BENEATH | ResolveFlags::NO_SYMLINKS | ResolveFlags::NO_MAGICLINKS;
        let parent = openat2(&root, above, flags, Mode::empty(), resolve).map_err(failed)?;
        Ok((parent, name.into()))
    }
}

/// The device number of the file system that is mounted at a path, as the mount table has it.
///
/// # Errors
/// When the table cannot be read.
pub fn device(path: &Path) -> io::Result<Option<String>> {
    let real = match (path.parent(), path.file_name()) {
        (Some(parent), Some(name)) => parent.canonicalize()?.join(name),
        _ => path.to_owned(),
    };
    Ok(mounts_at(&real)?.pop().map(|top| top.device))
}

fn failed(what: &'static str, path: &Path) -> impl Fn(io::Error) -> TargetError + use<> {
    let path = path.to_owned();
    move |cause| TargetError::Failed { what, path: path.clone(), cause }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_pod_is_lost_when_its_own_directory_is_gone_with_the_target_in_it() {
        let kubelet = tempfile::tempdir().expect("a directory");
        std::fs::create_dir_all(kubelet.path().join("pods/here")).expect("a directory");
        let root = KubeletRoot::open(kubelet.path()).expect("a kubelet's");
        let target = |pod: &str| kubelet.path().join("pods").join(pod).join("volumes/kubernetes.io~csi/config/mount");
        assert!(!root.has_lost_pod(&target("here"), "here"));
        assert!(root.has_lost_pod(&target("gone"), "gone"));
        assert!(!root.has_lost_pod(&kubelet.path().join("elsewhere/mount"), "gone"), "as csi-sanity publishes");
    }
}
