//! Makes the pod's run directory or its files again when another process has deleted them while the pod runs.
//!
//! While supervisor and server live, no volume depends on these files, so no call of a container fails meanwhile. Without the
//! files, agents cannot reach the supervisor, another supervisor could begin to serve the pod, and the next supervisor would not
//! find the server.
//!
//! 1. The supervisor makes the lock file, its claim on the pod, first. If another podfs has claimed the pod meanwhile, the
//!    supervisor makes nothing more.
//! 2. Then it makes the control socket, and the socket on which the next supervisor finds the server.
//! 3. The supervisor looks for the files when a program that followed the pod disconnects, as `podfs node` does when it misses a
//!    file, and at each heartbeat of its unit. It also looks every five seconds while no daemon follows it.
//! 4. While a thread has the mount points locked, the supervisor does not look, because the disk that this thread waits for may
//!    not answer. It looks a second later.

use std::future::pending;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use tokio::task::spawn_blocking;
use tokio::time::{Instant, Interval, MissedTickBehavior, interval_at, sleep_until};
use tracing::{error, info, warn};

use super::Supervisor;
use crate::supervisor::control::Control;
use crate::supervisor::run_dir::file_names::{CONTROL, SERVER};
use crate::supervisor::run_dir::mount_points::{MountPoints, RestoreError};
use crate::supervisor::run_dir::server_socket;

/// The time between two looks of a supervisor that no daemon follows.
const PERIOD: Duration = Duration::from_secs(5);
/// The pause after a look that found the mount points locked.
const RETRY_PAUSE: Duration = Duration::from_secs(1);

/// Waits until a look is due, because a program that followed the pod has disconnected. Cancel-safe.
pub(super) async fn look_is_due(control: Option<&Control>) {
    match control {
        Some(control) => control.follower_gone().await,
        None => pending().await,
    }
}

/// The times of looks that no event makes due.
pub(super) struct RunDirectoryTimer {
    /// The regular looks; `None` for a pod without a run directory.
    regular: Option<Interval>,
    /// When to look again after a look that found the mount points locked.
    again_at: Option<Instant>,
}

impl RunDirectoryTimer {
    /// A timer with regular looks if the pod has a run directory.
    pub(super) fn new(has_run_directory: bool) -> Self {
        let regular = has_run_directory.then(|| {
            let mut looks = interval_at(Instant::now() + PERIOD, PERIOD);
            looks.set_missed_tick_behavior(MissedTickBehavior::Delay);
            looks
        });
        Self { regular, again_at: None }
    }

    /// Waits until a look is due. While a daemon follows the supervisor (`is_watched`), there are no regular looks. Cancel-safe.
    pub(super) async fn look_is_due(&mut self, is_watched: bool) {
        let Self { regular, again_at } = self;
        let regular = async {
            match regular {
                Some(looks) if !is_watched => drop(looks.tick().await),
                _ => pending().await,
            }
        };
        let again = async {
            match again_at {
                Some(at) => sleep_until(*at).await,
                None => pending().await,
            }
        };
        tokio::select! {
            () = regular => {}
            () = again => {}
        }
    }
}

impl Supervisor {
    pub(super) fn has_run_directory(&self) -> bool {
        self.setting.mount_points().run_directory().is_some()
    }

    /// Whether `podfs node` follows the supervisor, and so watches the files of the run directory.
    pub(super) fn has_daemon(&self) -> bool {
        self.setting.keep_empty_dirs && self.control.as_ref().is_some_and(Control::has_follower)
    }

    /// Makes again what another process has deleted from the pod's run directory. While a thread has the mount points locked, this
    /// only makes the next look due soon.
    pub(super) fn look_at_run_directory(&mut self, timer: &mut RunDirectoryTimer) {
        let locked = self.setting.mount_points.try_lock();
        timer.again_at = locked.is_err().then(|| Instant::now() + RETRY_PAUSE);
        if let Some((directory, restored)) = locked.ok().and_then(|mut mount_points| restore_claim(&mut mount_points)) {
            self.restore_sockets(directory, restored);
        }
        if !self.are_definitions_recorded {
            self.record_definitions();
        }
    }

    /// Makes the sockets again that are missing, unless podfs could not restore its claim.
    fn restore_sockets(&mut self, directory: PathBuf, restored: Result<bool, RestoreError>) {
        let trouble = restored.as_ref().err().map(ToString::to_string);
        let is_known = trouble.is_some() && trouble == self.run_directory_trouble;
        self.run_directory_trouble = trouble;
        match restored {
            Ok(true) => warn!("another process has deleted {}; podfs makes it again", directory.display()),
            Ok(false) => {}
            Err(_) if is_known => return,
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

    /// Makes the server listen at a new socket. A blocking thread asks the server, which may answer late.
    fn let_server_listen(&self, directory: PathBuf) {
        // An earlier renewal may still wait for the server. Two at once would remove each other's socket.
        static IS_RENEWING: AtomicBool = AtomicBool::new(false);
        if IS_RENEWING.swap(true, Ordering::Relaxed) {
            return;
        }
        let server = self.server.client();
        spawn_blocking(move || {
            let path = directory.join(SERVER);
            match server_socket::renew(&directory, |socket| server.listen(socket)) {
                Ok(()) => info!("the server can be found at {} again", path.display()),
                // The next look finds that the socket is missing, and tries again.
                Err(error) => warn!(
                    "podfs cannot listen at {}, where the next podfs of the pod looks for the server: {error}",
                    path.display()
                ),
            }
            IS_RENEWING.store(false, Ordering::Relaxed);
        });
    }
}

/// Makes the claim again if another process has deleted the lock file. Returns the run directory, and whether the lock file was
/// deleted; `None` if the pod has no run directory.
fn restore_claim(mount_points: &mut MountPoints) -> Option<(PathBuf, Result<bool, RestoreError>)> {
    let directory = mount_points.run_directory()?.to_owned();
    Some((directory, mount_points.restore_claim()))
}

fn is_missing(path: &Path) -> bool {
    path.symlink_metadata().is_err_and(|error| error.kind() == std::io::ErrorKind::NotFound)
}
