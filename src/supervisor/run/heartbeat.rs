//! Notifies systemd that the supervisor's task makes progress, if the unit has a watchdog (`WatchdogSec=`).

use std::future::pending;

use sd_notify::NotifyState;
use tokio::time::{Interval, MissedTickBehavior, interval};

use crate::supervisor::status::report::notify;

/// A timer of half the unit's watchdog timeout; `None` without a watchdog.
pub(crate) struct Heartbeat(Option<Interval>);

impl Heartbeat {
    /// The timer of this process's unit.
    pub(crate) fn of_unit() -> Self {
        let limit = sd_notify::watchdog_enabled().filter(|limit| !limit.is_zero());
        Self(limit.map(|limit| {
            let mut beats = interval(limit / 2);
            beats.set_missed_tick_behavior(MissedTickBehavior::Delay);
            beats
        }))
    }

    /// Waits for the timer, and notifies systemd. Without a watchdog, it waits for ever.
    pub(crate) async fn beat(&mut self) {
        match &mut self.0 {
            Some(beats) => drop(beats.tick().await),
            None => pending().await,
        }
        notify(&[NotifyState::Watchdog]);
    }
}
