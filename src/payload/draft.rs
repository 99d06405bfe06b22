//! A payload under assembly: the file at each path, the origin of the file, and the problems.

use std::collections::BTreeMap;
use std::fmt;

use super::{PayloadError, PayloadFile, Problem, Warning};
use crate::types::PayloadPath;
use crate::volume::ProjectionSource;

/// Files by path with their origins. The draft collects the problems of all sources, so that podfs reports them
/// together.
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
    /// Adds a file. It replaces an earlier file at the same path, as in the kubelet.
    pub(super) fn add_file(&mut self, path: PayloadPath, file: PayloadFile<'a>, origin: FileOrigin<'a>) {
        if let Some((_, replaced)) = self.files.get(&path) {
            let (hidden, shown) = (replaced.to_string(), origin.to_string());
            self.warnings.push(Warning::HiddenFile { path: path.clone(), hidden, shown });
        }
        self.files.insert(path, (file, origin));
    }

    /// Records problems. A draft with problems cannot become a payload.
    pub(super) fn fail(&mut self, problems: impl IntoIterator<Item = Problem>) {
        self.problems.extend(problems);
    }

    /// The files and warnings, if there are no problems.
    pub(super) fn finish(mut self) -> Result<(BTreeMap<PayloadPath, PayloadFile<'a>>, Vec<Warning>), PayloadError> {
        let conflicts: Vec<Problem> =
            self.files.iter().flat_map(|(path, (_, origin))| self.conflicts(path, origin)).collect();
        self.problems.extend(conflicts);
        if !self.problems.is_empty() {
            return Err(PayloadError { problems: self.problems });
        }
        let files = self.files.into_iter().map(|(path, (file, _))| (path, file)).collect();
        Ok((files, self.warnings))
    }

    /// A problem for each file at a path where `path` needs a directory. `origin` is that of the file at `path`.
    fn conflicts(&self, path: &PayloadPath, origin: &FileOrigin<'_>) -> Vec<Problem> {
        let files = path.ancestors().filter_map(|directory| self.files.get_key_value(directory));
        files
            .map(|(file, (_, claim))| Problem::FileAndDirectory {
                file: file.clone(),
                claim: claim.to_string(),
                below: path.clone(),
                below_claim: origin.to_string(),
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
