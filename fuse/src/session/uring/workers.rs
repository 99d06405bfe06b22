//! Threads for requests that may take long.
//!
//! A ring has one thread, and the callers of its CPU wait while that thread waits for a disk. So when requests of a kind that
//! may wait were slow lately, other threads execute them. Where they are fast, the thread of the ring executes them itself: to
//! wake another thread costs more than a fast answer.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::thread;
use std::time::{Duration, Instant};

use super::volume::{ExecutingRequest, RingVolume};

/// The most threads.
const MOST: usize = crate::region::SLOTS - 2;
/// The time for which a thread waits for another request.
const IDLE_TIMEOUT: Duration = Duration::from_secs(10);
/// The time after which a request counts as slow.
const SLOW: Duration = Duration::from_millis(1);
/// The number of requests to hand over to these threads after a slow one.
const CAUTION: u32 = 32;

/// The threads of one volume. The lock is held for moments.
#[derive(Default)]
pub(super) struct Workers {
    state: Mutex<WorkersState>,
    changed: Condvar,
    caution: AtomicU32,
}

#[derive(Default)]
struct WorkersState {
    jobs: VecDeque<ExecutingRequest>,
    idle: usize,
    running: usize,
    over: bool,
}

impl Workers {
    /// Whether to hand over requests that may wait.
    pub(super) fn are_needed(&self) -> bool {
        self.caution.load(Ordering::Relaxed) > 0
    }

    /// Records how long a request took that may wait.
    pub(super) fn note(&self, since: Instant) {
        if since.elapsed() >= SLOW {
            self.caution.store(CAUTION, Ordering::Relaxed);
        } else {
            let less = |caution: u32| caution.checked_sub(1);
            let _fast = self.caution.fetch_update(Ordering::Relaxed, Ordering::Relaxed, less);
        }
    }

    /// Hands a request over to a thread. Returns it if all threads are busy and no other can start.
    pub(super) fn take(
        workers: &Arc<Workers>,
        served: &Arc<RingVolume>,
        job: ExecutingRequest,
    ) -> Result<(), ExecutingRequest> {
        let mut state = workers.lock();
        if state.idle <= state.jobs.len() {
            if state.running == MOST {
                return Err(job);
            }
            let (own, served) = (Arc::clone(workers), Arc::clone(served));
            if thread::Builder::new().name("slow".to_owned()).spawn(move || own.work(&served)).is_err() {
                return Err(job);
            }
            state.running += 1;
        }
        state.jobs.push_back(job);
        workers.changed.notify_one();
        Ok(())
    }

    /// Ends the threads: no request comes any more.
    pub(super) fn end(&self) {
        self.lock().over = true;
        self.changed.notify_all();
    }

    fn work(&self, served: &RingVolume) {
        served.service.begin_thread();
        let mut buffer = Vec::new();
        while let Some(job) = self.next() {
            let since = Instant::now();
            job.execute(served, &mut buffer);
            self.note(since);
        }
    }

    fn next(&self) -> Option<ExecutingRequest> {
        let mut state = self.lock();
        loop {
            if let Some(job) = state.jobs.pop_front() {
                return Some(job);
            }
            if state.over {
                state.running -= 1;
                return None;
            }
            state.idle += 1;
            let (woken, wait) =
                self.changed.wait_timeout(state, IDLE_TIMEOUT).expect("a thread that panics ends the process");
            state = woken;
            state.idle -= 1;
            if wait.timed_out() && state.jobs.is_empty() {
                state.running -= 1;
                return None;
            }
        }
    }

    fn lock(&self) -> MutexGuard<'_, WorkersState> {
        self.state.lock().expect("a thread that panics ends the process")
    }
}
