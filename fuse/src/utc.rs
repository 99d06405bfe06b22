//! Dates and times of the system's clock, in UTC.

use std::time::SystemTime;

use jiff::Timestamp;

/// The date and time of a moment. After the year 9999, it is the beginning of 1970.
pub(crate) fn utc(at: SystemTime) -> Timestamp {
    Timestamp::try_from(at).unwrap_or(Timestamp::UNIX_EPOCH)
}

#[cfg(test)]
mod tests {
    use std::time::{Duration, UNIX_EPOCH};

    use super::*;

    #[test]
    fn a_clock_beyond_the_year_9999_causes_no_panic() {
        assert_eq!(utc(UNIX_EPOCH + Duration::from_secs(1 << 40)), Timestamp::UNIX_EPOCH);
        assert_eq!(
            utc(UNIX_EPOCH + Duration::from_micros(1_700_000_000_000_001)).as_microsecond(),
            1_700_000_000_000_001
        );
    }
}
