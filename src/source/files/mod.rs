//! Manifest files as a source.
//!
//! One thread owns the files: it hears of changes ([`watch`]), finds the files ([`find`]), reads what changed ([`read`]),
//! works out the next snapshot ([`ledger`]) and publishes it. [`FileSource::changed`] only waits for the next publication, so it may be
//! cancelled at any point, and a slow caller skips snapshots that are out of date already.
//!
//! Why no change is lost and no half-written file is shown:
//!
//! 1. Every directory a configured path goes through is watched before anything is read ([`route`]), so what changes
//!    after the reading raises an event that causes another scan.
//! 2. The kernel queues events in order. After reading, the scan waits until the events queued meanwhile have been
//!    heard ([`watch::Watcher::catch_up`]), and leaves out every file that was written to ([`settle`], [`judge`]).
//! 3. A file that changed in place counts only after its writer has closed it, or after a second without a write.
//! 4. What is left out keeps its last good documents, and is looked at again by 1 or by the second's end.

mod error;
mod find;
mod judge;
mod ledger;
mod read;
mod route;
mod settle;
#[cfg(test)]
mod tests;
mod watch;

use std::path::PathBuf;
use std::sync::mpsc::Sender;
use std::thread;

use tokio::sync::watch::{Receiver, channel};

use super::Snapshot;
use ledger::Ledger;
use watch::{Signal, Watcher};

pub use error::SourceError;

/// Where the pod manifest comes from.
pub enum PodInput {
    /// Bytes that were read from standard input. They never change.
    Stdin(Vec<u8>),
    /// A file, which is watched.
    File(PathBuf),
}

/// Which documents of the pod file count as its pod.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Accepted {
    /// Pods.
    Pods,
    /// Pods, and the pod templates of workloads such as Deployments.
    Templates,
}

/// A pod manifest and object manifests in files, read at the start and again whenever they change.
pub struct FileSource {
    updates: Receiver<Snapshot>,
    stop: Sender<Signal>,
}

impl FileSource {
    /// Reads everything once and starts to watch. `objects` are files, or directories whose `.yaml`, `.yml` and `.json`
    /// entries are read; further documents of the pod file count as objects too.
    ///
    /// # Errors
    ///
    /// A path that is missing or unreadable, a malformed manifest, an object described twice, not exactly one Pod in
    /// the pod file, a file that is written to all the time, and the kernel's limits on inotify.
    pub fn open(pod: Option<PodInput>, objects: &[PathBuf]) -> Result<(Self, Snapshot), SourceError> {
        Self::open_accepting(Accepted::Pods, pod, objects)
    }

    /// As [`Self::open`]. `accepted` says what may be the pod of the pod file.
    ///
    /// # Errors
    ///
    /// Those of [`Self::open`].
    pub fn open_accepting(
        accepted: Accepted,
        pod: Option<PodInput>,
        objects: &[PathBuf],
    ) -> Result<(Self, Snapshot), SourceError> {
        let (mut watcher, stop) = Watcher::new()?;
        let mut ledger = Ledger::new(accepted, pod, objects)?;
        let snapshot = ledger.first_scan(&mut watcher)?;
        let (publish, updates) = channel(snapshot.clone());
        thread::Builder::new()
            .name("manifests".into())
            .spawn(move || {
                while watcher.wait() {
                    if let Some(snapshot) = ledger.next_scan(&mut watcher) {
                        publish.send_replace(Snapshot { heard: watcher.heard(), ..snapshot });
                    }
                }
            })
            .map_err(SourceError::Thread)?;
        Ok((Self { updates, stop }, snapshot))
    }

    /// The next snapshot that differs in what was read. Cancel-safe.
    ///
    /// Trouble with a file is logged once and leaves its last good documents in use; it never ends the wait.
    pub async fn changed(&mut self) -> Snapshot {
        // The publishing thread outlives `self`, unless it panics; then nothing ever changes again.
        if self.updates.changed().await.is_err() {
            std::future::pending::<()>().await;
        }
        self.updates.borrow_and_update().clone()
    }
}

impl Drop for FileSource {
    fn drop(&mut self) {
        // Fails only when the thread is gone.
        let _ = self.stop.send(Signal::Stop);
    }
}
