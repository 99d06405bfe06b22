//! The content of the files: the last good documents of each, and their sum.
//!
//! One scan finds the files, reads those that have changed, waits for the events that were queued meanwhile, and takes
//! over every file that was at rest. A file that cannot be read or parsed keeps its last good documents. A [`Sum`]
//! defines documents, and the whole that the documents of all files form.

use std::collections::{BTreeMap, BTreeSet};
use std::hash::{BuildHasher, RandomState};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use super::SourceError;
use super::find::{ConfiguredPath, FileToRead, FoundFiles, Role};
use super::judge::{Judge, Verdict};
use super::read::{Stamp, read};
use super::watch::Watcher;
use crate::manifest::ManifestError;

/// How long the files may take to come to rest when podfs starts.
const START_TIMEOUT: Duration = Duration::from_secs(5);

/// How the bytes of one file become contents, and the contents of all files become a whole.
pub(crate) trait Sum: Send + 'static {
    /// The good documents of one file.
    type Contents: Send;
    /// The whole that all of them form.
    type Whole: Send;
    /// Whether the file of a document matters.
    const NAMES_COUNT: bool;

    /// Parses one file.
    ///
    /// # Errors
    /// When the file is invalid; then its contents stay as they were.
    fn parse(&self, role: Role, file: &Path, bytes: &[u8]) -> Result<Self::Contents, ManifestError>;

    /// Adds up all files, in the order of their paths.
    ///
    /// # Errors
    /// When files contradict each other; then the last whole stays.
    fn add_up(&mut self, files: Files<'_, Self::Contents>) -> Result<Self::Whole, ManifestError>;

    /// The problems of the files in the last whole.
    fn problems(&self) -> Vec<ManifestError>;
}

/// The contents of all files with their paths.
pub(crate) type Files<'a, C> = &'a [(&'a Path, &'a C)];

/// The configured paths and their contents.
pub(super) struct Ledger<S: Sum> {
    sum: S,
    roots: Vec<ConfiguredPath>,
    files: BTreeMap<PathBuf, LedgerEntry<S::Contents>>,
    /// The name and contents of bytes that are read only once, before the scans.
    fixed: Option<(PathBuf, Fingerprinted<S::Contents>)>,
    hasher: RandomState,
    published: Option<Vec<(PathBuf, Fingerprint)>>,
    problems: BTreeSet<String>,
    problems_before: BTreeSet<String>,
}

/// A file that was read at least once.
struct LedgerEntry<C> {
    /// Index of the configured path that it belongs to.
    root: usize,
    stamp: Stamp,
    /// Whether the contents belong to the stamp, and are not older.
    current: bool,
    contents: Option<Fingerprinted<C>>,
}

/// The good documents of a file.
struct Fingerprinted<C> {
    fingerprint: Fingerprint,
    documents: C,
}

/// Identifies contents: whether they describe the pod, their length and a hash with a key of this process.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
struct Fingerprint {
    role: Role,
    len: usize,
    hash: u64,
}

/// The name of standard input.
pub(super) const STDIN: &str = "standard input";

impl<S: Sum> Ledger<S> {
    /// A ledger of the configured paths, of which nothing is read yet. `fixed` is the name and the bytes of a manifest
    /// that is read only once.
    ///
    /// # Errors
    ///
    /// When these bytes are a malformed manifest.
    pub(super) fn new(
        sum: S,
        fixed: Option<(PathBuf, Vec<u8>)>,
        roots: Vec<ConfiguredPath>,
    ) -> Result<Self, ManifestError> {
        let mut ledger = Self {
            sum,
            roots,
            files: BTreeMap::new(),
            fixed: None,
            hasher: RandomState::new(),
            published: None,
            problems: BTreeSet::new(),
            problems_before: BTreeSet::new(),
        };
        if let Some((name, bytes)) = fixed {
            let fingerprint = ledger.fingerprint(Role::Pod, &bytes);
            let documents = ledger.sum.parse(Role::Pod, &name, &bytes)?;
            ledger.fixed = Some((name, Fingerprinted { fingerprint, documents }));
        }
        Ok(ledger)
    }

