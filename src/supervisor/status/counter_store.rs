//! The counters of a pod, shared by the supervisor's task, which counts, and the threads that report the counts. A file in the
//! pod's run directory keeps the counts, so that no count goes back when the next supervisor continues with the pod.
//!
//! 1. A blocking thread writes the file, and does not hold the lock meanwhile: a slow disk delays neither the supervisor's task
//!    nor a status.
//! 2. One thread writes at a time, and always the newest counts: no older counts replace newer ones.
//! 3. The thread writes a second file and renames it to the first: if the supervisor is killed meanwhile, the old counts stay.
//! 4. A scrape waits until the counts that it shows are in the file ([`CounterStore::wait_until_written`]), so that
//!    none goes back when the supervisor is killed after the scrape. It waits at most for [`SCRAPE_TIMEOUT`]; if the
//!    disk is slower, the scrape gets its answer all the same.
//! 5. A supervisor that ends, leaves or is upgraded waits at most for [`END_TIMEOUT`]. Before a supervisor removes the file, it
//!    waits for a write that has begun, which would make the file again.

use std::fs::{OpenOptions, rename};
use std::io::{self, Read, Write};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::time::Duration;

use tokio::task::spawn_blocking;
use tokio::time::timeout;
use tracing::{debug, warn};

use super::counters::PodCounters;
use crate::supervisor::run_dir::file_names::{COUNTS, NEXT_COUNTS};
use crate::supervisor::run_dir::trust;
use crate::types::{UnusableRecord, parse_record};

/// How long a supervisor that ends, leaves or is upgraded waits for the disk.
const END_TIMEOUT: Duration = Duration::from_secs(2);
/// How long a scrape waits for the disk. The client waits two seconds, and sources that do not answer take one of them.
const SCRAPE_TIMEOUT: Duration = Duration::from_millis(500);

/// The counters of a pod. Cheap to clone.
#[derive(Clone)]
pub(in crate::supervisor) struct CounterStore(Arc<SharedCounters>);

struct SharedCounters {
    state: Mutex<State>,
    /// Announces that a write has ended.
    written: Condvar,
    /// The function that writes the file. A test has another one.
    write: fn(&Path, &[u8]) -> io::Result<()>,
}

#[derive(Default)]
struct State {
    counters: PodCounters,
    /// The file that keeps the counters; `None` if no file does.
    file: Option<PathBuf>,
    /// How often the counters have changed.
    changes: u64,
    /// How many of the changes are in the file.
    written: u64,
    /// Whether a thread writes changes, or is about to.
    is_writing: bool,
    /// Whether that thread waits for the disk.
    is_at_disk: bool,
}

impl Default for CounterStore {
    fn default() -> CounterStore {
        CounterStore::with(write)
    }
}

impl CounterStore {
    fn with(write: fn(&Path, &[u8]) -> io::Result<()>) -> CounterStore {
        CounterStore(Arc::new(SharedCounters { state: Mutex::default(), written: Condvar::new(), write }))
    }

    /// Continues the counts in this run directory, and keeps them there. If only another version of podfs can use them, leaves them as
    /// they are, and counts anew without a file.
    pub(in crate::supervisor) fn keep_in(&self, directory: &Path) {
        let file = directory.join(COUNTS);
        let (counters, file) = match read(&file) {
            Err(error) if error.is_of_other_version() => {
                warn!(
                    "podfs cannot use the counts of the pod in {}: {error}; the metrics of the pod begin anew",
                    file.display()
                );
                (PodCounters::default(), None)
            }
            counters => (counters.unwrap_or_default(), Some(file)),
        };
        let mut state = self.0.lock();
        (state.counters, state.file) = (counters, file);
    }

    /// Calls `read` with the counters.
    pub(in crate::supervisor) fn read<T>(&self, read: impl FnOnce(&PodCounters) -> T) -> T {
        read(&self.0.lock().counters)
    }

    /// Counts servers that replaced a dead one.
    pub(in crate::supervisor) fn restarted(&self, servers: u32) {
        if servers > 0 {
            self.change(|counters| counters.server_restarts += u64::from(servers));
        }
    }

    /// Counts an operation on a volume that has ended.
    pub(in crate::supervisor) fn operated(&self, name: &str, plugin: &str, succeeded: bool, took: Duration) {
        self.change(|counters| counters.operated(name, plugin, succeeded, took));
    }

