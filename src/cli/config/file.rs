//! The file of settings: TOML, one line for each, no tables.

use std::ffi::OsString;
use std::fs::File;
use std::io::{self, ErrorKind, Read};
use std::ops::Range;
use std::path::Path;

use clap::builder::ValueHint;
use clap::{Arg, Command};
use toml::de::{DeTable, DeValue};

use super::keys::{KEYS, Key};
use super::{Setting, check};

/// Most bytes that podfs reads of a file of settings.
const LONGEST: u64 = 1 << 20;

/// The settings of a file. Gives none if the file at the default path does not exist. `podfs` describes the commands that have
/// settings, which a file that says nothing does not need.
///
/// # Errors
/// One sentence, with the line where there is one.
pub(super) fn read(path: &Path, named: bool, podfs: impl FnOnce() -> Command) -> Result<Vec<Setting>, String> {
    match text(path) {
        Ok(text) if text.is_empty() => Ok(Vec::new()),
        Ok(text) => settings(path, &text, &podfs()),
        Err(error) if error.kind() == ErrorKind::NotFound && !named => Ok(Vec::new()),
        Err(error) => Err(format!("{}: {}", path.display(), reason(&error))),
    }
}

/// The settings in the text of a file.
fn settings(path: &Path, text: &str, podfs: &Command) -> Result<Vec<Setting>, String> {
    let line = |offset: usize| 1 + text.bytes().take(offset).filter(|byte| *byte == b'\n').count();
    let place = |offset: usize| format!("{}:{}", path.display(), line(offset));
    let table = DeTable::parse(text).map_err(|error| {
        let Range { start, .. } = error.span().unwrap_or_default();
        let message = error.message().lines().collect::<Vec<_>>().join("; ");
        format!("{}: is not TOML: {message}", place(start))
    })?;
    let mut entries: Vec<_> = table.get_ref().iter().collect();
    entries.sort_by_key(|(name, _)| name.span().start);
    let settings = entries.into_iter().map(|(name, value)| {
        let origin = place(name.span().start);
        let name = name.get_ref().as_ref();
        let key = KEYS.iter().find(|key| key.name == name).ok_or_else(|| format!("{origin}: {}", unknown(name)))?;
        let value = typed(key, value.get_ref(), podfs).map_err(|error| format!("{origin}: {name} {error}"))?;
        let setting = Setting { key, value, origin };
        check(&setting, key.option(podfs))?;
        Ok(setting)
    });
    settings.collect()
}

fn text(path: &Path) -> io::Result<String> {
    let mut bytes = Vec::new();
    File::open(path)?.take(LONGEST + 1).read_to_end(&mut bytes)?;
    if bytes.len() as u64 > LONGEST {
        return Err(ErrorKind::FileTooLarge.into());
    }
    String::from_utf8(bytes).map_err(|error| io::Error::new(ErrorKind::InvalidData, error.utf8_error()))
}

fn reason(error: &io::Error) -> String {
    match error.kind() {
        ErrorKind::NotFound => "there is no such file; --config and PODFS_CONFIG name the file of settings".to_owned(),
        ErrorKind::IsADirectory => "is a directory; give a file of settings".to_owned(),
        ErrorKind::FileTooLarge => format!("has more than {LONGEST} bytes, so it is no file of settings"),
        ErrorKind::InvalidData => format!("the text is not UTF-8 ({error})"),
        _ => format!("cannot be read: {error}"),
    }
}

fn unknown(name: &str) -> String {
    /// Words that are less alike are not meant.
    const ALIKE: f64 = 0.75;
    let likeness = |key: &Key| strsim::jaro_winkler(key.name, name);
    let nearest = KEYS.iter().max_by(|one, other| likeness(one).total_cmp(&likeness(other)));
    match nearest.filter(|key| likeness(key) > ALIKE) {
        Some(key) => format!("unknown key {name:?}; did you mean {:?}?", key.name),
        None => {
            let all: Vec<_> = KEYS.iter().map(|key| key.name).collect();
            format!("unknown key {name:?}; the keys are {}", all.join(", "))
        }
    }
}

/// The value as it would stand on the command line.
fn typed(key: &Key, value: &DeValue<'_>, podfs: &Command) -> Result<OsString, String> {
    let option = key.option(podfs);
    match value {
        DeValue::Boolean(value) if !option.get_action().takes_values() => Ok(value.to_string().into()),
        DeValue::String(_) | DeValue::Boolean(_) if !option.get_action().takes_values() => {
            Err("must be true or false, without quotes".to_owned())
        }
        DeValue::String(value) if value.contains('\0') => Err("has a NUL character; remove it".to_owned()),
        DeValue::String(value) if value.is_empty() => Err("is empty; give a value, or remove the line".to_owned()),
        DeValue::String(value) if is_path(option) && Path::new(value.as_ref()).is_relative() => {
            Err(format!("must be an absolute path; {value:?} is another place for everybody who reads it"))
        }
        DeValue::String(value) => Ok(value.as_ref().into()),
        _ if !option.get_action().takes_values() => Err("must be true or false".to_owned()),
        _ => Err(format!("must be a string in quotes, such as {}", key.example(podfs))),
    }
}

fn is_path(option: &Arg) -> bool {
    matches!(option.get_value_hint(), ValueHint::AnyPath | ValueHint::FilePath | ValueHint::DirPath)
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;
    use proptest::prelude::*;

    use super::*;
    use crate::cli::Cli;

    proptest! {
        #[test]
        fn no_text_is_too_strange(text in ".*", line in "[a-z-]{1,8}[ =.]{1,3}[\"'\\[{]?[^\"]{0,9}[\"'\\]}]?", before in "(\n|#é\n){0,3}") {
            let podfs = Cli::command();
            for text in [&text, &(before + &line + "\n" + &text)] {
                if let Err(sentence) = settings(Path::new("/f"), text, &podfs) {
                    prop_assert!(sentence.starts_with("/f:"), "{}", sentence);
                    prop_assert!(!sentence.contains('\n'), "{}", sentence);
                }
            }
        }
    }
}
