//! Manifest files as a source.
//!
//! One thread owns the files: it watches them ([`watch`]), finds them ([`find`]), reads changed ones ([`read`]), combines their
//! documents ([`documents`]) and publishes the result: a pod and its objects ([`pod_and_objects`], [`FileSource`]), or that of
//! another [`FileCombiner`] ([`CombinedFiles`]). [`FileSource::changed`] only waits for the next publication, so it may be
//! cancelled at any point, and a slow caller skips outdated snapshots.
//!
//! Why no change is lost and no half-written file is shown:
//!
//! 1. The thread watches every directory of a configured path before it reads a file ([`route`]), so a change after the reading
//!    raises an event that causes another scan.
//! 2. The kernel queues events in order. After reading, the scan waits until it has received all events queued
//!    meanwhile ([`watch::Watcher::catch_up`]), and leaves out every file that was written to ([`settle`], [`read_check`]). If the
//!    events do not come in time, or are lost, it leaves out every file that it has read anew.
//! 3. podfs uses a file that changed in place only after its writer has closed it, or after a second without a write.
//! 4. A file that a scan leaves out keeps its last good documents. The thread reads it again at its next event (1), or after that
//!    second.

mod bad_document;
mod documents;
mod error;
mod find;
mod needs;
mod pod_and_objects;
mod read;
mod read_check;
mod route;
mod settle;
#[cfg(test)]
mod tests;
mod watch;

use std::collections::BTreeSet;
use std::path::PathBuf;
use std::sync::mpsc::Sender;
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;

use tokio::sync::watch::{Receiver, channel};

use super::Snapshot;
use crate::manifest::pod::Pod;
use documents::STDIN;
use documents::{DocumentStore, ScanResult};
use find::ConfiguredPath;
use pod_and_objects::PodAndObjects;
use read::FileReading;
use watch::{WatchMessage, Watcher};

pub(crate) use bad_document::{BadDocument, CombinationProblem, ParsedFile, Subject};
pub(crate) use documents::{FileCombiner, Files};
pub use error::SourceError;
pub(crate) use find::PathRole;
pub(crate) use pod_and_objects::IMMUTABLE;

/// The source of the pod manifest.
pub enum PodInput {
    /// Bytes that were read from standard input.
    Stdin(Vec<u8>),
    /// A file, which is watched.
    File(PathBuf),
    /// A file that is read once.
    Once(PathBuf),
}

/// The documents of the pod file that can be its pod.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AcceptedDocuments {
    /// Pods.
    Pods,
    /// Pods, and the pod templates of workloads such as Deployments.
    Templates,
    /// Pods that podfs has accepted before. Nothing is said about the spelling of their fields.
    KnownPods,
}

/// A pod manifest and object manifests in files, read at the start and again whenever they change.
pub struct FileSource {
    updates: Receiver<Snapshot>,
    start_problem: StartProblem,
    /// `None` where no file is watched.
    stop: Option<Sender<WatchMessage>>,
}

/// Why a podfs that started now would refuse the files, as of the last scan. The thread that owns the files sets it.
#[derive(Clone, Default)]
pub(crate) struct StartProblem(Arc<Mutex<Option<String>>>);

impl StartProblem {
    /// One sentence, if there is such a problem.
    pub(crate) fn sentence(&self) -> Option<String> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    fn set(&self, sentence: Option<String>) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = sentence;
    }
}

/// The last good pod manifest of the files.
#[derive(Clone)]
pub(super) struct LastManifest(Receiver<Snapshot>);

impl LastManifest {
    /// The pod, if one of the files has to have it.
    pub(super) fn pod(&self) -> Option<Arc<Pod>> {
        self.0.borrow().pod.clone()
    }
}

impl FileSource {
    /// Reads everything once and starts to watch. `objects` are files, or directories with `.yaml`, `.yml` and `.json`
    /// entries; further documents of the pod file count as objects, too.
    ///
    /// # Errors
    ///
    /// When a path is missing or unreadable, the pod file does not have exactly one Pod, a document is malformed or describes the
    /// same object as another one and the pod needs it (or no file has the pod), a file is written to all the time, or a limit
    /// of the kernel on inotify is reached. podfs logs other bad documents and goes on without them.
    pub fn open(pod: Option<PodInput>, objects: &[PathBuf]) -> Result<(Self, Snapshot), SourceError> {
        Self::open_accepting(AcceptedDocuments::Pods, pod, objects)
    }

