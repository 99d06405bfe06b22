//! How long a call may take.

use std::time::Duration;

use crate::DoublingPause;

/// How a call ends when a server does not answer.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Persistence {
    /// The call waits until it does.
    Hard,
    /// The call fails with `EIO`.
    Soft,
    /// The call fails with `ETIMEDOUT`.
    SoftErr,
}

/// How long a call may take, and how often it is sent again.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Policy {
    /// How the call ends after that time.
    pub persistence: Persistence,
    /// After so long without an answer a call is sent again on the same connection.
    pub timeo: Duration,
    /// After so many times the server counts as gone.
    pub retrans: u32,
    /// The caller tells of it itself, and the log does not.
    pub quiet: bool,
}

impl Default for Policy {
    /// The defaults of Linux over TCP: `hard,timeo=600,retrans=2`.
    fn default() -> Self {
        Self { persistence: Persistence::Hard, timeo: Duration::from_secs(60), retrans: 2, quiet: false }
    }
}

impl Policy {
    /// For a call that is given up with `ETIMEDOUT` after `budget`.
    pub fn within(budget: Duration) -> Self {
        Self { persistence: Persistence::SoftErr, timeo: budget, retrans: 0, quiet: true }
    }

    /// How long the server may be silent, before a call fails or the log reports it.
    pub fn budget(&self) -> Duration {
        self.timeo * self.retrans.saturating_add(1)
    }
}

/// Pauses between attempts of one connection or call.
pub const RETRY: DoublingPause = DoublingPause::new(Duration::from_millis(100), Duration::from_secs(5));
