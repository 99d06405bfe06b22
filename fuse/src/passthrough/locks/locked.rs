//! The locks of an owner, in cells of the region, so that a successor can take the same locks again when no process has the owner's
//! description any more.
//!
//! 1. A lock is recorded when it is granted, before its caller gets the answer. *Killed before:* the kernel sends the request
//!    again.
//! 2. An unlock is recorded before it is made. *Killed between:* the lock goes with its description, or the kernel sends the
//!    unlock again.
//! 3. Each change of a record stores one word, or makes or erases a cell.
//!
//! So the records of a request that was answered are right, whenever the server dies.

use std::ops::Deref;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::Ordering::{Relaxed, Release};

use rustix::fs::FlockOperation;
use rustix::io::Errno;

use super::super::state::{HeldCell, LOCKS_LOST, WHOLE, no_memory};
use super::LockRequest;
use crate::region::Region;
use crate::region::cells::OwnedCell;
use crate::session::abi::FileLock;
use crate::session::{LockOwner, NodeId};

/// The locks of one owner on one file.
#[derive(Debug, Default)]
pub struct FileLocks(Vec<LockRecord>);

/// Most locks that a volume records. Each takes memory of the node that no limit of the container counts.
const MOST: usize = 1 << 16;

/// Checks, before a lock is taken, that the volume may record it.
///
/// # Errors
/// `ENOLCK` when the volume has [`MOST`] locks.
pub fn check_lock_limit(region: &Region) -> Result<(), Errno> {
    if region.lock_records().load(Relaxed) < MOST { Ok(()) } else { Err(Errno::NOLCK) }
}

/// A recorded lock.
#[derive(Debug)]
struct LockRecord(OwnedCell<HeldCell>);

impl LockRecord {
    fn of(cell: OwnedCell<HeldCell>) -> Self {
        cell.region().lock_records().fetch_add(1, Relaxed);
        Self(cell)
    }
}

impl Deref for LockRecord {
    type Target = HeldCell;

    fn deref(&self) -> &HeldCell {
        &self.0
    }
}

impl Drop for LockRecord {
    fn drop(&mut self) {
        self.0.region().lock_records().fetch_sub(1, Relaxed);
    }
}

/// The owner and the file of a set of locks.
#[derive(Clone, Copy)]
pub struct Holder<'a> {
    /// The region that records the locks.
    pub region: &'a Arc<Region>,
    /// The file's node.
    pub node: NodeId,
    /// The owner.
    pub owner: LockOwner,
}

impl FileLocks {
    /// A lock that a dead server has recorded.
    pub fn inherit(&mut self, record: OwnedCell<HeldCell>) {
        self.0.push(LockRecord::of(record));
    }

    /// Whether the owner holds no lock on the file.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Whether the locks are lost, and another process may have locked the same ranges.
    pub fn is_lost(&self) -> bool {
        self.0.iter().any(|record| record.form.load(Relaxed) & LOCKS_LOST != 0)
    }

    /// Records that the locks are lost, and that another process may have locked the same ranges. A successor reads this.
    pub fn lose(&mut self) {
        self.0.truncate(1);
        self.0.iter().for_each(|record| record.form.store(LOCKS_LOST, Release));
    }

    /// Takes the recorded locks on `description`, without waiting.
    ///
    /// # Errors
    /// `EAGAIN` if another process holds a conflicting lock, and those of `fcntl(2)`.
    pub fn apply_to(&self, description: &OwnedFd) -> Result<(), Errno> {
        self.0.iter().try_for_each(|record| lock_request(record).try_on(description))
    }

    /// Records a granted lock, or an unlock.
    ///
    /// # Errors
    /// When there is no memory.
    pub fn record(&mut self, holder: Holder<'_>, lock_request: LockRequest) -> Result<(), Errno> {
        match lock_request {
            LockRequest::Whole(operation) => self.record_whole(holder, operation),
            LockRequest::Range(range) => {
                self.clear(holder, range.start, range.end)?;
                if lock_request.is_unlock() { Ok(()) } else { self.add(holder, range) }
            }
        }
    }

    fn record_whole(&mut self, holder: Holder<'_>, operation: FlockOperation) -> Result<(), Errno> {
        let form = match operation {
            FlockOperation::LockShared => libc::F_RDLCK.cast_unsigned() | WHOLE,
            FlockOperation::LockExclusive => libc::F_WRLCK.cast_unsigned() | WHOLE,
            _ => {
                self.0.retain(|record| record.form.load(Relaxed) & WHOLE == 0);
                return Ok(());
            }
        };
        match self.0.iter().find(|record| record.form.load(Relaxed) & WHOLE != 0) {
            Some(record) => record.form.store(form, Release),
            None => self.0.push(holder.record(form, 0, 0)?),
        }
        Ok(())
    }

    /// Removes a range from the recorded locks.
    fn clear(&mut self, holder: Holder<'_>, start: u64, end: u64) -> Result<(), Errno> {
        let mut upper_part = None;
        for record in &self.0 {
            let (form, first, last) = record_fields(record);
            if is_range(form) && first < start && end < last {
                // At most one lock contains the range and more on both sides: the locks of an owner do not overlap.
                upper_part = Some(holder.record(form, end + 1, last)?);
            }
        }
        self.0.retain(|record| {
            let (form, first, last) = record_fields(record);
            if !is_range(form) || last < start || end < first {
                return true;
            }
            if first < start {
                record.end.store(start - 1, Release);
            } else if end < last {
                record.start.store(end + 1, Release);
            }
            first < start || end < last
        });
        self.0.extend(upper_part);
        Ok(())
    }

