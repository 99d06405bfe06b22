//! Child processes that end when the test program does, however it ends.
//!
//! The kernel sends the signal of `PR_SET_PDEATHSIG` when the *thread* ends that has started the child, and the thread of
//! a test ends before its program. So one thread starts all children, and it lives as long as the program.

use std::io::{Error, Result};
use std::os::unix::process::CommandExt;
use std::process::{Child, Command};
use std::sync::LazyLock;
use std::sync::mpsc::{Sender, channel};
use std::thread;

type Task = Box<dyn FnOnce() + Send>;

static STARTER: LazyLock<Sender<Task>> = LazyLock::new(|| {
    let (tasks, mine) = channel::<Task>();
    thread::spawn(move || mine.into_iter().for_each(|task| task()));
    tasks
});

/// Starts the child. The caller still ends it and waits for it.
pub fn start(mut command: Command) -> Result<Child> {
    let parent = std::process::id();
    // SAFETY: all calls are async-signal-safe.
    unsafe {
        command.pre_exec(move || {
            if libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL) == -1 {
                return Err(Error::last_os_error());
            }
            // The parent may have ended before the child requested the signal.
            if libc::getppid().cast_unsigned() == parent { Ok(()) } else { Err(Error::from_raw_os_error(libc::ESRCH)) }
        });
    }
    let (result, started) = channel();
    STARTER.send(Box::new(move || drop(result.send(command.spawn())))).expect("the thread never ends");
    started.recv().expect("every task ends")
}
