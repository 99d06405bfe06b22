//! The checkpoint of a pod with a supervisor, from which the next daemon knows the pod without its source.
//!
//! Each pod has a directory, `RUN/node/pods/UID`, with these files:
//!
//! | file | read by |
//! |---|---|
//! | `pod.json` | the supervisor (`podfs-supervisor --pod`): the pod's manifest with its wanted volumes |
//! | `checkpoint.json` | the next daemon: [`Checkpoint`] |
//! | `failure` | the daemon: why the pod's last supervisor has failed, in the words of that supervisor, which writes the file |
//!
//! 1. The daemon writes its files under another name and renames them, so a reader sees the old or the new file, complete.
//! 2. The daemon writes `pod.json` first. If it is killed between the two, the supervisor may serve more volumes than the
//!    checkpoint has; the next daemon finds them in the supervisor's status.
//! 3. Only root can read them: a pod's environment may hold secrets.

use std::collections::BTreeSet;
use std::fs::{self, DirBuilder, OpenOptions};
use std::io::{self, ErrorKind, Read};
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use podfs_fuse::printable::printable_line;
use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::manifest::pod::{DEFAULT_NAMESPACE, PodUid};
use crate::node::files::replace;
use crate::node::pod::PodOrigin;
use crate::supervisor::program::failure::FAILURE;
use crate::supervisor::run_dir::trust;
use crate::types::{RECORD_VERSION, UnusableRecord, parse_record};
use crate::volume::forget_other_volumes;

/// The directory of checkpoints, in the run directory.
const PODS: &str = "node/pods";
/// The file for the supervisor.
const MANIFEST: &str = "pod.json";
/// The file for the next daemon.
const CHECKPOINT: &str = "checkpoint.json";
/// The most bytes of a supervisor's words about its failure.
const LONGEST_FAILURE: u64 = 4096;

/// A checkpoint that a daemon cannot use.
#[derive(Debug, thiserror::Error)]
#[error("{}: {problem}", path.display())]
struct UnreadableCheckpoint {
    path: PathBuf,
    #[source]
    problem: UnusableRecord,
}

/// Whether an error of [`Checkpoints::read`] says that only another version of podfs can use the checkpoint.
pub fn is_of_other_version(error: &io::Error) -> bool {
    let unreadable = error.get_ref().and_then(|error| error.downcast_ref::<UnreadableCheckpoint>());
    unreadable.is_some_and(|error| error.problem.is_of_other_version())
}

/// The state of a pod for a daemon that does not have the pod's source yet.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Checkpoint {
    version: u32,
    /// The source that described the pod.
    pub origin: PodOrigin,
    /// Whether an agent has reported that its containers have stopped.
    pub released: bool,
    /// The volumes that its supervisor serves.
    pub volumes: BTreeSet<String>,
    /// Whether it has a supervisor even without a volume, for the other files of its containers.
    #[serde(default)]
    pub without_volumes: bool,
    /// The pod's manifest, as the source has it.
    #[serde(with = "shared")]
    pub manifest: Arc<Value>,
}

impl Checkpoint {
    /// The checkpoint of a pod whose supervisor serves these volumes.
    pub fn new(origin: PodOrigin, manifest: Arc<Value>, volumes: BTreeSet<String>, released: bool) -> Checkpoint {
        Checkpoint { version: RECORD_VERSION, origin, released, volumes, without_volumes: false, manifest }
    }

    /// Takes the description of a pod that needs volumes. A released pod does so if it has come back.
    pub(in crate::node) fn describe(&mut self, origin: PodOrigin, manifest: Arc<Value>) {
        (self.origin, self.manifest, self.released) = (origin, manifest, false);
    }

    /// The namespace and the name of the pod, if the manifest has them.
    pub(in crate::node) fn pod_name(&self) -> Option<(&str, &str)> {
        let metadata = &self.manifest["metadata"];
        Some((metadata["namespace"].as_str().unwrap_or(DEFAULT_NAMESPACE), metadata["name"].as_str()?))
    }

