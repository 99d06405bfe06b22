//! Locks of callers, taken on the source, so that they conflict with those of other volumes and of the host.
//!
//! A lock belongs to its *owner*, a number the kernel makes: of a process for `fcntl(2)` locks, of an open file for
//! `flock(2)` and open-file-description locks. Each owner gets an open file description of its own on the source, and
//! what it locks is locked there, with open-file-description locks and `flock(2)`. They conflict like the caller's
//! own would:
//!
//! 1. Two owners have two descriptions, so they exclude each other; one owner has one, so it never excludes itself.
//! 2. A process gives up its `fcntl` locks when it closes any descriptor of the file. The kernel reports that with FLUSH, which
//!    names the owner: the description is closed. A descriptor that only reads, and was opened when the file had no lock, is
//!    closed without FLUSH: that is what makes reading a file cheap. What is locked through it alone is given up with its
//!    RELEASE.
//! 3. Locks that belong to an open file end with it. The kernel reports that with RELEASE: descriptions that only this open file
//!    has locked through are closed.
//!
//! A lock lives as long as its description, which a successor has too: a cell for each owner and open file names it,
//! from before anything is locked on it. So every lock that is held is recorded, and an owner that asks again for a lock that it
//! has gets it.
//!
//! When the server and its keeper are killed, the descriptions and their locks are gone. The successor makes new
//! descriptions and locks on them what [`locked`](super::locked) has recorded, before any other request of the volume may lock
//! the file. If another process of the host has locked the same meanwhile, the owner's locks are lost: what the owner does with
//! them, and with the open files that it locked through, fails with `EIO` until it closes them.
//!
//! A wait for a lock is one thread that waits in the kernel. It ends with the lock, or when the kernel interrupts the caller:
//! [`Waits::interrupt`] sends the thread signals until it has noticed.

use std::collections::hash_map::Entry;
use std::collections::{HashMap, VecDeque};
use std::io;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::sync::atomic::Ordering::{Relaxed, Release};
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::thread;
use std::time::Duration;

use nix::sys::signal::{SaFlags, SigAction, SigHandler, SigSet, Signal, sigaction};
use rustix::fs::OFlags;
use rustix::io::Errno;

use super::handle::last_errno;
use super::locked::{Holder, Locked};
use super::mounts::reopen;
use super::share::Taken;
use super::state::{HeldCell, LockCell, no_memory, recordable};
use crate::region::Region;
use crate::region::cells::Record;
use crate::region::waits::WAITS;
use crate::session::abi::{FileLock, LK_FLOCK, LkIn};
use crate::session::{Answer, Deferred};

/// Sent to threads that wait for a lock.
const WAKE: Signal = Signal::SIGUSR1;
/// `OFFSET_MAX` of the kernel: to the end of the file, however long it gets.
const TO_THE_END: u64 = i64::MAX as u64;
/// Interrupts that came before the wait they are for.
const REMEMBERED: usize = 64;

/// The locks of one node.
#[derive(Debug, Default)]
pub struct Locks {
    by_owner: HashMap<LockOwner, OwnerLocks>,
    /// Some owner's description is to be reopened.
    to_be_restored: bool,
}

/// The number that the kernel makes for an owner of locks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct LockOwner(pub u64);

/// What one owner has locked.
#[derive(Debug)]
struct OwnerLocks {
    locked: Locked,
    /// The open files it locked through. Dropped before the descriptor that they name is closed.
    handles: HashMap<u64, Record<LockCell>>,
    description: Description,
    _taken: Taken,
    /// The process that locked last.
    pid: u32,
}

/// What an owner locks on.
#[derive(Debug)]
enum Description {
    /// It is open.
    Open(Arc<OwnedFd>),
    /// No process has it any more; [`Locks::restore`] leads to one of the others.
    Gone,
    /// Another process has locked what was locked on it.
    Lost,
}

