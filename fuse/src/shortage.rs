//! Errors that pass by themselves: this process or the node lacks a resource for a moment.

use std::error::Error;
use std::io::{self, ErrorKind};

use rustix::io::Errno;

/// Whether the call may succeed later, when this process or the node has more descriptors, processes or memory.
pub fn is_shortage(error: &io::Error) -> bool {
    let mut next: Option<&(dyn Error + 'static)> = Some(error);
    while let Some(error) = next {
        next = error.source();
        if let Some(errno) = error.downcast_ref::<Errno>()
            && is_of_resources(*errno)
        {
            return true;
        }
        let Some(error) = error.downcast_ref::<io::Error>() else { continue };
        let errno = error.raw_os_error().map(Errno::from_raw_os_error);
        if error.kind() == ErrorKind::OutOfMemory || errno.is_some_and(is_of_resources) {
            return true;
        }
        // `source` of such an error is that of the error inside.
        if let Some(inside) = error.get_ref() {
            next = Some(inside);
        }
    }
    false
}

fn is_of_resources(errno: Errno) -> bool {
    matches!(errno, Errno::AGAIN | Errno::MFILE | Errno::NFILE | Errno::NOBUFS | Errno::NOMEM)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::region::RegionError;

    #[test]
    fn a_shortage_is_found_behind_other_errors() {
        let memory = || io::Error::from(Errno::NOMEM);
        assert!(is_shortage(&memory()));
        assert!(is_shortage(&io::Error::other(RegionError::from(memory()))));
        assert!(is_shortage(&io::Error::new(ErrorKind::InvalidData, memory())));
        assert!(is_shortage(&io::Error::other(Errno::MFILE)));
        assert!(!is_shortage(&io::Error::other(RegionError::Truncated(7))));
        assert!(!is_shortage(&Errno::INVAL.into()));
    }
}