    /// The manifest for the supervisor. Its volumes are those that the supervisor serves, and images, which runtimes
    /// mount.
    pub fn served_manifest(&self) -> Value {
        let mut manifest = Value::clone(&self.manifest);
        if let Some(volumes) = manifest.pointer_mut("/spec/volumes").and_then(Value::as_array_mut) {
            let is_served = |volume: &Value| volume["name"].as_str().is_some_and(|name| self.volumes.contains(name));
            volumes.retain(|volume| is_served(volume) || volume["image"].is_object());
        }
        forget_other_volumes(&mut manifest);
        manifest
    }
}

/// Serializes a shared value like the value itself.
mod shared {
    use std::sync::Arc;

    use serde::{Deserialize, Deserializer, Serialize, Serializer};
    use serde_json::Value;

    pub(super) fn serialize<S: Serializer>(value: &Arc<Value>, serializer: S) -> Result<S::Ok, S::Error> {
        Value::serialize(value, serializer)
    }

    pub(super) fn deserialize<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Arc<Value>, D::Error> {
        Value::deserialize(deserializer).map(Arc::new)
    }
}

/// The checkpoints of a node.
#[derive(Clone, Debug)]
pub struct Checkpoints {
    directory: PathBuf,
}

impl Checkpoints {
    /// The checkpoints in this run directory. Makes nothing.
    pub fn of(run_directory: &Path) -> Checkpoints {
        Checkpoints { directory: run_directory.join(PODS) }
    }

    /// The manifest that the pod's supervisor is started with.
    pub fn manifest_path(&self, uid: &PodUid) -> PathBuf {
        self.pod(uid).join(MANIFEST)
    }

    /// Writes the checkpoint of a pod.
    ///
    /// # Errors
    /// When the files cannot be written, users other than root can change the directory, or another version of podfs
    /// wrote the checkpoint that is there.
    pub fn write(&self, uid: &PodUid, checkpoint: &Checkpoint) -> io::Result<()> {
        let directory = self.pod(uid);
        if let Err(error) = self.read(uid)
            && is_of_other_version(&error)
        {
            return Err(error);
        }
        DirBuilder::new().recursive(true).mode(0o700).create(&directory)?;
        trust::check(&directory)?;
        replace(&directory, MANIFEST, &serde_json::to_vec(&checkpoint.served_manifest())?)?;
        replace(&directory, CHECKPOINT, &serde_json::to_vec(checkpoint)?)
    }

    /// The checkpoint of a pod, if there is one.
    ///
    /// # Errors
    /// When the file cannot be read, or is not a checkpoint of this version.
    pub fn read(&self, uid: &PodUid) -> io::Result<Option<Checkpoint>> {
        let path = self.pod(uid).join(CHECKPOINT);
        let failed = |problem: UnusableRecord| io::Error::other(UnreadableCheckpoint { path: path.clone(), problem });
        let mut bytes = Vec::new();
        match trust::open(OpenOptions::new().read(true), &path) {
            Err(error) if error.kind() == ErrorKind::NotFound => return Ok(None),
            opened => opened.and_then(|mut file| file.read_to_end(&mut bytes)).map_err(|error| failed(error.into()))?,
        };
        parse_record(&bytes).map(Some).map_err(failed)
    }

    /// Whether the files of a pod exist.
    pub fn has_files(&self, uid: &PodUid) -> bool {
        [MANIFEST, CHECKPOINT].iter().all(|name| self.pod(uid).join(name).symlink_metadata().is_ok())
    }

    /// Why the pod's last supervisor has failed, in its words.
    pub fn failure(&self, uid: &PodUid) -> Option<String> {
        let mut words = Vec::new();
        let file = trust::open(OpenOptions::new().read(true), &self.pod(uid).join(FAILURE)).ok()?;
        file.take(LONGEST_FAILURE).read_to_end(&mut words).ok()?;
        let words = String::from_utf8_lossy(&words);
        Some(printable_line(words.trim()).into_owned()).filter(|words| !words.is_empty())
    }

