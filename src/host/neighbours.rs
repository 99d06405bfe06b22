//! Other pods of this node that use the same PersistentVolume, as the mount table shows them: their podfs has the same
//! root directory, and has mounted the volume already.
//!
//! Two pods that start at the same moment do not see each other there. If only one pod may use a volume, its podfs therefore
//! takes a [`NeighbourLock`] before it reads the table, and keeps it until its mount is in the table. The kernel ends the lock
//! of a dead podfs.

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

/// Whether another pod has mounted the volume of the mount point `path`.
pub fn has_neighbour(path: &Path) -> bool {
    // Without a mount table there are no known neighbours; the mount itself will report the error.
    let table = mounts().unwrap_or_default();
    let own = VolumePlace::of(path);
    own.is_some_and(|own| {
        table.iter().filter_map(|mounted| VolumePlace::of(&mounted.at)).any(|other| own.is_beside(&other))
    })
}

/// The right to look for neighbours of a volume, and to mount it. It ends when this is dropped.
#[derive(Debug)]
pub struct NeighbourLock {
    _lock: File,
}

impl NeighbourLock {
    /// Takes the turn for the volume that is to be mounted at `path`, by a lock of one byte in `file`, which is made if it is
    /// missing and stays. Nothing if another podfs has the turn.
    ///
    /// # Errors
    /// When the file cannot be made, or the kernel does not lock it.
    pub fn take(file: &Path, path: &Path) -> io::Result<Option<NeighbourLock>> {
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
            Ok(_) => Ok(Some(NeighbourLock { _lock: lock })),
            Err(Errno::EAGAIN | Errno::EACCES) => Ok(None),
            Err(errno) => Err(errno.into()),
        }
    }
}

/// Whether another pod has the block device that `link`, `<root>/pods/<uid>/volumeDevices/<kind>/<name>`, will point to.
pub fn have_device_of(link: &Path) -> bool {
    let parts: Option<(PathBuf, &OsStr)> = (|| {
        let pod = link.parent()?.parent()?.parent()?;
        Some((link.strip_prefix(pod).ok()?.to_owned(), pod.file_name()?))
    })();
    let (Some((device, own)), Some(pods)) = (parts, link.ancestors().nth(4)) else { return false };
    let entries = std::fs::read_dir(pods).into_iter().flatten().flatten();
    entries.filter(|entry| entry.file_name() != own).any(|entry| entry.path().join(&device).is_symlink())
}

/// `<root>/pods/<uid>/volumes/<kind>/<name>`
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
        let fits = volumes.file_name()? == "volumes" && pods.file_name()? == "pods";
        let volume = Path::new(kind.file_name()?).join(path.file_name()?);
        fits.then(|| Some(VolumePlace { root: pods.to_owned(), uid: pod.file_name()?.into(), volume })).flatten()
    }

    /// A number for the volume, the same in each pod. Two volumes may have one number: then they wait for each other.
    fn number(&self) -> i64 {
        let mut hasher = DefaultHasher::new();
        (&self.root, &self.volume).hash(&mut hasher);
        i64::try_from(hasher.finish() >> 2).unwrap_or_default()
    }

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
            |pod: &str, volume: &str| NeighbourLock::take(&file, &path(pod, volume)).expect("the file can be locked");
        let first = take("a", "pv-1").expect("it is free");
        assert!(take("b", "pv-1").is_none(), "another pod has the turn");
        assert!(take("b", "pv-2").is_some(), "that is another volume");
        drop(first);
        assert!(take("b", "pv-1").is_some());
    }

    #[test]
    fn a_neighbour_has_the_same_volume_in_another_pod() {
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
