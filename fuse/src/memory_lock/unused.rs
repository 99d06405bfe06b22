//! Returns unused memory to the kernel, although all memory of the process is locked.
//!
//! Neither malloc_trim(3) nor the C library at the end of a thread can return locked pages to the kernel. So a process that was
//! busy for a moment, such as at its start, would keep its largest heap and its deepest stacks for ever.
//!
//! 1. `MADV_DONTNEED_LOCKED` (Linux 5.18) returns the pages of a stack below the frames in use: those of the main thread when
//!    there is no work, those of other threads at their end. The C library keeps stacks for later threads.
//! 2. podfs unlocks the heap while malloc_trim(3) runs, for less than a millisecond. The allocator has zeroed free blocks. If the
//!    memory is not locked, podfs only calls malloc_trim(3).
//! 3. The code of the start is unmapped once, after the start.

use std::ffi::{c_int, c_void};
use std::fs;
use std::mem::MaybeUninit;
use std::ops::Range;
use std::{ptr, slice};

use libc::{PF_W, PT_LOAD};
use rustix::mm::{MlockFlags, mlock_with, munlock};

use super::is_locked;

/// Bytes of the stack below the caller's frame that are not returned: the functions that the caller calls next use them.
const KEPT: usize = 16 << 10;
/// The size of a page, in bytes.
const PAGE: usize = 4096;

/// Returns free memory of the heap and of the main thread's stack to the kernel. The main thread calls it when it has no work.
pub fn return_unused_memory() {
    if let Some(stack) = mapping("[stack]") {
        return_stack(&stack);
    }
    if is_locked() {
        with_heap(|start, length| {
            // SAFETY: a memory lock has no effect on the content of memory.
            let _ = unsafe { munlock(start, length) };
        });
    }
    super::return_free_memory();
    if is_locked() {
        with_heap(lock);
    }
}

/// Returns the unused stack of the calling thread to the kernel. The thread calls it before its end.
pub fn return_own_stack() {
    if let Some(stack) = own_stack() {
        return_stack(&stack);
    }
}

/// Unmaps the code and constants of the program and its libraries. The kernel maps again, and locks again, what the process then
/// uses, from its page cache or the files. A process calls it when its start is over, so that it does not lock the code of its start.
pub fn unmap_program() {
    // SAFETY: the callback gets no data.
    unsafe { libc::dl_iterate_phdr(Some(unmap_object), ptr::null_mut()) };
}

/// Unmaps the read-only segments of the program or of a library.
unsafe extern "C" fn unmap_object(object: *mut libc::dl_phdr_info, _: usize, _: *mut c_void) -> c_int {
    // SAFETY: the C library passes an object that is loaded, and the number of its headers.
    let (base, headers) = unsafe {
        let object = &*object;
        (object.dlpi_addr, slice::from_raw_parts(object.dlpi_phdr, object.dlpi_phnum.into()))
    };
    for header in headers.iter().filter(|header| header.p_type == PT_LOAD && header.p_flags & PF_W == 0) {
        let start = (base + header.p_vaddr) as usize;
        let (first, end) = (start & !(PAGE - 1), start + header.p_memsz as usize);
        // SAFETY: the process cannot write to the segment, so the file has the same bytes. An error leaves the pages mapped.
        unsafe { libc::madvise(ptr::with_exposed_provenance_mut(first), end - first, libc::MADV_DONTNEED_LOCKED) };
    }
    0
}

/// Locks pages when the process first touches them.
fn lock(start: *mut c_void, length: usize) {
    // SAFETY: a memory lock has no effect on the content of memory.
    let _ = unsafe { mlock_with(start, length, MlockFlags::ONFAULT) };
}

fn return_stack(stack: &Range<usize>) {
    let here = 0_u8;
    let end = (&raw const here as usize).saturating_sub(KEPT) & !(PAGE - 1);
    if stack.contains(&end) {
        let start = ptr::with_exposed_provenance_mut(stack.start);
        // SAFETY: this function runs on the stack, and nothing so far below its frame is in use.
        unsafe { libc::madvise(start, end - stack.start, libc::MADV_DONTNEED_LOCKED) };
    }
}

fn with_heap(act: impl FnOnce(*mut c_void, usize)) {
    if let Some(heap) = mapping("[heap]") {
        act(ptr::with_exposed_provenance_mut(heap.start), heap.len());
    }
}

/// The addresses of the first mapping with this name.
fn mapping(name: &str) -> Option<Range<usize>> {
    let maps = fs::read_to_string("/proc/self/maps").ok()?;
    let line = maps.lines().find(|line| line.ends_with(name))?;
    let (start, end) = line.split_whitespace().next()?.split_once('-')?;
    Some(usize::from_str_radix(start, 16).ok()?..usize::from_str_radix(end, 16).ok()?)
}

/// The addresses of the calling thread's stack.
fn own_stack() -> Option<Range<usize>> {
    let mut attributes = MaybeUninit::<libc::pthread_attr_t>::uninit();
    let (mut start, mut length) = (ptr::null_mut(), 0);
    // SAFETY: the calling thread exists. Its attributes are read and destroyed only if the first call has set them.
    unsafe {
        if libc::pthread_getattr_np(libc::pthread_self(), attributes.as_mut_ptr()) != 0 {
            return None;
        }
        let got = libc::pthread_attr_getstack(attributes.as_ptr(), &raw mut start, &raw mut length);
        libc::pthread_attr_destroy(attributes.as_mut_ptr());
        (got == 0).then(|| start.expose_provenance()..start.addr() + length)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_thread_continues_after_it_has_returned_its_stack() {
        fn deep(depth: u64) -> u64 {
            let frame = [depth; 64];
            if depth == 0 { 0 } else { deep(depth - 1) + frame[63] }
        }
        let thread = std::thread::spawn(|| {
            let (kept, before) = ([7_u8; 4096], deep(500));
            return_own_stack();
            (kept.iter().all(|byte| *byte == 7), before == deep(500))
        });
        assert_eq!(thread.join().expect("no panic"), (true, true));
    }

    #[test]
    fn memory_in_use_stays_as_it_is() {
        let kept: Vec<Vec<u8>> = (0..2000_usize).map(|length| vec![7; length]).collect();
        drop((0..2000_usize).map(|length| vec![7_u8; length]).collect::<Vec<_>>());
        return_unused_memory();
        assert!(
            kept.iter().enumerate().all(|(length, block)| block.len() == length && block.iter().all(|byte| *byte == 7))
        );
    }
}
