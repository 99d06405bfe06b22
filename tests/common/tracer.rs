//! Kills a server at the beginning or the end of any of its system calls: `ptrace(2)` stops each of its threads there.

use std::collections::BTreeMap;
use std::fs;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Sender, channel};
use std::thread;

use nix::errno::Errno;
use nix::sys::ptrace::{Options, interrupt, seize, syscall};
use nix::sys::signal::{Signal, kill};
use nix::sys::wait::{WaitPidFlag, WaitStatus, waitpid};
use nix::unistd::Pid;

/// Runs `act`, and kills `server` when `ptrace(2)` has stopped it `stop` times before. Also returns whether the server was
/// killed: whether there were so many stops before `act` returned.
pub fn killed_at<T>(server: Pid, stop: usize, act: impl FnOnce() -> T) -> (T, bool) {
    let done = AtomicBool::new(false);
    thread::scope(|scope| {
        let (ready, is_ready) = channel();
        let tracer = scope.spawn(|| Tracer::new(server, stop, ready).run(&done));
        // A tracer that fails drops its sender, which ends the wait.
        let _ = is_ready.recv();
        let result = {
            let _done = EndTracer { done: &done, server };
            act()
        };
        (result, tracer.join().expect("the server can be traced"))
    })
}

/// Ends the tracer when it is dropped, also if `act` has panicked.
struct EndTracer<'a> {
    done: &'a AtomicBool,
    server: Pid,
}

impl Drop for EndTracer<'_> {
    fn drop(&mut self) {
        self.done.store(true, Ordering::Release);
        // The signal ends the tracer's wait for the next stop. The server ignores it.
        let _ = kill(self.server, Signal::SIGURG);
    }
}

/// The tracer must be one thread; the kernel detaches its tracees when it ends.
struct Tracer {
    server: Pid,
    /// The threads, and whether each is in a system call.
    threads: BTreeMap<Pid, bool>,
    /// How many stops the server may still have before it is killed.
    remaining: usize,
    /// Dropped when every thread is in a system call, which tells `killed_at` that it may call `act`.
    ready: Option<Sender<()>>,
}

impl Tracer {
    fn new(server: Pid, stop: usize, ready: Sender<()>) -> Self {
        Self { server, threads: BTreeMap::new(), remaining: stop, ready: Some(ready) }
    }

    fn run(mut self, done: &AtomicBool) -> bool {
        self.seize_all();
        let mut killed = false;
        loop {
            let status = match waitpid(None, Some(WaitPidFlag::__WALL | WaitPidFlag::__WNOTHREAD)) {
                Err(Errno::EINTR) => continue,
                // All threads of the server have ended.
                Err(Errno::ECHILD) => return killed,
                status => status.expect("tracees"),
            };
            if done.load(Ordering::Acquire) && !killed {
                return false;
            }
            let (thread, signal) = match status {
                WaitStatus::PtraceSyscall(thread) => {
                    if self.ready.is_none() && !killed {
                        if self.remaining == 0 {
                            kill(self.server, Signal::SIGKILL).expect("it is there");
                            killed = true;
                        }
                        self.remaining = self.remaining.saturating_sub(1);
                    }
                    let inside = self.threads.entry(thread).or_default();
                    *inside = !*inside;
                    (thread, None)
                }
                WaitStatus::PtraceEvent(thread, _, _) => {
                    self.threads.entry(thread).or_default();
                    (thread, None)
                }
                WaitStatus::Stopped(thread, signal) => (thread, Some(signal)),
                WaitStatus::Exited(thread, _) | WaitStatus::Signaled(thread, _, _) => {
                    self.threads.remove(&thread);
                    continue;
                }
                _ => continue,
            };
            // This fails if the thread was killed meanwhile: such a thread needs no order to continue.
            let _ = syscall(thread, signal);
            if self.threads.values().all(|inside| *inside) {
                self.ready = None;
            }
        }
    }

    fn seize_all(&mut self) {
        loop {
            let tasks = fs::read_dir(format!("/proc/{}/task", self.server)).expect("a process").flatten();
            let ids = tasks.filter_map(|task| Some(Pid::from_raw(task.file_name().to_str()?.parse().ok()?)));
            let new: Vec<_> = ids.filter(|thread| !self.threads.contains_key(thread)).collect();
            if new.iter().all(|thread| ended(*thread)) {
                return;
            }
            for thread in new {
                self.threads.insert(thread, false);
                let options = Options::PTRACE_O_TRACESYSGOOD | Options::PTRACE_O_TRACECLONE;
                match seize(thread, options).and_then(|()| interrupt(thread)) {
                    // A worker thread that the server no longer needed has just ended.
                    Err(Errno::ESRCH | Errno::EPERM) if ended(thread) => drop(self.threads.remove(&thread)),
                    traced => traced.expect("traced"),
                }
            }
        }
    }
}

/// Whether a thread has ended, though its id may still exist.
fn ended(thread: Pid) -> bool {
    let stat = fs::read_to_string(format!("/proc/{thread}/stat")).unwrap_or_default();
    stat.rsplit_once(") ").is_none_or(|(_, fields)| fields.starts_with(['Z', 'X']))
}