impl Description {
    fn get(&self) -> Result<Arc<OwnedFd>, Errno> {
        match self {
            Self::Open(description) => Ok(Arc::clone(description)),
            Self::Gone => Err(Errno::NOLCK),
            Self::Lost => Err(Errno::IO),
        }
    }
}

impl Locks {
    /// The description that an owner locks on when it asks for a lock of `node`; `open` makes it if there is none.
    ///
    /// # Errors
    /// Those of `open`, `EIO` when the owner's locks are lost, and when there is no memory.
    pub fn description(
        &mut self,
        region: &Arc<Region>,
        node: u64,
        asked: &LkIn,
        open: impl FnOnce() -> Result<(OwnedFd, Taken), Errno>,
    ) -> Result<Arc<OwnedFd>, Errno> {
        let pid = asked.lk.pid;
        let locks = match self.by_owner.entry(LockOwner(asked.owner)) {
            Entry::Occupied(locks) => locks.into_mut(),
            Entry::Vacant(place) => {
                let (description, taken) = open()?;
                let description = Description::Open(Arc::new(recordable(description)));
                place.insert(OwnerLocks {
                    locked: Locked::default(),
                    handles: HashMap::new(),
                    description,
                    _taken: taken,
                    pid,
                })
            }
        };
        let description = locks.description.get()?;
        if pid != 0 {
            locks.pid = pid;
        }
        match locks.handles.entry(asked.fh) {
            Entry::Occupied(record) => record.get().pid.store(locks.pid, Release),
            Entry::Vacant(place) => {
                let record = Record::new(region, |cell: &LockCell| {
                    cell.pid.store(locks.pid, Relaxed);
                    cell.node.store(node, Relaxed);
                    cell.owner.store(asked.owner, Relaxed);
                    cell.handle.store(asked.fh, Relaxed);
                    cell.descriptor.store(description.as_raw_fd().cast_unsigned(), Relaxed);
                });
                place.insert(record.map_err(no_memory)?);
            }
        }
        Ok(description)
    }

    /// Takes in what a dead server's cell says. Calls `descriptor` once for each owner.
    pub fn inherit(&mut self, record: Record<LockCell>, descriptor: impl FnOnce() -> (Option<OwnedFd>, Taken)) {
        let pid = record.pid.load(Relaxed);
        let locks = match self.by_owner.entry(LockOwner(record.owner.load(Relaxed))) {
            Entry::Occupied(locks) => locks.into_mut(),
            Entry::Vacant(place) => {
                let (description, taken) = descriptor();
                self.to_be_restored |= description.is_none();
                let description = description.map_or(Description::Gone, |open| Description::Open(Arc::new(open)));
                let locked = Locked::default();
                place.insert(OwnerLocks { locked, handles: HashMap::new(), description, _taken: taken, pid })
            }
        };
        if pid != 0 {
            locks.pid = pid;
        }
        locks.handles.insert(record.handle.load(Relaxed), record);
    }

    /// Takes in a lock that a dead server has recorded; returns whether its owner is known.
    pub fn inherit_locked(&mut self, record: Record<HeldCell>) -> bool {
        let Some(locks) = self.by_owner.get_mut(&LockOwner(record.owner.load(Relaxed))) else { return false };
        locks.locked.inherit(record);
        // Restoring then makes its open files fail.
        self.to_be_restored |= locks.locked.is_lost();
        true
    }

    /// How many owners have no description any more.
    pub fn to_be_restored(&self) -> usize {
        let gone = |locks: &&OwnerLocks| matches!(locks.description, Description::Gone);
        if self.to_be_restored { self.by_owner.values().filter(gone).count() } else { 0 }
    }

