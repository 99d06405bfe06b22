//! The system's clock as dates and times of day, in UTC.

use std::time::SystemTime;

use jiff::Timestamp;

/// The same moment as a date. A clock that is set beyond the year 9999 counts as one that was never set.
pub(crate) fn utc(at: SystemTime) -> Timestamp {
    Timestamp::try_from(at).unwrap_or(Timestamp::UNIX_EPOCH)
}

#[cfg(test)]
mod tests {
    use std::time::{Duration, UNIX_EPOCH};

    use super::*;

    #[test]
    fn a_clock_that_is_set_to_nonsense_is_no_reason_to_panic() {
        assert_eq!(utc(UNIX_EPOCH + Duration::from_secs(1 << 40)), Timestamp::UNIX_EPOCH);
        assert_eq!(
            utc(UNIX_EPOCH + Duration::from_micros(1_700_000_000_000_001)).as_microsecond(),
            1_700_000_000_000_001
        );
    }
}
