//! Finds what earlier daemons and their supervisors have left on the node, by names, locks and sockets alone.
//!
//! The search accesses no mount, so none can block it (RC-03): it lists directories from the root directory down to
//! the names of volumes, and does not enter, look up or stat a directory that is a mount point in the mount table.

use std::collections::{BTreeMap, BTreeSet};
use std::ffi::OsStr;
use std::fs;
use std::io::{self, ErrorKind};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use podfs_fuse::mount::table::mounts;

use super::checkpoint::{Checkpoint, Checkpoints, is_of_other_version};
use crate::manifest::pod::PodUid;
use crate::supervisor::program;
use crate::supervisor::run_dir::claim;
use crate::supervisor::run_dir::file_names::LOCK;
use crate::supervisor::run_dir::record::PodLockRecord;
use crate::supervisor::run_dir::trust;

/// A pod of which podfs has found something.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ReconstructedPod {
    /// The pod.
    pub uid: PodUid,
    /// Its checkpoint from an earlier daemon.
    pub checkpoint: Option<Checkpoint>,
    /// Why its checkpoint cannot be read, if it has one.
    pub trouble: Option<String>,
    /// Whether the checkpoint cannot be read because only another version of podfs can use it.
    pub is_of_other_version: bool,
    /// Whether it has a supervisor.
    pub supervisor: FoundSupervisor,
    /// Whether a daemon has started that supervisor.
    pub is_of_daemon: bool,
    /// The directories of its volumes: mounted, or left behind.
    pub volumes: Vec<VolumeDirectory>,
}

/// Whether a pod has a supervisor, by the lock in its run directory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FoundSupervisor {
    /// The process with this id holds the lock.
    Alive(u32),
    /// No process holds the lock. The pod's server may still run.
    Dead,
}

impl FoundSupervisor {
    /// Whether it lives, and a daemon has started it with this manifest: its command line shows that, whatever became of the
    /// checkpoint.
    pub(super) fn is_started_with(self, manifest: &Path) -> bool {
        let FoundSupervisor::Alive(pid) = self else { return false };
        let words = fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
        let words: Vec<&OsStr> = words.split(|byte| *byte == 0).map(OsStr::from_bytes).collect();
        program::is_started_with(&words, manifest.as_os_str())
    }
}

/// A directory in a pod's `volumes`.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct VolumeDirectory {
    /// The directory of its plugin: `kubernetes.io~configmap`.
    pub plugin: String,
    /// The volume's name, or the name of its PersistentVolume if it shows one.
    pub name: String,
}

/// Finds the pods with a volume, a lock or a checkpoint, in the order of their uids.
///
/// # Errors
/// When the run directory, the root directory or the mount table cannot be read, or users other than root can change
/// them.
pub fn reconstruct(run_directory: &Path, root_directory: &Path) -> io::Result<Vec<ReconstructedPod>> {
    trust::check(run_directory)?;
    trust::check(root_directory)?;
    let checkpoints = Checkpoints::of(run_directory);
    let listing = RootDirectories::new(root_directory)?;
    let mut volumes: BTreeMap<PodUid, Vec<VolumeDirectory>> = BTreeMap::new();
    for uid in listing.pods()? {
        let found = listing.volumes(&uid);
        if !found.is_empty() {
            volumes.insert(uid, found);
        }
    }
    let mut pods: BTreeSet<PodUid> = volumes.keys().cloned().collect();
    pods.extend(checkpoints.pods()?);
    pods.extend(uids(run_directory)?.into_iter().filter(|uid| run_directory.join(uid.as_str()).join(LOCK).exists()));
    let reconstructed = pods.into_iter().map(|uid| {
        let (checkpoint, trouble, is_of_other_version) = match checkpoints.read(&uid) {
            Ok(checkpoint) => (checkpoint, None, false),
            Err(error) => (None, Some(error.to_string()), is_of_other_version(&error)),
        };
        let supervisor = supervisor(&run_directory.join(uid.as_str()));
        let is_of_daemon = supervisor.is_started_with(&checkpoints.manifest_path(&uid));
        let volumes = volumes.remove(&uid).unwrap_or_default();
        ReconstructedPod { uid, checkpoint, trouble, is_of_other_version, supervisor, is_of_daemon, volumes }
    });
    Ok(reconstructed.collect())
}

/// The supervisor of the pod with this run directory.
pub(super) fn supervisor(directory: &Path) -> FoundSupervisor {
    match claim::is_held(directory) {
        // A supervisor that has just taken the lock has not written its process id yet.
        true => FoundSupervisor::Alive(PodLockRecord::read(directory).unwrap_or_default().pid),
        false => FoundSupervisor::Dead,
    }
}

/// The directories below the root directory, without those that are mount points.
struct RootDirectories {
    pods: PathBuf,
    mounted: BTreeSet<PathBuf>,
}

