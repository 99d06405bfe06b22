//! Locks of callers, taken on the source, so that they conflict with those of other volumes and of the host.
//!
//! A lock belongs to its *owner*, a number the kernel makes: of a process for `fcntl(2)` locks, of an open file for
//! `flock(2)` and open-file-description locks. Each owner gets an open file description of its own on the source, on which the
//! server takes the owner's locks, as open-file-description locks and by `flock(2)`. These locks conflict as locks of the caller
//! itself would:
//!
//! 1. Two owners have two descriptions, so they exclude each other; one owner has one, so it never excludes itself.
//! 2. A process gives up its `fcntl` locks when it closes any descriptor of the file. The kernel reports that with FLUSH, which
//!    names the owner: the server closes the owner's description. If another thread of the process waits for a lock on it, the
//!    server unlocks the description instead, so the thread keeps the lock that it gets later. A descriptor that only reads, and
//!    was opened when the file had no lock, is closed without FLUSH, which makes reading a file cheap. Locks taken through it
//!    alone end with its RELEASE.
//! 3. Locks that belong to an open file end with it. The kernel reports that with RELEASE: the server closes the descriptions on
//!    which only callers of this open file have locked.
//!
//! A lock lives as long as its description, which a successor has too: a cell for each owner and open file names the description,
//! and is complete before the server locks anything on it. So every lock that is held is recorded, and an owner that asks again
//! for a lock that it has gets it.
//!
//! When the server and its keeper are killed, the descriptions and their locks are gone. The successor makes new
//! descriptions and takes the locks that [`locked`] has recorded, before any other request of the volume may lock
//! the file. If another process of the host has taken a conflicting lock meanwhile, the owner's locks are lost: its calls on
//! them, and on the open files that it locked through, fail with `EIO` until it closes them.
//!
//! | module | owns |
//! |---|---|
//! | [`lock_request`] | one lock that a caller asks for, and its system calls |
//! | [`waits`] | the threads that wait for a lock, or answer after the kernel has dropped cached pages |
//! | [`locked`] | the locks of an owner, as the region records them |

mod lock_request;
mod locked;
mod waits;

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::Ordering::{Relaxed, Release};

use rustix::fs::OFlags;
use rustix::io::Errno;

use super::descriptor::reopen;
use super::share::DescriptorPermit;
use super::state::{HeldCell, LockCell, no_memory, recordable};
use crate::region::Region;
use crate::region::cells::OwnedCell;
use crate::session::abi::LkIn;
use crate::session::{HandleId, LockOwner, NodeId};
use locked::FileLocks;

pub use lock_request::{LockRequest, conflict};
pub use locked::{Holder, check_lock_limit};
pub use waits::{LockStep, LockWaits, catch_wake_signal};

/// The locks of one node.
#[derive(Debug, Default)]
pub struct NodeLocks {
    by_owner: HashMap<LockOwner, OwnerLocks>,
    /// Some owner's description must be reopened.
    must_restore: bool,
}

/// The locks of one owner.
#[derive(Debug)]
struct OwnerLocks {
    locked: FileLocks,
    /// The cells of the open files through which the owner locked. Dropped before the descriptor that they name is closed.
    handles: HashMap<HandleId, OwnedCell<LockCell>>,
    description: OpenDescription,
    _taken: DescriptorPermit,
    /// The process that locked last.
    pid: u32,
    /// Whether the owner has given up its locks while a request used the description.
    has_given_up: bool,
}

/// The open file description of an owner's locks.
#[derive(Debug)]
enum OpenDescription {
    /// It is open.
    Open(Arc<OwnedFd>),
    /// No process has it any more; [`NodeLocks::restore`] changes it to `Open` or `Lost`.
    Gone,
    /// Its locks are lost: another process has locked the same ranges meanwhile.
    Lost,
}

impl OpenDescription {
    fn get(&self) -> Result<Arc<OwnedFd>, Errno> {
        match self {
            Self::Open(description) => Ok(Arc::clone(description)),
            Self::Gone => Err(Errno::NOLCK),
            Self::Lost => Err(Errno::IO),
        }
    }
}

