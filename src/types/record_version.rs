//! The version of a record: JSON in a file or a variable that another version of podfs may have written.
//!
//! A record without the field `version` has version 1. A podfs that writes a record which an earlier one would misread gives it a
//! higher version, and the earlier one refuses it before it changes anything.

use std::io;

use serde::Deserialize;
use serde::de::DeserializeOwned;
use serde_json::Value;

/// The version of all records that this podfs writes, and the only one that it reads.
pub const RECORD_VERSION: u32 = 1;

/// Why a record cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum UnusableRecord {
    /// Another version of podfs wrote it.
    #[error("it has version {0}, and this podfs reads version {RECORD_VERSION}; use the podfs that wrote it")]
    OtherVersion(Value),
    /// It has fields or words that this version of podfs does not know.
    #[error("{0}; use the podfs that wrote it")]
    Unknown(#[source] serde_json::Error),
    /// It is damaged: no version of podfs has written it like this.
    #[error(transparent)]
    Damaged(serde_json::Error),
    /// Its file cannot be read.
    #[error(transparent)]
    Read(#[from] io::Error),
}

impl UnusableRecord {
    /// Whether another version of podfs may be able to use the record.
    pub fn is_of_other_version(&self) -> bool {
        matches!(self, UnusableRecord::OtherVersion(_) | UnusableRecord::Unknown(_))
    }
}

impl From<serde_json::Error> for UnusableRecord {
    fn from(error: serde_json::Error) -> UnusableRecord {
        if error.is_data() { UnusableRecord::Unknown(error) } else { UnusableRecord::Damaged(error) }
    }
}

/// Parses a record.
///
/// # Errors
/// When the record has another version, this version of podfs does not know its fields or words, or it is damaged.
pub fn parse_record<T: DeserializeOwned>(bytes: &[u8]) -> Result<T, UnusableRecord> {
    check_version(bytes)?;
    Ok(serde_json::from_slice(bytes)?)
}

/// Checks the version of the record with which these bytes begin. Bytes that begin with no JSON object have none.
///
/// # Errors
/// When the record has another version.
pub fn check_version(bytes: &[u8]) -> Result<(), UnusableRecord> {
    #[derive(Deserialize)]
    struct Versioned {
        version: Option<Value>,
    }
    if !bytes.trim_ascii_start().starts_with(b"{") {
        return Ok(());
    }
    let mut values = serde_json::Deserializer::from_slice(bytes).into_iter::<Versioned>();
    match values.next() {
        Some(Ok(Versioned { version: Some(other @ (Value::Number(_) | Value::String(_))) }))
            if other != RECORD_VERSION =>
        {
            Err(UnusableRecord::OtherVersion(other))
        }
        _ => Ok(()),
    }
}

/// Whether a file has no content: a crash of the machine may leave it empty, or with zeros, if podfs did not sync it.
pub fn is_blank(bytes: &[u8]) -> bool {
    bytes.iter().all(|byte| *byte == 0)
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::*;

    #[test]
    fn a_record_of_another_version_is_refused_whatever_else_is_in_it() {
        for (text, is_of_other) in [
            (r#"{"a":1}"#, false),
            (r#"{"version":1,"a":1}"#, false),
            (r#"{"version":{"a":1}}"#, false),
            ("[2]", false),
            ("", false),
            (r#"{"version":0}"#, true),
            (r#"{"a":[{}],"version":2}"#, true),
            (r#"{"version":"2"}"#, true),
            ("{\"version\":2}\n7\n", true),
        ] {
            assert_eq!(check_version(text.as_bytes()).is_err(), is_of_other, "{text}");
        }
        let refused = parse_record::<Value>(br#"{"version":2}"#).expect_err("unknown").to_string();
        assert_eq!(refused, "it has version 2, and this podfs reads version 1; use the podfs that wrote it");
        for (text, is_of_other) in
            [(r#"{"a":"no number"}"#, true), ("{}", false), ("{", false), ("", false), ("\0", false)]
        {
            let parsed = parse_record::<BTreeMap<String, u32>>(text.as_bytes());
            assert_eq!(parsed.is_err_and(|error| error.is_of_other_version()), is_of_other, "{text}");
        }
    }
}
