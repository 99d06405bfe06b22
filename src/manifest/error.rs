//! Errors of a manifest, one sentence each.
//!
//! A sentence says where (file, document, field) and what to do. It never quotes a value: the value may be a secret.

use std::fmt::Display;
use std::path::{Path, PathBuf};

use serde_path_to_error::Segment;

use super::Origin;

/// A manifest podfs cannot use. Its text is one sentence for the user.
#[derive(Debug, thiserror::Error)]
pub enum ManifestError {
    /// The text is not YAML, JSON or UTF-8.
    #[error("{}:{line}:{column}: {problem}", file.display())]
    Syntax {
        /// The file, as the user named it.
        file: PathBuf,
        /// Line of the first fault, from 1.
        line: u64,
        /// Column in characters, from 1.
        column: u64,
        /// The error.
        problem: String,
    },

    /// A document that parses but has a value that podfs cannot accept.
    #[error("{origin}: {}{problem}", prefix(field))]
    Invalid {
        /// The document.
        origin: Origin,
        /// Path of the field, such as `spec.volumes[2].configMap`; empty for the document itself.
        field: String,
        /// The error.
        problem: String,
    },

    /// A ClusterTrustBundle with other text than certificates.
    #[error("{origin}: spec.trustBundle: {cause}")]
    TrustBundle {
        /// The document.
        origin: Origin,
        /// The error in the text.
        #[source]
        cause: TrustAnchorsError,
    },

    /// Two documents describe the same object.
    #[error("{object} is described twice, in {first} and in {second}; remove one of them")]
    Duplicate {
        /// Kind, namespace and name.
        object: String,
        /// The position of the first one.
        first: Origin,
        /// The position of the second one.
        second: Origin,
    },
}

/// Why a text is no list of trust anchors.
#[derive(Debug, thiserror::Error)]
pub enum TrustAnchorsError {
    /// The text is no PEM.
    #[error("is no PEM; write the certificates as PEM blocks")]
    Pem(#[source] pem::PemError),
    /// The text has no certificate.
    #[error("at least one trust anchor must be provided")]
    Empty,
    /// The block with this index is no certificate.
    #[error("entry {0} is no certificate; a bundle may hold nothing else")]
    OtherBlock(usize),
    /// The block with this index has headers.
    #[error("entry {0} has PEM block headers; remove them")]
    Headers(usize),
}

impl ManifestError {
    /// A document that parses but has a value that podfs cannot accept.
    ///
    /// `field` is a path such as `spec.volumes[2].configMap.items[0].path`; it may be empty. `sentence` follows it after
    /// a colon: what is wrong and what to do, without the value.
    pub fn invalid(origin: &Origin, field: &str, sentence: impl Into<String>) -> Self {
        Self::Invalid { origin: origin.clone(), field: field.to_owned(), problem: sentence.into() }
    }

    /// The same kind, namespace and name in two documents. `object` reads like `ConfigMap default/app`.
    pub fn duplicate(object: impl Display, first: &Origin, second: &Origin) -> Self {
        Self::Duplicate { object: object.to_string(), first: first.clone(), second: second.clone() }
    }

    pub(super) fn syntax(file: &Path, line: u64, column: u64, problem: impl Into<String>) -> Self {
        Self::Syntax { file: file.to_owned(), line, column, problem: problem.into() }
    }

    /// A field of the wrong type.
    pub(super) fn mistyped(origin: &Origin, error: &serde_path_to_error::Error<serde_json::Error>) -> Self {
        Self::Invalid {
            origin: origin.clone(),
            field: field_path(error.path()),
            problem: mismatch_sentence(&error.inner().to_string()),
        }
    }
}

fn prefix(field: &str) -> String {
    match field {
        "" => String::new(),
        field => format!("{field}: "),
    }
}

/// Spells a path as Kubernetes does: `spec.volumes[2].configMap`, `data[app.conf]`.
fn field_path(path: &serde_path_to_error::Path) -> String {
    let mut text = String::new();
    for segment in path {
        match segment {
            Segment::Seq { index } => text += &format!("[{index}]"),
            Segment::Map { key } if key.contains('.') => text += &format!("[{key}]"),
            Segment::Map { key } | Segment::Enum { variant: key } => {
                if !text.is_empty() {
                    text.push('.');
                }
                text += key;
            }
            Segment::Unknown => {}
        }
    }
    text
}

/// The sentence for the user in place of serde's message. That message quotes the value, which may be secret. So this function
/// reads only the text behind the last `expected`, which comes from the type, and returns no text of the message but the name of
/// a field.
fn mismatch_sentence(message: &str) -> String {
    if let Some(field) = message.strip_prefix("missing field `").and_then(|rest| rest.strip_suffix('`')) {
        return format!("{field} is missing");
    }
    let expected = message.rsplit_once(", expected ").map(|(_, expected)| expected);
    let out_of_range = message.starts_with("invalid value: integer");
    let sentence = match expected {
        Some("a string" | "a base64-encoded string") if is_plain_scalar(message) => {
            "must be a string; put it in quotes"
        }
        Some("a string" | "a base64-encoded string") => "must be a string",
        Some("a boolean") => "must be true or false",
        Some("i32" | "i64" | "u32" | "u64") if out_of_range => "is out of range",
        Some("i32" | "i64" | "u32" | "u64") => "must be a whole number without quotes",
        Some("a sequence") => "must be a list",
        Some("a map") => "must be a mapping",
        // For a structure, serde's message has the name of its type.
        Some(name) if name.starts_with(|c: char| c.is_ascii_uppercase()) => "must be a mapping",
        _ => "has a value of the wrong form",
    };
    sentence.to_owned()
}

fn is_plain_scalar(message: &str) -> bool {
    ["integer", "floating point", "boolean"]
        .iter()
        .any(|kind| message.strip_prefix("invalid type: ").is_some_and(|rest| rest.starts_with(kind)))
}