    /// Locks again what was locked on descriptions that no process has any more; `open` makes new ones. Gives the open files
    /// whose locks are lost.
    pub fn restore(&mut self, mut open: impl FnMut() -> Result<OwnedFd, Errno>) -> Vec<u64> {
        let mut lost = Vec::new();
        if !std::mem::take(&mut self.to_be_restored) {
            return lost;
        }
        for locks in self.by_owner.values_mut() {
            if matches!(locks.description, Description::Gone) && !locks.locked.is_lost() {
                match open().map(recordable).and_then(|open| locks.locked.take_on(&open).map(|()| open)) {
                    Ok(open) => {
                        let number = open.as_raw_fd().cast_unsigned();
                        locks.handles.values().for_each(|record| record.descriptor.store(number, Release));
                        locks.description = Description::Open(Arc::new(open));
                    }
                    // There is nothing to lose, or it may be possible later.
                    Err(errno) if locks.locked.is_empty() || is_passing(errno) => self.to_be_restored = true,
                    Err(_) => locks.locked.lose(),
                }
            }
            if locks.locked.is_lost() {
                locks.description = Description::Lost;
                lost.extend(locks.handles.keys());
            }
        }
        lost
    }

    /// Records that `wish` was granted to an owner, or that it unlocks something.
    ///
    /// # Errors
    /// When there is no memory.
    pub fn record(&mut self, holder: Holder<'_>, wish: Wish) -> Result<(), Errno> {
        // An owner that has given up its locks meanwhile has no description.
        self.by_owner.get_mut(&holder.owner).map_or(Ok(()), |locks| locks.locked.record(holder, wish))
    }

    /// The description that `owner` has locked on, if it has.
    ///
    /// # Errors
    /// `EIO` when the owner's locks are lost.
    pub fn existing(&self, owner: LockOwner) -> Result<Option<Arc<OwnedFd>>, Errno> {
        self.by_owner.get(&owner).map(|locks| locks.description.get()).transpose()
    }

    /// Whether no lock is held.
    pub fn is_empty(&self) -> bool {
        self.by_owner.is_empty()
    }

    /// `owner` gives up all it has locked.
    ///
    /// # Errors
    /// `EIO` when its locks are lost.
    pub fn give_up(&mut self, owner: LockOwner) -> Result<(), Errno> {
        match self.by_owner.remove(&owner) {
            Some(OwnerLocks { description: Description::Lost, .. }) => Err(Errno::IO),
            _ => Ok(()),
        }
    }

    /// An open file is closed for good: what was locked through it alone is given up.
    pub fn release(&mut self, handle: u64) {
        self.by_owner.retain(|_, locks| locks.handles.remove(&handle).is_none() || !locks.handles.is_empty());
    }

    /// The process that holds a lock of this node, if it can only be one: not the asking owner's.
    pub fn holder(&self, asking: LockOwner) -> Option<u32> {
        let mut others = self.by_owner.iter().filter(|(owner, _)| **owner != asking);
        let (_, only) = others.next()?;
        others.next().is_none().then_some(only.pid)
    }
}

/// A lock that a caller asks for.
#[derive(Clone, Copy, Debug)]
pub enum Wish {
    /// `flock(2)`: `LOCK_SH`, `LOCK_EX` or `LOCK_UN`.
    Whole(libc::c_int),
    /// `fcntl(2)`: a kind and a range.
    Range(FileLock),
}

impl Wish {
    /// What the request asks for.
    ///
    /// # Errors
    /// `EINVAL` for a kind of lock that there is not.
    pub fn parse(arguments: &LkIn) -> Result<Wish, Errno> {
        let kind = arguments.lk.typ.cast_signed();
        if arguments.lk_flags & LK_FLOCK == 0 {
            let known = [libc::F_RDLCK, libc::F_WRLCK, libc::F_UNLCK].contains(&kind);
            return if known { Ok(Wish::Range(arguments.lk)) } else { Err(Errno::INVAL) };
        }
        match kind {
            libc::F_RDLCK => Ok(Wish::Whole(libc::LOCK_SH)),
            libc::F_WRLCK => Ok(Wish::Whole(libc::LOCK_EX)),
            libc::F_UNLCK => Ok(Wish::Whole(libc::LOCK_UN)),
            _ => Err(Errno::INVAL),
        }
    }

