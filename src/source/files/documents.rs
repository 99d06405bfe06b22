//! The last good documents of each file, and their combination.
//!
//! One scan finds the files, reads those that have changed, waits for the events that the kernel has queued meanwhile, and
//! uses the new content of every settled file. A file that cannot be read keeps its last good documents; so does a document that
//! cannot be parsed. A [`FileCombiner`] parses the documents, and combines those of all files.

use std::collections::{BTreeMap, BTreeSet};
use std::hash::{BuildHasher, RandomState};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use super::SourceError;
use super::bad_document::{BadDocument, CombinationProblem, ParsedFile, Subject};
use super::error::ScanProblem;
use super::find::{ConfiguredPath, FileToRead, FoundFiles, PathRole};
use super::read::{Stamp, read};
use super::read_check::{DocumentUpdate, ReadCheck};
use super::settle::SETTLE_DELAY;
use super::watch::Watcher;

/// How long podfs waits at its start for files that are being written.
const START_TIMEOUT: Duration = Duration::from_secs(5);

/// Parses the bytes of a file, and combines the documents of all files.
pub(crate) trait FileCombiner: Send + 'static {
    /// The good documents of one file.
    type Contents: Send;
    /// The documents of all files, combined.
    type Combined: Send;
    /// Whether the combination depends on the paths of the files, and not only on their documents.
    const NAMES_COUNT: bool;

    /// Parses one file. In place of a bad document, its `earlier` contents stay in use.
    fn parse(
        &self,
        role: PathRole,
        file: &Path,
        bytes: &[u8],
        earlier: Option<&Self::Contents>,
    ) -> ParsedFile<Self::Contents>;

    /// Combines all files, in the order of their paths. `None` if the result is that of the last time.
    fn combine(&mut self, files: Files<'_, Self::Contents>) -> Option<Self::Combined>;

    /// Documents of the last combination that do not go together.
    fn problems(&self) -> &[CombinationProblem];

    /// Whether a podfs that starts now would refuse the files because of a bad document, as of the last combination.
    fn refuses_to_start(&self, subject: &Subject) -> bool;
}

/// The contents of all files with their paths.
pub(crate) type Files<'a, C> = &'a [(&'a Path, &'a C)];

/// The configured paths and their contents.
pub(super) struct DocumentStore<S: FileCombiner> {
    combiner: S,
    roots: Vec<ConfiguredPath>,
    files: BTreeMap<PathBuf, StoredFile<S::Contents>>,
    /// The name and contents of bytes that are read only once, before the scans.
    fixed: Option<FixedFile<S::Contents>>,
    hasher: RandomState,
    published: Option<Vec<(PathBuf, Fingerprint)>>,
    problems: BTreeSet<String>,
    problems_before: BTreeSet<String>,
}

/// Bytes that are read only once.
struct FixedFile<C> {
    name: PathBuf,
    contents: Fingerprinted<C>,
    bad: Vec<BadDocument>,
}

/// A file that was read at least once.
struct StoredFile<C> {
    /// Index of the configured path that it belongs to.
    root: usize,
    stamp: Stamp,
    /// The bytes of the file with this stamp.
    read: Fingerprint,
    contents: Fingerprinted<C>,
    /// The documents that podfs could not use.
    bad: Vec<BadDocument>,
    /// Since when the file has been absent.
    absent_since: Option<Instant>,
}

impl<C> StoredFile<C> {
    /// Until when an absent file counts as before. Editors and git remove a file before they write it again.
    fn counts_until(&mut self, now: Instant) -> Option<Instant> {
        let until = *self.absent_since.get_or_insert(now) + SETTLE_DELAY;
        (now < until).then_some(until)
    }
}

/// The good documents of a file. Earlier documents that stay in use in place of bad ones count for the fingerprint, too.
struct Fingerprinted<C> {
    fingerprint: Fingerprint,
    documents: C,
}

/// Identifies contents: whether they describe the pod, their length and a hash with a key of this process.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
struct Fingerprint {
    role: PathRole,
    len: usize,
    hash: u64,
}

