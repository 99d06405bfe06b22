//! Since when the source of a volume says nothing, for those who watch: since it was heard last while something was asked of
//! it. Calls that end without an answer do not end it, nor does it begin anew when the next one is made; so it may go on
//! when nobody waits any more, until something is answered. Where nothing is asked there is none. Who serves the volume
//! writes it when that changes, so it costs no timer. One that is killed leaves it; its successor begins with none.

use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::Relaxed;
use std::time::{Duration, Instant};

use rustix::time::{ClockId, clock_gettime};

use super::shared::shared;

shared! {
    /// One moment.
    pub(crate) struct Silence {
        /// Milliseconds on the clock that all processes have ([`ClockId::Monotonic`]); 0 for no silence.
        since: AtomicU64,
    }
}

impl Silence {
    /// The source was asked something, and was heard last at that moment. With none, it has answered.
    pub(crate) fn set(&self, since: Option<Moment>) {
        let milliseconds = |Moment(since): Moment| u64::try_from(since.as_millis()).unwrap_or(u64::MAX).max(1);
        self.since.store(since.map_or(0, milliseconds), Relaxed);
    }

    /// When it began.
    pub(crate) fn since(&self) -> Option<Moment> {
        let since = self.since.load(Relaxed);
        (since != 0).then_some(Moment(Duration::from_millis(since)))
    }
}

/// A moment on a clock that is the same in all processes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Moment(Duration);

impl Moment {
    /// The same moment as one of this process alone.
    pub(crate) fn of(instant: Instant) -> Self {
        Self(now().saturating_sub(instant.elapsed()))
    }

    /// How long ago it was.
    pub fn elapsed(self) -> Duration {
        now().saturating_sub(self.0)
    }
}

fn now() -> Duration {
    let now = clock_gettime(ClockId::Monotonic);
    Duration::try_from(now).unwrap_or_default()
}
