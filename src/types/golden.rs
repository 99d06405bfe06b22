//! Golden files in the unit tests of formats: bytes that another version of podfs reads (`tests/golden/README.md`).

use serde::Serialize;
use serde::de::DeserializeOwned;

/// The text of a golden file.
macro_rules! golden {
    ($name:literal) => {
        include_str!(concat!(env!("CARGO_MANIFEST_DIR"), "/tests/golden/", $name))
    };
}
pub(crate) use golden;

/// What to do if a test of a golden file fails.
pub(crate) const CHANGED: &str = "another version of podfs reads these bytes: give the changed format a new version and a golden file of its own, keep \
     this file, and test that podfs still reads it; a new field that has a default needs only a new line";

/// Reads a golden file, one JSON value a line, and fails unless the same bytes are written again. Returns the values.
#[track_caller]
pub(crate) fn values<T: Serialize + DeserializeOwned>(golden: &str) -> Vec<T> {
    written_by(golden, |value| serde_json::to_string(value).expect("JSON"))
}

/// As [`values`], for values that podfs writes as a part of other JSON.
#[track_caller]
pub(crate) fn parts<T: Serialize + DeserializeOwned>(golden: &str) -> Vec<T> {
    written_by(golden, |part| serde_json::to_value(part).expect("JSON").to_string())
}

#[track_caller]
fn written_by<T: DeserializeOwned>(golden: &str, write: impl Fn(&T) -> String) -> Vec<T> {
    let value = |line: &str| {
        let value: T = serde_json::from_str(line).unwrap_or_else(|error| panic!("{line}: {error}: {CHANGED}"));
        assert_eq!(write(&value), line, "{CHANGED}");
        value
    };
    let values: Vec<T> = golden.lines().map(value).collect();
    assert!(!values.is_empty(), "the golden file is empty");
    values
}