/// The name of standard input.
pub(super) const STDIN: &str = "standard input";

impl<S: FileCombiner> DocumentStore<S> {
    /// The store of the configured paths, before the first scan. `fixed` is the name and the bytes of a manifest
    /// that is read only once.
    pub(super) fn new(combiner: S, fixed: Option<(PathBuf, Vec<u8>)>, roots: Vec<ConfiguredPath>) -> Self {
        let mut store = Self {
            combiner,
            roots,
            files: BTreeMap::new(),
            fixed: None,
            hasher: RandomState::new(),
            published: None,
            problems: BTreeSet::new(),
            problems_before: BTreeSet::new(),
        };
        if let Some((name, bytes)) = fixed {
            let fingerprint = store.fingerprint(PathRole::Pod, &bytes);
            let ParsedFile { contents, bad } = store.combiner.parse(PathRole::Pod, &name, &bytes, None);
            let contents = Fingerprinted { fingerprint, documents: contents };
            store.fixed = Some(FixedFile { name, contents, bad });
        }
        store
    }

    /// Combines the bytes that are read only once, if no path is configured.
    ///
    /// # Errors
    /// The first bad document that podfs needs.
    pub(super) fn combine_fixed(&mut self) -> Result<S::Combined, SourceError> {
        let fixed = self.fixed.iter();
        let documents: Vec<_> = fixed.map(|fixed| (fixed.name.as_path(), &fixed.contents.documents)).collect();
        let combined = self.combiner.combine(&documents);
        let problems = self.document_problems();
        self.report(&problems);
        match problems.into_iter().find(|problem| problem.refuses_to_start) {
            Some(problem) => Err(problem.error),
            None => Ok(combined.expect("it is the first combination")),
        }
    }

    /// Reads all files, and waits for files that are being written.
    ///
    /// # Errors
    ///
    /// When podfs cannot read a file, when a process writes to a file all the time, or when a document that podfs needs is bad.
    pub(super) fn first_scan(&mut self, watcher: &mut Watcher) -> Result<S::Combined, SourceError> {
        let deadline = Instant::now() + START_TIMEOUT;
        let mut latest = None;
        loop {
            let scan = self.scan(watcher);
            self.report(&scan.problems);
            latest = scan.combined.or(latest);
            // The file that is being written may be what another problem needs.
            if scan.being_written.is_none() || Instant::now() > deadline {
                let refused = scan.problems.into_iter().find(|problem| problem.refuses_to_start);
                match (refused, scan.being_written, latest.take()) {
                    (Some(problem), _, _) => return Err(problem.error),
                    (None, Some(path), _) => return Err(SourceError::BeingWritten(path)),
                    (None, None, Some(combined)) => return Ok(combined),
                    (None, None, None) => {}
                }
            }
            watcher.wait();
        }
    }

    /// Reads all files that can be read, and waits for a while for files that are being written.
    pub(super) fn first_scan_of_good_files(&mut self, watcher: &mut Watcher) -> ScanResult<S::Combined> {
        let deadline = Instant::now() + START_TIMEOUT;
        let mut latest = None;
        loop {
            let mut scan = self.scan(watcher);
            latest = scan.combined.take().or(latest);
            match &scan.being_written {
                Some(_) if Instant::now() <= deadline && watcher.wait() => continue,
                Some(path) => scan.problems.push(ScanProblem::of_path(SourceError::BeingWritten(path.clone()))),
                None => {}
            }
            self.report(&scan.problems);
            return ScanResult { combined: latest, ..scan };
        }
    }

    /// Reads the files that have changed.
    pub(super) fn next_scan(&mut self, watcher: &mut Watcher) -> ScanResult<S::Combined> {
        let scan = self.scan(watcher);
        self.report(&scan.problems);
        scan
    }

