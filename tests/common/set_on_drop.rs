//! A flag for the threads of a test that run until the test has done its part.

use std::sync::atomic::{AtomicBool, Ordering};

/// Sets a flag when it is dropped: threads that wait for the flag end also if a check fails, and the test does not hang.
pub struct SetOnDrop<'a>(pub &'a AtomicBool);

impl Drop for SetOnDrop<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::SeqCst);
    }
}
