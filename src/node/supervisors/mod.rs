//! The supervisors of a node's pods: one `podfs-supervisor` for each.
//!
//! | module | owns |
//! |---|---|
//! | `pod` | the task of one pod, which runs its operations |
//! | `waiting` | the operations that wait for a supervisor |
//! | `life` | the life of a supervisor, from its start to its end |
//! | `launch` | starting a supervisor, as a unit of systemd or detached |
//! | `control` | requests to a supervisor |
//! | `retire` | removing the leftovers of a pod without a supervisor |
//! | `error` | why an operation on a pod does not succeed |
//!
//! The daemon finds a pod's supervisor by the lock in the run directory, not as its child: when the daemon is killed, its
//! supervisors continue, and the next daemon adopts them ([`Supervisors::adopt`]).

mod control;
mod error;
mod launch;
mod life;
mod pod;
mod retire;
mod waiting;

use std::ffi::OsString;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use dashmap::DashMap;
use dashmap::mapref::entry::Entry;
use tokio::sync::{Semaphore, mpsc, oneshot};
use tokio::task::spawn_blocking;
use tracing::{Instrument, Span};

pub use self::control::{PushFailure, PushPath};
pub use self::error::OperationError;
use self::launch::Launcher;
use self::pod::{PodOperation, PodTask};
use super::checkpoint::Checkpoints;
use super::pod::NodePod;
use super::reconstruct::ReconstructedPod;
use super::spans;
use crate::manifest::pod::PodUid;
use crate::supervisor::status::PodStatus;

/// How many supervisors start at once: more would not be ready sooner, but take memory at the same time.
const STARTS: usize = 8;
/// Reports in the queue of the manager; when it is full, the tasks of pods wait.
const REPORTS: usize = 256;

/// The supervisors of a node. Cheap to clone.
#[derive(Clone, Debug)]
pub struct Supervisors {
    shared: Arc<SharedSupervisors>,
}

#[derive(Debug)]
struct SharedSupervisors {
    settings: SupervisorSettings,
    checkpoints: Checkpoints,
    launcher: Launcher,
    /// A task holds a permit while its supervisor starts.
    starts: Arc<Semaphore>,
    reports: mpsc::Sender<(PodUid, SupervisorReport)>,
    /// The tasks of pods.
    tasks: DashMap<PodUid, mpsc::UnboundedSender<PodOperation>>,
}

/// The directories of pods, and the command line of their supervisors.
#[derive(Clone, Debug)]
pub struct SupervisorSettings {
    run_directory: PathBuf,
    root_directory: PathBuf,
    /// The program of supervisors.
    program: PathBuf,
    /// The program podfs.
    podfs: PathBuf,
    arguments: Vec<OsString>,
}

/// A report about a supervisor, for the manager.
#[derive(Clone, Debug, PartialEq)]
pub enum SupervisorReport {
    /// A supervisor listens: podfs has started or found the process with this id, or the process has executed another version of
    /// podfs. It may not have the objects that were pushed before.
    Up(u32),
    /// The status of the pod: at once, and after each change; also if its supervisor no longer answers.
    Status(Box<PodStatus>),
    /// The supervisor has ended by itself. The next mount of a volume starts another supervisor with all volumes that it served.
    Gone,
    /// The supervisor has not ended soon after SIGTERM. The sentence says what podfs waits for; `None` once it has ended.
    Ending(Option<String>),
}

/// Why a volume is not mounted.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{reason}")]
pub struct MountFailure {
    /// The reason, a sentence.
    pub reason: String,
    /// The class of the failure.
    pub kind: FailureKind,
}

/// The kubelet's classes of errors.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FailureKind {
    /// Nothing of the volume is mounted.
    Final,
    /// The volume may be mounted, now or later: its supervisor continues with it, and it has to be unmounted.
    Uncertain,
    /// podfs did not try.
    Transient,
}

impl MountFailure {
    fn transient(reason: &str) -> MountFailure {
        MountFailure { reason: reason.to_owned(), kind: FailureKind::Transient }
    }
}