    /// Records a locked range, of which no byte is recorded yet.
    fn add(&mut self, holder: Holder<'_>, range: FileLock) -> Result<(), Errno> {
        // A caller that locks a file piece by piece has one lock.
        let before = self.0.iter().find(|record| {
            let (form, _, last) = record_fields(record);
            is_range(form) && form == range.typ && last.checked_add(1) == Some(range.start)
        });
        match before {
            Some(record) => record.end.store(range.end, Release),
            None => self.0.push(holder.record(range.typ, range.start, range.end)?),
        }
        Ok(())
    }
}

impl Holder<'_> {
    fn record(self, form: u32, start: u64, end: u64) -> Result<LockRecord, Errno> {
        let record = OwnedCell::new(self.region, |cell: &HeldCell| {
            cell.form.store(form, Relaxed);
            cell.node.store(self.node.0, Relaxed);
            cell.owner.store(self.owner.0, Relaxed);
            cell.start.store(start, Relaxed);
            cell.end.store(end, Relaxed);
        });
        record.map(LockRecord::of).map_err(no_memory)
    }
}

fn is_range(form: u32) -> bool {
    form & (WHOLE | LOCKS_LOST) == 0
}

fn record_fields(record: &HeldCell) -> (u32, u64, u64) {
    (record.form.load(Relaxed), record.start.load(Relaxed), record.end.load(Relaxed))
}

/// The lock that is recorded.
fn lock_request(record: &HeldCell) -> LockRequest {
    let (form, start, end) = record_fields(record);
    let typ = form & !WHOLE;
    if form & WHOLE == 0 {
        return LockRequest::Range(FileLock { start, end, typ, pid: 0 });
    }
    let is_exclusive = typ == libc::F_WRLCK.cast_unsigned();
    LockRequest::Whole(if is_exclusive { FlockOperation::LockExclusive } else { FlockOperation::LockShared })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::region::VolumeKind;

    const READ: u32 = libc::F_RDLCK as u32;
    const WRITE: u32 = libc::F_WRLCK as u32;
    const NONE: u32 = libc::F_UNLCK as u32;

    /// The recorded ranges after these locks were granted, in order.
    fn after(granted: &[(u32, u64, u64)]) -> Vec<(u32, u64, u64)> {
        let region = Arc::new(Region::create(VolumeKind::Passthrough).expect("a region"));
        let holder = Holder { region: &region, node: NodeId(2), owner: LockOwner(3) };
        let mut locked = FileLocks::default();
        for (typ, start, end) in granted.iter().copied() {
            locked.record(holder, LockRequest::Range(FileLock { start, end, typ, pid: 0 })).expect("recorded");
        }
        let mut ranges: Vec<_> = locked.0.iter().map(|record| record_fields(record)).collect();
        ranges.sort_unstable_by_key(|(_, start, _)| *start);
        assert_eq!(region.cells().tagged().count(), ranges.len(), "other cells are erased");
        ranges
    }

    #[test]
    fn ranges_are_recorded_as_the_kernel_has_them() {
        assert_eq!(after(&[(WRITE, 10, 19), (NONE, 13, 14)]), [(WRITE, 10, 12), (WRITE, 15, 19)]);
        assert_eq!(after(&[(WRITE, 10, 19), (READ, 13, 14)]), [(WRITE, 10, 12), (READ, 13, 14), (WRITE, 15, 19)]);
        assert_eq!(after(&[(WRITE, 10, 19), (NONE, 0, 14)]), [(WRITE, 15, 19)]);
        assert_eq!(after(&[(WRITE, 10, 19), (NONE, 15, 30)]), [(WRITE, 10, 14)]);
        assert_eq!(after(&[(READ, 0, 4), (READ, 10, 14), (WRITE, 0, 20)]), [(WRITE, 0, 20)]);
        assert_eq!(after(&[(WRITE, 5, 5), (WRITE, 6, 6), (WRITE, 7, 7)]), [(WRITE, 5, 7)]);
        assert_eq!(after(&[(WRITE, 5, i64::MAX as u64), (NONE, 0, i64::MAX as u64)]), []);
    }

    #[test]
    fn a_lock_of_a_whole_file_is_recorded_once_and_changes_its_kind() {
        let region = Arc::new(Region::create(VolumeKind::Passthrough).expect("a region"));
        let holder = Holder { region: &region, node: NodeId(2), owner: LockOwner(3) };
        let mut locked = FileLocks::default();
        for operation in [FlockOperation::LockShared, FlockOperation::LockExclusive] {
            locked.record(holder, LockRequest::Whole(operation)).expect("recorded");
            assert!(
                matches!(&locked.0[..], [one] if matches!(lock_request(one), LockRequest::Whole(is) if is == operation))
            );
        }
        locked.record(holder, LockRequest::Whole(FlockOperation::Unlock)).expect("recorded");
        assert!(locked.is_empty());
    }

    #[test]
    fn a_volume_records_no_more_locks_than_the_limit() {
        let region = Arc::new(Region::create(VolumeKind::Passthrough).expect("a region"));
        let holder = Holder { region: &region, node: NodeId(2), owner: LockOwner(3) };
        let range = |typ, start, end| LockRequest::Range(FileLock { start, end, typ, pid: 0 });
        let mut locked = FileLocks::default();
        region.lock_records().store(MOST - 1, Relaxed);
        check_lock_limit(&region).expect("room for one");
        locked.record(holder, range(WRITE, 0, 99)).expect("the last one");
        assert_eq!(check_lock_limit(&region), Err(Errno::NOLCK));
        locked.record(holder, range(NONE, 50, 50)).expect("an unlock never fails");
        locked.record(holder, range(NONE, 0, 999)).expect("unlocked");
        assert_eq!(region.lock_records().load(Relaxed), MOST - 1);
        check_lock_limit(&region).expect("there is room again");
    }
}
