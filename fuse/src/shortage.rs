//! Errors that pass by themselves: this process or the node lacks a resource for a moment.

use std::io;

use rustix::io::Errno;

/// Whether the call may succeed later, when this process or the node has more descriptors, processes or memory.
pub fn is_shortage(error: &io::Error) -> bool {
    let errno = error.raw_os_error().map(Errno::from_raw_os_error);
    matches!(errno, Some(Errno::AGAIN | Errno::MFILE | Errno::NFILE | Errno::NOBUFS | Errno::NOMEM))
}