impl SupervisorSettings {
    /// Settings for pods below these directories, whose supervisors are started from this program.
    ///
    /// # Errors
    /// When `/proc` is not mounted, or a path is relative and there is no working directory.
    pub fn new(run_directory: &Path, root_directory: &Path, program: PathBuf) -> io::Result<SupervisorSettings> {
        let (run_directory, root_directory) =
            (std::path::absolute(run_directory)?, std::path::absolute(root_directory)?);
        let arguments = [("--root-dir", &root_directory), ("--run-dir", &run_directory)];
        let arguments = arguments.into_iter().flat_map(|(option, path)| [option.into(), path.clone().into_os_string()]);
        let arguments = arguments.collect();
        Ok(SupervisorSettings { run_directory, root_directory, program, podfs: own_program()?, arguments })
    }

    /// The directory of the pods' locks and sockets.
    pub fn run_directory(&self) -> &Path {
        &self.run_directory
    }

    /// The directory of the volumes.
    pub fn root_directory(&self) -> &Path {
        &self.root_directory
    }

    /// These settings, with further arguments of each supervisor.
    #[must_use]
    pub fn with_arguments(mut self, arguments: impl IntoIterator<Item = OsString>) -> SupervisorSettings {
        self.arguments.extend(arguments);
        self
    }
}

/// The path of this program, also after an upgrade has replaced the file.
fn own_program() -> io::Result<PathBuf> {
    let path = std::fs::read_link("/proc/self/exe")?;
    let replaced = path.to_str().and_then(|path| path.strip_suffix(" (deleted)")).map(PathBuf::from);
    Ok(replaced.unwrap_or(path))
}

impl Supervisors {
    /// Without any supervisor. The receiver gets the reports about all supervisors; operations block unless the caller reads the
    /// reports.
    pub fn new(settings: SupervisorSettings) -> (Supervisors, mpsc::Receiver<(PodUid, SupervisorReport)>) {
        let (reports, receiver) = mpsc::channel(REPORTS);
        let shared = SharedSupervisors {
            checkpoints: Checkpoints::of(&settings.run_directory),
            launcher: Launcher::new(
                settings.program.clone(),
                settings.podfs.clone(),
                settings.arguments.clone(),
                settings.run_directory.clone(),
            ),
            settings,
            starts: Arc::new(Semaphore::new(STARTS)),
            reports,
            tasks: DashMap::new(),
        };
        (Supervisors { shared: Arc::new(shared) }, receiver)
    }

    /// Follows the supervisor that an earlier daemon started for the pod, if it lives. There are no reports about a dead
    /// supervisor; the next mount of a volume starts another one.
    pub fn adopt(&self, pod: &ReconstructedPod) {
        if pod.checkpoint.is_some() {
            self.shared.send(&pod.uid, PodOperation::Adopt);
        }
    }

    /// Mounts a volume of the pod: starts the pod's supervisor if there is none, makes it serve the volume, and waits
    /// until it is mounted. After `limit`, returns the reason why the volume waits; the supervisor continues with it.
    /// The time before the supervisor gets its permit to start does not count.
    ///
    /// # Errors
    /// When the supervisor cannot be started, ends, or does not mount the volume in time.
    pub async fn mount(&self, pod: &NodePod, volume: &str, limit: Duration) -> Result<(), MountFailure> {
        let (answer, answered) = oneshot::channel();
        let request = PodOperation::Mount { pod: pod.clone(), volume: volume.to_owned(), limit, answer };
        self.shared.send(&pod.pod.identity.uid, request);
        answered.await.unwrap_or_else(|_| Err(MountFailure::transient("podfs node ends")))
    }

    /// Serves a pod even without a volume: starts its supervisor if there is none, and waits until it answers. It stays
    /// until the pod is [retired](Supervisors::retire).
    ///
    /// # Errors
    /// When the supervisor cannot be started, ends, or does not answer within `limit`.
    pub async fn serve(&self, pod: &NodePod, limit: Duration) -> Result<(), MountFailure> {
        let (answer, answered) = oneshot::channel();
        self.shared.send(&pod.pod.identity.uid, PodOperation::Serve { pod: pod.clone(), limit, answer });
        answered.await.unwrap_or_else(|_| Err(MountFailure::transient("podfs node ends")))
    }

    /// Unmounts a volume. With the last volume of the pod, the supervisor ends, and podfs removes everything of the pod.
    ///
    /// # Errors
    /// When something of the volume may still be mounted.
    pub async fn unmount(&self, pod: &PodUid, volume: &str) -> Result<(), OperationError> {
        self.ask(pod, |answer| PodOperation::Unmount { volume: volume.to_owned(), answer }).await
    }

