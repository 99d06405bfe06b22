//! Files that lose their names to other files while callers look for them.
//!
//! A process of the host may replace a file by rename(2) between two requests of one call: LOOKUP finds a file, and OPEN of that file
//! fails with `ESTALE`, because no process has it open. The kernel then walks the path once more, and looks every name up again
//! (`LOOKUP_REVAL`). The file that it finds this time may be replaced, too, and a second `ESTALE` would reach the caller. So for
//! [`PERIOD`] after an `ESTALE`, the server keeps each file open that a LOOKUP finds. It opens such a file by that descriptor although
//! the file is deleted, as the kernel does on the source.
//!
//! The server cannot open what the name leads to now instead: OPEN names a node, and the kernel would read and write the new file
//! with the attributes, pages and locks of the old one.
//!
//! A directory may be replaced, too (`filesystem::replacement`). The kernel returns a second `ESTALE` of a call to the caller, so the
//! server sends a thread back once. The second walk ends with the request that was sent back, or with another one that opens a file or
//! changes a name.

use std::ffi::OsStr;
use std::num::NonZeroUsize;
use std::os::fd::OwnedFd;
use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::{Arc, Mutex, MutexGuard};
use std::thread;
use std::time::{Duration, Instant};

use lru::LruCache;

use crate::session::{FuseOperation, NodeId, Request};

/// The time after an `ESTALE` in which files are kept open, and the time for which each is.
const PERIOD: Duration = Duration::from_secs(1);
/// The most files that are kept open: more than the requests that other threads make between two requests of one call.
const KEPT: NonZeroUsize = NonZeroUsize::new(256).expect("it is not zero");
/// The most threads that the server remembers to have sent back.
const SENT_BACK: NonZeroUsize = NonZeroUsize::new(256).expect("it is not zero");
/// The time for the second walk. A walk that ends without such a request, as that of stat(2), counts as over after this time.
const SECOND_WALK: Duration = Duration::from_secs(1);

/// The files that are kept open, and the threads that look again.
pub struct ReplacedFiles {
    is_active: Arc<AtomicBool>,
    state: Arc<Mutex<ReplacedState>>,
    /// The threads that were sent back.
    sent_back: Mutex<LruCache<u32, SentBack>>,
    /// Whether there are such threads.
    has_sent_back: AtomicBool,
}

/// A request that the server answered with `ESTALE`, so that the kernel walks the path again.
struct SentBack {
    /// The name, if the request was a LOOKUP.
    looked_up: Option<Box<OsStr>>,
    at: Instant,
}

struct ReplacedState {
    kept: LruCache<NodeId, (Arc<OwnedFd>, Instant)>,
    /// Whether there was an `ESTALE` in this period.
    is_continued: bool,
    /// Whether the thread runs that ends the periods.
    is_running: bool,
}

impl Default for ReplacedFiles {
    fn default() -> Self {
        let state = ReplacedState { kept: LruCache::new(KEPT), is_continued: false, is_running: false };
        Self {
            is_active: Arc::default(),
            state: Arc::new(Mutex::new(state)),
            sent_back: Mutex::new(LruCache::new(SENT_BACK)),
            has_sent_back: AtomicBool::new(false),
        }
    }
}

impl ReplacedFiles {
    /// The server answers `request` with `ESTALE`, because a file is gone.
    pub fn found_stale(&self, request: &Request<'_>) {
        self.note_sent_back(request);
        let mut state = lock(&self.state);
        state.is_continued = true;
        if !state.is_running {
            let (is_active, shared) = (Arc::clone(&self.is_active), Arc::clone(&self.state));
            let started = thread::Builder::new().name("replaced".to_owned()).spawn(move || run(&is_active, &shared));
            // Without a thread no file is kept open, and the next `ESTALE` tries again.
            state.is_running = started.is_ok();
        }
        self.is_active.store(state.is_running, Relaxed);
    }

    /// Whether files that a LOOKUP finds are kept open.
    pub fn is_active(&self) -> bool {
        self.is_active.load(Relaxed)
    }

    /// Keeps `file`, open on this node, for a moment.
    pub fn keep(&self, node: NodeId, file: OwnedFd) {
        // The replaced descriptor is closed after the lock is released.
        let _before = lock(&self.state).kept.push(node, (Arc::new(file), Instant::now()));
    }

    /// The descriptor that is kept for a node.
    pub fn kept(&self, node: NodeId) -> Option<Arc<OwnedFd>> {
        lock(&self.state).kept.peek(&node).map(|(file, _)| Arc::clone(file))
    }

    /// Whether to answer `ESTALE` to `request`, whose directory was replaced: not if the thread was just sent back.
    pub fn sends_back(&self, request: &Request<'_>) -> bool {
        let is_recent = |before: &SentBack| before.at.elapsed() < SECOND_WALK;
        let is_second = self.lock_sent_back().peek(&request.caller.pid).is_some_and(is_recent);
        if !is_second {
            self.note_sent_back(request);
        }
        !is_second
    }

    fn note_sent_back(&self, request: &Request<'_>) {
        let looked_up = match request.operation {
            FuseOperation::Lookup { name } => Some(name.into()),
            _ => None,
        };
        self.lock_sent_back().put(request.caller.pid, SentBack { looked_up, at: Instant::now() });
        self.has_sent_back.store(true, Relaxed);
    }

    /// The server answers `request`, which may end the second walk of its thread. `found`: it does not fail.
    pub fn answered(&self, request: &Request<'_>, found: bool) {
        if !self.has_sent_back.load(Relaxed) {
            return;
        }
        let mut sent_back = self.lock_sent_back();
        let Some(before) = sent_back.peek(&request.caller.pid) else { return };
        let is_end = match request.operation {
            FuseOperation::Lookup { name } => found && before.looked_up.as_deref() == Some(name),
            FuseOperation::Open { .. }
            | FuseOperation::OpenDir
            | FuseOperation::SetAttr(_)
            | FuseOperation::TmpFile { .. } => true,
            ref operation => operation.entry().is_some(),
        };
        if is_end {
            sent_back.pop(&request.caller.pid);
            self.has_sent_back.store(!sent_back.is_empty(), Relaxed);
        }
    }

    fn lock_sent_back(&self) -> MutexGuard<'_, LruCache<u32, SentBack>> {
        self.sent_back.lock().expect("a thread that panics ends the process")
    }
}

fn run(is_active: &AtomicBool, state: &Mutex<ReplacedState>) {
    loop {
        thread::sleep(PERIOD);
        let mut gone = Vec::new();
        let mut state = lock(state);
        while state.kept.peek_lru().is_some_and(|(_, (_, since))| since.elapsed() >= PERIOD) {
            gone.extend(state.kept.pop_lru());
        }
        if !std::mem::take(&mut state.is_continued) {
            is_active.store(false, Relaxed);
            if state.kept.is_empty() {
                state.is_running = false;
                return;
            }
        }
        // The lock is released before the descriptors are closed.
        drop(state);
        drop(gone);
    }
}

fn lock(state: &Mutex<ReplacedState>) -> MutexGuard<'_, ReplacedState> {
    state.lock().expect("a thread that panics ends the process")
}
