//! Zeroes freed memory.
//!
//! Bytes of a Secret pass through readers, parsers and maps before they become a payload. These do not clean up, so the
//! allocator of both programs overwrites every block when it is freed.

use std::alloc::{GlobalAlloc, Layout, System};

use super::wipe;

/// The allocator returns freed blocks of this size and above to the kernel at once: it is above the mmap threshold, which
/// [`tune_allocator`](super::tune_allocator) sets. The kernel zeroes them before another process gets them.
const RETURNED_AT_ONCE: usize = 1 << 20;

/// The system's allocator, with every block zeroed before it is freed.
pub struct ZeroingAllocator;

// SAFETY: every call goes to the system's allocator unchanged, and a block is written only while it is allocated. The default
// `realloc` allocates, copies and frees through these.
unsafe impl GlobalAlloc for ZeroingAllocator {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        // SAFETY: the caller keeps the contract of `GlobalAlloc::alloc`.
        unsafe { System.alloc(layout) }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        // SAFETY: the caller keeps the contract of `GlobalAlloc::alloc_zeroed`.
        unsafe { System.alloc_zeroed(layout) }
    }

    unsafe fn dealloc(&self, block: *mut u8, layout: Layout) {
        if layout.size() < RETURNED_AT_ONCE {
            // SAFETY: the block is `layout.size()` bytes long and no code uses it any more.
            wipe(unsafe { std::slice::from_raw_parts_mut(block, layout.size()) });
        }
        // SAFETY: the caller keeps the contract of `GlobalAlloc::dealloc`.
        unsafe { System.dealloc(block, layout) }
    }
}