impl NodeLocks {
    /// The description that an owner locks on when it asks for a lock of `node`; `open` makes it if there is none.
    ///
    /// # Errors
    /// Those of `open`, `EIO` when the owner's locks are lost, and when there is no memory.
    pub fn description(
        &mut self,
        region: &Arc<Region>,
        node: NodeId,
        arguments: &LkIn,
        open: impl FnOnce() -> Result<(OwnedFd, DescriptorPermit), Errno>,
    ) -> Result<Arc<OwnedFd>, Errno> {
        let pid = arguments.lk.pid;
        let locks = match self.by_owner.entry(arguments.owner) {
            Entry::Occupied(locks) => locks.into_mut(),
            Entry::Vacant(place) => {
                let (description, taken) = open()?;
                let description = OpenDescription::Open(Arc::new(recordable(description)));
                place.insert(OwnerLocks {
                    locked: FileLocks::default(),
                    handles: HashMap::new(),
                    description,
                    _taken: taken,
                    pid,
                    has_given_up: false,
                })
            }
        };
        let description = locks.description.get()?;
        if pid != 0 {
            locks.pid = pid;
        }
        match locks.handles.entry(arguments.fh) {
            Entry::Occupied(record) => record.get().pid.store(locks.pid, Release),
            Entry::Vacant(place) => {
                let record = OwnedCell::new(region, |cell: &LockCell| {
                    cell.pid.store(locks.pid, Relaxed);
                    cell.node.store(node.0, Relaxed);
                    cell.owner.store(arguments.owner.0, Relaxed);
                    cell.handle.store(arguments.fh.0, Relaxed);
                    cell.descriptor.store(description.as_raw_fd().cast_unsigned(), Relaxed);
                });
                place.insert(record.map_err(no_memory)?);
            }
        }
        Ok(description)
    }

    /// Takes over the cell of a dead server. Calls `descriptor` once for each owner.
    pub fn inherit(
        &mut self,
        record: OwnedCell<LockCell>,
        descriptor: impl FnOnce() -> (Option<OwnedFd>, DescriptorPermit),
    ) {
        let pid = record.pid.load(Relaxed);
        let locks = match self.by_owner.entry(LockOwner(record.owner.load(Relaxed))) {
            Entry::Occupied(locks) => locks.into_mut(),
            Entry::Vacant(place) => {
                let (description, taken) = descriptor();
                self.must_restore |= description.is_none();
                let description =
                    description.map_or(OpenDescription::Gone, |open| OpenDescription::Open(Arc::new(open)));
                place.insert(OwnerLocks {
                    locked: FileLocks::default(),
                    handles: HashMap::new(),
                    description,
                    _taken: taken,
                    pid,
                    has_given_up: false,
                })
            }
        };
        if pid != 0 {
            locks.pid = pid;
        }
        locks.handles.insert(HandleId(record.handle.load(Relaxed)), record);
    }

    /// Takes over a lock that a dead server has recorded; returns whether its owner is known.
    pub fn inherit_locked(&mut self, record: OwnedCell<HeldCell>) -> bool {
        let Some(locks) = self.by_owner.get_mut(&LockOwner(record.owner.load(Relaxed))) else { return false };
        locks.locked.inherit(record);
        // The next `restore` then reports the owner's open files, on which calls fail.
        self.must_restore |= locks.locked.is_lost();
        true
    }

    /// Returns the number of owners whose description no process has any more.
    pub fn missing_descriptions(&self) -> usize {
        let gone = |locks: &&OwnerLocks| matches!(locks.description, OpenDescription::Gone);
        if self.must_restore { self.by_owner.values().filter(gone).count() } else { 0 }
    }

