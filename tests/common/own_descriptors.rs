//! Tests in which the last close of a file matters.

use std::any::Any;
use std::panic::resume_unwind;
use std::thread;

/// Runs `act` in a thread with a table of descriptors of its own, which has nothing but standard input, output and error at first.
///
/// The tests of a program run in one process, and start other programs. Between fork and exec, such a child has all files open that
/// the process had: the kernel closes a file for the last time, and sends its RELEASE, when the child executes its program. So a
/// removed file may still be open after the test has closed it.
#[track_caller]
pub fn with_own_descriptors<T: Send>(act: impl FnOnce() -> T + Send) -> T {
    let inside = || {
        // SAFETY: it closes descriptors in the new table of this thread alone, in which nothing owns them yet.
        let closed = unsafe { libc::syscall(libc::SYS_close_range, 3, u32::MAX, libc::CLOSE_RANGE_UNSHARE) };
        assert_eq!(closed, 0, "the thread has a table of its own");
        act()
    };
    let ended: Result<T, Box<dyn Any + Send>> = thread::scope(|scope| scope.spawn(inside).join());
    ended.unwrap_or_else(|panic| resume_unwind(panic))
}
