//! The stall guard: requests of a file system whose source may become silent, such as a mount of the kernel's NFS client.
//!
//! A thread that calls such a source waits in the kernel until the source is back, and cannot be interrupted. So:
//!
//! 1. At most [`MOST_CALLS`] requests call the source at one time, one less than a session may have threads. Further requests are
//!    *parked*, in their order, and each calls the source as soon as another one is done. So one thread can always read.
//! 2. A caller that is being killed gets `EINTR` instead of waiting on. The thread that executes its request continues, and the
//!    kernel drops its answer, because it has forgotten the request. The service takes back the lookups and handles of the answer
//!    ([`Filesystem::release_references`]).
//! 3. The source is *silent* while a request has been calling it for [`ANSWER_TIMEOUT`]. Then the service answers questions
//!    about its root from memory ([`Filesystem::answer_from_cache`]): new ones at once, and earlier ones after
//!    [`ANSWER_TIMEOUT`].
//! 4. All other requests wait. Each change of the source is made once, with the credentials of its caller.
//!
//! The guard's thread does points 2 and 3: it checks every [`CHECK_INTERVAL`] while a request is under way, and sleeps otherwise.

use std::collections::{HashMap, VecDeque};
use std::io;
use std::os::fd::OwnedFd;
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::thread;
use std::time::{Duration, Instant};

use rustix::io::Errno;
use zerocopy::IntoBytes;

use super::answer::Responder;
use super::ids::NodeId;
use super::request::{FuseOperation, Request};
use super::{Answer, Filesystem};
use crate::caller::ending::has_given_up;
use crate::region::{Region, SLOTS};

/// Most requests that call the source at one time.
const MOST_CALLS: usize = SLOTS - 1;
/// Most requests that are parked. Further requests wait in the kernel, and all other requests of the volume with them.
const MOST_PARKED: usize = 512;
/// The interval at which the thread checks the requests under way.
const CHECK_INTERVAL: Duration = Duration::from_millis(200);
/// The time after which the source counts as silent if it has not answered a request.
const ANSWER_TIMEOUT: Duration = Duration::from_millis(400);

/// A question about the root that a service may answer without its source.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RootQuestion {
    /// The root's attributes (GETATTR).
    Attributes,
    /// The root's attributes in full (STATX).
    Statx,
    /// The file system as a whole (STATFS).
    FileSystem,
}

impl RootQuestion {
    fn of(request: &Request<'_>) -> Option<Self> {
        match request.operation {
            FuseOperation::GetAttr { .. } if request.node == NodeId::ROOT => Some(Self::Attributes),
            FuseOperation::Statx { .. } if request.node == NodeId::ROOT => Some(Self::Statx),
            FuseOperation::StatFs => Some(Self::FileSystem),
            _ => None,
        }
    }
}

/// The requests of one session.
pub(super) struct StallGuard {
    device: Arc<OwnedFd>,
    region: Arc<Region>,
    service: Arc<dyn Filesystem>,
    state: Mutex<GuardState>,
    /// Signals that a request is under way, that one can be parked, or that the session ends.
    changed: Condvar,
}

#[derive(Default)]
struct GuardState {
    /// The requests under way, by their numbers.
    waiting: HashMap<u64, WaitingCall>,
    /// The number of threads that call the source.
    calling: usize,
    parked: VecDeque<Parked>,
    /// Whether the guard's thread waits for a request.
    asleep: bool,
    over: bool,
}

struct WaitingCall {
    unique: u64,
    /// The caller's process id, as this process sees it.
    pid: u32,
    since: Instant,
    question: Option<RootQuestion>,
    /// Whether the kernel has sent INTERRUPT for the request. This decides if this process cannot see the caller's thread.
    interrupted: bool,
    /// Whether the guard has answered the request.
    answered: bool,
    /// Whether podfs has to execute the request even after an answer, because it releases something.
    obligation: bool,
}

/// A request that waits for its turn to call the source.
pub(super) struct Parked {
    number: u64,
    words: Vec<u64>,
    length: usize,
    /// The item in the region's waits that records the request; `None` if there was no free one.
    place: Option<usize>,
}

impl Parked {
    /// The request, as it was read.
    pub(super) fn bytes(&self) -> &[u8] {
        &self.words.as_bytes()[..self.length]
    }
}

impl StallGuard {
    /// Starts the guard's thread. The guard answers with `service` on `device`.
    ///
    /// # Errors
    /// When no thread can be started.
    pub(super) fn start(
        device: &Arc<OwnedFd>,
        region: &Arc<Region>,
        service: &Arc<dyn Filesystem>,
    ) -> io::Result<Arc<Self>> {
        let stall_guard = Arc::new(Self {
            device: Arc::clone(device),
            region: Arc::clone(region),
            service: Arc::clone(service),
            state: Mutex::default(),
            changed: Condvar::new(),
        });
        let own = Arc::clone(&stall_guard);
        thread::Builder::new().name("stall-guard".to_owned()).spawn(move || own.watch())?;
        Ok(stall_guard)
    }

    /// Ends the guard's thread: no request comes any more.
    pub(super) fn end(&self) {
        self.state().over = true;
        self.changed.notify_all();
    }

    /// The answer from memory, if `request` is a question about the root and the source is silent.
    pub(super) fn answer_from_cache(&self, request: &Request<'_>) -> Option<Answer> {
        let question = RootQuestion::of(request)?;
        let is_silent = self.state().is_silent();
        if is_silent { self.service.answer_from_cache(question) } else { None }
    }

