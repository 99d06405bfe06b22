//! The layout of the memory of a volume's rings, in bytes, and its size.
//!
//! Servers of other versions read it: a change of it needs another [`LAYOUT`].

/// Most bytes behind the headers of a request or an answer. The longest is an extended attribute with its name.
pub(in crate::session) const PAYLOAD: usize = 18 * PAGE;
/// Entries besides one for each queue. An entry stays with its queue, so there are more than callers may wait for locks.
pub(super) const SPARE: usize = 2 * crate::region::waits::WAITS;
/// Most queues: as many as a kernel may have CPUs.
pub(super) const MOST_QUEUES: usize = 8192;

pub(super) const PAGE: usize = 4096;
pub(super) const ENTRY: usize = PAGE + PAYLOAD;
/// `podfsrng`.
pub(super) const MAGIC: u64 = u64::from_le_bytes(*b"podfsrng");
pub(super) const LAYOUT: u32 = 1;
/// Where the first server maps the memory of its first volume, and how far the next volume is away. No kernel places anything
/// here by itself.
pub(super) const ADDRESS: usize = 0x2000_0000_0000;
pub(super) const APART: usize = 1 << 32;
pub(super) const MOST_VOLUMES: usize = 4096;

/// `struct fuse_uring_req_header`: where its parts begin.
pub(super) const OPERATION: usize = 128;
pub(super) const COMMIT_ID: usize = 256 + 8;
pub(super) const PAYLOAD_SIZE: usize = 256 + 16;
/// Its length.
pub(super) const KERNELS: usize = 288;
/// Where a short answer is kept, and how long it may be.
pub(super) const ANSWER: usize = 512;
pub(super) const SHORT_ANSWER: usize = 512;
/// Where a request with a short payload is kept as one piece, and how long it may be. Further down it would be in the way of
/// headers that stand before a payload.
pub(super) const REQUEST: usize = 1024;
pub(super) const SHORT_REQUEST: usize = 2048;

pub(super) const TAKEN: u32 = 1;
pub(super) const ANSWERED: u32 = 2;
