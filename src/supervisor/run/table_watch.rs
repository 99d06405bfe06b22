//! When to read the mount table of this process.
//!
//! The kernel marks an open mount table at each change (`proc_pid_mounts(5)`). Every process that watches gets an event
//! for every mount on the node, and a read takes the longer, the more mounts the node has: 2.5 ms with 1 000 mounts. So
//! a look, which is one read, is due 100 ms after the first change, when most bursts of changes are over, and then at
//! most once a second.

use std::fs::File;
use std::future::pending;
use std::io;
use std::time::Duration;

use tokio::io::Interest;
use tokio::io::unix::AsyncFd;
use tokio::time::{Instant, sleep_until};

/// The time from a change of the table to the look at it.
const SETTLE_DELAY: Duration = Duration::from_millis(100);
/// The least time from one look to the next.
const PAUSE: Duration = Duration::from_secs(1);

/// Decides when a look is due.
pub(crate) struct TableWatch {
    /// The open mount table; `None` if only [`TableWatch::look_soon`] makes looks due.
    table: Option<AsyncFd<File>>,
    look_at: Option<Instant>,
    last: Option<Instant>,
}

impl TableWatch {
    /// The first look is due at once, and then one after each change.
    ///
    /// # Errors
    /// When the table cannot be watched.
    pub(crate) fn open() -> io::Result<TableWatch> {
        let table = File::open("/proc/self/mountinfo")?;
        // SAFETY: the `AsyncFd` owns the file, which keeps its descriptor, and closes it only when it is dropped.
        let table = unsafe { AsyncFd::register_with_interest(table, Interest::PRIORITY) }?;
        Ok(TableWatch { table: Some(table), ..TableWatch::on_demand() })
    }

    /// The first look is due at once, and later ones only after [`TableWatch::look_soon`].
    pub(crate) fn on_demand() -> TableWatch {
        TableWatch { table: None, look_at: Some(Instant::now()), last: None }
    }

    /// Makes a look due after [`SETTLE_DELAY`], but not within [`PAUSE`] of the last look.
    pub(crate) fn look_soon(&mut self) {
        let soonest = Instant::now() + SETTLE_DELAY;
        let at = self.last.map_or(soonest, |last| soonest.max(last + PAUSE));
        self.look_at.get_or_insert(at);
    }

    /// Waits until a look is due. Cancel-safe.
    pub(crate) async fn look_is_due(&mut self) {
        let at = loop {
            if let Some(at) = self.look_at {
                break at;
            }
            let Some(table) = &self.table else { return pending().await };
            match table.ready(Interest::PRIORITY).await {
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
