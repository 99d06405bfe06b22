//! Notifies systemd that the supervisor's task makes progress, if the unit has a watchdog (`WatchdogSec=`).

use std::future::pending;

use sd_notify::NotifyState;
use tokio::time::{Interval, MissedTickBehavior, interval};

use crate::supervisor::status::report::notify;

/// Beats twice in the time after which systemd takes the process for dead.
pub(crate) struct Heartbeat(Option<Interval>);

impl Heartbeat {
    /// As the unit wants it; none without one.
    pub(crate) fn of_unit() -> Self {
        let patience = sd_notify::watchdog_enabled().filter(|patience| !patience.is_zero());
        Self(patience.map(|patience| {
            let mut beats = interval(patience / 2);
            beats.set_missed_tick_behavior(MissedTickBehavior::Delay);
            beats
        }))
    }

    /// Waits until it is time, and notifies systemd.
    pub(crate) async fn beat(&mut self) {
        match &mut self.0 {
            Some(beats) => drop(beats.tick().await),
            None => pending().await,
        }
        notify(&[NotifyState::Watchdog]);
    }
}