    fn report(&mut self, problems: &[ScanProblem]) {
        let sentences = problems.iter().map(ScanProblem::sentence).collect();
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

    fn scan(&mut self, watcher: &mut Watcher) -> ScanResult<S::Combined> {
        let reread = watcher.has_lost_track();
        let settled = watcher.activity.begin_scan();
        let FoundFiles { targets, kept, mut problems } = FoundFiles::inspect(&mut self.roots, watcher);
        let readings: Vec<_> = targets
            .into_iter()
            .map(|target| {
                let known = self.files.get(&target.path);
                let known = known.filter(|_| !reread && !settled.contains_key(&target.real));
                let reading = read(&target.path, known.map(|entry| entry.stamp));
                (target, reading)
            })
            .collect();
        let is_certain = watcher.catch_up();

        let mut check = ReadCheck::new(settled, &mut watcher.activity, is_certain);
        let mut before = std::mem::take(&mut self.files);
        let mut unread = BTreeSet::new();
        let (now, mut absent_until) = (Instant::now(), Vec::new());
        for (target, reading) in readings {
            let old = before.remove(&target.path);
            let update = check.update(&target, reading, old.as_ref().map(|entry| entry.stamp));
            let is_there = !matches!(update, Ok(DocumentUpdate::Drop));
            let entry = match update {
                Ok(DocumentUpdate::Keep) => old.map(|entry| StoredFile { absent_since: None, ..entry }),
                Ok(DocumentUpdate::Drop) => None,
                Ok(DocumentUpdate::Absent) => {
                    before.extend(old.map(|entry| (target.path, entry)));
                    continue;
                }
                Ok(DocumentUpdate::Take(stamp, bytes)) => Some(self.entry(&target, stamp, &bytes, old)),
                Err(unreadable) => {
                    let mut old = old;
                    if let Some(entry) = old.as_mut().filter(|_| unreadable.keeps) {
                        entry.absent_since = None;
                    }
                    let until = old.as_mut().filter(|_| !unreadable.keeps).and_then(|entry| entry.counts_until(now));
                    absent_until.extend(until);
                    if until.is_none() {
                        problems.push(ScanProblem::of_file(unreadable.problem, old.is_some()));
                    }
                    old.filter(|_| unreadable.keeps || until.is_some())
                }
            };
            match entry {
                Some(entry) => drop(self.files.insert(target.path, entry)),
                None if is_there => drop(unread.insert(target.path)),
                None => {}
            }
        }
        for (path, mut entry) in before {
            let (is_kept, has_moved) = (kept.contains(&entry.root), check.has_seen(&entry.stamp));
            let until = if is_kept || has_moved { None } else { entry.counts_until(now) };
            if is_kept {
                entry.absent_since = None;
            }
            if is_kept || until.is_some() {
                absent_until.extend(until);
                self.files.insert(path, entry);
            }
        }
        let without_contents = self.files.iter().filter(|(_, entry)| entry.bad.iter().any(BadDocument::is_unread));
        unread.extend(without_contents.map(|(path, _)| path.clone()));
        let being_written = check.being_written();
        absent_until.into_iter().for_each(|until| watcher.activity.scan_at(until));
        let combined = self.combine_present();
        problems.extend(self.document_problems());
        ScanResult { problems, being_written, unread, combined }
    }

    /// The bad documents of all files, and the documents that do not go together.
    fn document_problems(&self) -> Vec<ScanProblem> {
        let of_fixed = self.fixed.iter().flat_map(|fixed| &fixed.bad);
        let bad = of_fixed.chain(self.files.values().flat_map(|entry| &entry.bad));
        let bad = bad.map(|bad| ScanProblem::of_document(bad, self.combiner.refuses_to_start(&bad.subject)));
        let combined = self.combiner.problems().iter().map(|problem| {
            let subject = problem.object.clone().map(Subject::Object);
            let refuses_to_start = subject.is_some_and(|subject| self.combiner.refuses_to_start(&subject));
            ScanProblem::of_combination(problem, refuses_to_start)
        });
        bad.chain(combined).collect()
    }

    /// The entry of a file that was just read. Bad documents leave the old contents in place.
    fn entry(
        &self,
        target: &FileToRead,
        stamp: Stamp,
        bytes: &[u8],
        old: Option<StoredFile<S::Contents>>,
    ) -> StoredFile<S::Contents> {
        let read = self.fingerprint(target.role, bytes);
        let (root, absent_since) = (target.root, None);
        let old = match old {
            Some(old) if old.read == read => return StoredFile { root, stamp, absent_since, ..old },
            old => old.map(|old| old.contents),
        };
        let earlier = old.as_ref().map(|old| &old.documents);
        let ParsedFile { contents: documents, bad } = self.combiner.parse(target.role, &target.path, bytes, earlier);
        let keeps_earlier = bad.iter().any(|bad| bad.has_earlier_content);
        let fingerprint = match old.filter(|_| keeps_earlier) {
            Some(old) => Fingerprint { hash: self.hasher.hash_one((read.hash, old.fingerprint.hash)), ..read },
            None => read,
        };
        StoredFile { root, stamp, read, contents: Fingerprinted { fingerprint, documents }, bad, absent_since }
    }

    /// Combines all files, also absent ones that still count, unless these contradict other files: an object may have moved to
    /// another file. `None` if nothing has changed.
    fn combine_present(&mut self) -> Option<S::Combined> {
        let problems_before = self.combiner.problems().len();
        let combined = self.combine_changed(true);
        let problems = self.combiner.problems().len();
        if problems <= problems_before || self.files.values().all(|entry| entry.absent_since.is_none()) {
            return combined;
        }
        let present = self.combine_changed(false);
        if self.combiner.problems().len() < problems {
            // They do not count again: podfs has forgotten their objects.
            self.files.retain(|_, entry| entry.absent_since.is_none());
            return present.or(combined);
        }
        // The absent files are not the reason.
        self.combine_changed(true).or(present).or(combined)
    }

    /// Combines the files that exist, and the absent ones if `with_absent`. `None` if they have not changed.
    fn combine_changed(&mut self, with_absent: bool) -> Option<S::Combined> {
        let counting = self.files.iter().filter(|(_, entry)| with_absent || entry.absent_since.is_none());
        let of_files = counting.map(|(path, entry)| (path.as_path(), &entry.contents));
        let fixed = self.fixed.iter().map(|fixed| (fixed.name.as_path(), &fixed.contents));
        let all: Vec<_> = fixed.chain(of_files).collect();
        let name = |path: &Path| if S::NAMES_COUNT { path.to_owned() } else { PathBuf::new() };
        let mut fingerprints: Vec<_> = all.iter().map(|(path, contents)| (name(path), contents.fingerprint)).collect();
        fingerprints.sort_unstable();
        if self.published.as_ref() == Some(&fingerprints) {
            return None;
        }
        let documents: Vec<_> = all.iter().map(|(path, contents)| (*path, &contents.documents)).collect();
        self.published = Some(fingerprints);
        self.combiner.combine(&documents)
    }

    fn fingerprint(&self, role: PathRole, bytes: &[u8]) -> Fingerprint {
        Fingerprint { role, len: bytes.len(), hash: self.hasher.hash_one(bytes) }
    }
}

/// The result of a scan.
pub(super) struct ScanResult<W> {
    problems: Vec<ScanProblem>,
    /// A file that was left out because a process is writing it.
    being_written: Option<PathBuf>,
    /// Files that podfs has never been able to read. One that was removed less than a second ago counts.
    pub(super) unread: BTreeSet<PathBuf>,
    /// The documents of all files, combined, if they differ from those of the last scan.
    pub(super) combined: Option<W>,
}

impl<W> ScanResult<W> {
    /// The first problem for which [`DocumentStore::first_scan`] would refuse these files.
    pub(super) fn start_problem(&self) -> Option<String> {
        let refused = self.problems.iter().find(|problem| problem.refuses_to_start);
        refused.map(|problem| problem.error.to_string())
    }
}