    /// Removes the words of a supervisor that has failed: another one is started, or has started.
    pub fn forget_failure(&self, uid: &PodUid) {
        // Fails if there is no such file.
        let _ = fs::remove_file(self.pod(uid).join(FAILURE));
    }

    /// Removes the manifest of the pod's supervisor. A supervisor that starts later, or has not claimed the pod yet, ends.
    ///
    /// # Errors
    /// When it cannot be removed.
    pub fn remove_manifest(&self, uid: &PodUid) -> io::Result<()> {
        match fs::remove_file(self.manifest_path(uid)) {
            Err(error) if error.kind() != ErrorKind::NotFound => Err(error),
            _ => Ok(()),
        }
    }

    /// Removes the checkpoint of a pod.
    ///
    /// # Errors
    /// When it cannot be removed.
    pub fn remove(&self, uid: &PodUid) -> io::Result<()> {
        match fs::remove_dir_all(self.pod(uid)) {
            Err(error) if error.kind() != ErrorKind::NotFound => Err(error),
            _ => Ok(()),
        }
    }

    /// The pods with a checkpoint.
    ///
    /// # Errors
    /// When the directory cannot be read, or users other than root can change it.
    pub fn pods(&self) -> io::Result<Vec<PodUid>> {
        trust::check(&self.directory)?;
        let entries = match fs::read_dir(&self.directory) {
            Err(error) if error.kind() == ErrorKind::NotFound => return Ok(Vec::new()),
            entries => entries?,
        };
        Ok(entries.filter_map(|entry| PodUid::parse(entry.ok()?.file_name().to_str()?).ok()).collect())
    }

