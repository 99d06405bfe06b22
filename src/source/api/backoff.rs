//! How long to wait after a failure: twice as long after each, with a random part so that many clients do not come back
//! at the same moment, and never longer than half a minute. A success starts over.

use std::time::Duration;

const FIRST: Duration = Duration::from_millis(100);
const LONGEST: Duration = Duration::from_secs(30);

/// The failures in a row.
#[derive(Debug, Default)]
pub(super) struct Backoff {
    failures: u32,
}

impl Backoff {
    /// Counts a failure: how long to wait now.
    pub(super) fn fail(&mut self) -> Duration {
        let full = FIRST.saturating_mul(2_u32.saturating_pow(self.failures)).min(LONGEST);
        self.failures = self.failures.saturating_add(1);
        full.mul_f64(0.5 + fastrand::f64() / 2.0)
    }

    /// Whether nothing has failed since the last success.
    pub(super) fn is_fresh(&self) -> bool {
        self.failures == 0
    }

    /// Something went right.
    pub(super) fn reset(&mut self) {
        self.failures = 0;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn waits_grow_up_to_a_limit_and_start_over_after_a_success() {
        let mut backoff = Backoff::default();
        for full in [100, 200, 400, 800, 1600, 3200, 6400, 12800, 25600, 30000, 30000] {
            let wait = backoff.fail().as_millis();
            assert!((full / 2..=full).contains(&wait), "{wait} of {full}");
        }
        backoff.reset();
        assert!(backoff.fail() <= FIRST);
    }
}
