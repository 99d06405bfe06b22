//! Pauses after failures: each is twice as long as the one before, has a random part so that many clients do not come
//! back in the same moment, and is never longer than a limit. A success starts over.

use std::time::Duration;

use podfs_fuse::DoublingPause;

const FIRST_PAUSE: Duration = Duration::from_millis(100);

/// The failures in a row.
#[derive(Debug, Default)]
pub(crate) struct JitteredBackoff {
    failures: u32,
}

impl JitteredBackoff {
    /// The longest pause, unless the caller passes another one.
    pub(crate) const LONGEST: Duration = Duration::from_secs(30);

    /// Counts a failure. Returns the pause.
    pub(crate) fn fail(&mut self) -> Duration {
        self.fail_within(Self::LONGEST)
    }

    /// Counts a failure. Returns the pause, at most `longest`.
    pub(crate) fn fail_within(&mut self, longest: Duration) -> Duration {
        let full = DoublingPause::new(FIRST_PAUSE, longest).after(self.failures);
        self.failures = self.failures.saturating_add(1);
        full.mul_f64(0.5 + fastrand::f64() / 2.0)
    }

    /// How many failures there were in a row.
    pub(crate) fn failures(&self) -> u32 {
        self.failures
    }

    /// Counts a success: the pauses start over.
    pub(crate) fn reset(&mut self) {
        self.failures = 0;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pauses_grow_up_to_a_limit_and_start_over_after_a_success() {
        let mut backoff = JitteredBackoff::default();
        for full in [100, 200, 400, 800, 1600, 3200, 6400, 12800, 25600, 30000, 30000] {
            let pause = backoff.fail().as_millis();
            assert!((full / 2..=full).contains(&pause), "{pause} of {full}");
        }
        assert!(backoff.fail_within(FIRST_PAUSE * 2) <= FIRST_PAUSE * 2);
        backoff.reset();
        assert!(backoff.fail() <= FIRST_PAUSE);
    }
}
