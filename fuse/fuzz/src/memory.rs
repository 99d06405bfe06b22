//! How much memory a decoder asks for.
//!
//! Only what Rust allocates is counted: libFuzzer has its memory from elsewhere. Each thread has its own count.

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;

struct Counting;

#[global_allocator]
static MEMORY: Counting = Counting;

thread_local! {
    /// Bytes that are allocated now. Negative if this thread has freed memory that others allocated.
    static NOW: Cell<isize> = const { Cell::new(0) };
    /// Most bytes that have been allocated at a time.
    static PEAK: Cell<isize> = const { Cell::new(0) };
}

/// Runs `run`, and returns the most bytes that it had allocated at a time.
pub fn peak<T>(run: impl FnOnce() -> T) -> (T, usize) {
    let before = NOW.get();
    PEAK.set(before);
    let value = run();
    (value, (PEAK.get() - before).cast_unsigned())
}

fn taken(bytes: usize) {
    NOW.set(NOW.get() + bytes.cast_signed());
    PEAK.set(PEAK.get().max(NOW.get()));
}

fn given_back(bytes: usize) {
    NOW.set(NOW.get() - bytes.cast_signed());
}

// SAFETY: everything is passed on to the system's allocator as it came.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        taken(layout.size());
        // SAFETY: the caller's promises are those that are asked for.
        unsafe { System.alloc(layout) }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        taken(layout.size());
        // SAFETY: as above.
        unsafe { System.alloc_zeroed(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        given_back(layout.size());
        // SAFETY: as above.
        unsafe { System.dealloc(pointer, layout) }
    }

    unsafe fn realloc(&self, pointer: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        taken(size);
        given_back(layout.size());
        // SAFETY: as above.
        unsafe { System.realloc(pointer, layout, size) }
    }
}
