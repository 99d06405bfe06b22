//! Calls that must not take effect twice: those that make or remove a file.
//!
//! podfs records such a call before it sends it. When the server process dies, its successor gets the same request, and sends the
//! same bytes with the same xid from the same port: then the NFS server repeats its answer (RFC 1813, 4.6). If the NFS server has
//! forgotten the call, podfs examines the outcome.

use std::cell::RefCell;
use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::Ordering::{Acquire, Relaxed, Release};

use podfs_nfs::rpc::Credential;
use rustix::io::Errno;
use rustix::time::{ClockId, Timespec, clock_gettime};

use super::state::{CallCell, no_memory};
use crate::region::Region;
use crate::region::cells::OwnedCell;

/// The xid of a call that was not sent.
const NOT_SENT: u32 = 0;

/// A call that is recorded in the region. Dropping it removes the record, so that no successor makes the call again.
#[derive(Debug)]
pub struct RecordedCall {
    record: OwnedCell<CallCell>,
}

impl RecordedCall {
    /// The xid with which it may have been sent already.
    pub fn xid(&self) -> Option<u32> {
        Some(self.record.xid.load(Acquire)).filter(|xid| *xid != NOT_SENT)
    }

    /// Records the xid with which the call is about to be sent.
    pub fn announce(&self, xid: u32) {
        self.record.xid.store(xid, Release);
    }

    /// The credential of the call.
    pub fn credential(&self) -> Credential {
        self.record.identity.get()
    }

    /// The time at which the call was first made.
    pub fn at(&self) -> Timespec {
        Timespec {
            tv_sec: self.record.seconds.load(Relaxed).cast_signed(),
            tv_nsec: i64::from(self.record.nanoseconds.load(Relaxed).min(999_999_999)),
        }
    }
}

/// The calls that a dead server recorded, and the region for records of new calls.
pub struct Calls {
    region: Arc<Region>,
    inherited: RefCell<HashMap<(u64, u32), OwnedCell<CallCell>>>,
}

impl Calls {
    /// A table of the records that a dead server left.
    pub fn new(region: Arc<Region>, inherited: HashMap<(u64, u32), OwnedCell<CallCell>>) -> Self {
        Self { region, inherited: RefCell::new(inherited) }
    }

    /// Records call number `step` of the request `unique`. A call that a dead server has recorded stays as it is.
    ///
    /// # Errors
    /// When there is no memory.
    pub fn begin(&self, unique: u64, step: u32, credential: &Credential) -> Result<RecordedCall, Errno> {
        if let Some(record) = self.inherited.borrow_mut().remove(&(unique, step)) {
            return Ok(RecordedCall { record });
        }
        let now = clock_gettime(ClockId::RealtimeCoarse);
        let record = OwnedCell::new(&self.region, |cell: &CallCell| {
            cell.xid.store(NOT_SENT, Relaxed);
            cell.unique.store(unique, Relaxed);
            cell.step.store(step, Relaxed);
            cell.seconds.store(now.tv_sec.cast_unsigned(), Relaxed);
            cell.nanoseconds.store(now.tv_nsec as u32, Relaxed);
            cell.identity.set(credential);
        });
        Ok(RecordedCall { record: record.map_err(no_memory)? })
    }

    /// Whether a dead server has begun call number `step` of the request `unique`.
    pub fn was_begun(&self, unique: u64, step: u32) -> bool {
        self.inherited.borrow().contains_key(&(unique, step))
    }

    /// Drops the inherited records of an answered request. Its calls will not be made again.
    pub fn end(&self, unique: u64) {
        let mut inherited = self.inherited.borrow_mut();
        if !inherited.is_empty() {
            inherited.retain(|(of, _), _| *of != unique);
        }
    }
}

/// A number that no other volume has.
pub fn seed(region: &Region) -> u64 {
    let word = &region.header().calls.seed;
    if word.load(Relaxed) == 0 {
        word.store(random() | 1, Release);
    }
    word.load(Relaxed)
}

fn random() -> u64 {
    let mut bytes = [0; 8];
    // Without random bytes, the number is made from the time.
    match rustix::rand::getrandom(&mut bytes, rustix::rand::GetRandomFlags::empty()) {
        Ok(_) => u64::from_ne_bytes(bytes),
        Err(_) => clock_gettime(ClockId::Realtime).tv_nsec.cast_unsigned().wrapping_mul(0x9e37_79b9_7f4a_7c15),
    }
}
