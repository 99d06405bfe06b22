//! Notices that another process has unmounted a volume.
//!
//! The kernel marks an open mount table at each change (`proc_pid_mounts(5)`), and the supervisor reads the table then. It never
//! looks at a mount itself: a look may wait for the server that the supervisor has to replace.
//!
//! Every podfs of a node hears of every mount on it, and the table grows with the node: with 1 000 mounts, a read takes 2.5 ms. So
//! the supervisor reads it 100 ms after the first change, when the rest of a burst is over, and then at most once a second. A
//! hundred pods that start one after the other cost their supervisors a quarter of a CPU meanwhile, and nothing afterwards.

use std::fs::File;
use std::future::pending;
use std::io;
use std::path::PathBuf;
use std::time::Duration;

use podfs_fuse::mount::table::mounts;
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;
use tokio::time::{Instant, sleep_until};
use tracing::warn;

use super::Supervisor;
use crate::supervisor::run_dir::site::Site;

/// From a change of the table to the look at it.
const SETTLE: Duration = Duration::from_millis(100);
/// From one look to the next.
const PAUSE: Duration = Duration::from_secs(1);

/// The mount table.
pub(in crate::supervisor) struct UnmountWatch {
    table: AsyncFd<File>,
    look_at: Option<Instant>,
    last: Option<Instant>,
    /// Whether podfs ends when its volume is unmounted.
    is_end: bool,
    /// Whether podfs worked on a volume during the last look, which therefore missed it.
    missed: bool,
}

impl UnmountWatch {
    /// Volumes are served without a watch if there can be none. What was unmounted before is found, too.
    pub(in crate::supervisor) fn of(site: &Site) -> Option<Self> {
        let open = || -> io::Result<AsyncFd<File>> {
            let table = File::open("/proc/self/mountinfo")?;
            // SAFETY: a file has the same descriptor for as long as it lives, and closes it only at its end.
            Ok(unsafe { AsyncFd::register_with_interest(table, Interest::PRIORITY) }?)
        };
        let table = open();
        let table = table.inspect_err(|error| warn!("podfs cannot notice an unmount from outside: {error}")).ok()?;
        let is_end = matches!(site, Site::Exactly(_));
        Some(Self { table, look_at: Some(Instant::now()), last: None, is_end, missed: false })
    }

    /// The next look is due soon.
    fn look_soon(&mut self) {
        let soonest = Instant::now() + SETTLE;
        let at = self.last.map_or(soonest, |last| soonest.max(last + PAUSE));
        self.look_at.get_or_insert(at);
    }

    async fn look_is_due(&mut self) {
        let at = loop {
            if let Some(at) = self.look_at {
                break at;
            }
            match self.table.ready(Interest::PRIORITY).await {
                Ok(mut ready) => ready.clear_ready(),
                Err(_) => pending().await,
            }
            self.look_soon();
        };
        sleep_until(at).await;
        self.look_at = None;
        self.last = Some(Instant::now());
    }
}

/// Waits until the mount table has changed and a look at it is due; for ever without a watch.
pub(in crate::supervisor) async fn look_is_due(watch: Option<&mut UnmountWatch>) {
    match watch {
        Some(watch) => watch.look_is_due().await,
        None => pending().await,
    }
}

impl Supervisor {
    /// Compares the volumes with the mount table. Those that another process has unmounted are mounted again, unless podfs is
    /// to end with its volume; then this is where it was mounted.
    pub(in crate::supervisor) fn look_at_mounts(&mut self) -> Option<PathBuf> {
        let table = mounts().inspect_err(|error| warn!("podfs cannot read the mount table: {error}")).ok()?;
        let is_end = self.unmount_watch.as_mut().is_some_and(|watch| {
            watch.missed = !self.working.is_empty();
            watch.is_end
        });
        let mut changed = Vec::new();
        for (place, volume) in &mut self.idle {
            if is_end {
                return volume.unmounted_from(&table);
            }
            let Some(pause) = volume.look(&table) else { continue };
            self.turns.entry(*place).or_default().retry_at = Some(Instant::now() + pause);
            changed.push(*place);
        }
        let idle = std::mem::take(&mut self.idle);
        changed.iter().filter_map(|place| Some((*place, idle.get(place)?))).for_each(|(place, volume)| {
            self.report_volume(place, volume);
        });
        self.idle = idle;
        None
    }

    /// Looks again if the last look missed the volume that podfs worked on until now.
    pub(in crate::supervisor) fn look_again(&mut self) {
        if let Some(watch) = self.unmount_watch.as_mut().filter(|watch| watch.missed) {
            watch.missed = false;
            watch.look_soon();
        }
    }
}
