//! The record of a publication of a kubelet, one volume at one target, for the next daemon.
//!
//! Each record is a file below `RUN/node/csi`, named by its target. Only root can read it. It has no token and no Secret:
//! the kubelet sends those with each call, and podfs never stores them.

use std::collections::BTreeMap;
use std::fs::{self, DirBuilder, OpenOptions};
use std::io::{self, ErrorKind, Read};
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};
use serde_json::Value;
use tracing::Span;
use uuid::Uuid;

use crate::manifest::pod::{PodIdentity, PodUid};
use crate::node::files::replace;
use crate::node::spans;
use crate::supervisor::run_dir::trust;
use crate::types::{RECORD_VERSION, UnusableRecord, parse_record};

/// The name of podfs's CSI driver.
pub const DRIVER: &str = "podfs.io";
/// The directory of the records, in the run directory.
const DIRECTORY: &str = "node/csi";

/// A volume that a kubelet wants at a target.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Publication {
    version: u32,
    /// The kubelet's name of the volume.
    pub volume_id: String,
    /// The path at which it has to appear, below the kubelet's directory.
    pub target: PathBuf,
    /// The pod of the volume.
    pub pod: PublishedPod,
    /// The name that podfs gives it: unique among the publications of the pod.
    pub name: String,
    /// The entry of `spec.volumes` without its name.
    pub volume: Value,
    /// The directory that the node allowed, if the volume shows it or a directory below it. Records of earlier versions have none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub within: Option<PathBuf>,
    /// Whether its files come from fields of the pod.
    pub needs_pod: bool,
    /// Whether the target is read-only.
    pub read_only: bool,
    /// The group that owns the files, if the kubelet gave one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub group: Option<u32>,
    /// The options of the mount of an NFS export: the mountOptions of a PersistentVolume.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub mount_options: Vec<String>,
}

/// The pod of a publication, according to the kubelet.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct PublishedPod {
    /// Its uid.
    pub uid: String,
    /// Its namespace: the one that its objects come from.
    pub namespace: String,
    /// Its name.
    pub name: String,
    /// Its service account.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub service_account: String,
}

impl Publication {
    /// A publication; its fields are checked by [`request`](super::csi::request).
    pub(in crate::node) fn new(
        volume_id: String,
        target: PathBuf,
        pod: PublishedPod,
        name: String,
        volume: Value,
    ) -> Publication {
        Publication {
            version: RECORD_VERSION,
            volume_id,
            target,
            pod,
            name,
            volume,
            within: None,
            needs_pod: false,
            read_only: false,
            group: None,
            mount_options: Vec::new(),
        }
    }

    /// The span of log lines about its volume.
    pub(super) fn span(&self) -> Span {
        spans::of_volume(&self.uid(), Some(&self.identity()), &self.name)
    }

    /// Adds its pod and its volume to the log lines of the current call.
    pub(super) fn name_in_span(&self) {
        spans::set_volume(&self.identity(), &self.name);
    }

    fn identity(&self) -> PodIdentity {
        let PublishedPod { namespace, name, .. } = &self.pod;
        PodIdentity { namespace: namespace.clone(), name: name.clone(), uid: self.uid() }
    }

    /// The uid of its pod, which is valid.
    pub fn uid(&self) -> PodUid {
        PodUid::parse(&self.pod.uid).expect("it was parsed when the publication was made or read")
    }

    /// Whether both publish the same volume in the same way at the same target. Ignores what podfs derives from the volume: an
    /// earlier podfs, or one with another list of allowed directories, may have derived something else.
    pub fn is_repeat_of(&self, earlier: &Publication) -> bool {
        let Publication { within, needs_pod, .. } = earlier.clone();
        *earlier == Publication { within, needs_pod, ..self.clone() }
    }

    /// Whether both publish the same volume, perhaps at different targets.
    pub fn is_same_volume(&self, other: &Publication) -> bool {
        self.volume == other.volume && self.mount_options == other.mount_options && self.volume_id == other.volume_id
    }
}

/// The name of a target's record, and of its volume.
pub(in crate::node) fn name_of_target(target: &Path) -> String {
    format!("csi-{}", Uuid::new_v5(&Uuid::NAMESPACE_URL, target.as_os_str().as_encoded_bytes()).simple())
}

/// The recorded publications.
#[derive(Clone, Debug)]
pub struct Publications {
    directory: PathBuf,
}

impl Publications {
    /// The records in this run directory. Makes nothing.
    pub fn of(run_directory: &Path) -> Publications {
        Publications { directory: run_directory.join(DIRECTORY) }
    }

    /// Writes the record of a publication. Replaces an earlier record of its target.
    ///
    /// # Errors
    /// When the file cannot be written, or users other than root can change the directory.
    pub fn write(&self, publication: &Publication) -> io::Result<()> {
        DirBuilder::new().recursive(true).mode(0o700).create(&self.directory)?;
        trust::check(&self.directory)?;
        replace(&self.directory, &file_name(&publication.target), &serde_json::to_vec(publication)?)
    }

