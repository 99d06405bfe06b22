//! The keeper, as the supervisor sees it: the process that holds the server's open files for a successor.

use std::io;
use std::sync::Arc;

use podfs_fuse::caller::ending::{is_dying, is_exiting};
use podfs_fuse::client::LastFdKeeper;
use tokio::task::JoinHandle;
use tokio::time::{Instant, sleep_until, timeout};
use tracing::{info, warn};

use super::process::WatchedProcess;
use super::{KILL_TIMEOUT, PodServer, oom};

/// The keeper of the server that serves.
pub(super) enum FdKeeperState {
    /// No keeper runs, or this supervisor does not know the keeper.
    Unknown,
    /// The keeper lives, or ended while the supervisor watched it.
    Watched(WatchedProcess),
    /// The keeper with this process id had ended before this supervisor could watch it.
    Gone(i32),
    /// The server could not start another keeper. At this time, it tries again to replace the keeper with this process id.
    Missing(i32, Instant),
    /// The server is starting another keeper in the place of the one with this process id.
    Starting(i32, JoinHandle<io::Result<()>>),
}

/// A change of the keeper.
pub(super) enum FdKeeperChange {
    /// The keeper with this process id has ended.
    Ended(i32),
    /// The server has started another keeper.
    Started,
    /// The server could not start another keeper in the place of the one with this process id.
    Failed(i32, io::Error),
}

impl FdKeeperState {
    /// Waits until the keeper ends, or until the server has started another keeper.
    pub(super) async fn changed(&mut self) -> FdKeeperChange {
        match self {
            Self::Unknown => std::future::pending().await,
            Self::Watched(process) => {
                process.ended().await;
                FdKeeperChange::Ended(process.pid())
            }
            Self::Gone(pid) => FdKeeperChange::Ended(*pid),
            Self::Missing(pid, until) => {
                sleep_until(*until).await;
                FdKeeperChange::Ended(*pid)
            }
            Self::Starting(pid, start) => match start.await.expect("a task that panics ends the process") {
                Ok(()) => FdKeeperChange::Started,
                Err(error) => FdKeeperChange::Failed(*pid, error),
            },
        }
    }
}

impl PodServer {
    /// Watches the keeper of the server that serves now, and lets the kernel not kill it when memory runs out.
    pub(super) fn watch_keeper(&mut self) {
        if let FdKeeperState::Watched(last) = std::mem::replace(&mut self.keeper, FdKeeperState::Unknown) {
            // The successor has the open files of this earlier keeper, which ends; this reaps it.
            last.reap_in_background();
        }
        if let Some((keeper, _)) = self.client.facts() {
            self.keeper_pauses.reset();
            oom::protect_keeper(keeper);
            self.keeper = WatchedProcess::with_pid(keeper).map_or(FdKeeperState::Gone(keeper), FdKeeperState::Watched);
        }
    }

    /// Handles a change of the keeper. Makes the server start another keeper after the keeper has ended.
    pub(super) fn replace_keeper(&mut self, change: FdKeeperChange) {
        match change {
            FdKeeperChange::Ended(keeper) => {
                let client = Arc::clone(&self.client);
                let start = tokio::task::spawn_blocking(move || client.start_keeper(keeper));
                self.keeper = FdKeeperState::Starting(keeper, start);
            }
            FdKeeperChange::Started => {
                self.keeper = FdKeeperState::Unknown;
                self.watch_keeper();
                info!("the keeper of the server's open files ended; podfs has started another one");
            }
            FdKeeperChange::Failed(keeper, error) => {
                if self.keeper_pauses.failures() == 0 {
                    warn!(
                        "the server has no keeper, so its open files are lost if it is killed: {error}; podfs tries again to start one"
                    );
                }
                self.keeper = FdKeeperState::Missing(keeper, Instant::now() + self.keeper_pauses.fail());
            }
        }
    }
}

/// Whether the keeper of a dead server is dead, too. Waits at most [`KILL_TIMEOUT`] for the end of a keeper that is
/// being killed. After the keeper's end, its file locks on the source are free, and a successor can take them again.
pub(super) async fn is_gone(keeper: &LastFdKeeper) -> bool {
    let Some(pid) = keeper.pid() else { return false };
    let number = pid.cast_unsigned();
    if !keeper.has_hung_up() && !is_dying(number) && !is_exiting(number) {
        return false;
    }
    if let Ok(process) = WatchedProcess::with_pid(pid) {
        let _ended = timeout(KILL_TIMEOUT, process.ended()).await;
    }
    true
}
