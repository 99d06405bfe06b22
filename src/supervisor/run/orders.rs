//! The orders that a supervisor receives as signals.
//!
//! | signal | order |
//! |---|---|
//! | SIGTERM, SIGINT, SIGHUP | unmount and end |
//! | SIGUSR1 | end, and leave the volumes to the next supervisor, as a crash would; a restart of the unit sends it |

use std::io;

use tokio::signal::unix::{Signal, SignalKind, signal};

use super::signals::StopSignals;

/// An order to a supervisor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::supervisor) enum SupervisorOrder {
    /// Unmount the volumes, and end.
    Stop,
    /// End, and leave the volumes mounted.
    Leave,
}

/// The signals that carry orders.
pub(in crate::supervisor) struct OrderSignals {
    stop: StopSignals,
    leave: Signal,
}

impl OrderSignals {
    /// Starts to listen. From now on, none of these signals ends the process by default.
    pub(in crate::supervisor) fn listen() -> io::Result<Self> {
        Ok(Self { stop: StopSignals::listen()?, leave: signal(SignalKind::user_defined1())? })
    }

    /// Waits for the next order. Returns it with the signal's name.
    pub(in crate::supervisor) async fn received(&mut self) -> (&'static str, SupervisorOrder) {
        tokio::select! {
            signal = self.stop.received() => (signal, SupervisorOrder::Stop),
            _ = self.leave.recv() => ("SIGUSR1", SupervisorOrder::Leave),
        }
    }
}
