//! How long the source of an NFS volume has been silent, for the supervisor: since its last answer, if a call has been outstanding
//! since then.
//!
//! A call that ends without an answer does not end the silence, and the next call does not begin it anew. So a silence may last
//! after all callers have given up, until the source answers. Without calls, there is no silence. The server of the volume writes
//! when the silence begins and ends, so this needs no timer. A killed server leaves its silence in the region; the successor begins
//! with none.

use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::Relaxed;
use std::time::{Duration, Instant};

use rustix::time::{ClockId, clock_gettime};

use super::shared::shared;

shared! {
    /// The beginning of the silence.
    pub(crate) struct Silence {
        /// Milliseconds on the clock that all processes share ([`ClockId::Monotonic`]); 0 for no silence.
        since: AtomicU64,
    }
}

impl Silence {
    /// Sets the moment of the source's last answer while a call is outstanding, or `None` once the source has answered.
    pub(crate) fn set(&self, since: Option<Moment>) {
        let milliseconds = |Moment(since): Moment| u64::try_from(since.as_millis()).unwrap_or(u64::MAX).max(1);
        self.since.store(since.map_or(0, milliseconds), Relaxed);
    }

    /// The moment at which the silence began.
    pub(crate) fn since(&self) -> Option<Moment> {
        let since = self.since.load(Relaxed);
        (since != 0).then_some(Moment(Duration::from_millis(since)))
    }
}

/// A moment on a clock that is the same in all processes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Moment(Duration);

impl Moment {
    /// The moment of an [`Instant`], which only this process can read.
    pub(crate) fn of(instant: Instant) -> Self {
        Self(now().saturating_sub(instant.elapsed()))
    }

    /// The time since this moment.
    pub fn elapsed(self) -> Duration {
        now().saturating_sub(self.0)
    }
}

fn now() -> Duration {
    let now = clock_gettime(ClockId::Monotonic);
    Duration::try_from(now).unwrap_or_default()
}
