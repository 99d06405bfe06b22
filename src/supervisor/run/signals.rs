//! The signals that ask podfs to end: SIGTERM, SIGINT and SIGHUP.

use std::io;

use tokio::signal::unix::{Signal, SignalKind, signal};

use crate::supervisor::signal_record::is_hangup_ignored;

/// The signals that ask the process to end.
pub(crate) struct StopSignals {
    terminate: Signal,
    interrupt: Signal,
    /// `None` if the process that started podfs ignores it for podfs.
    hang_up: Option<Signal>,
}

impl StopSignals {
    /// Listens from now on.
    ///
    /// # Errors
    /// When the process cannot listen.
    pub(crate) fn listen() -> io::Result<Self> {
        Ok(Self {
            terminate: signal(SignalKind::terminate())?,
            interrupt: signal(SignalKind::interrupt())?,
            hang_up: if is_hangup_ignored() { None } else { Some(signal(SignalKind::hangup())?) },
        })
    }

    /// Waits for the next signal, and returns its name. Cancel-safe.
    pub(crate) async fn received(&mut self) -> &'static str {
        let hang_up = async {
            match &mut self.hang_up {
                Some(signal) => signal.recv().await,
                None => std::future::pending().await,
            }
        };
        tokio::select! {
            _ = self.terminate.recv() => "SIGTERM",
            _ = self.interrupt.recv() => "SIGINT",
            _ = hang_up => "SIGHUP",
        }
    }
}