    /// Whether it gives something up, which never waits.
    pub fn is_unlock(self) -> bool {
        match self {
            Wish::Whole(operation) => operation == libc::LOCK_UN,
            Wish::Range(range) => range.typ.cast_signed() == libc::F_UNLCK,
        }
    }

    /// What gives it up.
    fn undone(self) -> Self {
        match self {
            Wish::Whole(_) => Wish::Whole(libc::LOCK_UN),
            Wish::Range(range) => Wish::Range(FileLock { typ: libc::F_UNLCK.cast_unsigned(), ..range }),
        }
    }

    /// Gives up what was granted and not recorded or answered.
    pub fn undo_on(self, description: &OwnedFd) {
        // Unlocking fails only where locking would.
        let _ = self.undone().try_on(description);
    }

    /// Locks or unlocks, or fails at once with `EAGAIN`.
    pub fn try_on(self, description: &OwnedFd) -> Result<(), Errno> {
        match self {
            Wish::Whole(operation) => flock(description, operation | libc::LOCK_NB),
            Wish::Range(range) => fcntl(description, libc::F_OFD_SETLK, range).map(drop),
        }
    }

    /// Locks, and waits for it as long as it takes; `EINTR` when a signal came.
    fn wait_on(self, description: &OwnedFd) -> Result<(), Errno> {
        match self {
            Wish::Whole(operation) => flock(description, operation),
            Wish::Range(range) => fcntl(description, libc::F_OFD_SETLKW, range).map(drop),
        }
    }
}

/// The lock that keeps `range` from being locked on `description`, or one of kind `F_UNLCK`.
///
/// # Errors
/// Those of `fcntl(2)`.
pub fn conflict(description: &OwnedFd, range: FileLock) -> Result<FileLock, Errno> {
    fcntl(description, libc::F_OFD_GETLK, range)
}

fn flock(description: &OwnedFd, operation: libc::c_int) -> Result<(), Errno> {
    // SAFETY: flock takes numbers only.
    let result = unsafe { libc::flock(description.as_raw_fd(), operation) };
    if result == 0 { Ok(()) } else { Err(last_errno()) }
}

fn fcntl(description: &OwnedFd, command: libc::c_int, range: FileLock) -> Result<FileLock, Errno> {
    let start = i64::try_from(range.start).map_err(|_| Errno::INVAL)?;
    let length = if range.end >= TO_THE_END { 0 } else { range.end.saturating_sub(range.start).saturating_add(1) };
    let mut lock = libc::flock {
        l_type: range.typ as libc::c_short,
        l_whence: libc::SEEK_SET as libc::c_short,
        l_start: start,
        l_len: i64::try_from(length).map_err(|_| Errno::INVAL)?,
        l_pid: 0,
    };
    // SAFETY: the lock outlives the call.
    let result = unsafe { libc::fcntl(description.as_raw_fd(), command, &raw mut lock) };
    if result != 0 {
        return Err(last_errno());
    }
    let start = lock.l_start.max(0).cast_unsigned();
    let end = if lock.l_len == 0 { TO_THE_END } else { start.saturating_add_signed(lock.l_len - 1) };
    Ok(FileLock { start, end, typ: lock.l_type as u32, pid: lock.l_pid.max(0).cast_unsigned() })
}

/// The waits of a volume.
#[derive(Default)]
pub struct Waits {
    table: Mutex<LockTable>,
}

#[derive(Default)]
struct LockTable {
    waits: HashMap<u64, Arc<Wait>>,
    /// Requests that were interrupted before their wait began, the latest last.
    early: VecDeque<u64>,
}

/// One wait.
#[derive(Default)]
struct Wait {
    progress: Mutex<Progress>,
    ended: Condvar,
}

