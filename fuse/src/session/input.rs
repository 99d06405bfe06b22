//! Buffers for requests.
//!
//! The kernel takes a request from its queue, and then copies it. If it has to allocate memory for that while this process is
//! killed, the request fails with `EIO` and is not sent again (`fuse_dev_do_read`). So the buffer has its memory before, and does
//! not share it with a clone of the process such as the keeper: otherwise the next write to each page would have to copy the page.

use std::io;
use std::ops::{Deref, DerefMut};

use memmap2::{Advice, MmapMut};

use super::REQUEST_SIZE;

const WORDS: usize = REQUEST_SIZE / size_of::<u64>();

/// Room for a request, aligned as its structs are.
pub struct InputBuffer(MmapMut);

impl InputBuffer {
    /// A buffer of zeros, whose first `bytes` bytes have memory.
    ///
    /// # Errors
    /// When there is no memory.
    pub fn new(bytes: usize) -> io::Result<InputBuffer> {
        let mut input = InputBuffer(MmapMut::map_anon(REQUEST_SIZE)?);
        input.0.advise(Advice::DontFork)?;
        const PAGE: usize = 4096 / size_of::<u64>();
        for word in input.iter_mut().take(bytes.div_ceil(size_of::<u64>())).step_by(PAGE) {
            // SAFETY: the word is a valid place; the store is not left out, though it changes nothing.
            unsafe { std::ptr::write_volatile(word, 0) };
        }
        Ok(input)
    }
}

impl Deref for InputBuffer {
    type Target = [u64];

    fn deref(&self) -> &[u64] {
        // SAFETY: the mapping begins at a page, has this length, is initialised by the kernel, and belongs to this buffer alone.
        unsafe { std::slice::from_raw_parts(self.0.as_ptr().cast(), WORDS) }
    }
}

impl DerefMut for InputBuffer {
    fn deref_mut(&mut self) -> &mut [u64] {
        // SAFETY: as above.
        unsafe { std::slice::from_raw_parts_mut(self.0.as_mut_ptr().cast(), WORDS) }
    }
}
