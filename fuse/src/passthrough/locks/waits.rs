//! Callers that wait for a lock: one thread each, which waits in the kernel. The wait ends with the lock, or when the kernel
//! interrupts the caller: [`LockWaits::interrupt`] sends the thread signals until the wait has ended. The thread makes the kernel drop
//! what it has cached of the file, and answers.

use std::collections::{HashMap, VecDeque};
use std::io;
use std::os::fd::OwnedFd;
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::thread;
use std::time::Duration;

use nix::sys::pthread::{Pthread, pthread_kill, pthread_self};
use nix::sys::signal::{SaFlags, SigAction, SigHandler, SigSet, Signal, sigaction};
use rustix::io::Errno;

use super::LockRequest;
use crate::region::waits::WAITS;
use crate::session::{Answer, DeferredAnswer};

/// Sent to threads that wait for a lock.
const WAKE: Signal = Signal::SIGUSR1;
/// The most interrupts to remember that came before their waits.
const REMEMBERED: usize = 64;

/// What a thread does for a caller.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum LockStep {
    /// Wait for the lock.
    Wait,
    /// The lock is granted and recorded: drop what the kernel has cached.
    Granted,
    /// Drop what the kernel has cached, which writes what callers stored through mappings, and unlock.
    Unlock,
}

/// The waits of a volume.
#[derive(Default)]
pub struct LockWaits {
    table: Mutex<LockTable>,
}

#[derive(Default)]
struct LockTable {
    waits: HashMap<u64, Arc<Wait>>,
    /// Requests that were interrupted before their wait began, the latest last.
    early: VecDeque<u64>,
}

/// A wait for a lock.
#[derive(Default)]
struct Wait {
    progress: Mutex<WaitProgress>,
    ended: Condvar,
}

#[derive(Default)]
struct WaitProgress {
    interrupted: bool,
    /// The thread that waits, while it does.
    thread: Option<Pthread>,
    ended: bool,
}

impl LockWaits {
    /// Takes or releases a lock on a thread of its own, has `record` record that, and answers from there. `drop_cached` runs after the
    /// lock is granted, or before it is released. Waits again if `record` fails with `EAGAIN`.
    ///
    /// # Errors
    /// `ENOLCK` when [`WAITS`] callers wait already, or no thread can be started.
    pub fn start(
        self: &Arc<Self>,
        step: LockStep,
        lock_request: LockRequest,
        description: Arc<OwnedFd>,
        record: &(impl Fn(LockRequest) -> Result<(), Errno> + Clone + Send + 'static),
        drop_cached: impl FnOnce() + Send + 'static,
        answer: DeferredAnswer,
    ) -> Result<(), Errno> {
        let (unique, record) = (answer.number(), record.clone());
        let wait = self.register(unique)?;
        let waits = Arc::clone(self);
        let work = move || {
            let outcome = match step {
                LockStep::Wait => wait.run(lock_request, &description, &record),
                LockStep::Granted | LockStep::Unlock => wait.end(Ok(())),
            };
            let locked = outcome.is_ok() && step != LockStep::Unlock;
            if outcome.is_ok() {
                drop_cached();
            }
            let outcome = match step {
                LockStep::Unlock => record(lock_request).and_then(|()| lock_request.try_on(&description)),
                LockStep::Wait | LockStep::Granted => outcome,
            };
            waits.lock().waits.remove(&unique);
            if answer.send(outcome.map(|()| Answer::Done)).is_err() && locked {
                // The caller does not know of the lock, so it would never give it up.
                let _recorded = record(lock_request.undone());
                lock_request.undo_on(&description);
            }
        };
        let started = thread::Builder::new().name("lock".to_owned()).stack_size(64 << 10).spawn(work);
        started.map(drop).map_err(|_| {
            self.lock().waits.remove(&unique);
            Errno::NOLCK
        })
    }

    /// The caller of the request `unique` waits no longer.
    pub fn interrupt(&self, unique: u64) {
        let wait = {
            let mut table = self.lock();
            match table.waits.get(&unique) {
                Some(wait) => Arc::clone(wait),
                None => {
                    // The wait may be about to begin. Or the request is of another kind, which no interrupt ends.
                    if table.early.len() == REMEMBERED {
                        table.early.pop_front();
                    }
                    table.early.push_back(unique);
                    return;
                }
            }
        };
        wait.interrupt();
    }

    fn register(&self, unique: u64) -> Result<Arc<Wait>, Errno> {
        let mut table = self.lock();
        if table.waits.len() >= WAITS {
            return Err(Errno::NOLCK);
        }
        let interrupted = table.early.contains(&unique);
        let progress = Mutex::new(WaitProgress { interrupted, ..WaitProgress::default() });
        let wait = Arc::new(Wait { progress, ended: Condvar::new() });
        table.waits.insert(unique, Arc::clone(&wait));
        Ok(wait)
    }

    fn lock(&self) -> MutexGuard<'_, LockTable> {
        self.table.lock().expect("a thread that panics ends the process")
    }
}

impl Wait {
    fn run(
        &self,
        lock_request: LockRequest,
        description: &OwnedFd,
        record: impl Fn(LockRequest) -> Result<(), Errno>,
    ) -> Result<(), Errno> {
        self.progress().thread = Some(pthread_self());
        let outcome = loop {
            if self.progress().interrupted {
                break Err(Errno::INTR);
            }
            match lock_request.wait_on(description) {
                Err(Errno::INTR) => continue,
                Err(errno) => break Err(errno),
                Ok(()) => {}
            }
            match record(lock_request) {
                Err(Errno::AGAIN) => {}
                recorded => break recorded,
            }
        };
        self.end(outcome)
    }

    /// Ends the wait with this outcome. From here on the thread may end, and gets no signals any more.
    fn end(&self, outcome: Result<(), Errno>) -> Result<(), Errno> {
        let mut progress = self.progress();
        progress.thread = None;
        progress.ended = true;
        self.ended.notify_all();
        outcome
    }

    /// A signal that comes just before the thread begins to wait in the kernel is lost, so it is sent again.
    fn interrupt(&self) {
        const RESEND_INTERVAL: Duration = Duration::from_millis(1);
        let mut progress = self.progress();
        progress.interrupted = true;
        while !progress.ended {
            if let Some(thread) = progress.thread {
                // The thread lives: it takes itself out of `progress`, whose lock is held here, before it ends. So the only
                // error, that of a signal that does not exist, cannot happen.
                let _ = pthread_kill(thread, WAKE);
            }
            progress = match self.ended.wait_timeout(progress, RESEND_INTERVAL) {
                Ok((progress, _)) => progress,
                Err(_) => return,
            };
        }
    }

    fn progress(&self) -> MutexGuard<'_, WaitProgress> {
        self.progress.lock().expect("a thread that panics ends the process")
    }
}

/// Lets signals end a wait: without a handler they would end the process.
///
/// # Errors
/// When the handler cannot be set.
pub fn catch_wake_signal() -> io::Result<()> {
    extern "C" fn nothing(_: libc::c_int) {}
    let action = SigAction::new(SigHandler::Handler(nothing), SaFlags::empty(), SigSet::empty());
    // SAFETY: the handler does nothing.
    unsafe { sigaction(WAKE, &action) }?;
    Ok(())
}
