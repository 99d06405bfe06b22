//! The file of settings: TOML without tables, one line for each setting.

use std::ffi::OsString;
use std::fs::File;
use std::io::{self, ErrorKind, Read};
use std::ops::Range;
use std::path::Path;

use clap::builder::ValueHint;
use clap::{Arg, Command};
use toml::de::{DeTable, DeValue};

use super::error::{ConfigError, ValueProblem};
use super::keys::{KEYS, Key};
use super::{LONGEST, Setting, check};

/// The settings of a file. There are none if the file at the default path does not exist. Calls `podfs`, which describes the
/// commands, only if the file has text.
///
/// # Errors
/// The problem, with the line if it is in one.
pub(super) fn read(path: &Path, named: bool, podfs: impl FnOnce() -> Command) -> Result<Vec<Setting>, ConfigError> {
    match text(path) {
        Ok(text) if text.is_empty() => Ok(Vec::new()),
        Ok(text) => settings(path, &text, &podfs()),
        Err(error) if error.kind() == ErrorKind::NotFound && !named => Ok(Vec::new()),
        Err(cause) => Err(ConfigError::File { path: path.to_owned(), cause }),
    }
}

/// The settings in the text of a file.
fn settings(path: &Path, text: &str, podfs: &Command) -> Result<Vec<Setting>, ConfigError> {
    let line = |offset: usize| 1 + text.bytes().take(offset).filter(|byte| *byte == b'\n').count();
    let place = |offset: usize| format!("{}:{}", path.display(), line(offset));
    let table = DeTable::parse(text).map_err(|error| {
        let Range { start, .. } = error.span().unwrap_or_default();
        let message = error.message().lines().collect::<Vec<_>>().join("; ");
        ConfigError::Toml { origin: place(start), message }
    })?;
    let mut entries: Vec<_> = table.get_ref().iter().collect();
    entries.sort_by_key(|(name, _)| name.span().start);
    let settings = entries.into_iter().map(|(name, value)| {
        let origin = place(name.span().start);
        let name = name.get_ref().as_ref();
        let key = KEYS.iter().find(|key| key.name == name);
        let key = key.ok_or_else(|| ConfigError::UnknownKey {
            origin: origin.clone(),
            key: name.to_owned(),
            hint: hint(name),
        })?;
        let value = typed(key, value.get_ref(), podfs);
        let value = value.map_err(|problem| ConfigError::Value { origin: origin.clone(), key: key.name, problem })?;
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

/// The known key that an unknown one resembles.
fn hint(name: &str) -> String {
    /// Least likeness of two keys for a hint, from 0 to 1.
    const ALIKE: f64 = 0.75;
    let likeness = |key: &Key| strsim::jaro_winkler(key.name, name);
    let nearest = KEYS.iter().max_by(|one, other| likeness(one).total_cmp(&likeness(other)));
    match nearest.filter(|key| likeness(key) > ALIKE) {
        Some(key) => format!("did you mean {:?}?", key.name),
        None => {
            let all: Vec<_> = KEYS.iter().map(|key| key.name).collect();
            format!("the keys are {}", all.join(", "))
        }
    }
}

/// The value in the form that it has on the command line.
fn typed(key: &Key, value: &DeValue<'_>, podfs: &Command) -> Result<OsString, ValueProblem> {
    let option = key.option(podfs);
    match value {
        DeValue::Boolean(value) if !option.get_action().takes_values() => Ok(value.to_string().into()),
        DeValue::String(_) | DeValue::Boolean(_) if !option.get_action().takes_values() => {
            Err(ValueProblem::QuotedFlag)
        }
        DeValue::String(value) if value.contains('\0') => Err(ValueProblem::Nul),
        DeValue::String(value) if value.is_empty() => Err(ValueProblem::Empty),
        DeValue::String(value) if is_path(option) && Path::new(value.as_ref()).is_relative() => {
            Err(ValueProblem::RelativePath(value.to_string()))
        }
        DeValue::String(value) => Ok(value.as_ref().into()),
        _ if !option.get_action().takes_values() => Err(ValueProblem::NoFlag),
        _ => Err(ValueProblem::NoString { example: key.sample(podfs) }),
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

    #[test]
    fn a_sample_of_a_setting_is_a_value_and_no_placeholder() {
        let podfs = Cli::command();
        for key in KEYS {
            let sample = key.sample(&podfs);
            assert!(key.has_default(&podfs) || sample != key.example(&podfs), "{}: {sample}", key.name);
            settings(Path::new("/f"), &format!("{} = {sample}\n", key.name), &podfs).expect("it is valid");
        }
        let error = settings(Path::new("/f"), "server-memory-max = 5\n", &podfs).err().expect("it is no string");
        assert!(error.to_string().ends_with("such as \"512Mi\""), "{error}");
    }

    proptest! {
        #[test]
        fn no_text_causes_a_panic(text in ".*", line in "[a-z-]{1,8}[ =.]{1,3}[\"'\\[{]?[^\"]{0,9}[\"'\\]}]?", before in "(\n|#é\n){0,3}") {
            let podfs = Cli::command();
            for text in [&text, &(before + &line + "\n" + &text)] {
                if let Err(error) = settings(Path::new("/f"), text, &podfs) {
                    let sentence = error.to_string();
                    prop_assert!(sentence.starts_with("/f:"), "{}", sentence);
                    prop_assert!(!sentence.contains('\n'), "{}", sentence);
                }
            }
        }
    }
}
