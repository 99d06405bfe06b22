//! The socket for agents, and the files of the run directory while the daemon runs: the daemon makes deleted ones again.
//!
//! 1. Every five seconds the daemon checks its lock, its socket, and the files of each pod.
//! 2. Without its lock, another daemon could start. The daemon takes the lock again; if another daemon has taken it meanwhile, this
//!    one ends.
//! 3. Then the daemon writes the checkpoints of pods, and closes its connections to supervisors whose own files are missing. These
//!    make their files again, and the daemon calls them until they answer.
//!
//! No volume depends on these files while the processes of a pod live.

use std::time::Duration;

use tokio::time::{MissedTickBehavior, interval, sleep};
use tracing::{info, warn};

use super::NodeHandle;
use super::error::NodeError;
use super::service::{self, DaemonError, DaemonLock};
use super::supervisors::Supervisors;

/// How often the daemon checks its files. A check takes a few system calls for each pod.
const CHECK_INTERVAL: Duration = Duration::from_secs(5);

/// Serves agents. After another process has deleted the socket, the daemon makes a new one.
///
/// # Errors
/// When the socket cannot be used, or another daemon serves the run directory now.
pub(super) async fn serve(mut lock: DaemonLock, node: NodeHandle, supervisors: Supervisors) -> Result<(), NodeError> {
    let directory = supervisors.run_directory().to_owned();
    let mut listener = lock.listen()?;
    info!("podfs serves this node; agents ask at {}", directory.join(service::socket::SOCKET).display());
    loop {
        tokio::select! {
            served = service::serve(listener, node.clone(), directory.clone()) => return served.map_err(NodeError::Service),
            () = until_files_are_missing(&lock, &supervisors) => {}
        }
        warn!("another process has deleted files of podfs node in {}; podfs makes them again", directory.display());
        let mut last = None;
        listener = loop {
            match lock.restore() {
                Ok(listener) => break listener,
                Err(error @ DaemonError::Taken { .. }) => return Err(error.into()),
                Err(error) => {
                    let reason = error.to_string();
                    if last.as_ref() != Some(&reason) {
                        warn!("{reason}; agents cannot reach podfs node until that is fixed");
                    }
                    last = Some(reason);
                    sleep(CHECK_INTERVAL).await;
                }
            }
        };
    }
}

/// Makes missing files of pods again. Returns when the daemon's lock or socket is missing.
async fn until_files_are_missing(lock: &DaemonLock, supervisors: &Supervisors) {
    let mut checks = interval(CHECK_INTERVAL);
    checks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    while lock.is_in_place() {
        supervisors.restore_files().await;
        checks.tick().await;
    }
}