    /// Removes everything of a pod, whether it has a supervisor or not.
    ///
    /// # Errors
    /// When something stays.
    pub async fn retire(&self, pod: &PodUid) -> Result<(), OperationError> {
        self.ask(pod, PodOperation::End).await
    }

    /// The connection for pushes of objects to the pod's supervisor. The first push opens it.
    pub fn push_path(&self, pod: &PodUid) -> PushPath {
        PushPath::new(self.shared.settings.run_directory.join(pod.as_str()))
    }

    /// Makes the pod's supervisor refresh volumes, and mount those again that another process has unmounted.
    ///
    /// # Errors
    /// When there is no supervisor, or it does not have the volumes.
    pub async fn remount(&self, pod: &PodUid, volumes: Vec<String>) -> Result<(), OperationError> {
        control::remount(&self.shared.settings.run_directory.join(pod.as_str()), volumes).await
    }

    /// Takes a changed pod of the source: writes its checkpoint.
    pub fn update(&self, pod: &NodePod) {
        self.shared.send(&pod.pod.identity.uid, PodOperation::Update(pod.clone()));
    }

    /// The directory of the pods' locks and sockets.
    pub fn run_directory(&self) -> &Path {
        self.shared.settings.run_directory()
    }

    /// Makes files of pods again that another process has deleted from the run directory.
    pub async fn restore_files(&self) {
        let uids: Vec<PodUid> = self.shared.tasks.iter().map(|task| task.key().clone()).collect();
        let shared = Arc::clone(&self.shared);
        let missing = blocking(move || uids.into_iter().filter(|uid| shared.misses_files(uid)).collect::<Vec<_>>());
        for uid in missing.await {
            if let Some(task) = self.shared.tasks.get(&uid) {
                // Fails if the task ends just now: then the pod needs no files.
                let _ = task.send(PodOperation::Restore);
            }
        }
    }

    /// Records whether an agent has released the pod.
    ///
    /// # Errors
    /// When the record cannot be written.
    pub async fn set_released(&self, pod: &PodUid, released: bool) -> Result<(), OperationError> {
        self.ask(pod, |answer| PodOperation::Released(released, answer)).await
    }

    async fn ask(
        &self,
        pod: &PodUid,
        request: impl FnOnce(oneshot::Sender<Result<(), OperationError>>) -> PodOperation,
    ) -> Result<(), OperationError> {
        let (answer, answered) = oneshot::channel();
        self.shared.send(pod, request(answer));
        answered.await.unwrap_or_else(|_| Err(OperationError::DaemonEnds))
    }
}

impl SharedSupervisors {
    /// Whether a file is missing that a pod with a supervisor has.
    fn misses_files(&self, pod: &PodUid) -> bool {
        !self.checkpoints.has_files(pod) || control::misses_files(&self.settings.run_directory.join(pod.as_str()))
    }

    /// Sends a request to the task of the pod. Starts the task if there is none.
    fn send(self: &Arc<Self>, pod: &PodUid, request: PodOperation) {
        match self.tasks.entry(pod.clone()) {
            Entry::Occupied(task) => drop(task.get().send(request)),
            Entry::Vacant(free) => {
                let (requests, received) = mpsc::unbounded_channel();
                let _ = requests.send(request);
                free.insert(requests);
                let follow = Arc::clone(self).follow(pod.clone(), received);
                tokio::spawn(follow.instrument(spans::of_uid(pod, None)));
            }
        }
    }

    /// Runs the tasks of a pod, one after another, until a task has left nothing to do. While the entry exists, requests go
    /// to its sender. This function removes the entry only if the receiver is empty, and holds the entry's lock meanwhile, so
    /// no request is lost.
    async fn follow(self: Arc<Self>, pod: PodUid, mut requests: mpsc::UnboundedReceiver<PodOperation>) {
        loop {
            requests = PodTask::new(pod.clone(), Arc::clone(&self), requests).run().await;
            if self.tasks.remove_if(&pod, |_, _| requests.is_empty()).is_some() {
                return;
            }
        }
    }
}

/// Runs a call that may block on a blocking thread, in the current span.
async fn blocking<T: Send + 'static>(work: impl FnOnce() -> T + Send + 'static) -> T {
    let span = Span::current();
    match spawn_blocking(move || span.in_scope(work)).await {
        Ok(result) => result,
        // The daemon ends, and this task with it.
        Err(_cancelled) => std::future::pending().await,
    }
}
