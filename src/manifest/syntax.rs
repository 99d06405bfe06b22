//! Text into untyped values: YAML and JSON.
//!
//! YAML is read as kubectl reads it, which is YAML 1.1 for scalars: `0644` is the number 420, `yes` and `on` are
//! booleans. A quoted scalar is a string, always; keys are texts (`go_yaml`). A mapping with the same key twice is refused in both syntaxes.

use std::borrow::Cow;
use std::path::Path;
use std::thread;

use serde_json::Value;
use serde_saphyr::budget::BudgetBreach;
use serde_saphyr::{DuplicateKeyPolicy, MergeKeyPolicy, Options};

use super::ManifestError;
use super::go_yaml::{GoValue, is_own_error};

/// The non-empty documents of a file. A document that cannot be read leaves the others as they are.
///
/// The errors are those of malformed text, with line and column. After a fault in JSON, nothing can be read: JSON does not mark
/// where the next document begins.
pub(super) fn values(file: &Path, bytes: &[u8]) -> Vec<Result<Value, ManifestError>> {
    if file.extension().is_some_and(|ending| ending == "json") {
        return match text(file, bytes, 0) {
            Ok(text) => json(text).map(|value| value.map_err(|error| json_fault(file, &error))).collect(),
            Err(error) => vec![Err(error)],
        };
    }
    let mut fault = None;
    if let Ok(text) = text(file, bytes, 0) {
        // Standard input has no file name extension. JSON is YAML except for details such as surrogate pairs in escapes, so text
        // that begins like JSON is parsed as JSON first.
        if text.trim_start().starts_with('{')
            && let Ok(values) = json(text).collect::<Result<Vec<_>, _>>()
        {
            return values.into_iter().map(Ok).collect();
        }
        match yaml(text) {
            Ok(values) => return values.into_iter().map(Ok).collect(),
            Err(error) => fault = Some(error),
        }
    }
    match (yaml_documents(bytes).as_slice(), fault) {
        ([_], Some(fault)) => vec![Err(yaml_fault(file, &fault, 0))],
        (documents, _) => one_by_one(file, documents),
    }
}

/// The documents of YAML text with a fault, each parsed alone.
fn one_by_one(file: &Path, documents: &[(u64, &[u8])]) -> Vec<Result<Value, ManifestError>> {
    let mut values = Vec::new();
    for &(lines_before, document) in documents {
        let parsed = text(file, document, lines_before)
            .and_then(|text| yaml(text).map_err(|error| yaml_fault(file, &error, lines_before)));
        match parsed {
            Ok(parsed) => values.extend(parsed.into_iter().map(Ok)),
            Err(error) => values.push(Err(error)),
        }
    }
    values
}

/// The documents of YAML text, each with the number of lines before it. A document begins at a line that starts with `---`, or
/// at directives (`%YAML 1.2`) before this line.
fn yaml_documents(bytes: &[u8]) -> Vec<(u64, &[u8])> {
    let mut documents = Vec::new();
    let (mut start, mut start_line, mut has_content) = (0, 0, false);
    let mut position = 0;
    for (line_number, line) in (0..).zip(bytes.split_inclusive(|byte| *byte == b'\n')) {
        let is_marker = line.strip_prefix(b"---").is_some_and(|rest| rest.first().is_none_or(u8::is_ascii_whitespace));
        let is_directive = line.starts_with(b"%");
        if has_content && (is_marker || is_directive && ends_document(&bytes[start..position])) {
            documents.push((start_line, &bytes[start..position]));
            (start, start_line, has_content) = (position, line_number, false);
        }
        let is_blank = line.trim_ascii().is_empty() || line.trim_ascii_start().starts_with(b"#");
        has_content |= is_marker || !is_blank && !is_directive;
        position += line.len();
    }
    documents.push((start_line, &bytes[start..]));
    documents
}

/// Whether the last line of the text marks the end of a document. Only behind this mark, a line that starts with `%` is a
/// directive.
fn ends_document(text: &[u8]) -> bool {
    text.trim_ascii_end().rsplit(|byte| *byte == b'\n').next().is_some_and(|line| line.starts_with(b"..."))
}

/// The bytes as text. Before them are `lines_before` lines of the file.
fn text<'a>(file: &Path, bytes: &'a [u8], lines_before: u64) -> Result<&'a str, ManifestError> {
    match std::str::from_utf8(bytes) {
        Ok(text) => Ok(text.strip_prefix('\u{feff}').unwrap_or(text)),
        Err(error) => {
            let valid = String::from_utf8_lossy(&bytes[..error.valid_up_to()]);
            let line = valid.matches('\n').count() + 1;
            let column = valid.rsplit('\n').next().unwrap_or_default().chars().count() + 1;
            let problem =
                "the text is not UTF-8; save the file as UTF-8, or put binary content into binaryData as base64";
            Err(ManifestError::syntax(file, lines_before + line as u64, column as u64, problem))
        }
    }
}

