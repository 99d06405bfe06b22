//! Child processes that the kernel kills when the test program ends, also when a signal ends it.
//!
//! The kernel sends the signal of `PR_SET_PDEATHSIG` when the *thread* ends that has started the child, and the thread of a
//! test ends before the test program. So one thread, which lives as long as the program, starts all children.

use std::io::{Error, Result};
use std::os::unix::process::CommandExt;
use std::process::{Child, Command};
use std::sync::LazyLock;
use std::sync::mpsc::{Sender, channel};
use std::thread;

type Task = Box<dyn FnOnce() + Send>;

static STARTER: LazyLock<Sender<Task>> = LazyLock::new(|| {
    let (sender, tasks) = channel::<Task>();
    thread::spawn(move || tasks.into_iter().for_each(|task| task()));
    sender
});

/// Starts a child. The caller still has to end it and to wait for it.
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
    let (result_sender, result) = channel();
    STARTER.send(Box::new(move || drop(result_sender.send(command.spawn())))).expect("the thread never ends");
    result.recv().expect("the thread executes every task")
}
