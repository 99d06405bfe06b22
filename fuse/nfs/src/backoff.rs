//! Pauses between attempts: each twice as long as the one before, up to a longest one.

use std::time::Duration;

/// A series of pauses: each is twice as long as the one before.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DoublingPause {
    first: Duration,
    longest: Duration,
}

impl DoublingPause {
    /// Pauses from `first` to `longest`.
    pub const fn new(first: Duration, longest: Duration) -> Self {
        Self { first, longest }
    }

    /// The longest pause.
    pub const fn longest(self) -> Duration {
        self.longest
    }

    /// The state of attempts of which none has failed yet.
    pub const fn backoff(self) -> Backoff {
        Backoff { pauses: self, failures: 0 }
    }

    /// The pause after a failure, by the number of failures before it.
    pub fn after(self, failures: u32) -> Duration {
        self.first.saturating_mul(2_u32.saturating_pow(failures)).min(self.longest)
    }
}

/// The state of a series of attempts: how many have failed in a row, and so how long the next pause is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Backoff {
    pauses: DoublingPause,
    failures: u32,
}

impl Backoff {
    /// Records that an attempt has failed. Returns the pause before the next attempt.
    pub fn fail(&mut self) -> Duration {
        let pause = self.pauses.after(self.failures);
        self.failures = self.failures.saturating_add(1);
        pause
    }

    /// Records that an attempt has succeeded. The next pause is the first one again.
    pub fn reset(&mut self) {
        self.failures = 0;
    }

    /// Returns the number of attempts that have failed in a row.
    pub fn failures(self) -> u32 {
        self.failures
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pauses_double_up_to_the_longest_one() {
        let pause = DoublingPause::new(Duration::from_millis(100), Duration::from_secs(1));
        let pauses: Vec<_> =
            [0, 1, 2, 3, 4, 5, 31, 32, u32::MAX].map(|failures| pause.after(failures).as_millis()).into();
        assert_eq!(pauses, [100, 200, 400, 800, 1000, 1000, 1000, 1000, 1000]);
    }

    #[test]
    fn a_success_starts_the_pauses_over() {
        let mut backoff = DoublingPause::new(Duration::from_secs(2), Duration::from_secs(30)).backoff();
        let pauses: Vec<_> = (0..6).map(|_| backoff.fail().as_secs()).collect();
        assert_eq!((pauses, backoff.failures()), (vec![2, 4, 8, 16, 30, 30], 6));
        backoff.reset();
        assert_eq!((backoff.failures(), backoff.fail().as_secs()), (0, 2));
    }
}