fn json(text: &str) -> impl Iterator<Item = Result<Value, serde_json::Error>> {
    serde_json::Deserializer::from_str(text)
        .into_iter::<GoValue<false>>()
        .map(|value| value.map(|GoValue(value)| value))
        .filter(|value| !matches!(value, Ok(Value::Null)))
}

fn yaml(text: &str) -> Result<Vec<Value>, serde_saphyr::Error> {
    let text = without_marks(text);
    match yaml_of_depth(&text, DEPTH) {
        Err(error) if is_too_deep(&error) => thread::scope(|scope| {
            let deep = thread::Builder::new().stack_size(DEEP_STACK);
            let parsed = deep.spawn_scoped(scope, || yaml_of_depth(&text, MOST_DEPTH));
            parsed.map_or(Err(error), |parsed| parsed.join().expect("the parser does not panic"))
        }),
        parsed => parsed,
    }
}

/// The nesting that fits on the stack of any thread.
const DEPTH: usize = 64;
/// The nesting that JSON may have, too, and the stack that it takes in a build without optimization.
const MOST_DEPTH: usize = 127;
const DEEP_STACK: usize = 16 << 20;

fn yaml_of_depth(text: &str, depth: usize) -> Result<Vec<Value>, serde_saphyr::Error> {
    let values: Vec<GoValue<true>> = serde_saphyr::from_multiple_with_options(text, options(text.len(), depth))?;
    Ok(values.into_iter().map(|GoValue(value)| value).collect())
}

/// Whether the text is nested too deeply for [`DEPTH`]. No other limit is higher on a larger stack.
fn is_too_deep(error: &serde_saphyr::Error) -> bool {
    match error.without_snippet() {
        serde_saphyr::Error::AliasError { error, .. } => is_too_deep(error),
        error => matches!(error, serde_saphyr::Error::Budget { breach: BudgetBreach::Depth { .. }, .. }),
    }
}

/// The text without byte order marks at the begin of documents, as files have them that were joined.
fn without_marks(text: &str) -> Cow<'_, str> {
    if !text.contains('\u{feff}') {
        return Cow::Borrowed(text);
    }
    let mut is_behind_marker = false;
    let lines = text.split_inclusive('\n').map(|line| {
        let shown = if is_behind_marker { line.trim_start_matches('\u{feff}') } else { line };
        is_behind_marker = line.starts_with("---");
        shown
    });
    Cow::Owned(lines.collect())
}

fn options(len: usize, depth: usize) -> Options {
    // Without aliases, the parsed text takes memory in proportion to its length, whatever its structure; a file of a thousand
    // ConfigMaps with several MiB of data is legitimate. Aliases multiply content. So the budget allows as much as the text
    // itself can hold, and a fixed amount more for aliases.
    let budget = serde_saphyr::budget! {
        max_depth: depth,
        max_documents: usize::MAX,
        max_nodes: len + 250_000,
        max_events: 2 * len + 1_000_000,
        max_total_scalar_bytes: len + 16 * 1024 * 1024,
        enforce_alias_anchor_ratio: false,
    };
    serde_saphyr::options! {
        budget: budget,
        duplicate_keys: DuplicateKeyPolicy::Error,
        // A merge acts at its place, see `go_yaml`.
        merge_keys: MergeKeyPolicy::AsOrdinary,
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

fn yaml_fault(file: &Path, error: &serde_saphyr::Error, lines_before: u64) -> ManifestError {
    use serde_saphyr::Error;

    let cause = match error.without_snippet() {
        Error::AliasError { error, .. } => error,
        error => error,
    };
    let problem = match cause {
        Error::ExternalMessage { msg, .. } => msg.clone(),
        Error::Message { msg, .. } if is_own_error(msg) => msg.clone(),
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
    ManifestError::syntax(file, lines_before + line.max(1), column.max(1), problem)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_text_that_is_nested_too_deeply_is_parsed_on_a_larger_stack() {
        let error = |text: &str| yaml_of_depth(text, DEPTH).expect_err("a fault");
        let nested = |levels: usize| format!("{}1{}", "[".repeat(levels), "]".repeat(levels));
        assert!(is_too_deep(&error(&nested(DEPTH + 1))));
        assert!(is_too_deep(&error(&format!("a: &a {}\nb: {}", nested(40), nested(40).replace('1', "*a")))));
        let mut bomb = format!("a0: &a0 [{}]\n", "x".repeat(100_000));
        for level in 1..9 {
            let below = vec![format!("*a{}", level - 1); 10].join(", ");
            bomb += &format!("a{level}: &a{level} [{below}]\n");
        }
        assert!(!is_too_deep(&error(&bomb)));
        assert!(!is_too_deep(&error("a: [")));
    }
}
