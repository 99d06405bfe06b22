//! The timeout and retries of a call.

use std::time::Duration;

use crate::DoublingPause;

/// The way in which a call ends when a server does not answer.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Persistence {
    /// The call waits until the server answers.
    Hard,
    /// The call fails with `EIO`.
    Soft,
    /// The call fails with `ETIMEDOUT`.
    SoftErr,
}

/// The timeout and retries of a call.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Policy {
    /// How the call ends after [`budget`](Self::budget).
    pub persistence: Persistence,
    /// The time after which the client sends a call again on the same connection.
    pub timeo: Duration,
    /// The number of times that the client sends a call again before the server counts as gone.
    pub retrans: u32,
    /// The caller reports a timeout itself, so the log does not.
    pub quiet: bool,
}

impl Default for Policy {
    /// The defaults of Linux over TCP: `hard,timeo=600,retrans=2`.
    fn default() -> Self {
        Self { persistence: Persistence::Hard, timeo: Duration::from_secs(60), retrans: 2, quiet: false }
    }
}

impl Policy {
    /// The policy of a call that fails with `ETIMEDOUT` after `budget`.
    pub fn within(budget: Duration) -> Self {
        Self { persistence: Persistence::SoftErr, timeo: budget, retrans: 0, quiet: true }
    }

    /// Returns the time without an answer after which a call fails, or the log reports the server.
    pub fn budget(&self) -> Duration {
        self.timeo * self.retrans.saturating_add(1)
    }
}

/// Pauses between attempts of one connection or call.
pub const RETRY: DoublingPause = DoublingPause::new(Duration::from_millis(100), Duration::from_secs(5));
