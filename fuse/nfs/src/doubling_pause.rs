//! Pauses between attempts: each twice as long as the one before, up to a longest one.

use std::time::Duration;

/// Such pauses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DoublingPause {
    first: Duration,
    longest: Duration,
}

impl DoublingPause {
    /// From `first` to `longest`.
    pub const fn new(first: Duration, longest: Duration) -> Self {
        Self { first, longest }
    }

    /// The longest pause.
    pub const fn longest(self) -> Duration {
        self.longest
    }

    /// The pause after a failure that came after so many others.
    pub fn after(self, failures: u32) -> Duration {
        self.first.saturating_mul(2_u32.saturating_pow(failures)).min(self.longest)
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
}