    /// Takes the locks again that were on descriptions which no process has any more; `open` makes new descriptions. Returns the
    /// open files whose locks are lost.
    pub fn restore(&mut self, mut open: impl FnMut() -> Result<OwnedFd, Errno>) -> Vec<HandleId> {
        let mut lost = Vec::new();
        if !std::mem::take(&mut self.must_restore) {
            return lost;
        }
        for locks in self.by_owner.values_mut() {
            if matches!(locks.description, OpenDescription::Gone) && !locks.locked.is_lost() {
                match open().map(recordable).and_then(|open| locks.locked.apply_to(&open).map(|()| open)) {
                    Ok(open) => {
                        let number = open.as_raw_fd().cast_unsigned();
                        locks.handles.values().for_each(|record| record.descriptor.store(number, Release));
                        locks.description = OpenDescription::Open(Arc::new(open));
                    }
                    // The owner holds no lock, or a later attempt may succeed.
                    Err(errno) if locks.locked.is_empty() || is_temporary(errno) => self.must_restore = true,
                    Err(_) => locks.locked.lose(),
                }
            }
            if locks.locked.is_lost() {
                locks.description = OpenDescription::Lost;
                lost.extend(locks.handles.keys());
            }
        }
        lost
    }

    /// Records that `lock_request` was granted to an owner, or that it unlocks something. If this fails, the owner has no such
    /// lock.
    ///
    /// # Errors
    /// When there is no memory. `EAGAIN` if the owner has given up the lock meanwhile, and another process has it now.
    pub fn record(&mut self, holder: Holder<'_>, lock_request: LockRequest) -> Result<(), Errno> {
        let Some(locks) = self.by_owner.get_mut(&holder.owner) else { return Ok(()) };
        if lock_request.is_unlock() {
            return locks.locked.record(holder, lock_request);
        }
        let description = locks.description.get()?;
        if locks.has_given_up {
            // The owner may have given up its locks after this one was granted.
            lock_request.try_on(&description)?;
        }
        locks.locked.record(holder, lock_request).inspect_err(|_| lock_request.undo_on(&description))
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

    /// `owner` gives up all its `fcntl` locks.
    ///
    /// # Errors
    /// `EIO` when its locks are lost.
    pub fn give_up(&mut self, owner: LockOwner) -> Result<(), Errno> {
        let Entry::Occupied(mut entry) = self.by_owner.entry(owner) else { return Ok(()) };
        let locks = entry.get_mut();
        match &locks.description {
            // A request gets the description under the lock on this table, so no other request begins to use it now.
            OpenDescription::Open(description) if Arc::strong_count(description) > 1 => {
                locks.locked = FileLocks::default();
                locks.has_given_up = true;
                LockRequest::unlock_all().try_on(description)
            }
            OpenDescription::Lost => {
                entry.remove();
                Err(Errno::IO)
            }
            _ => {
                entry.remove();
                Ok(())
            }
        }
    }

    /// An open file is closed: this releases the locks of owners that locked only through it.
    pub fn release(&mut self, handle: HandleId) {
        self.by_owner.retain(|_, locks| locks.handles.remove(&handle).is_none() || !locks.handles.is_empty());
    }

    /// The process that holds a lock on this node, if only one owner beside `asking` has locks.
    pub fn holder(&self, asking: LockOwner) -> Option<u32> {
        let has_lock = |(owner, locks): &(&LockOwner, &OwnerLocks)| **owner != asking && !locks.locked.is_empty();
        let mut others = self.by_owner.iter().filter(has_lock);
        let (_, only) = others.next()?;
        others.next().is_none().then_some(only.pid)
    }
}

/// A new open file description to lock on, open for writing if the source allows that: a write lock needs a description that is
/// open for writing (`fcntl(2)`). The kernel has checked that the caller's description is.
///
/// # Errors
/// A temporary error of `open(2)` as it is; `ENOLCK` for any other.
pub fn for_locking(file: &OwnedFd) -> Result<OwnedFd, Errno> {
    reopen(file.as_fd(), OFlags::RDWR | OFlags::NONBLOCK)
        .or_else(|_| reopen(file.as_fd(), OFlags::RDONLY | OFlags::NONBLOCK))
        .map_err(|errno| if is_temporary(errno) { errno } else { Errno::NOLCK })
}

/// Whether the failed call may succeed a moment later.
fn is_temporary(errno: Errno) -> bool {
    matches!(errno, Errno::MFILE | Errno::NFILE | Errno::NOMEM | Errno::INTR)
}
