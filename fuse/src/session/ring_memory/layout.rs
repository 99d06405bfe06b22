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
/// The address at which the first server maps the memory of its first volume, and the distance to the next volume. No kernel
/// places a mapping here by itself.
pub(super) const ADDRESS: usize = 0x2000_0000_0000;
pub(super) const APART: usize = 1 << 32;
pub(super) const MOST_VOLUMES: usize = 4096;

/// Offsets of the parts of `struct fuse_uring_req_header`.
pub(super) const OPERATION: usize = 128;
pub(super) const COMMIT_ID: usize = 256 + 8;
pub(super) const PAYLOAD_SIZE: usize = 256 + 16;
/// The length of `struct fuse_uring_req_header`.
pub(super) const KERNELS: usize = 288;
/// The offset in an entry at which a short answer is kept, and the most bytes of such an answer.
pub(super) const ANSWER: usize = 512;
pub(super) const SHORT_ANSWER: usize = 512;
/// The offset in an entry at which a short request is kept as one piece, and the most bytes of such a request. At a higher offset
/// it would overlap the headers that stand before a payload.
pub(super) const REQUEST: usize = 1024;
pub(super) const SHORT_REQUEST: usize = 2048;

pub(super) const TAKEN: u32 = 1;
pub(super) const ANSWERED: u32 = 2;