    /// Counts a mount or refresh that failed.
    pub(in crate::supervisor) fn failed(&self, volume: &str) {
        self.change(|counters| counters.failed(volume));
    }

    /// Notes whether a server serves this volume now.
    pub(in crate::supervisor) fn served(&self, volume: &str, is_served: bool) {
        let mut state = self.0.lock();
        if state.counters.served(volume, is_served) {
            self.changed(state);
        }
    }

    /// Blocks until the file has all counts so far, or for [`SCRAPE_TIMEOUT`].
    pub(in crate::supervisor) fn wait_until_written(&self) {
        self.wait(SCRAPE_TIMEOUT);
    }

    /// Blocks until the file has all counts so far, or for `limit`.
    fn wait(&self, limit: Duration) {
        let state = self.0.lock();
        let counted = state.changes;
        let is_missing = |state: &mut State| state.is_writing && state.written < counted;
        let waited = self.0.written.wait_timeout_while(state, limit, is_missing);
        drop(waited.expect("no thread panics while it counts"));
    }

    /// Waits until the file has all counts so far, or for [`END_TIMEOUT`], without blocking the task.
    pub(in crate::supervisor) async fn written(&self) {
        let store = self.clone();
        let wait = spawn_blocking(move || store.wait(END_TIMEOUT));
        // If volumes block all blocking threads, this one does not even start.
        let _late = timeout(END_TIMEOUT, wait).await;
    }

    /// Waits like [`CounterStore::written`], and then lets no further write begin.
    pub(in crate::supervisor) async fn finish(&self) {
        self.written().await;
        self.0.lock().file = None;
    }

    /// Blocks until the disk has answered a write that has begun. After [`CounterStore::finish`] and this, the caller may remove
    /// the file.
    pub(in crate::supervisor) fn wait_for_disk(&self) {
        let waited = self.0.written.wait_while(self.0.lock(), |state| state.is_at_disk);
        drop(waited.expect("no thread panics while it counts"));
    }

    fn change(&self, change: impl FnOnce(&mut PodCounters)) {
        let mut state = self.0.lock();
        change(&mut state.counters);
        self.changed(state);
    }

    /// Notes a change of the counters, and starts a thread that writes it, unless one writes already.
    fn changed(&self, mut state: MutexGuard<'_, State>) {
        state.changes += 1;
        if state.file.is_some() && !std::mem::replace(&mut state.is_writing, true) {
            let shared = Arc::clone(&self.0);
            spawn_blocking(move || shared.write_changes());
        }
    }
}

impl SharedCounters {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().expect("no thread panics while it counts")
    }

    /// Writes until the file has all changes.
    fn write_changes(&self) {
        loop {
            let mut state = self.lock();
            let (changes, file) = (state.changes, state.file.clone());
            let Some(file) = file.filter(|_| state.written < changes) else {
                state.is_writing = false;
                self.written.notify_all();
                return;
            };
            let text = serde_json::to_vec(&state.counters);
            state.is_at_disk = true;
            drop(state);
            if let Err(error) = text.map_err(Into::into).and_then(|text| (self.write)(&file, &text)) {
                debug!("{} cannot be written: {error}; the next supervisor of the pod counts anew", file.display());
            }
            let mut state = self.lock();
            (state.written, state.is_at_disk) = (changes, false);
            self.written.notify_all();
        }
    }
}

/// How many servers of the pod with this run directory have replaced a dead one.
pub fn kept_restarts(directory: &Path) -> u64 {
    read(&directory.join(COUNTS)).unwrap_or_default().server_restarts
}

/// The counts in a file.
fn read(file: &Path) -> Result<PodCounters, UnusableRecord> {
    let mut text = Vec::new();
    trust::open(OpenOptions::new().read(true), file).and_then(|mut kept| kept.read_to_end(&mut text))?;
    parse_record(&text)
}

