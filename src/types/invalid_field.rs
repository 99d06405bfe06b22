//! Errors with the path of the field that they are about, and the checks that several fields share.

use std::fmt::Display;

use super::payload_path::PayloadPath;

/// Largest uid or gid the API accepts.
const MAX_ID: i64 = i32::MAX as i64;

/// A field of a manifest with a value that Kubernetes does not accept.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{}{sentence}", prefix(field))]
pub struct InvalidField {
    /// Path of the field, such as `configMap.items[0].path`; empty if the error is about the whole value.
    pub field: String,
    /// The error, in a sentence.
    pub sentence: String,
}

impl InvalidField {
    /// An error about `field`.
    pub fn new(field: impl Into<String>, sentence: impl Display) -> InvalidField {
        InvalidField { field: field.into(), sentence: sentence.to_string() }
    }

    /// The same error with a path that starts at `parent`, the field that holds this one.
    pub fn under(mut self, parent: impl Display) -> InvalidField {
        self.field = match self.field.as_str() {
            "" => parent.to_string(),
            field => format!("{parent}.{field}"),
        };
        self
    }
}

fn prefix(field: &str) -> String {
    match field {
        "" => String::new(),
        field => format!("{field}: "),
    }
}

/// Permission bits of `defaultMode` and `mode`.
///
/// # Errors
/// A number outside 0..=0777, with the API's text and the number as the parser of the manifest understood it: YAML
/// takes `0644` for octal and `644` for decimal.
pub(crate) fn mode(field: &str, mode: i32) -> Result<u16, InvalidField> {
    match u16::try_from(mode) {
        Ok(bits @ 0..=0o777) => Ok(bits),
        Ok(bits) => Err(InvalidField::new(field, format!("{MODE_RANGE}; it is {mode}, octal {bits:04o}"))),
        Err(_) => Err(InvalidField::new(field, format!("{MODE_RANGE}; it is {mode}"))),
    }
}

const MODE_RANGE: &str = "must be a number between 0 and 0777 (octal), both inclusive";

/// A numeric user or group.
///
/// # Errors
/// A number outside 0..=2147483647, with the API's text.
pub(crate) fn numeric_id(field: &str, id: i64) -> Result<u32, InvalidField> {
    match id {
        0..=MAX_ID => Ok(id as u32),
        _ => Err(InvalidField::new(field, format!("must be between 0 and {MAX_ID}, inclusive"))),
    }
}

/// A text that the manifest must have.
///
/// # Errors
/// When it is absent or empty.
pub(crate) fn required<'a>(field: &str, text: Option<&'a str>) -> Result<&'a str, InvalidField> {
    text.filter(|text| !text.is_empty()).ok_or_else(|| InvalidField::new(field, "is required"))
}

/// The path of a file inside a volume.
///
/// # Errors
/// The first rule that the path breaks, with the kubelet's text.
pub(crate) fn payload_path(field: &str, text: &str) -> Result<PayloadPath, InvalidField> {
    PayloadPath::parse(text).map_err(|error| InvalidField::new(field, error))
}