    /// The whole of the bytes that are read only once, if no path is configured.
    ///
    /// # Errors
    /// When they form no whole.
    pub(super) fn fixed_whole(&mut self) -> Result<S::Whole, ManifestError> {
        let documents: Vec<_> =
            self.fixed.iter().map(|(name, contents)| (name.as_path(), &contents.documents)).collect();
        self.sum.add_up(&documents)
    }

    /// Reads everything, and waits for files that are being written.
    ///
    /// # Errors
    ///
    /// The first problem with any file, also a file that is written to all the time.
    pub(super) fn first_scan(&mut self, watcher: &mut Watcher) -> Result<S::Whole, SourceError> {
        let deadline = Instant::now() + START_TIMEOUT;
        let mut latest = None;
        loop {
            let scan = self.scan(watcher);
            if let Some(problem) = scan.problems.into_iter().next() {
                return Err(problem);
            }
            latest = scan.whole.or(latest);
            match (scan.restless, latest.take()) {
                (None, Some(whole)) => return Ok(whole),
                (Some(path), _) if Instant::now() > deadline => return Err(SourceError::Restless(path)),
                (_, before) => latest = before,
            }
            watcher.wait();
        }
    }

    /// Reads everything that can be read, and waits for a while for files that are being written.
    pub(super) fn first_scan_of_what_is_good(&mut self, watcher: &mut Watcher) -> Scan<S::Whole> {
        let deadline = Instant::now() + START_TIMEOUT;
        let mut latest = None;
        loop {
            let mut scan = self.scan(watcher);
            latest = scan.whole.take().or(latest);
            match &scan.restless {
                Some(_) if Instant::now() <= deadline && watcher.wait() => continue,
                Some(path) => scan.problems.push(SourceError::Restless(path.clone())),
                None => {}
            }
            self.report(&scan.problems);
            return Scan { whole: latest, ..scan };
        }
    }

    /// Reads what changed.
    pub(super) fn next_scan(&mut self, watcher: &mut Watcher) -> Scan<S::Whole> {
        let scan = self.scan(watcher);
        self.report(&scan.problems);
        scan
    }

    fn report(&mut self, problems: &[SourceError]) {
        let sentences = problems.iter().map(SourceError::while_running).collect();
        self.problems_before = std::mem::replace(&mut self.problems, sentences);
    }

    /// The problems of the last scan, one sentence each.
    pub(super) fn problems(&self) -> impl Iterator<Item = &str> {
        self.problems.iter().map(String::as_str)
    }

    /// The problems that the scan before did not have.
    pub(super) fn new_problems(&self) -> impl Iterator<Item = &str> {
        self.problems.difference(&self.problems_before).map(String::as_str)
    }

    /// Whether each configured path was found at least once.
    pub(super) fn has_found_all(&self) -> bool {
        self.roots.iter().all(|root| root.was_listed() || self.files.contains_key(root.path()))
    }

