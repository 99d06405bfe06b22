//! Freed memory holds no secrets.
//!
//! Bytes of a Secret pass through readers, parsers and maps before they become a payload. Rather than
//! trusting each of these to clean up, the allocator of both programs overwrites every block when it is
//! freed.

use std::alloc::{GlobalAlloc, Layout, System};

use super::wipe;

/// From this size on, a freed block goes back to the kernel at once (the C allocator's mmap threshold,
/// which [`tune_allocator`](super::tune_allocator) fixes), and the kernel zeroes it before any process gets it. Below, the block
/// would be handed out again as it is.
const RETURNED_AT_ONCE: usize = 1 << 20;

/// The system's allocator, with every block zeroed before it is freed.
pub struct ZeroingAllocator;

// SAFETY: every call is passed on to the system's allocator unchanged; a block is only written while
// it is still allocated. The default `realloc` allocates, copies and frees through these.
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
