//! An alarm that wakes the process once.
//!
//! A timer of tokio that is seconds away wakes the process up to three times: it moves from a coarse wheel to finer ones on its way. A
//! node has a supervisor for each pod, and most of what an idle supervisor costs is being woken. So the alarm is a timer of the
//! kernel (`timerfd_create(2)`).

use std::os::fd::OwnedFd;
use std::time::{Duration, Instant};

use nix::sys::time::TimeSpec;
use nix::sys::timerfd::{ClockId, Expiration, TimerFd, TimerFlags, TimerSetTimeFlags};
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;
use tokio::time::sleep_until;

/// An alarm that is set.
pub(super) struct Alarm {
    at: Instant,
    /// `None` if the process has no descriptor to spare; then tokio's timer has to do.
    timer: Option<AsyncFd<OwnedFd>>,
}

impl Alarm {
    /// To be called on the supervisor's runtime.
    pub(super) fn at(at: Instant) -> Alarm {
        Alarm { at, timer: timer(at.saturating_duration_since(Instant::now())) }
    }

    /// Waits until it is time, or no longer if that has passed.
    pub(super) async fn rings(&self) {
        match &self.timer {
            Some(timer) if timer.readable().await.is_ok() => {}
            _ => sleep_until(self.at.into()).await,
        }
    }
}

fn timer(remaining: Duration) -> Option<AsyncFd<OwnedFd>> {
    let timer = TimerFd::new(ClockId::CLOCK_MONOTONIC, TimerFlags::TFD_NONBLOCK | TimerFlags::TFD_CLOEXEC).ok()?;
    // Zero would disarm it.
    let remaining = TimeSpec::from_duration(remaining.max(Duration::from_nanos(1)));
    timer.set(Expiration::OneShot(remaining), TimerSetTimeFlags::empty()).ok()?;
    let timer: OwnedFd = timer.into();
    // SAFETY: the descriptor belongs to the `AsyncFd` and is closed with it.
    unsafe { AsyncFd::register_with_interest(timer, Interest::READABLE) }.ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn an_alarm_rings_when_it_is_time_and_again_for_those_who_ask_later() {
        let at = Instant::now() + Duration::from_millis(20);
        let alarm = Alarm::at(at);
        alarm.rings().await;
        assert!(Instant::now() >= at);
        alarm.rings().await;
        Alarm::at(at).rings().await;
    }
}
