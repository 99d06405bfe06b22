//! Makes the pod's run directory or its files again when another process has deleted them while the pod runs.
//!
//! Nothing of a volume depends on these files while supervisor and server live, so no call of a container fails meanwhile. Without
//! them, agents cannot reach the supervisor, another supervisor could begin to serve the pod, and the next one would not find the
//! server.
//!
//! 1. The claim comes first. If another podfs has claimed the pod meanwhile, this one makes nothing more.
//! 2. Then the sockets: the control socket, and the one on which the next supervisor finds the server.
//! 3. The supervisor looks when a program that followed the pod disconnects, as `podfs node` does when it misses a
//!    file, and at each heartbeat of its unit. A supervisor without a daemon looks every five seconds, but not while a
//!    thread has the mount points locked, whose disk may not answer.

use std::future::pending;
use std::path::{Path, PathBuf};
use std::time::Duration;

use tokio::task::spawn_blocking;
use tokio::time::{Instant, Interval, MissedTickBehavior, interval_at};
use tracing::{error, info, warn};

use super::Supervisor;
use crate::supervisor::control::Control;
use crate::supervisor::run_dir::claim::{CONTROL, SERVER};
use crate::supervisor::run_dir::mount_points::{MountPoints, RestoreError};
use crate::supervisor::run_dir::socket;

/// How often a supervisor without a daemon looks.
const PERIOD: Duration = Duration::from_secs(5);

/// Waits until a look is due. Cancel-safe.
pub(super) async fn look_is_due(control: Option<&Control>) {
    match control {
        Some(control) => control.follower_gone().await,
        None => pending().await,
    }
}

/// The timer of a supervisor that no daemon watches.
pub(super) struct RunDirectoryTimer(Option<Interval>);

impl RunDirectoryTimer {
    /// A timer, if `is_alone`.
    pub(super) fn new(is_alone: bool) -> Self {
        Self(is_alone.then(|| {
            let mut looks = interval_at(Instant::now() + PERIOD, PERIOD);
            looks.set_missed_tick_behavior(MissedTickBehavior::Delay);
            looks
        }))
    }

    /// Waits until a look is due. Cancel-safe.
    pub(super) async fn look_is_due(&mut self) {
        match &mut self.0 {
            Some(looks) => drop(looks.tick().await),
            None => pending().await,
        }
    }
}

impl Supervisor {
    /// Whether the pod has a run directory that no daemon watches.
    pub(super) fn watches_run_directory(&self) -> bool {
        !self.setting.keep_empty_dirs && self.setting.mount_points().run_directory().is_some()
    }

    /// Looks, unless a thread has the mount points locked.
    pub(super) fn look_at_run_directory_if_free(&mut self) {
        let free = self.setting.mount_points.try_lock().ok();
        if let Some((directory, restored)) = free.and_then(|mut mount_points| restore_claim(&mut mount_points)) {
            self.restore_sockets(directory, restored);
        }
    }

    /// Makes again what another process has deleted from the pod's run directory.
    pub(super) fn look_at_run_directory(&mut self) {
        let looked = restore_claim(&mut self.setting.mount_points());
        if let Some((directory, restored)) = looked {
            self.restore_sockets(directory, restored);
        }
    }

    fn restore_sockets(&mut self, directory: PathBuf, restored: Result<bool, RestoreError>) {
        match restored {
            Ok(true) => warn!("another process has deleted {}; podfs makes it again", directory.display()),
            Ok(false) => {}
            Err(reason) => {
                return error!(
                    "another process has deleted {}, and podfs cannot make it again: {reason}; the volumes are served on, and \
                     agents cannot reach this supervisor",
                    directory.display()
                );
            }
        }
        if is_missing(&directory.join(CONTROL))
            && let Some(control) = &mut self.control
            && let Err(error) = control.open_again(&directory)
        {
            warn!("podfs status cannot ask this process: {error}");
        }
        if is_missing(&directory.join(SERVER)) {
            self.let_server_listen(directory);
        }
    }

    /// Makes the server listen at a new socket. The server may take its time to answer.
    fn let_server_listen(&self, directory: PathBuf) {
        let server = self.server.client();
        spawn_blocking(move || {
            let path = directory.join(SERVER);
            match socket::make(&directory, SERVER).and_then(|socket| server.listen(socket)) {
                Ok(()) => info!("the server can be found at {} again", path.display()),
                Err(error) => {
                    // The next look finds that it is missing.
                    let _ = std::fs::remove_file(&path);
                    warn!(
                        "podfs cannot listen at {}, where the next podfs of the pod looks for the server: {error}",
                        path.display()
                    );
                }
            }
        });
    }
}

/// Makes the claim again if another process has deleted it. Returns the run directory, and whether there was need to; `None`
/// if the pod has no run directory.
fn restore_claim(mount_points: &mut MountPoints) -> Option<(PathBuf, Result<bool, RestoreError>)> {
    let directory = mount_points.run_directory()?.to_owned();
    Some((directory, mount_points.restore_claim()))
}

fn is_missing(path: &Path) -> bool {
    path.symlink_metadata().is_err_and(|error| error.kind() == std::io::ErrorKind::NotFound)
}
