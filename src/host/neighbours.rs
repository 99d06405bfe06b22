//! Other pods of this node that use the same PersistentVolume, as far as the mount table tells: their podfs has the same
//! root directory, and has mounted the volume already. Two pods that start at the same moment do not see each other.

use std::ffi::OsStr;
use std::path::{Path, PathBuf};

use podfs_fuse::mount::table::mounts;

/// Whether another pod has mounted what is to be mounted at `path`.
pub fn use_volume_of(path: &Path) -> bool {
    // Without a table there are no neighbours to be seen, and mounting will tell what is wrong.
    let table = mounts().unwrap_or_default();
    let own = Place::of(path);
    own.is_some_and(|own| table.iter().filter_map(|mounted| Place::of(&mounted.at)).any(|other| own.is_beside(&other)))
}

/// `<root>/pods/<uid>/volumes/<kind>/<name>`
struct Place {
    root: PathBuf,
    uid: Box<OsStr>,
    volume: PathBuf,
}

impl Place {
    fn of(path: &Path) -> Option<Place> {
        let kind = path.parent()?;
        let volumes = kind.parent()?;
        let pod = volumes.parent()?;
        let pods = pod.parent()?;
        let fits = volumes.file_name()? == "volumes" && pods.file_name()? == "pods";
        let volume = Path::new(kind.file_name()?).join(path.file_name()?);
        fits.then(|| Some(Place { root: pods.to_owned(), uid: pod.file_name()?.into(), volume })).flatten()
    }

    fn is_beside(&self, other: &Place) -> bool {
        self.root == other.root && self.volume == other.volume && self.uid != other.uid
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_neighbour_has_the_same_volume_in_another_pod() {
        let own = Place::of(Path::new("/k/pods/a/volumes/kubernetes.io~local-volume/pv-1")).expect("a place");
        let beside = |path: &str| Place::of(Path::new(path)).is_some_and(|other| own.is_beside(&other));
        assert!(beside("/k/pods/b/volumes/kubernetes.io~local-volume/pv-1"));
        assert!(!beside("/k/pods/a/volumes/kubernetes.io~local-volume/pv-1"));
        assert!(!beside("/k/pods/b/volumes/kubernetes.io~local-volume/pv-2"));
        assert!(!beside("/other/pods/b/volumes/kubernetes.io~local-volume/pv-1"));
        assert!(!beside("/k/pods/b/volumes"));
        assert!(!beside("/"));
    }
}
