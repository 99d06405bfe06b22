//! The life of a pod's supervisor, from the side of the pod's task.

use std::collections::BTreeSet;
use std::path::PathBuf;
use std::pin::Pin;
use std::time::Duration;

use tokio::sync::OwnedSemaphorePermit;
use tokio::task::JoinHandle;
use tokio::time::{Instant, sleep_until};

use super::OperationError;
use super::control::StatusWatch;
use crate::node::checkpoint::Checkpoint;
use crate::supervisor::control::AskError;
use crate::supervisor::server::WatchedProcess;
use crate::supervisor::status::PodStatus;

/// The first pause before the task calls a supervisor again; each pause is a quarter longer than the one before. So the
/// task reaches a supervisor after at most 1.25 times its start-up time.
const FIRST_PAUSE: Duration = Duration::from_millis(1);

/// The life of the supervisor.
pub(super) enum SupervisorLife {
    /// No supervisor runs. A mount leads to `Queued`.
    Absent,
    /// It waits for a permit to start.
    Queued(Pin<Box<dyn Future<Output = Option<OwnedSemaphorePermit>> + Send + Sync>>),
    /// It was started or found, and does not answer yet, or no longer.
    Calling(ConnectingSupervisor),
    /// It sends its status.
    Up(RunningSupervisor),
    /// It got SIGTERM. podfs kills it if its end takes too long.
    Ending { process: WatchedProcess, kill_at: Instant, cgroup: Option<PathBuf> },
}

/// A supervisor that does not answer.
pub(super) struct ConnectingSupervisor {
    /// The process; `None` while systemd starts it.
    pub(super) process: Option<WatchedProcess>,
    /// Whether systemd starts it.
    pub(super) is_unit: bool,
    /// Since when it has not answered.
    pub(super) since: Instant,
    /// When the task calls it again, and the pause after that.
    pub(super) next: Instant,
    pub(super) pause: Duration,
    /// Whether the manager has the report that it does not answer.
    pub(super) is_reported: bool,
    /// The permit to start, of which there are only a few at a time.
    pub(super) permit: Option<OwnedSemaphorePermit>,
}

/// A supervisor that sends its status.
pub(super) struct RunningSupervisor {
    pub(super) watch: StatusWatch,
    pub(super) process: WatchedProcess,
    /// A running publication of the wanted volumes.
    pub(super) change: Option<PublicationChange>,
    /// Whether it has sent a status.
    pub(super) has_sent_status: bool,
}

/// A running publication to a supervisor.
pub(super) struct PublicationChange {
    pub(super) wanted: Checkpoint,
    /// The volumes that the supervisor may not have served before.
    pub(super) added: BTreeSet<String>,
    pub(super) task: JoinHandle<PublicationResult>,
}

/// The outcome of a publication; if there are new volumes, with a connection that carries only statuses from after it.
pub(super) type PublicationResult = Result<Option<Result<StatusWatch, AskError>>, OperationError>;

/// An event of the supervisor.
pub(super) enum LifeEvent {
    /// It has the permit to start.
    Permit(Option<OwnedSemaphorePermit>),
    /// It is time to call it again.
    Call,
    /// Its process has ended, in this way.
    Ended(String),
    /// It sent its status or closed the connection, or its message cannot be parsed.
    Status(Result<Option<Box<PodStatus>>, AskError>),
    /// A publication of the wanted volumes has ended.
    Changed(PublicationResult),
    /// It has not ended in time after SIGTERM.
    Overdue,
}

impl ConnectingSupervisor {
    /// Calls it from now on.
    pub(super) fn new(
        process: Option<WatchedProcess>,
        is_unit: bool,
        permit: Option<OwnedSemaphorePermit>,
    ) -> ConnectingSupervisor {
        let now = Instant::now();
        ConnectingSupervisor { process, is_unit, since: now, next: now, pause: FIRST_PAUSE, is_reported: false, permit }
    }
}

impl SupervisorLife {
    /// Waits for the next event. Cancel-safe.
    pub(super) async fn next(&mut self) -> LifeEvent {
        match self {
            SupervisorLife::Absent => std::future::pending().await,
            SupervisorLife::Queued(permit) => LifeEvent::Permit(permit.await),
            SupervisorLife::Calling(ConnectingSupervisor { process: Some(process), next, .. }) => tokio::select! {
                end = process.ended() => LifeEvent::Ended(end.to_string()),
                () = sleep_until(*next) => LifeEvent::Call,
            },
            SupervisorLife::Calling(ConnectingSupervisor { process: None, next, .. }) => {
                sleep_until(*next).await;
                LifeEvent::Call
            }
            SupervisorLife::Up(RunningSupervisor { watch, process, change, .. }) => tokio::select! {
                end = process.ended() => LifeEvent::Ended(end.to_string()),
                status = watch.next() => LifeEvent::Status(status),
                changed = async { (&mut change.as_mut().expect("there is one").task).await }, if change.is_some() => {
                    LifeEvent::Changed(changed.unwrap_or_else(|error| Err(error.into())))
                }
            },
            SupervisorLife::Ending { process, kill_at, .. } => tokio::select! {
                end = process.ended() => LifeEvent::Ended(end.to_string()),
                () = sleep_until(*kill_at) => LifeEvent::Overdue,
            },
        }
    }
}

/// The process with this id, if it exists.
pub(super) fn process(pid: u32) -> Option<WatchedProcess> {
    i32::try_from(pid).ok().and_then(|pid| WatchedProcess::with_pid(pid).ok())
}
