//! The life of a pod's supervisor, as the task of the pod sees it.

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
use crate::supervisor::server::Process;
use crate::supervisor::status::PodStatus;

/// The first pause before a supervisor is called again; each is a quarter longer than the one before. So it is called at the
/// latest when a quarter of the time of its start has passed once more.
const FIRST_PAUSE: Duration = Duration::from_millis(1);

/// The life of the supervisor.
pub(super) enum Life {
    /// There is none. A mount leads to `Queued`.
    Absent,
    /// It waits for its turn to be started.
    Queued(Pin<Box<dyn Future<Output = Option<OwnedSemaphorePermit>> + Send + Sync>>),
    /// It was started or found, and does not answer yet, or does not any more.
    Calling(Calling),
    /// It sends its status.
    Up(Up),
    /// It got SIGTERM. It is killed when its end takes too long.
    Ending { process: Process, kill_at: Instant, cgroup: Option<PathBuf> },
}

/// A supervisor that does not answer.
pub(super) struct Calling {
    /// The process; systemd does not say which it is.
    pub(super) process: Option<Process>,
    /// Whether systemd was asked to start it.
    pub(super) is_unit: bool,
    /// Since when it does not answer.
    pub(super) since: Instant,
    /// When it is called again, and how long the pause after that is.
    pub(super) next: Instant,
    pub(super) pause: Duration,
    /// Whether its silence is reported.
    pub(super) is_reported: bool,
    /// So many supervisors are started at once.
    pub(super) permit: Option<OwnedSemaphorePermit>,
}

/// A supervisor that sends its status.
pub(super) struct Up {
    pub(super) watch: StatusWatch,
    pub(super) process: Process,
    /// A publication of the wanted volumes under way.
    pub(super) change: Option<PublicationChange>,
    /// Whether it has sent a status.
    pub(super) has_spoken: bool,
}

/// A publication to a supervisor under way.
pub(super) struct PublicationChange {
    pub(super) wanted: Checkpoint,
    /// The volumes that the supervisor may not have served before.
    pub(super) added: BTreeSet<String>,
    pub(super) told: JoinHandle<PublicationResult>,
}

/// What a publication came to; if there are new volumes, with a connection that has only statuses from after it.
pub(super) type PublicationResult = Result<Option<Result<StatusWatch, AskError>>, OperationError>;

/// What happened to the supervisor.
pub(super) enum LifeEvent {
    /// It is its turn to be started.
    Turn(Option<OwnedSemaphorePermit>),
    /// It is to be called again.
    Call,
    /// Its process has ended, in this way.
    Ended(String),
    /// It says how it is, closed the connection, or cannot be understood.
    Status(Result<Option<Box<PodStatus>>, AskError>),
    /// It knows which volumes are wanted, or not.
    Changed(PublicationResult),
    /// It got SIGTERM long ago.
    Overdue,
}

impl Calling {
    /// Begins now.
    pub(super) fn new(process: Option<Process>, is_unit: bool, permit: Option<OwnedSemaphorePermit>) -> Calling {
        let now = Instant::now();
        Calling { process, is_unit, since: now, next: now, pause: FIRST_PAUSE, is_reported: false, permit }
    }
}

impl Life {
    /// What happens next. Cancel-safe.
    pub(super) async fn next(&mut self) -> LifeEvent {
        match self {
            Life::Absent => std::future::pending().await,
            Life::Queued(turn) => LifeEvent::Turn(turn.await),
            Life::Calling(Calling { process: Some(process), next, .. }) => tokio::select! {
                how = process.ended() => LifeEvent::Ended(how.to_string()),
                () = sleep_until(*next) => LifeEvent::Call,
            },
            Life::Calling(Calling { process: None, next, .. }) => {
                sleep_until(*next).await;
                LifeEvent::Call
            }
            Life::Up(Up { watch, process, change, .. }) => tokio::select! {
                how = process.ended() => LifeEvent::Ended(how.to_string()),
                status = watch.next() => LifeEvent::Status(status),
                changed = async { (&mut change.as_mut().expect("there is one").told).await }, if change.is_some() => {
                    LifeEvent::Changed(changed.unwrap_or_else(|error| Err(error.into())))
                }
            },
            Life::Ending { process, kill_at, .. } => tokio::select! {
                how = process.ended() => LifeEvent::Ended(how.to_string()),
                () = sleep_until(*kill_at) => LifeEvent::Overdue,
            },
        }
    }
}

/// The process with this id, while it is there.
pub(super) fn process(pid: u32) -> Option<Process> {
    i32::try_from(pid).ok().and_then(|pid| Process::with_pid(pid).ok())
}
