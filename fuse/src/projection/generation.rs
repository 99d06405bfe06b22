//! The name of a generation, which is also the name of its directory.

use std::fmt;
use std::time::SystemTime;

use jiff::civil::DateTime;
use jiff::tz::Offset;
use serde::{Deserialize, Serialize};

use crate::utc::utc;

/// The format of the time in a generation's name.
const MADE_AT: &str = "..%Y_%m_%d_%H_%M_%S";

/// `..YYYY_MM_DD_hh_mm_ss.N`: the time in UTC when the generation was made, and a random decimal number, like the names of the
/// kubelet's `AtomicWriter`.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct GenerationName(String);

impl GenerationName {
    /// A new name for a generation that was made at `at`.
    pub fn new(at: SystemTime) -> Self {
        Self(format!("{}.{}", utc(at).strftime(MADE_AT), random()))
    }

    /// The time when it was made, in seconds.
    pub fn made_at(&self) -> Option<SystemTime> {
        let (made_at, _random) = self.0.rsplit_once('.')?;
        let made_at = DateTime::strptime(MADE_AT, made_at).ok()?;
        Some(Offset::UTC.to_timestamp(made_at).ok()?.into())
    }

    /// The name as the directory entry shows it.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl fmt::Display for GenerationName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// Whether an entry of the root is the directory of a generation. No path of a payload begins with `..`.
pub(crate) fn is_generation(name: &str) -> bool {
    name.strip_prefix("..").is_some_and(|rest| rest.starts_with(|c: char| c.is_ascii_digit()))
}

fn random() -> u32 {
    let mut bytes = [0; 4];
    let filled = rustix::rand::getrandom(&mut bytes, rustix::rand::GetRandomFlags::empty());
    match filled {
        Ok(4) => u32::from_ne_bytes(bytes),
        // The call is missing only in some sandboxes. A name can have the clock instead.
        _ => SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).map_or(0, |since| since.subsec_nanos()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    #[test]
    fn a_name_shows_the_utc_time_and_a_decimal_number() {
        // AW-02
        let name = GenerationName::new(SystemTime::UNIX_EPOCH + Duration::from_secs(1_795_196_778));
        let (time, number) = name
            .as_str()
            .split_once('.')
            .map_or(("", ""), |_| name.as_str().rsplit_once('.').expect("a name has a dot before its number"));
        assert_eq!(time, "..2026_11_20_17_46_18");
        assert!(number.parse::<u32>().is_ok());
        assert_eq!(name.made_at(), Some(SystemTime::UNIX_EPOCH + Duration::from_secs(1_795_196_778)));
        assert_eq!(GenerationName("..2026_13_20_17_46_18.7".to_owned()).made_at(), None);
        assert!(is_generation(name.as_str()));
        assert!(!is_generation("..data") && !is_generation("..data_tmp") && !is_generation("a"));
    }
}
