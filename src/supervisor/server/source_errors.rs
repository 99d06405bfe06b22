//! Errors of the sources of volumes: what servers have answered, and what the kernel has counted on disks.
//!
//! The watchdog's alarm rings every eight seconds at rest anyway. Then the supervisor compares the counters in shared memory and in
//! `/sys`, which takes a few system calls for each volume and waits for no disk. It logs one line for a volume whose counters have
//! grown, and the next one after [`PAUSE`] at the earliest.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use podfs_fuse::client::{ServerClient, VolumeNumber};
use tracing::warn;

use crate::host::disk_errors::{DiskErrorCounters, in_words};

/// The time between two looks.
const INTERVAL: Duration = Duration::from_secs(5);
/// The time between two log lines about a volume.
const PAUSE: Duration = Duration::from_secs(10 * 60);

/// The errors that the supervisor knows.
#[derive(Debug, Default)]
pub struct SourceErrors {
    /// In the order of the numbers: of volumes with one name, the last one is the present mount.
    volumes: BTreeMap<VolumeNumber, VolumeErrors>,
    looked: Option<Instant>,
}

#[derive(Debug)]
struct VolumeErrors {
    name: String,
    counters: DiskErrorCounters,
    answers: ReportedCounts,
    disk: ReportedCounts,
}

/// Counts, and what the log has of them.
#[derive(Debug, Default)]
struct ReportedCounts {
    counts: BTreeMap<String, u64>,
    reported: BTreeMap<String, u64>,
    at: Option<Instant>,
}

impl SourceErrors {
    /// Looks at the counters of all volumes. Returns whether a disk's counter has changed.
    pub(super) fn look(&mut self, client: &ServerClient) -> bool {
        let now = Instant::now();
        if self.looked.is_some_and(|looked| now - looked < INTERVAL) {
            return false;
        }
        self.looked = Some(now);
        let volumes = client.source_errors();
        let known = self.volumes.len();
        self.volumes.retain(|known, _| volumes.iter().any(|(number, ..)| number == known));
        let mut has_changed = self.volumes.len() != known;
        for (number, volume, answers) in volumes {
            let known = self.volumes.entry(number).or_insert_with(|| VolumeErrors::of(client, number, volume.clone()));
            let answers = answers.into_iter().map(|(errno, count)| (errno.to_owned(), count)).collect();
            known.answers.counts = answers;
            // A source that is read-only by intention answers with EROFS, too. The metric and the status have these.
            if let Some(text) = known.answers.due(now, |errno| errno != "EROFS") {
                warn!(
                    volume,
                    "volume {volume:?}: calls have failed because of its source: {text} since the volume was mounted; the kernel's log (dmesg) may name the \
                     cause; podfs logs this again after {} minutes at the earliest",
                    PAUSE.as_secs() / 60
                );
            }
            let disk = known.counters.read();
            has_changed |= disk != known.disk.counts;
            known.disk.counts = disk;
            if let Some(text) = known.disk.due(now, |_| true) {
                warn!(
                    volume,
                    "volume {volume:?}: the kernel has counted errors of the disk that its source is on: {text} so far; check \
                     the disk and its file system; podfs logs this again after {} minutes at the earliest",
                    PAUSE.as_secs() / 60
                );
            }
        }
        has_changed
    }

    /// The counters of disks that are not zero, by volume.
    pub fn of_disks(&self) -> BTreeMap<String, BTreeMap<String, u64>> {
        let counted = self.volumes.values().filter(|errors| !errors.disk.counts.is_empty());
        counted.map(|errors| (errors.name.clone(), errors.disk.counts.clone())).collect()
    }
}

impl VolumeErrors {
    fn of(client: &ServerClient, number: VolumeNumber, name: String) -> Self {
        let disk = client.source_disk(number);
        let counters = disk.map(|(fs_type, device)| DiskErrorCounters::of(&fs_type, device)).unwrap_or_default();
        // Disks also count commands that they do not know, so what they have counted before is no news. A file system counts damage.
        let mut reported = counters.read();
        reported.retain(|counter, _| counter == "device");
        let disk = ReportedCounts { counts: BTreeMap::new(), reported, at: None };
        Self { name, counters, answers: ReportedCounts::default(), disk }
    }
}

impl ReportedCounts {
    /// The counts in words, if some that `concern` the log have grown and the log may have a line about it now.
    fn due(&mut self, now: Instant, concern: impl Fn(&str) -> bool) -> Option<String> {
        let has_grown = self
            .counts
            .iter()
            .any(|(name, count)| concern(name) && *count > self.reported.get(name).copied().unwrap_or_default());
        if !has_grown || self.at.is_some_and(|at| now - at < PAUSE) {
            return None;
        }
        self.at = Some(now);
        self.reported = self.counts.clone();
        Some(in_words(&self.counts))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn counts(counts: &[(&str, u64)]) -> BTreeMap<String, u64> {
        counts.iter().map(|(name, count)| ((*name).to_owned(), *count)).collect()
    }

    #[test]
    fn growing_counts_are_reported_at_once_and_then_seldom() {
        let (mut errors, begin) = (ReportedCounts::default(), Instant::now());
        let concern = |errno: &str| errno != "EROFS";
        assert_eq!(errors.due(begin, concern), None);
        errors.counts = counts(&[("EROFS", 7)]);
        assert_eq!(errors.due(begin, concern), None);
        errors.counts = counts(&[("EIO", 1), ("EROFS", 7)]);
        assert_eq!(errors.due(begin, concern).as_deref(), Some("EIO 1, EROFS 7"));
        errors.counts = counts(&[("EIO", 5), ("EROFS", 7)]);
        assert_eq!(errors.due(begin + PAUSE / 2, concern), None);
        assert_eq!(errors.due(begin + PAUSE, concern).as_deref(), Some("EIO 5, EROFS 7"));
        assert_eq!(errors.due(begin + 3 * PAUSE, concern), None, "nothing is new");
    }
}
