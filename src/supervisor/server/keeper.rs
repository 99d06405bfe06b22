//! The process that keeps the server's open files, as the supervisor watches it.

use std::io;

use podfs_fuse::caller::ending::{is_dying, is_exiting};
use podfs_fuse::client::LastKeeper;
use tokio::task::JoinHandle;
use tokio::time::timeout;

use super::LAST_MOMENTS;
use super::process::Process;

/// The keeper of the server that serves.
pub(super) enum Keeper {
    /// There is none, or this supervisor does not know it.
    Unknown,
    /// It lives, or ended while it was watched.
    Watched(Process),
    /// It had ended before this supervisor could watch it.
    Gone(i32),
    /// The server starts another one.
    Coming(JoinHandle<io::Result<()>>),
}

/// What happens to a keeper.
pub(super) enum KeeperChange {
    /// This process ended.
    Ended(i32),
    /// There is another one.
    Came(io::Result<()>),
}

impl Keeper {
    /// Waits for its end, or for the next one to come.
    pub(super) async fn changed(&mut self) -> KeeperChange {
        match self {
            Self::Unknown => std::future::pending().await,
            Self::Watched(process) => {
                process.ended().await;
                KeeperChange::Ended(process.pid())
            }
            Self::Gone(pid) => KeeperChange::Ended(*pid),
            Self::Coming(coming) => KeeperChange::Came(coming.await.expect("a task that panics ends the process")),
        }
    }
}

/// Whether the keeper of a dead server is dead, too. A keeper that is being killed has ended when this returns, unless it
/// cannot end: its locks on the source are free then, and a successor can take them again.
pub(super) async fn is_gone(keeper: &LastKeeper) -> bool {
    let Some(pid) = keeper.pid() else { return false };
    let number = pid.cast_unsigned();
    if !keeper.has_hung_up() && !is_dying(number) && !is_exiting(number) {
        return false;
    }
    if let Ok(process) = Process::with_pid(pid) {
        let _ended = timeout(LAST_MOMENTS, process.ended()).await;
    }
    true
}