fn write(file: &Path, text: &[u8]) -> io::Result<()> {
    let next = file.with_file_name(NEXT_COUNTS);
    let mut kept = trust::open(OpenOptions::new().write(true).create(true).truncate(true), &next)?;
    kept.write_all(text)?;
    rename(next, file)
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::sync::mpsc::channel;
    use std::thread;

    use super::*;

    /// Held while the disk does not answer.
    static DISK: Mutex<()> = Mutex::new(());

    fn store_in(directory: &Path) -> CounterStore {
        let store = CounterStore::default();
        store.keep_in(directory);
        store
    }

    #[tokio::test]
    async fn the_next_supervisor_goes_on_counting_and_one_that_cannot_read_begins_anew() {
        let directory = tempfile::tempdir().expect("a directory");
        let store = store_in(directory.path());
        store.restarted(2);
        store.failed("config");
        store.operated("volume_mount", "kubernetes.io/secret", true, Duration::from_millis(1));
        store.served("config", true);
        store.restarted(1);
        store.finish().await;
        let next = store_in(directory.path());
        assert_eq!(next.read(PodCounters::clone), store.read(PodCounters::clone));
        assert_eq!(next.read(|counters| (counters.server_restarts, counters.restarts_of("config"))), (3, 1));
        store.restarted(1);
        store.finish().await;
        assert_eq!(kept_restarts(directory.path()), 3, "the store is finished");
        fs::write(directory.path().join(COUNTS), "{").expect("written");
        assert_eq!(kept_restarts(directory.path()), 0);
    }

    #[tokio::test]
    async fn counts_that_only_another_version_can_use_stay() {
        let directory = tempfile::tempdir().expect("a directory");
        let file = directory.path().join(COUNTS);
        for unknown in [r#"{"version":2,"serverRestarts":3}"#, r#"{"serverRestarts":"three"}"#] {
            fs::write(&file, unknown).expect("written");
            let store = store_in(directory.path());
            store.restarted(2);
            assert_eq!(store.read(|counters| counters.server_restarts), 2);
            store.finish().await;
            assert_eq!(fs::read_to_string(&file).expect("it stays"), unknown);
            assert_eq!(kept_restarts(directory.path()), 0);
        }
    }

    #[tokio::test]
    async fn counts_in_the_file_never_go_back_and_equal_those_of_the_store_after_a_wait() {
        let directory = tempfile::tempdir().expect("a directory");
        let store = store_in(directory.path());
        let mut before = 0;
        for count in 1..=500 {
            store.restarted(1);
            let kept = kept_restarts(directory.path());
            assert!((before..=count).contains(&kept), "{kept} after {before}, of {count}");
            before = kept;
            if count % 100 == 0 {
                store.wait_until_written();
                assert_eq!(kept_restarts(directory.path()), count);
            }
        }
    }

    #[tokio::test]
    async fn a_disk_that_does_not_answer_delays_no_count_and_gets_the_newest_ones() {
        let directory = tempfile::tempdir().expect("a directory");
        let store = CounterStore::with(|file, text| {
            let _turn = DISK.lock().expect("no panic");
            write(file, text)
        });
        store.keep_in(directory.path());
        let stopped = DISK.lock().expect("no panic");
        for _ in 0..100 {
            store.restarted(1);
        }
        assert_eq!(store.read(|counters| counters.server_restarts), 100, "a status has them");
        assert_eq!(kept_restarts(directory.path()), 0);
        drop(stopped);
        store.finish().await;
        assert_eq!(kept_restarts(directory.path()), 100);
    }

    #[tokio::test]
    async fn a_supervisor_removes_the_file_only_after_a_write_that_has_begun() {
        static LATE_DISK: Mutex<()> = Mutex::new(());
        let directory = tempfile::tempdir().expect("a directory");
        let store = CounterStore::with(|file, text| {
            let _turn = LATE_DISK.lock().expect("no panic");
            write(file, text)
        });
        store.keep_in(directory.path());
        let (answers, answered) = channel::<()>();
        let (stops, stopped) = channel();
        thread::spawn(move || {
            let _stopped = LATE_DISK.lock().expect("no panic");
            stops.send(()).expect("the test waits");
            let _answers = answered.recv();
        });
        stopped.recv().expect("the disk has stopped");
        store.restarted(1);
        store.finish().await;
        let (removes, removed) = channel();
        let path = directory.path().to_owned();
        thread::spawn(move || {
            store.wait_for_disk();
            let _test_is_over = removes.send(kept_restarts(&path));
        });
        assert!(removed.recv_timeout(Duration::from_millis(50)).is_err(), "the write has not ended");
        drop(answers);
        assert_eq!(removed.recv(), Ok(1));
    }

    #[tokio::test]
    async fn whenever_a_supervisor_is_killed_the_next_one_finds_whole_counts() {
        let directory = tempfile::tempdir().expect("a directory");
        let store = store_in(directory.path());
        store.restarted(1);
        store.wait_until_written();
        for _ in 0..2000 {
            store.failed("config");
            assert_eq!(kept_restarts(directory.path()), 1);
        }
    }
}