    fn pod(&self, uid: &PodUid) -> PathBuf {
        self.directory.join(uid.as_str())
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::MetadataExt;

    use super::*;
    use crate::types::golden::{golden, values};

    fn uid() -> PodUid {
        PodUid::parse("u1").expect("a uid")
    }

    fn checkpoint(volumes: &[&str]) -> Checkpoint {
        let manifest = serde_json::json!({
            "metadata": {"name": "web"},
            "spec": {"volumes": [
                {"name": "a", "emptyDir": {}}, {"name": "b", "emptyDir": {}}, {"name": "i", "image": {"reference": "x"}},
            ]},
        });
        Checkpoint::new(
            PodOrigin::Api,
            Arc::new(manifest),
            volumes.iter().map(|&name| name.to_owned()).collect(),
            false,
        )
    }

    #[test]
    fn a_checkpoint_is_read_back_and_only_root_can_read_it() {
        let run = tempfile::tempdir().expect("a directory");
        let checkpoints = Checkpoints::of(run.path());
        assert_eq!((checkpoints.pods().expect("none"), checkpoints.read(&uid()).expect("none")), (Vec::new(), None));
        for volumes in [&["a"][..], &["a", "b"]] {
            checkpoints.write(&uid(), &checkpoint(volumes)).expect("written");
            assert_eq!(checkpoints.read(&uid()).expect("read"), Some(checkpoint(volumes)));
            let served: Value =
                serde_json::from_slice(&fs::read(checkpoints.manifest_path(&uid())).expect("a file")).expect("JSON");
            assert_eq!(served["spec"]["volumes"].as_array().expect("volumes").len(), volumes.len() + 1);
        }
        assert_eq!(checkpoints.pods().expect("read"), [uid()]);
        let directory = run.path().join(PODS).join("u1");
        for entry in fs::read_dir(&directory).expect("a listing") {
            assert_eq!(entry.expect("an entry").metadata().expect("its mode").mode() & 0o777, 0o600);
        }
        assert_eq!(fs::metadata(&directory).expect("its mode").mode() & 0o777, 0o700);
        checkpoints.remove(&uid()).expect("removed");
        checkpoints.remove(&uid()).expect("it is gone");
        assert!(checkpoints.pods().expect("none").is_empty());
    }

    #[test]
    fn a_pod_that_needs_volumes_again_is_not_released() {
        let mut released = Checkpoint { released: true, ..checkpoint(&["a"]) };
        let file = PodOrigin::File("web.yaml".into());
        released.describe(file.clone(), Arc::new(Value::Null));
        assert_eq!((released.released, released.origin, released.volumes.len()), (false, file, 1));
    }

    #[test]
    fn a_file_that_is_no_checkpoint_is_named() {
        let run = tempfile::tempdir().expect("a directory");
        let checkpoints = Checkpoints::of(run.path());
        checkpoints.write(&uid(), &checkpoint(&["a"])).expect("written");
        let path = run.path().join(PODS).join("u1").join(CHECKPOINT);
        for (content, reason) in [
            ("{", "EOF"),
            (
                r#"{"version": 9, "origin": "api", "released": false, "volumes": [], "manifest": {}}"#,
                "it has version 9",
            ),
        ] {
            fs::write(&path, content).expect("written");
            let error = checkpoints.read(&uid()).expect_err("it is none").to_string();
            assert!(error.starts_with(&path.display().to_string()) && error.contains(reason), "{error}");
        }
    }

    #[test]
    fn a_checkpoint_has_the_bytes_that_other_versions_read() {
        let checkpoints = values::<Checkpoint>(golden!("checkpoints.jsonl"));
        let origins: Vec<_> = checkpoints.iter().map(|checkpoint| &checkpoint.origin).collect();
        let file = PodOrigin::File("/m/web.yaml".into());
        assert_eq!(origins, [&file, &PodOrigin::Api, &PodOrigin::Kubelet, &PodOrigin::Runtime]);
        assert!(checkpoints.iter().all(|checkpoint| checkpoint.released && checkpoint.without_volumes));
    }

    #[test]
    fn a_checkpoint_of_another_version_is_refused_and_stays() {
        let run = tempfile::tempdir().expect("a directory");
        let checkpoints = Checkpoints::of(run.path());
        checkpoints.write(&uid(), &checkpoint(&["a"])).expect("written");
        let directory = run.path().join(PODS).join("u1");
        let manifest = fs::read(directory.join(MANIFEST)).expect("a file");
        let recorded = golden!("checkpoints.jsonl").lines().next().expect("a line");
        let of_unknown_origin = golden!("checkpoints.jsonl").lines().nth(1).expect("a line").replace("api", "docker");
        for (unknown, reason) in [
            (
                recorded.replacen('1', "2", 1).as_str(),
                "it has version 2, and this podfs reads version 1; use the podfs that wrote it",
            ),
            (
                r#"{"version":2,"origin":"docker"}"#,
                "it has version 2, and this podfs reads version 1; use the podfs that wrote it",
            ),
            (of_unknown_origin.as_str(), "unknown variant `docker`"),
        ] {
            fs::write(directory.join(CHECKPOINT), unknown).expect("written");
            let refusals = [
                checkpoints.read(&uid()).map(drop).expect_err("unknown"),
                checkpoints.write(&uid(), &checkpoint(&["a", "b"])).expect_err("unknown"),
            ];
            for refused in refusals {
                assert!(is_of_other_version(&refused), "{refused}");
                assert!(refused.to_string().contains(&format!("checkpoint.json: {reason}")), "{refused}");
            }
            assert_eq!(fs::read_to_string(directory.join(CHECKPOINT)).expect("it stays"), unknown);
            assert_eq!(fs::read(directory.join(MANIFEST)).expect("it stays"), manifest);
        }
        fs::write(directory.join(CHECKPOINT), "{").expect("written");
        assert!(!is_of_other_version(&checkpoints.read(&uid()).expect_err("it is damaged")));
        checkpoints.write(&uid(), &checkpoint(&["a"])).expect("written");
    }
}
