//! Settings that cannot be used. Each text says where the setting is.

use std::io::{self, ErrorKind};
use std::path::PathBuf;

/// Why podfs cannot use the settings of the node.
#[derive(Debug, thiserror::Error)]
pub(super) enum ConfigError {
    /// The file cannot be read.
    #[error("{}: {}", path.display(), because(cause))]
    File {
        path: PathBuf,
        #[source]
        cause: io::Error,
    },
    /// The file is not TOML. The parser's own text has several lines.
    #[error("{origin}: is not TOML: {message}")]
    Toml { origin: String, message: String },
    /// The file has an unknown key.
    #[error("{origin}: unknown key {key:?}; {hint}")]
    UnknownKey { origin: String, key: String, hint: String },
    /// The value in the file has another type than the option.
    #[error("{origin}: {key} {problem}")]
    Value {
        origin: String,
        key: &'static str,
        #[source]
        problem: ValueProblem,
    },
    /// Two settings of the file, or of the environment, exclude each other.
    #[error("{origin}: {key} and {rival} ({rival_origin}) exclude each other; remove one")]
    Conflict { origin: String, key: &'static str, rival: &'static str, rival_origin: String },
    /// The environment variable of a flag is neither `true` nor `false`.
    #[error("{origin}: {key} must be true or false")]
    Flag { origin: String, key: &'static str },
    /// The option refuses the value.
    #[error("{origin}: {key}: {value_error}")]
    Refused {
        origin: String,
        key: &'static str,
        value_error: String,
        #[source]
        cause: clap::Error,
    },
}

/// Why a value in the file is invalid.
#[derive(Debug, thiserror::Error)]
pub(super) enum ValueProblem {
    #[error("must be true or false, without quotes")]
    QuotedFlag,
    #[error("must be true or false")]
    NoFlag,
    #[error("has a NUL character; remove it")]
    Nul,
    #[error("is empty; give a value, or remove the line")]
    Empty,
    #[error("must be an absolute path; {0:?} depends on the working directory of the process")]
    RelativePath(String),
    #[error("must be a string in quotes, such as {example}")]
    NoString { example: String },
}

fn because(error: &io::Error) -> String {
    match error.kind() {
        ErrorKind::NotFound => "there is no such file; --config and PODFS_CONFIG name the file of settings".to_owned(),
        ErrorKind::IsADirectory => "is a directory; give a file of settings".to_owned(),
        ErrorKind::FileTooLarge => {
            format!("has more than {} bytes, so it is no file of settings", super::LONGEST)
        }
        ErrorKind::InvalidData => format!("the text is not UTF-8 ({error})"),
        _ => format!("cannot be read: {error}"),
    }
}
