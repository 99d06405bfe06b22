//! Text into untyped values: YAML and JSON.
//!
//! YAML is read as kubectl reads it, which is YAML 1.1 for scalars: `0644` is the number 420, `yes` and `on` are
//! booleans. A quoted scalar is a string, always. A mapping with the same key twice is refused in both syntaxes.

use std::path::Path;

use serde_json::Value;
use serde_saphyr::{DuplicateKeyPolicy, Options};

use super::ManifestError;
use super::unique::Unique;

/// The non-empty documents of a file.
///
/// # Errors
///
/// Malformed text, with line and column.
pub(super) fn values(file: &Path, bytes: &[u8]) -> Result<Vec<Value>, ManifestError> {
    let text = text(file, bytes)?;
    if file.extension().is_some_and(|ending| ending == "json") {
        return json(text).map_err(|error| json_fault(file, &error));
    }
    // Standard input has no file name extension. JSON is YAML except for details such as surrogate pairs in escapes, so text
    // that begins like JSON is parsed as JSON first.
    if text.trim_start().starts_with('{')
        && let Ok(values) = json(text)
    {
        return Ok(values);
    }
    yaml(text).map_err(|error| yaml_fault(file, &error))
}

fn text<'a>(file: &Path, bytes: &'a [u8]) -> Result<&'a str, ManifestError> {
    match std::str::from_utf8(bytes) {
        Ok(text) => Ok(text.strip_prefix('\u{feff}').unwrap_or(text)),
        Err(error) => {
            let valid = String::from_utf8_lossy(&bytes[..error.valid_up_to()]);
            let line = valid.matches('\n').count() + 1;
            let column = valid.rsplit('\n').next().unwrap_or_default().chars().count() + 1;
            let problem =
                "the text is not UTF-8; save the file as UTF-8, or put binary content into binaryData as base64";
            Err(ManifestError::syntax(file, line as u64, column as u64, problem))
        }
    }
}

fn json(text: &str) -> Result<Vec<Value>, serde_json::Error> {
    serde_json::Deserializer::from_str(text)
        .into_iter::<Unique>()
        .map(|value| value.map(|Unique(value)| value))
        .filter(|value| !matches!(value, Ok(Value::Null)))
        .collect()
}

fn yaml(text: &str) -> Result<Vec<Value>, serde_saphyr::Error> {
    serde_saphyr::from_multiple_with_options(text, options(text.len()))
}

fn options(len: usize) -> Options {
    // Without aliases, the parsed text takes memory in proportion to its length, whatever its structure; a file of a thousand
    // ConfigMaps with several MiB of data is legitimate. Aliases multiply content. So the budget allows as much as the text
    // itself can hold, and a fixed amount more for aliases. The depth stays at the default of 64 levels, which fits on the
    // stack of a thread.
    let budget = serde_saphyr::budget! {
        max_documents: usize::MAX,
        max_nodes: len + 250_000,
        max_events: 2 * len + 1_000_000,
        max_total_scalar_bytes: len + 16 * 1024 * 1024,
        enforce_alias_anchor_ratio: false,
    };
    serde_saphyr::options! {
        budget: budget,
        duplicate_keys: DuplicateKeyPolicy::Error,
        legacy_octal_numbers: true,
        // A snippet of the source could show a secret.
        with_snippet: false,
    }
}

fn json_fault(file: &Path, error: &serde_json::Error) -> ManifestError {
    let (line, column) = (error.line(), error.column());
    let text = error.to_string();
    let place = format!(" at line {line} column {column}");
    let problem = text.strip_suffix(&place).unwrap_or(&text);
    ManifestError::syntax(file, line as u64, column.max(1) as u64, problem)
}

fn yaml_fault(file: &Path, error: &serde_saphyr::Error) -> ManifestError {
    use serde_saphyr::Error;

    let cause = match error.without_snippet() {
        Error::AliasError { error, .. } => error,
        error => error,
    };
    let problem = match cause {
        Error::ExternalMessage { msg, .. } => msg.clone(),
        Error::DuplicateMappingKey { key: Some(key), .. } => {
            format!("the key `{key}` appears twice in one mapping; remove one")
        }
        Error::DuplicateMappingKey { .. } => "a key appears twice in one mapping; remove one".into(),
        Error::UnknownAnchor { .. } => "the alias refers to an anchor that does not exist".into(),
        Error::RecursiveReferencesRequireWeakTypes { .. } => "the alias refers to itself".into(),
        Error::NonFiniteFloat { .. } => "the number is not finite; put text in quotes".into(),
        Error::Budget { .. }
        | Error::AliasReplayLimitExceeded { .. }
        | Error::AliasReplayStackDepthExceeded { .. }
        | Error::AliasExpansionLimitExceeded { .. } => {
            "the document is nested too deeply or its aliases repeat too much".into()
        }
        Error::Eof { .. } => "the text ends too early".into(),
        Error::Unexpected { expected, .. } => format!("expected {expected}"),
        Error::MergeValueNotMapOrSeqOfMaps { .. } => "a merge key (<<) takes a mapping or a list of mappings".into(),
        // Texts of other errors may quote the scalar, which may be a secret.
        _ => "the text is not valid YAML".into(),
    };
    let (line, column) = error.location().map_or((1, 1), |location| (location.line(), location.column()));
    ManifestError::syntax(file, line.max(1), column.max(1), problem)
}
