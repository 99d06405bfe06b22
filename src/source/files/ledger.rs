//! What the files say: the last good documents of each, and the snapshot they add up to.
//!
//! One scan finds the files, reads those that changed, waits for the events of the meantime, and takes over every file
//! that was at rest. A file in trouble keeps its last good documents. The snapshot follows from all documents together.

use std::collections::{BTreeMap, BTreeSet};
use std::hash::{BuildHasher, RandomState};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::find::{Found, Role, Root, Target};
use super::judge::{Judge, Verdict};
use super::read::{Stamp, read};
use super::watch::Watcher;
use super::{Accepted, PodInput, SourceError};
use crate::manifest::Tokens;
use crate::manifest::objects::{NamedObject, Objects, parse_object};
use crate::manifest::pod::{Pod, from_template, only_pod};
use crate::manifest::{ManifestError, Origin, parse_documents};
use crate::source::Snapshot;

/// How long the files may take to come to rest when podfs starts.
const START_TIMEOUT: Duration = Duration::from_secs(5);

/// The configured paths and what was read from them.
pub(super) struct Ledger {
    accepted: Accepted,
    roots: Vec<Root>,
    files: BTreeMap<PathBuf, Entry>,
    /// What came from standard input.
    fixed: Option<Contents>,
    hasher: RandomState,
    published: Option<Vec<Fingerprint>>,
    objects: Objects,
    /// Documents that change an immutable object.
    refused: Vec<Origin>,
    told: BTreeSet<String>,
}

/// A file that was read at least once.
struct Entry {
    /// Index of the configured path it was found by.
    root: usize,
    stamp: Stamp,
    /// Whether the contents are those of the stamp, and not older ones.
    current: bool,
    contents: Option<Contents>,
}

/// The good documents of a file.
struct Contents {
    fingerprint: Fingerprint,
    pod: Option<Arc<Pod>>,
    objects: Vec<Arc<NamedObject>>,
}

/// Tells contents apart: whether they describe the pod, their length and a hash with a key of this process.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
struct Fingerprint {
    pod: bool,
    len: usize,
    hash: u64,
}

impl Ledger {
    /// A ledger of the configured paths, nothing of them read.
    ///
    /// # Errors
    ///
    /// A malformed manifest from standard input.
    pub(super) fn new(accepted: Accepted, pod: Option<PodInput>, objects: &[PathBuf]) -> Result<Self, ManifestError> {
        let mut ledger = Self {
            accepted,
            roots: Vec::new(),
            files: BTreeMap::new(),
            fixed: None,
            hasher: RandomState::new(),
            published: None,
            objects: Objects::default(),
            refused: Vec::new(),
            told: BTreeSet::new(),
        };
        match pod {
            Some(PodInput::Stdin(bytes)) => {
                let fingerprint = ledger.fingerprint(true, &bytes);
                ledger.fixed = Some(parse(accepted, fingerprint, Path::new("standard input"), &bytes)?);
            }
            Some(PodInput::File(path)) => ledger.roots.push(Root::pod(path)),
            None => {}
        }
        ledger.roots.extend(objects.iter().cloned().map(Root::objects));
        Ok(ledger)
    }

    /// Reads everything, and waits for files that are just being written.
    ///
    /// # Errors
    ///
    /// The first problem with any file, or a file that does not come to rest.
    pub(super) fn first_scan(&mut self, watcher: &mut Watcher) -> Result<Snapshot, SourceError> {
        let patience = Instant::now() + START_TIMEOUT;
        let mut latest = None;
        loop {
            let scan = self.scan(watcher);
            if let Some(problem) = scan.problems.into_iter().next() {
                return Err(problem);
            }
            latest = scan.snapshot.or(latest);
            match (scan.restless, &latest) {
                (None, Some(snapshot)) => return Ok(snapshot.clone()),
                (Some(path), _) if Instant::now() > patience => return Err(SourceError::Restless(path)),
                _ => watcher.wait(),
            };
        }
    }

    /// Reads what changed. `None` when the result is the last snapshot again. Problems are logged, each of them once.
    pub(super) fn next_scan(&mut self, watcher: &mut Watcher) -> Option<Snapshot> {
        let scan = self.scan(watcher);
        let sentences: BTreeSet<String> = scan.problems.iter().map(SourceError::while_running).collect();
        for sentence in sentences.difference(&self.told) {
            tracing::warn!("{sentence}");
        }
        self.told = sentences;
        scan.snapshot
    }

    /// The problems of the last scan that were told.
    #[cfg(test)]
    pub(super) fn told(&self) -> impl Iterator<Item = &str> {
        self.told.iter().map(String::as_str)
    }

