//! A payload under assembly: the sources that claim each path, and the problems.

use std::collections::BTreeMap;
use std::fmt;

use super::{PayloadError, PayloadFile, Problem, Warning};
use crate::types::PayloadPath;
use crate::volume::ProjectionSource;

/// Files by path with their claims; problems of all sources, so that they are reported together.
#[derive(Default)]
pub(super) struct Draft<'a> {
    files: BTreeMap<PayloadPath, (PayloadFile<'a>, FileOrigin<'a>)>,
    problems: Vec<Problem>,
    warnings: Vec<Warning>,
}

/// The source of a file. Displayed as `key "app.conf" of configMap "app"`.
#[derive(Clone, Copy)]
pub(super) struct FileOrigin<'a> {
    pub(super) source: &'a ProjectionSource,
    pub(super) key: Option<&'a str>,
}

impl<'a> Draft<'a> {
    /// Adds a file; it replaces one that has the path already, as the kubelet's does.
    pub(super) fn put(&mut self, path: PayloadPath, file: PayloadFile<'a>, claim: FileOrigin<'a>) {
        if let Some((_, loser)) = self.files.get(&path) {
            let (loser, winner) = (loser.to_string(), claim.to_string());
            self.warnings.push(Warning { path: path.clone(), loser, winner });
        }
        self.files.insert(path, (file, claim));
    }

    /// Notes problems; the draft cannot become a payload any more.
    pub(super) fn fail(&mut self, problems: impl IntoIterator<Item = Problem>) {
        self.problems.extend(problems);
    }

    /// The files and warnings, when nothing went wrong.
    pub(super) fn finish(mut self) -> Result<(BTreeMap<PayloadPath, PayloadFile<'a>>, Vec<Warning>), PayloadError> {
        let conflicts: Vec<Problem> =
            self.files.iter().flat_map(|(path, (_, below))| self.conflicts(path, below)).collect();
        self.problems.extend(conflicts);
        if !self.problems.is_empty() {
            return Err(PayloadError { problems: self.problems });
        }
        let files = self.files.into_iter().map(|(path, (file, _))| (path, file)).collect();
        Ok((files, self.warnings))
    }

    /// Files at paths at which `path` needs a directory.
    fn conflicts(&self, path: &PayloadPath, below: &FileOrigin<'_>) -> Vec<Problem> {
        let files = path.ancestors().filter_map(|directory| self.files.get_key_value(directory));
        files
            .map(|(file, (_, claim))| Problem::FileAndDirectory {
                file: file.clone(),
                claim: claim.to_string(),
                below: path.clone(),
                below_claim: below.to_string(),
            })
            .collect()
    }
}

impl fmt::Display for FileOrigin<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.key {
            Some(key) => write!(f, "key {key:?} of {}", self.source),
            None => self.source.fmt(f),
        }
    }
}
