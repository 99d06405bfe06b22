//! The record in a pod's lock file: what a podfs has made for the pod, so that the next one removes it.

use std::fs::OpenOptions;
use std::io::Read;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use super::claim::LOCK;
use super::trust;
use crate::types::PodName;

/// The content of the lock file.
#[derive(Debug, Default, Serialize, Deserialize)]
pub struct PodLockRecord {
    /// The process id of the supervisor that wrote the record.
    pub pid: u32,
    /// The namespace and name of the pod.
    #[serde(default)]
    pub pod: PodName,
    /// The directories that were made for the lock file, in the order in which they were made.
    pub run: Vec<PathBuf>,
    /// The directories that were made for the pod's volumes, in the order in which they were made.
    pub directories: Vec<PathBuf>,
    /// Files in these directories that are mount points.
    #[serde(default)]
    pub files: Vec<PathBuf>,
    /// Mount points of volumes, and of parts of volumes (subPath).
    #[serde(default)]
    pub mounts: Vec<PathBuf>,
    /// Files for containers, which podfs removes with any content.
    #[serde(default)]
    pub written: Vec<PathBuf>,
    /// The cgroup of the server.
    #[serde(default)]
    pub cgroup: Option<PathBuf>,
}

impl PodLockRecord {
    /// The record in the lock file of this directory, if the lock file has one.
    pub fn read(directory: &Path) -> Option<PodLockRecord> {
        let mut bytes = Vec::new();
        trust::open(OpenOptions::new().read(true), &directory.join(LOCK)).ok()?.read_to_end(&mut bytes).ok()?;
        Self::parse(&bytes).ok()
    }

    /// The record in the content of a lock file; an empty record if there is no content.
    pub(super) fn parse(bytes: &[u8]) -> serde_json::Result<PodLockRecord> {
        // A process that was killed while it wrote a shorter record over a longer one has left the end of the longer one.
        let mut values = serde_json::Deserializer::from_slice(bytes).into_iter();
        // The file is empty while a process writes the first record, and after a write that failed.
        values.next().unwrap_or_else(|| Ok(PodLockRecord::default()))
    }
}
