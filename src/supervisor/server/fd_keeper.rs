//! The keeper, as the supervisor sees it: the process that holds the server's open files for a successor.

use std::io;

use podfs_fuse::caller::ending::{is_dying, is_exiting};
use podfs_fuse::client::LastFdKeeper;
use tokio::task::JoinHandle;
use tokio::time::timeout;

use super::KILL_TIMEOUT;
use super::process::WatchedProcess;

/// The keeper of the server that serves.
pub(super) enum FdKeeperState {
    /// No keeper runs, or this supervisor does not know the keeper.
    Unknown,
    /// The keeper lives, or ended while the supervisor watched it.
    Watched(WatchedProcess),
    /// The keeper with this process id had ended before this supervisor could watch it.
    Gone(i32),
    /// The server is starting another keeper.
    Starting(JoinHandle<io::Result<()>>),
}

/// A change of the keeper.
pub(super) enum FdKeeperChange {
    /// The keeper with this process id has ended.
    Ended(i32),
    /// The server has started another keeper, or could not start one.
    Started(io::Result<()>),
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
            Self::Starting(start) => FdKeeperChange::Started(start.await.expect("a task that panics ends the process")),
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
