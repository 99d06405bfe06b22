//! The orders that a supervisor receives as signals.
//!
//! | signal | order |
//! |---|---|
//! | SIGTERM, SIGINT, SIGHUP | unmount and end |
//! | SIGUSR1 | end, and leave the volumes mounted for the next supervisor; systemd sends it when the unit restarts |
//!
//! An upgrade loses no order: the next program gets the orders that this program has not obeyed ([`signal_record`]).

use std::io;

use nix::sys::signal::Signal as SignalNumber;
use tokio::signal::unix::{Signal, SignalKind, signal};

use super::signals::StopSignals;
use crate::supervisor::exec_state::record_left;
use crate::supervisor::signal_record;

/// An order to a supervisor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::supervisor) enum SupervisorOrder {
    /// Unmount the volumes, and end.
    Stop,
    /// End, and leave the volumes mounted.
    Leave,
}

/// The signals that are orders to a supervisor.
pub(in crate::supervisor) struct OrderSignals {
    /// A signal that this program received before it listened, or that the program before an upgrade has not obeyed.
    earlier: Option<SignalNumber>,
    stop: StopSignals,
    leave: Signal,
}

impl OrderSignals {
    /// Starts to listen. From now on, none of these signals ends the process by default.
    pub(in crate::supervisor) fn listen() -> io::Result<Self> {
        let (stop, leave) = (StopSignals::listen()?, signal(SignalKind::user_defined1())?);
        signal_record::start(record_left)?;
        Ok(Self { earlier: signal_record::first_recorded(), stop, leave })
    }

    /// Waits for the next order. Returns it with the signal's name.
    pub(in crate::supervisor) async fn received(&mut self) -> (&'static str, SupervisorOrder) {
        match self.earlier.take() {
            Some(SignalNumber::SIGUSR1) => return (SignalNumber::SIGUSR1.as_str(), SupervisorOrder::Leave),
            Some(signal) => return (signal.as_str(), SupervisorOrder::Stop),
            None => {}
        }
        tokio::select! {
            signal = self.stop.received() => (signal, SupervisorOrder::Stop),
            _ = self.leave.recv() => ("SIGUSR1", SupervisorOrder::Leave),
        }
    }
}