    fn scan(&mut self, watcher: &mut Watcher) -> Scan<S::Whole> {
        let reread = watcher.has_lost_track();
        let rested = watcher.activity.begin_scan();
        let FoundFiles { targets, kept, mut problems } = FoundFiles::look(&mut self.roots, watcher);
        let readings: Vec<_> = targets
            .into_iter()
            .map(|target| {
                let known = self.files.get(&target.path).filter(|entry| entry.current);
                let known = known.filter(|_| !reread && !rested.contains_key(&target.real));
                let reading = read(&target.path, known.map(|entry| entry.stamp));
                (target, reading)
            })
            .collect();
        watcher.catch_up();

        let mut judge = Judge::new(rested, &mut watcher.activity);
        let mut before = std::mem::take(&mut self.files);
        let mut unread = BTreeSet::new();
        for (target, reading) in readings {
            let old = before.remove(&target.path);
            let verdict = judge.judge(&target, reading, old.as_ref().map(|entry| entry.stamp));
            let is_there = !matches!(verdict, Ok(Verdict::Drop));
            let entry = match verdict {
                Ok(Verdict::Keep) => old,
                Ok(Verdict::Drop) => None,
                Ok(Verdict::Take(stamp, bytes)) => Some(self.entry(&target, stamp, &bytes, old, &mut problems)),
                Err(trouble) => {
                    problems.push(trouble.problem);
                    old.filter(|_| trouble.keeps)
                }
            };
            if is_there && entry.as_ref().is_none_or(|entry| entry.contents.is_none()) {
                unread.insert(target.path.clone());
            }
            if let Some(entry) = entry {
                self.files.insert(target.path, entry);
            }
        }
        let restless = judge.restless();
        self.files.extend(before.into_iter().filter(|(_, entry)| kept.contains(&entry.root)));
        let whole = self.whole().unwrap_or_else(|problem| {
            problems.push(problem.into());
            None
        });
        problems.extend(self.sum.problems().into_iter().map(SourceError::from));
        Scan { problems, restless, unread, whole }
    }

    /// The entry of a file that was just read. Invalid bytes leave the old contents in place.
    fn entry(
        &self,
        target: &FileToRead,
        stamp: Stamp,
        bytes: &[u8],
        old: Option<LedgerEntry<S::Contents>>,
        problems: &mut Vec<SourceError>,
    ) -> LedgerEntry<S::Contents> {
        let fingerprint = self.fingerprint(target.role, bytes);
        let old = old.and_then(|entry| entry.contents);
        let (current, contents) = match old {
            Some(old) if old.fingerprint == fingerprint => (true, Some(old)),
            old => match self.sum.parse(target.role, &target.path, bytes) {
                Ok(documents) => (true, Some(Fingerprinted { fingerprint, documents })),
                Err(problem) => {
                    problems.push(problem.into());
                    (false, old)
                }
            },
        };
        LedgerEntry { root: target.root, stamp, current, contents }
    }

    /// The whole of all contents. `None` if they have not changed.
    ///
    /// # Errors
    ///
    /// When files contradict each other; then the last whole stays in use.
    fn whole(&mut self) -> Result<Option<S::Whole>, ManifestError> {
        let of_files = self.files.iter().filter_map(|(path, entry)| Some((path.as_path(), entry.contents.as_ref()?)));
        let all: Vec<_> =
            self.fixed.iter().map(|(name, contents)| (name.as_path(), contents)).chain(of_files).collect();
        let name = |path: &Path| if S::NAMES_COUNT { path.to_owned() } else { PathBuf::new() };
        let mut fingerprints: Vec<_> = all.iter().map(|(path, contents)| (name(path), contents.fingerprint)).collect();
        fingerprints.sort_unstable();
        if self.published.as_ref() == Some(&fingerprints) {
            return Ok(None);
        }
        let documents: Vec<_> = all.iter().map(|(path, contents)| (*path, &contents.documents)).collect();
        let whole = self.sum.add_up(&documents)?;
        self.published = Some(fingerprints);
        Ok(Some(whole))
    }

    fn fingerprint(&self, role: Role, bytes: &[u8]) -> Fingerprint {
        Fingerprint { role, len: bytes.len(), hash: self.hasher.hash_one(bytes) }
    }
}

/// The result of a scan.
pub(super) struct Scan<W> {
    problems: Vec<SourceError>,
    /// A file that was left out because a process is writing it.
    restless: Option<PathBuf>,
    /// Files that exist, and that podfs has never read.
    pub(super) unread: BTreeSet<PathBuf>,
    /// The whole of all files, if it differs from the last time.
    pub(super) whole: Option<W>,
}