#[derive(Default)]
struct Progress {
    interrupted: bool,
    /// The thread that waits, while it does.
    thread: Option<libc::pthread_t>,
    ended: bool,
}

impl Waits {
    /// Waits for a lock on a thread of its own, has `record` record it, and answers from there.
    ///
    /// # Errors
    /// `ENOLCK` when [`WAITS`] callers wait already, or no thread can be started.
    pub fn start(
        self: &Arc<Self>,
        wish: Wish,
        description: Arc<OwnedFd>,
        record: impl Fn(Wish) -> Result<(), Errno> + Send + 'static,
        answer: Deferred,
    ) -> Result<(), Errno> {
        let unique = answer.number();
        let wait = self.register(unique)?;
        let waits = Arc::clone(self);
        let work = move || {
            let outcome =
                wait.run(wish, &description).and_then(|()| record(wish).inspect_err(|_| wish.undo_on(&description)));
            waits.lock().waits.remove(&unique);
            let locked = outcome.is_ok();
            if answer.send(outcome.map(|()| Answer::Done)).is_err() && locked {
                // The caller does not know of the lock, so it would never give it up.
                let _recorded = record(wish.undone());
                wish.undo_on(&description);
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
                    // The wait may be about to begin; or the request is of another kind, and was not to be interrupted.
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
        let progress = Mutex::new(Progress { interrupted, ..Progress::default() });
        let wait = Arc::new(Wait { progress, ended: Condvar::new() });
        table.waits.insert(unique, Arc::clone(&wait));
        Ok(wait)
    }

    fn lock(&self) -> MutexGuard<'_, LockTable> {
        self.table.lock().expect("a thread that panics ends the process")
    }
}

impl Wait {
    fn run(&self, wish: Wish, description: &OwnedFd) -> Result<(), Errno> {
        // SAFETY: the call has no conditions.
        self.progress().thread = Some(unsafe { libc::pthread_self() });
        let outcome = loop {
            if self.progress().interrupted {
                break Err(Errno::INTR);
            }
            match wish.wait_on(description) {
                Err(Errno::INTR) => {}
                outcome => break outcome,
            }
        };
        let mut progress = self.progress();
        // From here on the thread may end, and gets no signals any more.
        progress.thread = None;
        progress.ended = true;
        self.ended.notify_all();
        outcome
    }

    /// A signal that comes just before the thread begins to wait in the kernel is lost, so it is sent again.
    fn interrupt(&self) {
        const AGAIN: Duration = Duration::from_millis(1);
        let mut progress = self.progress();
        progress.interrupted = true;
        while !progress.ended {
            if let Some(thread) = progress.thread {
                // SAFETY: the thread lives: it takes itself out of `progress`, whose lock is held here, before it ends.
                unsafe { libc::pthread_kill(thread, WAKE as libc::c_int) };
            }
            progress = match self.ended.wait_timeout(progress, AGAIN) {
                Ok((progress, _)) => progress,
                Err(_) => return,
            };
        }
    }

    fn progress(&self) -> MutexGuard<'_, Progress> {
        self.progress.lock().expect("a thread that panics ends the process")
    }
}

/// A new open file description to lock on, open for as much as the source allows: a lock for writing needs one that
/// is open for writing (`fcntl(2)`), and the kernel has checked that the caller's is.
///
/// # Errors
/// `ENOLCK` when the source does not open, and those that pass.
pub fn for_locking(file: &OwnedFd) -> Result<OwnedFd, Errno> {
    reopen(file.as_fd(), OFlags::RDWR | OFlags::NONBLOCK)
        .or_else(|_| reopen(file.as_fd(), OFlags::RDONLY | OFlags::NONBLOCK))
        .map_err(|errno| if is_passing(errno) { errno } else { Errno::NOLCK })
}

/// Whether what failed may be possible a moment later.
fn is_passing(errno: Errno) -> bool {
    matches!(errno, Errno::MFILE | Errno::NFILE | Errno::NOMEM | Errno::INTR)
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
