//! What the supervisor counts of its pod. It is kept in a file of the pod's run directory, so that no count goes back when
//! another supervisor goes on with the pod. Little is counted here, and seldom; the counters of volumes are in their regions.

use std::collections::BTreeMap;
use std::fs::{OpenOptions, rename};
use std::io::{Read, Write};
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use podfs_fuse::region::Distribution;
use serde::{Deserialize, Serialize};
use tracing::debug;

use crate::supervisor::run_dir::claim::{COUNTS, NEXT_COUNTS};
use crate::supervisor::run_dir::trust;

/// The kubelet's groups for how long an operation took, in seconds.
pub const OPERATION_BOUNDS: [f64; 13] = [0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 15.0, 25.0, 50.0, 120.0, 300.0, 600.0];

/// The counts of a pod, those of its supervisors before included.
#[derive(Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub(in crate::supervisor) struct Counters {
    /// Servers that replaced a dead one.
    pub(in crate::supervisor) server_restarts: u64,
    pub(in crate::supervisor) operations: Vec<Operations>,
    /// By the name of the volume.
    pub(in crate::supervisor) refresh_errors: BTreeMap<String, Errors>,
    /// Where it is kept, if it is.
    #[serde(skip)]
    file: Option<PathBuf>,
}

/// Operations of one kind, by how long they took.
#[derive(Debug, PartialEq, Serialize, Deserialize)]
pub(in crate::supervisor) struct Operations {
    /// In the kubelet's words: `volume_mount`.
    pub(in crate::supervisor) name: String,
    /// Likewise: `kubernetes.io/secret`.
    pub(in crate::supervisor) plugin: String,
    pub(in crate::supervisor) succeeded: bool,
    pub(in crate::supervisor) durations: Distribution,
}

/// What went wrong with a volume.
#[derive(Debug, PartialEq, Serialize, Deserialize)]
pub(in crate::supervisor) struct Errors {
    pub(in crate::supervisor) count: u64,
    /// When that was last.
    pub(in crate::supervisor) last: SystemTime,
}

impl Counters {
    /// Goes on from what is kept in this run directory. What cannot be read is counted anew.
    pub(in crate::supervisor) fn of(directory: &Path) -> Counters {
        let file = directory.join(COUNTS);
        let mut text = Vec::new();
        let read = trust::open(OpenOptions::new().read(true), &file).and_then(|mut kept| kept.read_to_end(&mut text));
        let kept = read.ok().and_then(|_| serde_json::from_slice(&text).ok());
        Counters { file: Some(file), ..kept.unwrap_or_default() }
    }

    /// So many servers replaced a dead one.
    pub(in crate::supervisor) fn restarted(&mut self, servers: u32) {
        self.server_restarts += u64::from(servers);
        self.keep();
    }

    /// An operation on a volume came to its end.
    pub(in crate::supervisor) fn operated(&mut self, name: &str, plugin: &str, succeeded: bool, took: Duration) {
        let is_it = |one: &&mut Operations| one.name == name && one.plugin == plugin && one.succeeded == succeeded;
        match self.operations.iter_mut().find(is_it) {
            Some(operations) => operations.durations.add(took),
            None => {
                let mut durations = Distribution::new(&OPERATION_BOUNDS);
                durations.add(took);
                let (name, plugin) = (name.to_owned(), plugin.to_owned());
                self.operations.push(Operations { name, plugin, succeeded, durations });
            }
        }
        self.keep();
    }

    /// A volume could not be mounted or refreshed.
    pub(in crate::supervisor) fn failed(&mut self, volume: &str) {
        let now = SystemTime::now();
        let errors = self.refresh_errors.entry(volume.to_owned()).or_insert(Errors { count: 0, last: now });
        *errors = Errors { count: errors.count + 1, last: now };
        self.keep();
    }

    /// Writes it whole beside its place first: a supervisor that is killed meanwhile leaves the counts before.
    fn keep(&self) {
        let Some(file) = &self.file else { return };
        let write = |text: Vec<u8>| {
            let next = file.with_file_name(NEXT_COUNTS);
            let mut kept = trust::open(OpenOptions::new().write(true).create(true).truncate(true), &next)?;
            kept.write_all(&text)?;
            rename(next, file)
        };
        let kept = serde_json::to_vec(self).map_err(Into::into).and_then(write);
        if let Err(error) = kept {
            debug!("{} cannot be written: {error}; the next supervisor of the pod counts anew", file.display());
        }
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    #[test]
    fn the_next_supervisor_goes_on_counting_and_one_that_cannot_read_begins_anew() {
        let directory = tempfile::tempdir().expect("a directory");
        let mut counters = Counters::of(directory.path());
        counters.restarted(2);
        counters.failed("config");
        for (succeeded, milliseconds) in [(true, 1), (true, 300), (false, 700_000)] {
            counters.operated("volume_mount", "kubernetes.io/secret", succeeded, Duration::from_millis(milliseconds));
        }
        let next = Counters::of(directory.path());
        assert_eq!(next, counters);
        assert_eq!((next.server_restarts, next.operations.len()), (2, 2));
        assert_eq!(next.operations[0].durations.groups[..4], [1, 0, 1, 0]);
        assert_eq!(next.operations[1].durations.groups[13], 1, "beyond all bounds");
        assert_eq!(next.refresh_errors["config"].count, 1);
        fs::write(directory.path().join(COUNTS), "{").expect("written");
        assert_eq!(Counters::of(directory.path()).server_restarts, 0);
    }

    #[test]
    fn whenever_a_supervisor_is_killed_the_next_one_finds_whole_counts() {
        let directory = tempfile::tempdir().expect("a directory");
        let mut counters = Counters::of(directory.path());
        counters.restarted(1);
        std::thread::scope(|scope| {
            let counts = scope.spawn(|| (0..2000).for_each(|_| counters.failed("config")));
            while !counts.is_finished() {
                assert_eq!(Counters::of(directory.path()).server_restarts, 1);
            }
        });
    }
}
