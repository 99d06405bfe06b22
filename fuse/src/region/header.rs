//! The header of a region.

use std::sync::atomic::{AtomicU32, AtomicU64};

use super::counts::Counts;
use super::in_flight::InFlightSlots;
use super::opens::Opens;
use super::shared::shared;
use super::silence::Silence;
use super::waits::Waits;

/// The first bytes of every region: `podfsvol`.
pub(super) const MAGIC: u64 = u64::from_le_bytes(*b"podfsvol");
/// The layout that this program writes.
pub(super) const LAYOUT: u32 = 1;
/// The layout of a volume whose requests may come over io_uring. A program that does not know it cannot serve the volume.
pub(super) const LAYOUT_OF_RINGS: u32 = 2;
/// Bytes before the first cell.
pub(super) const SIZE: usize = 3 * 4096;

shared! {
    /// The header. A later layout adds fields in the place of `spare` and behind the last field, and has another number. A field
    /// that no successor depends on needs no new number.
    pub(crate) struct Header {
        magic: AtomicU64,
        layout: AtomicU32,
        cell_size: AtomicU32,
        kind: AtomicU32,
        /// The first thread of the session, as the server's pid namespace numbers it.
        session_thread: AtomicU32,
        /// The INIT flags in force; 0 before the handshake.
        accepted: AtomicU64,
        /// Requests that an earlier version of podfs served. It did not count them by opcode.
        requests: AtomicU64,
        /// Steps of commits that were applied, for a projection.
        applied: AtomicU64,
        /// Counters of a passthrough volume.
        counters: PassthroughCounters,
        /// Counters of an audited projection.
        opens: Opens,
        /// Further counters of an NFS volume.
        calls: CallCounters,
        /// Whether the server of an NFS volume answers.
        silence: Silence,
        /// The most bytes that a passthrough volume may take; 0 as long as the limit of its mount applies.
        limit: AtomicU64,
        /// Bytes of the root directory of a passthrough volume with a limit that are free of charge; 0 for its first block.
        root_free: AtomicU64,
        spare: [AtomicU64; 25],
        slots: InFlightSlots,
        waits: Waits,
        counts: Counts,
    }
    /// Further counters of an NFS volume.
    pub(crate) struct CallCounters {
        /// A number that no other volume has. Identifiers that the NFS server must recognise after a takeover derive from it.
        seed: AtomicU64,
    }
    /// A change of two numbers that belong together. A successor repeats an interrupted change.
    pub(crate) struct RedoRecord {
        /// The cell of the node whose space changes; 0 for no change. Written last.
        cell: AtomicU64,
        /// The space of the node after the change.
        charged: AtomicU64,
        /// The space of the volume after the change.
        used: AtomicU64,
    }
    /// Counters of a passthrough volume.
    pub(crate) struct PassthroughCounters {
        /// The data path of open files: kernel passthrough, or FUSE READ and WRITE.
        data_path: AtomicU32,
        /// The last backing id that was recorded. The kernel gives them in order.
        backing: AtomicU32,
        /// The next node's number.
        next_node: AtomicU64,
        /// The last open file's number.
        last_handle: AtomicU64,
        /// The next mount's number.
        next_mount: AtomicU64,
        /// Bytes taken of a limit.
        used: AtomicU64,
        /// The change of the account that is being made.
        redo: RedoRecord,
    }
}

const _: () = assert!(size_of::<Header>() <= SIZE);
