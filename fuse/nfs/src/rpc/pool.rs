//! Buffers that the client uses again, because memory that was just used is in the cache of the CPU and need not be
//! cleared.

use std::cell::RefCell;
use std::ops::{Deref, DerefMut};
use std::rc::{Rc, Weak};

/// The size of a buffer for short replies. It has room for many of them.
pub const SMALL: usize = 64 << 10;
/// The size of a buffer for the longest reply: 1 MiB of data, the fields before and after the data, and the marks of
/// its record and of the next one.
pub const LARGE: usize = (1 << 20) + (64 << 10) + 8;
/// Most free buffers that are kept, of each kind: 4 MiB, and 17 MiB.
const KEPT_SMALL: usize = 64;
const KEPT_LARGE: usize = 16;

/// The free buffers of a thread's connections.
#[derive(Clone, Debug, Default)]
pub struct Pool(Rc<RefCell<FreeBuffers>>);

#[derive(Debug, Default)]
struct FreeBuffers {
    small: Vec<Vec<u8>>,
    large: Vec<Vec<u8>>,
}

impl Pool {
    /// Returns a buffer of [`SMALL`] bytes, or of [`LARGE`] bytes if it must hold more than that. Its content is
    /// arbitrary.
    pub fn buffer(&self, holds: usize) -> PooledBuffer {
        let (size, free) = if holds > SMALL {
            (LARGE, self.0.borrow_mut().large.pop())
        } else {
            (SMALL, self.0.borrow_mut().small.pop())
        };
        PooledBuffer { bytes: free.unwrap_or_else(|| vec![0; size]), home: Rc::downgrade(&self.0) }
    }
}

/// A buffer of a pool. Dropping it returns its memory to the pool.
#[derive(Debug)]
pub struct PooledBuffer {
    bytes: Vec<u8>,
    home: Weak<RefCell<FreeBuffers>>,
}

impl Deref for PooledBuffer {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        &self.bytes
    }
}

impl DerefMut for PooledBuffer {
    fn deref_mut(&mut self) -> &mut [u8] {
        &mut self.bytes
    }
}

impl AsRef<[u8]> for PooledBuffer {
    fn as_ref(&self) -> &[u8] {
        &self.bytes
    }
}

impl Drop for PooledBuffer {
    fn drop(&mut self) {
        let Some(home) = self.home.upgrade() else { return };
        let mut free = home.borrow_mut();
        let (kept, most) =
            if self.bytes.len() > SMALL { (&mut free.large, KEPT_LARGE) } else { (&mut free.small, KEPT_SMALL) };
        if kept.len() < most {
            kept.push(std::mem::take(&mut self.bytes));
        }
    }
}
