//! The time in which the server cannot be reached, and the pauses between two tries to reach it.

use std::time::Duration;

use tokio::time::Instant;

use super::backoff::JitteredBackoff;

/// The longest pause between two tries to reach the server, in the first minutes of an outage and after that. A try costs a
/// refused connection; after some minutes of outage, a few seconds more do not matter.
const LONGEST_OF_OUTAGE: (Duration, Duration) = (Duration::from_millis(800), Duration::from_secs(5));
const FIRST_MINUTES: Duration = Duration::from_secs(120);

/// The time in which the server cannot be reached.
#[derive(Debug, Default)]
pub(crate) struct Outage {
    since: Option<Instant>,
    backoff: JitteredBackoff,
}

impl Outage {
    /// How long to pause before the next try.
    pub(crate) fn pause(&mut self, now: Instant) -> Duration {
        let lasted = now.saturating_duration_since(*self.since.get_or_insert(now));
        let (first, later) = LONGEST_OF_OUTAGE;
        self.backoff.fail_within(if lasted < FIRST_MINUTES { first } else { later })
    }

    /// Notes that the server answers.
    pub(crate) fn end(&mut self) {
        *self = Outage::default();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_server_that_was_away_for_minutes_is_tried_within_a_second() {
        let begun = Instant::now();
        let mut outage = Outage::default();
        for second in 0..119 {
            let pause = outage.pause(begun + Duration::from_secs(second));
            assert!(pause <= LONGEST_OF_OUTAGE.0, "{pause:?} after {second} s");
        }
        assert!(outage.pause(begun + Duration::from_secs(600)) <= LONGEST_OF_OUTAGE.1);
        outage.end();
        assert!(outage.pause(begun + Duration::from_secs(601)) <= Duration::from_millis(100));
    }
}