    /// As [`Self::open`]. `accepted` are the documents that can be the pod of the pod file.
    ///
    /// # Errors
    ///
    /// Those of [`Self::open`].
    pub fn open_accepting(
        accepted: AcceptedDocuments,
        pod: Option<PodInput>,
        objects: &[PathBuf],
    ) -> Result<(Self, Snapshot), SourceError> {
        let (fixed, pod) = match pod {
            Some(PodInput::Stdin(bytes)) => (Some((PathBuf::from(STDIN), bytes)), None),
            Some(PodInput::Once(path)) => (Some(read_once(path)?), None),
            Some(PodInput::File(path)) => (None, Some(ConfiguredPath::pod(path))),
            None => (None, None),
        };
        let roots: Vec<_> = pod.into_iter().chain(objects.iter().cloned().map(ConfiguredPath::objects)).collect();
        let watches_nothing = roots.is_empty();
        let mut store = DocumentStore::new(PodAndObjects::new(accepted), fixed, roots);
        if watches_nothing {
            // The kernel gives a user 128 instances of inotify, and a node has more than a hundred pods.
            let snapshot = store.combine_fixed()?;
            store.new_problems().for_each(|sentence| tracing::warn!("{sentence}"));
            let (updates, start_problem) = (channel(snapshot.clone()).1, StartProblem::default());
            return Ok((Self { updates, start_problem, stop: None }, snapshot));
        }
        let (mut watcher, stop) = Watcher::new()?;
        let snapshot = store.first_scan(&mut watcher)?;
        store.new_problems().for_each(|sentence| tracing::warn!("{sentence}"));
        let (publish, updates) = channel(snapshot.clone());
        let start_problem = StartProblem::default();
        let problem_of_last_scan = start_problem.clone();
        spawn(move || {
            while watcher.wait() {
                let scan = store.next_scan(&mut watcher);
                problem_of_last_scan.set(scan.start_problem());
                let combined = scan.combined;
                store.new_problems().for_each(|sentence| tracing::warn!("{sentence}"));
                if let Some(snapshot) = combined {
                    publish.send_replace(Snapshot { noticed_at: watcher.noticed_at(), ..snapshot });
                }
            }
        })?;
        Ok((Self { updates, start_problem, stop: Some(stop) }, snapshot))
    }

    /// Why a podfs that started now would refuse the files.
    pub(crate) fn start_problem(&self) -> &StartProblem {
        &self.start_problem
    }

    /// The pod that a podfs that started now would read from the files, as of the last scan.
    pub(super) fn manifest(&self) -> LastManifest {
        LastManifest(self.updates.clone())
    }

    /// Waits for a snapshot that differs in the content of the files. Cancel-safe.
    ///
    /// Trouble with a file is logged once and leaves its last good documents in use; it never ends the wait.
    pub async fn changed(&mut self) -> Snapshot {
        // The publishing thread outlives `self`, unless it panics; then, as without a thread, there is never another snapshot.
        if self.updates.changed().await.is_err() {
            std::future::pending::<()>().await;
        }
        self.updates.borrow_and_update().clone()
    }
}

impl Drop for FileSource {
    fn drop(&mut self) {
        // Fails only if the thread has ended.
        self.stop.iter().for_each(|stop| drop(stop.send(WatchMessage::Stop)));
    }
}

/// The name and the bytes of a file that is read once.
fn read_once(path: PathBuf) -> Result<(PathBuf, Vec<u8>), SourceError> {
    match read::read(&path, None)? {
        FileReading::Bytes(_, bytes) => Ok((path, bytes)),
        _ => Err(SourceError::BeingWritten(path)),
    }
}

/// Files that another [`FileCombiner`] combines. A thread reads them until this value is dropped.
pub(crate) struct CombinedFiles {
    stop: Sender<WatchMessage>,
}

/// The result of one scan.
pub(crate) struct Scanned<W> {
    /// The documents of all files, combined, if they differ from those of the last scan.
    pub(crate) combined: Option<W>,
    /// The present problems, one sentence each.
    pub(crate) problems: BTreeSet<String>,
    /// Files that podfs has never been able to read. One that was removed less than a second ago counts.
    pub(crate) unread: BTreeSet<PathBuf>,
    /// Whether the configured path was found, now or earlier: until then, its content is unknown.
    pub(crate) is_found: bool,
}

impl CombinedFiles {
    /// Reads a directory of manifests, or a file of them, and reads again what changes. Leaves out files with problems;
    /// the path itself need not exist yet. `publish` gets the result of each scan; the first one comes soon.
    ///
    /// # Errors
    /// When a limit of the kernel on inotify is reached.
    pub(crate) fn open<S: FileCombiner>(
        combiner: S,
        path: PathBuf,
        mut publish: impl FnMut(Scanned<S::Combined>) + Send + 'static,
    ) -> Result<Self, SourceError> {
        let (mut watcher, stop) = Watcher::new()?;
        let mut store = DocumentStore::new(combiner, None, vec![ConfiguredPath::objects(path)]);
        spawn(move || {
            let first = store.first_scan_of_good_files(&mut watcher);
            publish(scanned(&store, first));
            while watcher.wait() {
                let scan = store.next_scan(&mut watcher);
                publish(scanned(&store, scan));
            }
        })?;
        Ok(Self { stop })
    }
}

impl Drop for CombinedFiles {
    fn drop(&mut self) {
        // Fails only if the thread has ended.
        let _ = self.stop.send(WatchMessage::Stop);
    }
}

fn scanned<S: FileCombiner>(store: &DocumentStore<S>, scan: ScanResult<S::Combined>) -> Scanned<S::Combined> {
    let problems = store.problems().map(str::to_owned).collect();
    Scanned { combined: scan.combined, problems, unread: scan.unread, is_found: store.has_found_all() }
}

fn spawn(thread: impl FnOnce() + Send + 'static) -> Result<(), SourceError> {
    thread::Builder::new().name("manifests".into()).spawn(thread).map_err(SourceError::Thread)?;
    Ok(())
}
