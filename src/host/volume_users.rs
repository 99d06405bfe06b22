//! The users of a volume: other pods of this node that use the same PersistentVolume. podfs finds them in the mount table, if their podfs has
//! the same root directory and has mounted the volume already.
//!
//! Two pods that start at the same moment do not find each other in the mount table. So if only one pod may use a volume, podfs
//! takes a [`VolumeUsersLock`] before it reads the table, and keeps the lock until its mount is in the table. The kernel releases the
//! lock of a podfs that has ended. For a block device, podfs looks for the links of other pods, and keeps the lock until it has made
//! its own link.

use std::ffi::OsStr;
use std::fs::{File, OpenOptions};
use std::hash::{DefaultHasher, Hash, Hasher};
use std::io;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

use nix::errno::Errno;
use nix::fcntl::{FcntlArg, fcntl};
use podfs_fuse::mount::table::mounts;

use crate::volume::Csi;

/// Whether another pod has mounted the PersistentVolume whose mount point in this pod is `path`.
pub fn another_pod_mounts(path: &Path) -> bool {
    // If the mount table cannot be read, podfs knows of no other pods. The mount of the volume then reports the error.
    let table = mounts().unwrap_or_default();
    let own = VolumePlace::of(path);
    own.is_some_and(|own| {
        table.iter().filter_map(|mounted| VolumePlace::of(&mounted.at)).any(|other| own.is_beside(&other))
    })
}

/// The right to look for other pods with a volume, and to mount the volume. It ends when this is dropped.
#[derive(Debug)]
pub struct VolumeUsersLock {
    _lock: File,
}

impl VolumeUsersLock {
    /// Takes the lock for the volume that this pod will mount at `path`, or to whose device it will make a link there: a lock on one
    /// byte of `file`. Makes the file if it is missing; it stays. Returns `None` if another podfs has the lock.
    ///
    /// # Errors
    /// When the file cannot be made, or the kernel does not lock it.
    pub fn take(file: &Path, path: &Path) -> io::Result<Option<VolumeUsersLock>> {
        let mut options = OpenOptions::new();
        options.read(true).write(true).create(true).truncate(false).mode(0o600).custom_flags(libc::O_NOFOLLOW);
        let lock = options.open(file)?;
        let range = libc::flock {
            l_type: libc::F_WRLCK as libc::c_short,
            l_whence: libc::SEEK_SET as libc::c_short,
            l_start: VolumePlace::of(path).map_or(0, |place| place.number()),
            l_len: 1,
            l_pid: 0,
        };
        match fcntl(&lock, FcntlArg::F_OFD_SETLK(&range)) {
            Ok(_) => Ok(Some(VolumeUsersLock { _lock: lock })),
            Err(Errno::EAGAIN | Errno::EACCES) => Ok(None),
            Err(errno) => Err(errno.into()),
        }
    }
}

/// Whether another pod has the block device to which `link`, `<root>/pods/<uid>/volumeDevices/<kind>/<name>`, will lead.
pub fn another_pod_has_device(link: &Path) -> bool {
    let parts: Option<(PathBuf, &OsStr)> = (|| {
        let pod = link.parent()?.parent()?.parent()?;
        Some((link.strip_prefix(pod).ok()?.to_owned(), pod.file_name()?))
    })();
    let (Some((device, own)), Some(pods)) = (parts, link.ancestors().nth(4)) else { return false };
    let entries = std::fs::read_dir(pods).into_iter().flatten().flatten();
    entries.filter(|entry| entry.file_name() != own).any(|entry| entry.path().join(&device).is_symlink())
}

/// The parts of the path of a volume, `<root>/pods/<uid>/volumes/<kind>/<name>`, or of the link to its device, which is in
/// `volumeDevices`.
struct VolumePlace {
    root: PathBuf,
    uid: Box<OsStr>,
    volume: PathBuf,
}

impl VolumePlace {
    fn of(path: &Path) -> Option<VolumePlace> {
        // The mount of a CSI driver is in the directory `mount` below the volume's.
        let is_of_csi = |above: &&Path| above.ends_with(Csi::DIRECTORY) && path.ends_with("mount");
        let path = path.parent().filter(|at| at.parent().as_ref().is_some_and(is_of_csi)).unwrap_or(path);
        let kind = path.parent()?;
        let volumes = kind.parent()?;
        let pod = volumes.parent()?;
        let pods = pod.parent()?;
        let is_of_volumes = ["volumes", "volumeDevices"].iter().any(|name| volumes.ends_with(name));
        let fits = is_of_volumes && pods.file_name()? == "pods";
        let volume = Path::new(kind.file_name()?).join(path.file_name()?);
        fits.then(|| Some(VolumePlace { root: pods.to_owned(), uid: pod.file_name()?.into(), volume })).flatten()
    }

    /// A number for the volume, the same in each pod: the byte of the lock. If two volumes have the same number by chance, their
    /// pods also wait for each other.
    fn number(&self) -> i64 {
        let mut hasher = DefaultHasher::new();
        (&self.root, &self.volume).hash(&mut hasher);
        i64::try_from(hasher.finish() >> 2).unwrap_or_default()
    }

    /// Whether this is the path of the same volume in another pod.
    fn is_beside(&self, other: &VolumePlace) -> bool {
        self.root == other.root && self.volume == other.volume && self.uid != other.uid
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_pod_at_a_time_holds_the_lock_of_a_volume() {
        let directory = tempfile::tempdir().expect("a directory");
        let file = directory.path().join("lock");
        let path = |pod: &str, volume: &str| PathBuf::from(format!("/k/pods/{pod}/volumes/kubernetes.io~nfs/{volume}"));
        let take =
            |pod: &str, volume: &str| VolumeUsersLock::take(&file, &path(pod, volume)).expect("the file can be locked");
        let first = take("a", "pv-1").expect("it is free");
        assert!(take("b", "pv-1").is_none(), "another pod has the lock");
        assert!(take("b", "pv-2").is_some(), "that is another volume");
        drop(first);
        assert!(take("b", "pv-1").is_some());

        let link =
            |pod: &str, volume: &str| PathBuf::from(format!("/k/pods/{pod}/volumeDevices/kubernetes.io~csi/{volume}"));
        let take =
            |pod: &str, volume: &str| VolumeUsersLock::take(&file, &link(pod, volume)).expect("it can be locked");
        let _first = take("a", "pv-1").expect("it is free");
        assert!(take("b", "pv-1").is_none(), "another pod makes its link");
        assert!(take("b", "pv-2").is_some(), "that is another device");
    }

    #[test]
    fn another_user_has_the_same_volume_in_another_pod() {
        let own = VolumePlace::of(Path::new("/k/pods/a/volumes/kubernetes.io~local-volume/pv-1")).expect("a place");
        let beside = |path: &str| VolumePlace::of(Path::new(path)).is_some_and(|other| own.is_beside(&other));
        assert!(beside("/k/pods/b/volumes/kubernetes.io~local-volume/pv-1"));
        assert!(!beside("/k/pods/a/volumes/kubernetes.io~local-volume/pv-1"));
        assert!(!beside("/k/pods/b/volumes/kubernetes.io~local-volume/pv-2"));
        assert!(!beside("/other/pods/b/volumes/kubernetes.io~local-volume/pv-1"));
        assert!(!beside("/k/pods/b/volumes"));
        let of_csi =
            |pod: &str| VolumePlace::of(Path::new(&format!("/k/pods/{pod}/volumes/kubernetes.io~csi/pv-1/mount")));
        assert!(of_csi("a").expect("a place").is_beside(&of_csi("b").expect("a place")));
        assert!(!beside("/"));
    }
}