    fn scan(&mut self, watcher: &mut Watcher) -> Scan {
        let reread = watcher.has_lost_track();
        let rested = watcher.activity.begin_scan();
        let Found { targets, kept, mut problems } = Found::look(&mut self.roots, watcher);
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
        for (target, reading) in readings {
            let old = before.remove(&target.path);
            let verdict = judge.judge(&target, reading, old.as_ref().map(|entry| entry.stamp));
            let entry = match verdict {
                Ok(Verdict::Keep) => old,
                Ok(Verdict::Drop) => None,
                Ok(Verdict::Take(stamp, bytes)) => Some(self.entry(&target, stamp, &bytes, old, &mut problems)),
                Err(trouble) => {
                    problems.push(trouble.problem);
                    old.filter(|_| trouble.keeps)
                }
            };
            if let Some(entry) = entry {
                self.files.insert(target.path, entry);
            }
        }
        let restless = judge.restless();
        self.files.extend(before.into_iter().filter(|(_, entry)| kept.contains(&entry.root)));
        let snapshot = self.snapshot().unwrap_or_else(|problem| {
            problems.push(problem.into());
            None
        });
        problems.extend(self.refused.iter().map(|origin| {
            let sentence = "field is immutable when `immutable` is set; delete the object and create it again";
            ManifestError::invalid(origin, "data", sentence).into()
        }));
        Scan { problems, restless, snapshot }
    }

    /// The entry of a file that was just read. Bad bytes leave the old contents in place.
    fn entry(
        &self,
        target: &Target,
        stamp: Stamp,
        bytes: &[u8],
        old: Option<Entry>,
        problems: &mut Vec<SourceError>,
    ) -> Entry {
        let fingerprint = self.fingerprint(target.role == Role::Pod, bytes);
        let old = old.and_then(|entry| entry.contents);
        let (current, contents) = match old {
            Some(old) if old.fingerprint == fingerprint => (true, Some(old)),
            old => match parse(self.accepted, fingerprint, &target.path, bytes) {
                Ok(contents) => (true, Some(contents)),
                Err(problem) => {
                    problems.push(problem.into());
                    (false, old)
                }
            },
        };
        Entry { root: target.root, stamp, current, contents }
    }

    /// What all contents add up to. `None` when they are those of the last snapshot.
    ///
    /// # Errors
    ///
    /// An object in two documents; the last snapshot remains the last.
    fn snapshot(&mut self) -> Result<Option<Snapshot>, ManifestError> {
        let all = || self.fixed.iter().chain(self.files.values().filter_map(|entry| entry.contents.as_ref()));
        let mut fingerprints: Vec<_> = all().map(|contents| contents.fingerprint).collect();
        fingerprints.sort_unstable();
        if self.published.as_ref() == Some(&fingerprints) {
            return Ok(None);
        }
        let objects = Objects::collect(all().flat_map(|contents| &contents.objects).cloned())?;
        let (objects, refused) = objects.keep_immutable(&self.objects);
        let pod = all().find_map(|contents| contents.pod.clone());
        self.published = Some(fingerprints);
        self.refused = refused;
        self.objects = objects.clone();
        Ok(Some(Snapshot { pod, objects, tokens: Tokens::default(), heard: None, is_settling: false }))
    }

    fn fingerprint(&self, pod: bool, bytes: &[u8]) -> Fingerprint {
        Fingerprint { pod, len: bytes.len(), hash: self.hasher.hash_one(bytes) }
    }
}

/// What came out of a scan.
struct Scan {
    problems: Vec<SourceError>,
    /// A file that was left out because it is being written.
    restless: Option<PathBuf>,
    /// The snapshot, when it differs from the last one.
    snapshot: Option<Snapshot>,
}

fn parse(accepted: Accepted, fingerprint: Fingerprint, file: &Path, bytes: &[u8]) -> Result<Contents, ManifestError> {
    let mut documents = parse_documents(file, bytes)?;
    if fingerprint.pod && accepted == Accepted::Templates {
        documents = documents.into_iter().map(from_template).collect::<Result<_, _>>()?;
    }
    let (pod, others) = match fingerprint.pod {
        true => {
            let (pod, others) = only_pod(file, documents)?;
            (Some(Arc::new(Pod::parse(pod)?)), others)
        }
        false => (None, documents),
    };
    let objects = others.into_iter().filter_map(|document| parse_object(document).transpose());
    let objects = objects.map(|object| object.map(Arc::new)).collect::<Result<_, _>>()?;
    Ok(Contents { fingerprint, pod, objects })
}
