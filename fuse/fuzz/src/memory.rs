//! The memory that a decoder allocates.
//!
//! The counts have only allocations by Rust code, and none by libFuzzer, which uses another allocator. Each thread has its own
//! counts.

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;

struct Counting;

#[global_allocator]
static MEMORY: Counting = Counting;

thread_local! {
    /// Bytes that are allocated now. Negative if this thread has freed memory that others allocated.
    static NOW: Cell<isize> = const { Cell::new(0) };
    /// The most bytes that have been allocated at the same time.
    static PEAK: Cell<isize> = const { Cell::new(0) };
}

/// Runs `run`, and returns the most bytes that it had allocated at the same time.
pub fn peak<T>(run: impl FnOnce() -> T) -> (T, usize) {
    let before = NOW.get();
    PEAK.set(before);
    let value = run();
    (value, (PEAK.get() - before).cast_unsigned())
}

fn count_allocated(bytes: usize) {
    NOW.set(NOW.get() + bytes.cast_signed());
    PEAK.set(PEAK.get().max(NOW.get()));
}

fn count_freed(bytes: usize) {
    NOW.set(NOW.get() - bytes.cast_signed());
}

// SAFETY: every call goes to the system's allocator unchanged.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        count_allocated(layout.size());
        // SAFETY: the caller keeps the contract of `GlobalAlloc::alloc`.
        unsafe { System.alloc(layout) }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        count_allocated(layout.size());
        // SAFETY: the caller keeps the contract of `GlobalAlloc::alloc_zeroed`.
        unsafe { System.alloc_zeroed(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        count_freed(layout.size());
        // SAFETY: the caller keeps the contract of `GlobalAlloc::dealloc`.
        unsafe { System.dealloc(pointer, layout) }
    }

    unsafe fn realloc(&self, pointer: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        count_allocated(size);
        count_freed(layout.size());
        // SAFETY: the caller keeps the contract of `GlobalAlloc::realloc`.
        unsafe { System.realloc(pointer, layout, size) }
    }
}
