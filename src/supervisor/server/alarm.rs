//! An alarm that wakes the process once.
//!
//! A timer of tokio that is seconds away wakes the process up to three times: it moves from a coarse wheel to finer
//! ones on its way. A node has a supervisor for each pod, and an idle supervisor costs little but its wake-ups. So the
//! alarm is a timer of the kernel (`timerfd_create(2)`).

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
    /// `None` if the process has no descriptor left; then tokio's timer replaces it.
    timer: Option<AsyncFd<OwnedFd>>,
}

impl Alarm {
    /// To be called on the supervisor's runtime.
    pub(super) fn at(at: Instant) -> Alarm {
        Alarm { at, timer: timer(at.saturating_duration_since(Instant::now())) }
    }

    /// Waits until the alarm's time; returns at once if that has passed.
    pub(super) async fn expires(&self) {
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
    async fn an_alarm_expires_at_its_time_and_stays_expired() {
        let at = Instant::now() + Duration::from_millis(20);
        let alarm = Alarm::at(at);
        alarm.expires().await;
        assert!(Instant::now() >= at);
        alarm.expires().await;
        Alarm::at(at).expires().await;
    }
}