    /// Whether the calling thread may call the source for `request`. If not, the guard parks a copy of `bytes`, the
    /// request as it was read.
    pub(super) fn enter(&self, request: &Request<'_>, bytes: &[u8]) -> bool {
        let mut state = self.state();
        while state.calling >= MOST_CALLS && state.parked.len() >= MOST_PARKED {
            state = self.changed.wait(state).expect("a thread that panics ends the process");
        }
        let waiting = WaitingCall {
            unique: request.unique,
            pid: request.caller.pid,
            since: Instant::now(),
            question: RootQuestion::of(request),
            interrupted: false,
            answered: false,
            obligation: matches!(
                request.operation,
                FuseOperation::Release(_) | FuseOperation::ReleaseDir(_) | FuseOperation::Flush(_)
            ),
        };
        state.waiting.insert(request.number(), waiting);
        let enters = state.calling < MOST_CALLS;
        if enters {
            state.calling += 1;
        } else {
            let mut words = vec![0_u64; bytes.len().div_ceil(8)];
            words.as_mut_bytes()[..bytes.len()].copy_from_slice(bytes);
            let place = self.region.waits().add(request.number());
            state.parked.push_back(Parked { number: request.number(), words, length: bytes.len(), place });
        }
        if state.asleep {
            self.changed.notify_all();
        }
        enters
    }

    /// The calling thread has executed the request `number`. Returns the request that it executes next, if one is parked.
    pub(super) fn leave(&self, number: u64) -> Option<Parked> {
        let mut state = self.state();
        state.waiting.remove(&number);
        let next = state.parked.pop_front();
        match &next {
            Some(parked) => {
                // The call begins now; the time before does not count.
                if let Some(waiting) = state.waiting.get_mut(&parked.number) {
                    waiting.since = Instant::now();
                }
                self.unpark(parked);
                if state.parked.len() + 1 == MOST_PARKED {
                    self.changed.notify_all();
                }
            }
            None => state.calling -= 1,
        }
        next
    }

    /// The kernel has interrupted the caller of `number`.
    pub(super) fn interrupt(&self, number: u64) {
        if let Some(waiting) = self.state().waiting.get_mut(&number) {
            waiting.interrupted = true;
        }
    }

    fn unpark(&self, parked: &Parked) {
        if let Some(place) = parked.place {
            self.region.waits().remove(place);
        }
    }

    /// Checks the requests under way every [`CHECK_INTERVAL`], until the session ends.
    fn watch(&self) {
        let mut state = self.state();
        loop {
            while state.waiting.is_empty() && !state.over {
                state.asleep = true;
                state = self.changed.wait(state).expect("a thread that panics ends the process");
            }
            if state.over {
                return;
            }
            state.asleep = false;
            drop(state);
            thread::sleep(CHECK_INTERVAL);
            self.check_late();
            state = self.state();
        }
    }

    fn check_late(&self) {
        let late = |waiting: &WaitingCall| !waiting.answered && waiting.since.elapsed() >= CHECK_INTERVAL;
        let all = |state: &GuardState| -> Vec<_> {
            let late = state.waiting.iter().filter(|(_, waiting)| late(waiting));
            late.map(|(number, waiting)| (*number, waiting.pid, waiting.interrupted, waiting.question)).collect()
        };
        let all = all(&self.state());
        // No lock is held here: `has_given_up` reads `/proc`, and `answer_from_cache` runs code of the service.
        for (number, pid, interrupted, question) in all {
            let recalled = || {
                question.filter(|_| self.state().is_silent()).and_then(|known| self.service.answer_from_cache(known))
            };
            let outcome = if has_given_up(pid, interrupted) { Some(Err(Errno::INTR)) } else { recalled().map(Ok) };
            if let Some(outcome) = outcome {
                self.answer(number, outcome);
            }
        }
    }

    /// Answers for the thread that calls the source, unless that thread has answered before.
    fn answer(&self, number: u64, outcome: Result<Answer, Errno>) {
        let mut state = self.state();
        let Some(waiting) = state.waiting.get_mut(&number) else { return };
        waiting.answered = true;
        let (unique, obligation) = (waiting.unique, waiting.obligation);
        let place = state.parked.iter().position(|parked| parked.number == number).filter(|_| !obligation);
        if let Some(parked) = place.and_then(|place| state.parked.remove(place)) {
            state.waiting.remove(&number);
            self.unpark(&parked);
            self.changed.notify_all();
        }
        drop(state);
        // The kernel takes the first answer, and ignores a second.
        let _ = Responder::of_device(&self.device, unique).send(outcome);
    }

    fn state(&self) -> MutexGuard<'_, GuardState> {
        self.state.lock().expect("a thread that panics ends the process")
    }
}

impl GuardState {
    /// Whether a request has been calling the source for [`ANSWER_TIMEOUT`]. A parked request does not count: it has not called the
    /// source yet.
    fn is_silent(&self) -> bool {
        let parked = |number: &u64| self.parked.iter().any(|parked| parked.number == *number);
        self.waiting.iter().any(|(number, waiting)| waiting.since.elapsed() >= ANSWER_TIMEOUT && !parked(number))
    }
}

#[cfg(test)]
mod tests;
