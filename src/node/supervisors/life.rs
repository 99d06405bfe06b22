//! The life of a pod's supervisor, from the side of the pod's task.

use std::collections::BTreeSet;
use std::path::PathBuf;
use std::pin::Pin;
use std::time::{Duration, SystemTime};

use k8s_openapi::jiff::Timestamp;
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

/// How long a supervisor may take to end before the task reports that it waits.
const REPORT_DELAY: Duration = Duration::from_secs(3);
/// How long a supervisor may take to end: it deletes the content of emptyDirs (`TimeoutStopSec=` of its unit).
const STOP_TIMEOUT: Duration = Duration::from_secs(300);

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
    Ending(EndingSupervisor),
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

/// A supervisor that got SIGTERM.
pub(super) struct EndingSupervisor {
    pub(super) process: WatchedProcess,
    pub(super) cgroup: Option<PathBuf>,
    /// When it got SIGTERM.
    pub(super) since: SystemTime,
    /// When the manager gets the report that it has not ended; `None` once it has the report.
    pub(super) report_at: Option<Instant>,
    /// When podfs kills it, or kills it once more.
    pub(super) kill_at: Instant,
    /// Whether it got SIGKILL.
    pub(super) is_killed: bool,
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
    /// It has not ended soon after SIGTERM.
    Slow,
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

impl EndingSupervisor {
    /// A supervisor that has just got SIGTERM.
    pub(super) fn new(process: WatchedProcess, cgroup: Option<PathBuf>) -> EndingSupervisor {
        let now = Instant::now();
        EndingSupervisor {
            process,
            cgroup,
            since: SystemTime::now(),
            report_at: Some(now + REPORT_DELAY),
            kill_at: now + STOP_TIMEOUT,
            is_killed: false,
        }
    }

    /// Kills it. Returns whether this is the first time.
    pub(super) fn kill(&mut self) -> bool {
        self.process.kill();
        self.kill_at = Instant::now() + STOP_TIMEOUT;
        !std::mem::replace(&mut self.is_killed, true)
    }

    /// What podfs waits for, a sentence.
    pub(super) fn awaited(&self) -> String {
        awaited(self.process.pid().unsigned_abs(), self.since, self.is_killed)
    }
}

fn awaited(pid: u32, since: SystemTime, is_killed: bool) -> String {
    let at =
        |time: SystemTime| Timestamp::try_from(time).unwrap_or_default().strftime("%Y-%m-%dT%H:%M:%SZ").to_string();
    let next = match is_killed {
        false => format!("podfs kills it at {} if it has not ended", at(since + STOP_TIMEOUT)),
        true => {
            "SIGKILL has not ended it yet: a system call on a disk or a source that does not answer keeps it".to_owned()
        }
    };
    format!("podfs has waited since {} for the end of the pod's supervisor (pid {pid}); {next}", at(since))
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
            SupervisorLife::Ending(EndingSupervisor { process, report_at, kill_at, .. }) => tokio::select! {
                end = process.ended() => LifeEvent::Ended(end.to_string()),
                () = sleep_until(report_at.unwrap_or(*kill_at)), if report_at.is_some() => LifeEvent::Slow,
                () = sleep_until(*kill_at) => LifeEvent::Overdue,
            },
        }
    }
}

/// The process with this id, if it exists.
pub(super) fn process(pid: u32) -> Option<WatchedProcess> {
    i32::try_from(pid).ok().and_then(|pid| WatchedProcess::with_pid(pid).ok())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_state_says_since_when_podfs_waits_for_the_end_of_a_supervisor() {
        let since = SystemTime::UNIX_EPOCH + Duration::from_secs(1_800_000_000);
        let begin = "podfs has waited since 2027-01-15T08:00:00Z for the end of the pod's supervisor (pid 7); ";
        let sentences = [false, true].map(|is_killed| awaited(7, since, is_killed));
        assert_eq!(sentences[0], format!("{begin}podfs kills it at 2027-01-15T08:05:00Z if it has not ended"));
        assert!(sentences[1].starts_with(&format!("{begin}SIGKILL has not ended it yet")), "{}", sentences[1]);
    }
}