    /// Whether there is a record of a target.
    pub fn has(&self, target: &Path) -> bool {
        self.path(target).exists()
    }

    /// Removes the record of a target.
    ///
    /// # Errors
    /// When it cannot be removed.
    pub fn remove(&self, target: &Path) -> io::Result<()> {
        match fs::remove_file(self.path(target)) {
            Err(error) if error.kind() != ErrorKind::NotFound => Err(error),
            _ => Ok(()),
        }
    }

    /// All publications by their targets, and a sentence for each file that cannot be read.
    ///
    /// # Errors
    /// When the directory cannot be read, users other than root can change it, or only another version of podfs can use a record.
    pub fn read_all(&self) -> io::Result<(BTreeMap<PathBuf, Publication>, Vec<String>)> {
        let (mut all, mut trouble) = (BTreeMap::new(), Vec::new());
        trust::check(&self.directory)?;
        let entries = match fs::read_dir(&self.directory) {
            Err(error) if error.kind() == ErrorKind::NotFound => return Ok((all, trouble)),
            entries => entries?,
        };
        for path in entries.filter_map(|entry| Some(entry.ok()?.path())) {
            if path.extension().is_none_or(|ending| ending != "json") || is_temporary(&path) {
                continue;
            }
            match read(&path) {
                Ok(publication) => drop(all.insert(publication.target.clone(), publication)),
                // Without the record, podfs would unmount the volume, which containers use.
                Err(PublicationError::Record(cause)) if cause.is_of_other_version() => {
                    return Err(io::Error::other(OtherPublication { path, cause }));
                }
                Err(reason) => trouble.push(format!("{}: {reason}", path.display())),
            }
        }
        Ok((all, trouble))
    }

    fn path(&self, target: &Path) -> PathBuf {
        self.directory.join(file_name(target))
    }
}

/// The name of the record of a target.
fn file_name(target: &Path) -> String {
    format!("{}.json", name_of_target(target))
}

/// Whether the file is a temporary one. A daemon that was killed while it wrote a record leaves one.
fn is_temporary(path: &Path) -> bool {
    path.file_name().is_none_or(|name| name.as_encoded_bytes().starts_with(b"."))
}

/// Why the record of a publication cannot be used.
#[derive(Debug, thiserror::Error)]
enum PublicationError {
    #[error(transparent)]
    Record(#[from] UnusableRecord),
    #[error("its name is not the uid of a pod")]
    NoPod,
}

/// A record that only another version of podfs can use.
#[derive(Debug, thiserror::Error)]
#[error(
    "podfs cannot use the record of a CSI volume, {}: {cause}, or remove the file once the kubelet has unmounted the volume",
    path.display()
)]
struct OtherPublication {
    path: PathBuf,
    #[source]
    cause: UnusableRecord,
}

fn read(path: &Path) -> Result<Publication, PublicationError> {
    let mut bytes = Vec::new();
    let opened = trust::open(OpenOptions::new().read(true), path);
    opened.and_then(|mut file| file.read_to_end(&mut bytes)).map_err(UnusableRecord::from)?;
    let read: Publication = parse_record(&bytes)?;
    PodUid::parse(&read.pod.uid).map_err(|_| PublicationError::NoPod)?;
    Ok(read)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::types::golden::{golden, values};

    #[test]
    fn a_publication_has_the_bytes_that_other_versions_read() {
        let publications = values::<Publication>(golden!("publications.jsonl"));
        assert_eq!((publications[0].group, publications[0].within.as_deref()), (Some(7), Some(Path::new("/srv"))));
        assert!(publications[1].is_same_volume(&Publication { mount_options: Vec::new(), ..publications[0].clone() }));
    }

    #[test]
    fn a_publication_of_another_version_is_refused_and_stays() {
        let run = tempfile::tempdir().expect("a directory");
        let publications = Publications::of(run.path());
        let [known, other] = &values::<Publication>(golden!("publications.jsonl"))[..] else { panic!("two lines") };
        publications.write(known).expect("written");
        let path = publications.path(Path::new("/other"));
        let of_later = serde_json::to_string(other).expect("JSON").replace(r#""version":1"#, r#""version":2"#);
        for unknown in [of_later.as_str(), r#"{"version":2,"volumes":[]}"#] {
            fs::write(&path, unknown).expect("written");
            let refused = publications.read_all().expect_err("unknown").to_string();
            let reason = "it has version 2, and this podfs reads version 1; use the podfs that wrote it, or remove the file once";
            assert!(refused.contains(&format!("{}: {reason}", path.display())), "{refused}");
            assert_eq!(fs::read_to_string(&path).expect("it stays"), unknown);
        }
        fs::write(&path, "").expect("written");
        let (all, trouble) = publications.read_all().expect("the other one is read");
        assert_eq!((all.len(), trouble.len()), (1, 1));
    }
}
