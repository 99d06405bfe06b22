//! The paths at which the volumes of a supervisor appear.

use std::path::{Path, PathBuf};

use crate::manifest::pod::PodUid;
use crate::volume::Csi;

/// The kubelet's name for the directory of parts of volumes (subPath), in the pod's directory.
pub(super) const SUB_PATHS: &str = "volume-subpaths";

/// Where the volumes of one supervisor appear.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Site {
    /// Below this directory of a pod, in the kubelet's layout, by which container runtimes recognise volumes (FU-11).
    Pod(PathBuf),
    /// `podfs mount`: the only volume appears at exactly this path.
    Exactly(PathBuf),
}

impl Site {
    /// The site of a pod below the root directory. Its path is absolute and without symbolic links, like the paths in the mount
    /// table and in the pod's record, with which podfs compares it.
    pub fn of_pod(root: &Path, uid: &PodUid) -> Site {
        Site::Pod(resolve(&root.join("pods").join(uid.as_str())))
    }

    /// The path of a volume, given the kubelet's directory for its kind.
    pub(in crate::supervisor) fn volume(&self, directory: &str, name: &str) -> PathBuf {
        match self {
            // The kubelet has a file beside the mount of a CSI driver, so the mount is one directory deeper.
            Site::Pod(pod) if directory == Csi::DIRECTORY => {
                pod.join("volumes").join(directory).join(name.replace('/', "~")).join("mount")
            }
            Site::Pod(pod) => pod.join("volumes").join(directory).join(name),
            Site::Exactly(path) => path.clone(),
        }
    }

    /// The directory for the content of an emptyDir; `None` without a pod.
    pub(in crate::supervisor) fn home(&self, name: &str) -> Option<PathBuf> {
        self.homes().map(|homes| homes.join(name))
    }

    /// The directory for the content of all emptyDirs of a pod.
    pub(in crate::supervisor) fn homes(&self) -> Option<PathBuf> {
        match self {
            Site::Pod(pod) => Some(pod.join("plugins/kubernetes.io~empty-dir")),
            Site::Exactly(_) => None,
        }
    }

    /// The root directory, if there is a pod.
    pub(in crate::supervisor) fn root(&self) -> Option<PathBuf> {
        match self {
            Site::Pod(pod) => Some(pod.parent()?.parent()?.to_owned()),
            Site::Exactly(_) => None,
        }
    }

    /// The pod's uid, if there is a pod.
    pub(in crate::supervisor) fn uid(&self) -> Option<String> {
        match self {
            Site::Pod(pod) => pod.file_name()?.to_str().map(str::to_owned),
            Site::Exactly(_) => None,
        }
    }

    /// The pod's directory as mount tables name it, absolute and without symbolic links, if there is a pod.
    pub(in crate::supervisor) fn pod(&self) -> Option<PathBuf> {
        match self {
            // The directory may not exist yet. Then its path may still have symbolic links.
            Site::Pod(pod) => pod.canonicalize().or_else(|_| std::path::absolute(pod)).ok(),
            Site::Exactly(_) => None,
        }
    }

    /// The directory in which parts of volumes are mounted for containers (subPath). It has a directory for each
    /// volume, and that has a directory for each container.
    pub(in crate::supervisor) fn sub_paths(&self) -> Option<PathBuf> {
        self.pod().map(|pod| pod.join(SUB_PATHS))
    }

    /// The path at or below which the volumes appear.
    pub(in crate::supervisor) fn path(&self) -> &Path {
        match self {
            Site::Pod(path) | Site::Exactly(path) => path,
        }
    }
}

/// A path without the symbolic links in it. Its end need not exist.
fn resolve(path: &Path) -> PathBuf {
    let resolved = path.ancestors().find_map(|above| Some((above, above.canonicalize().ok()?)));
    let resolved = resolved.and_then(|(above, resolved)| Some(resolved.join(path.strip_prefix(above).ok()?)));
    resolved.or_else(|| std::path::absolute(path).ok()).unwrap_or_else(|| path.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_path_of_a_site_has_no_symbolic_links_before_and_after_the_root_directory_exists() {
        let base = tempfile::tempdir().expect("a directory");
        let real = base.path().canonicalize().expect("it is there").join("real");
        std::fs::create_dir(&real).expect("a directory");
        std::os::unix::fs::symlink("real", base.path().join("link")).expect("a link");
        let root = base.path().join("link/root");
        let site = || Site::of_pod(&root, &PodUid::parse("u").expect("a uid"));
        assert_eq!(site().path(), real.join("root/pods/u"));
        std::fs::create_dir_all(real.join("root/pods/u")).expect("a directory");
        assert_eq!(site().path(), real.join("root/pods/u"));
    }
}