impl RootDirectories {
    fn new(root_directory: &Path) -> io::Result<RootDirectories> {
        let root = match fs::canonicalize(root_directory) {
            Err(error) if error.kind() == ErrorKind::NotFound => root_directory.to_owned(),
            root => root?,
        };
        let mounted = mounts()?.into_iter().map(|mounted| mounted.at).filter(|at| at.starts_with(&root) && *at != root);
        Ok(RootDirectories { pods: root.join("pods"), mounted: mounted.collect() })
    }

    fn pods(&self) -> io::Result<Vec<PodUid>> {
        uids(&self.pods)
    }

    fn volumes(&self, uid: &PodUid) -> Vec<VolumeDirectory> {
        let mut found = Vec::new();
        let pod = self.pods.join(uid.as_str());
        let volumes = pod.join("volumes");
        if self.mounted.contains(&pod) {
            return found;
        }
        for plugin in self.names(&volumes) {
            let names = self.names(&volumes.join(&plugin));
            found.extend(names.into_iter().map(|name| VolumeDirectory { plugin: plugin.clone(), name }));
        }
        found.sort();
        found
    }

    /// The names in a directory; none if it is a mount point, or no directory.
    fn names(&self, directory: &Path) -> Vec<String> {
        if self.mounted.contains(directory) {
            return Vec::new();
        }
        names(directory).unwrap_or_default()
    }
}

/// The entries of a directory whose names can be uids of pods; none if it does not exist.
fn uids(directory: &Path) -> io::Result<Vec<PodUid>> {
    match names(directory) {
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(Vec::new()),
        names => Ok(names?.iter().filter_map(|name| PodUid::parse(name).ok()).collect()),
    }
}

fn names(directory: &Path) -> io::Result<Vec<String>> {
    let entries = fs::read_dir(directory)?;
    Ok(entries.filter_map(|entry| entry.ok()?.file_name().into_string().ok()).collect())
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use podfs_fuse::mount::visible::detach;

    use super::*;
    use crate::host::memory::mount_tmpfs;
    use crate::manifest::pod::PodIdentity;
    use crate::node::pod::PodOrigin;
    use crate::supervisor::run_dir::claim::PodLock;

    fn directory(plugin: &str, name: &str) -> VolumeDirectory {
        VolumeDirectory { plugin: plugin.to_owned(), name: name.to_owned() }
    }

    #[test]
    fn rc_03_pods_are_found_by_names_locks_and_checkpoints() {
        let (run, root) = (tempfile::tempdir().expect("a directory"), tempfile::tempdir().expect("a directory"));
        assert_eq!(reconstruct(run.path(), root.path()).expect("nothing"), []);
        let pods = root.path().join("pods");
        for path in [
            "a/volumes/p~one/v",
            "a/volumes/p~one/w",
            "a/volumes/p~two/v",
            "empty/volumes/p~one",
            "_no uid/volumes/p/v",
        ] {
            fs::create_dir_all(pods.join(path)).expect("directories");
        }
        fs::write(pods.join("a/volumes/file"), "").expect("written");
        let uid = |uid: &str| PodUid::parse(uid).expect("a uid");
        let checkpoint = Checkpoint::new(PodOrigin::Api, Arc::new(serde_json::json!({})), BTreeSet::new(), true);
        Checkpoints::of(run.path()).write(&uid("b"), &checkpoint).expect("written");
        let pod = PodIdentity { uid: uid("c"), ..PodIdentity::placeholder() };
        let (claim, _) = PodLock::take(run.path(), root.path(), &pod).expect("the pod is free");
        let nothing = |uid| ReconstructedPod {
            uid,
            checkpoint: None,
            trouble: None,
            is_of_other_version: false,
            supervisor: FoundSupervisor::Dead,
            is_of_daemon: false,
            volumes: Vec::new(),
        };
        let volumes = vec![directory("p~one", "v"), directory("p~one", "w"), directory("p~two", "v")];
        let expected = [
            ReconstructedPod { volumes, ..nothing(uid("a")) },
            ReconstructedPod { checkpoint: Some(checkpoint), ..nothing(uid("b")) },
            ReconstructedPod { supervisor: FoundSupervisor::Alive(std::process::id()), ..nothing(uid("c")) },
        ];
        assert_eq!(reconstruct(run.path(), root.path()).expect("found"), expected);
        claim.leave_record();
        assert_eq!(reconstruct(run.path(), root.path()).expect("found")[2], nothing(uid("c")));
    }

    #[test]
    fn rc_03_a_directory_that_is_mounted_on_is_not_listed() {
        let (run, root) = (tempfile::tempdir().expect("a directory"), tempfile::tempdir().expect("a directory"));
        let plugin = root.path().join("pods/a/volumes/p~one");
        fs::create_dir_all(&plugin).expect("directories");
        mount_tmpfs(&plugin, 1 << 20).expect("mounted");
        fs::create_dir(plugin.join("inside")).expect("a directory");
        let found = reconstruct(run.path(), root.path());
        detach(&plugin).expect("unmounted");
        assert_eq!(found.expect("found"), []);
    }
}
