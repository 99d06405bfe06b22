//! What signals tell the supervisor.
//!
//! | signal | meaning |
//! |---|---|
//! | SIGTERM, SIGINT, SIGHUP | unmount and end |
//! | SIGUSR1 | end, and leave the volumes to the next supervisor, as a crash would; a restart of the unit sends it |

use std::io;

use tokio::signal::unix::{Signal, SignalKind, signal};

/// What a supervisor is told to do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Order {
    /// Take the volumes down.
    Stop,
    /// Leave them as they are.
    Leave,
}

/// The signals that the supervisor listens for.
pub(crate) struct Signals {
    terminate: Signal,
    interrupt: Signal,
    hang_up: Signal,
    leave: Signal,
}

impl Signals {
    /// From here on none of them ends the process by itself.
    ///
    /// # Errors
    /// When the process cannot listen.
    pub(crate) fn listen() -> io::Result<Self> {
        Ok(Self {
            terminate: signal(SignalKind::terminate())?,
            interrupt: signal(SignalKind::interrupt())?,
            hang_up: signal(SignalKind::hangup())?,
            leave: signal(SignalKind::user_defined1())?,
        })
    }

    /// Waits for the next one, and gives its name. Cancel-safe.
    pub(crate) async fn received(&mut self) -> (&'static str, Order) {
        tokio::select! {
            _ = self.terminate.recv() => ("SIGTERM", Order::Stop),
            _ = self.interrupt.recv() => ("SIGINT", Order::Stop),
            _ = self.hang_up.recv() => ("SIGHUP", Order::Stop),
            _ = self.leave.recv() => ("SIGUSR1", Order::Leave),
        }
    }
}
