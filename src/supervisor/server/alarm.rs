//! An alarm that wakes the process once.
//!
//! A timer of tokio that expires in some seconds wakes the process up to three times, because tokio moves the timer
//! from coarse slots of its timer wheel to finer ones. A node has a supervisor for each pod, and an idle supervisor
//! costs little but its wake-ups. So the alarm is a timer of the kernel (`timerfd_create(2)`).

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
    /// `None` if the kernel made no timer, because the process has no descriptor left. A timer of tokio replaces it.
    timer: Option<AsyncFd<OwnedFd>>,
}

impl Alarm {
    /// An alarm for this time. Call it on the supervisor's tokio runtime.
    pub(super) fn at(at: Instant) -> Alarm {
        Alarm { at, timer: timer(at.saturating_duration_since(Instant::now())) }
    }

    /// Waits until the alarm's time. Returns at once if that time has passed.
    pub(super) async fn expires(&self) {
        match &self.timer {
            Some(timer) if timer.readable().await.is_ok() => {}
            _ => sleep_until(self.at.into()).await,
        }
    }
}

fn timer(remaining: Duration) -> Option<AsyncFd<OwnedFd>> {
    let timer = TimerFd::new(ClockId::CLOCK_MONOTONIC, TimerFlags::TFD_NONBLOCK | TimerFlags::TFD_CLOEXEC).ok()?;
    // A time of zero would disarm the timer.
    let remaining = TimeSpec::from_duration(remaining.max(Duration::from_nanos(1)));
    timer.set(Expiration::OneShot(remaining), TimerSetTimeFlags::empty()).ok()?;
    let timer: OwnedFd = timer.into();
    // SAFETY: the `AsyncFd` owns the descriptor, and closes it when it is dropped.
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
