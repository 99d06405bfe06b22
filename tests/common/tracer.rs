//! A server that is killed between two of its system calls, whichever they are: `ptrace(2)` stops each of its threads
//! at the beginning and at the end of every call.

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

/// Runs `act`, and kills `server` at stop number `stop` of its system calls. Also returns whether there were so many stops.
pub fn killed_at<T>(server: Pid, stop: usize, act: impl FnOnce() -> T) -> (T, bool) {
    let done = AtomicBool::new(false);
    thread::scope(|scope| {
        let (ready, is_ready) = channel();
        let tracer = scope.spawn(|| Tracer::new(server, stop, ready).run(&done));
        // A tracer that fails drops its end.
        let _ = is_ready.recv();
        let result = act();
        done.store(true, Ordering::Release);
        // Only the tracer notices this signal.
        let _ = kill(server, Signal::SIGURG);
        (result, tracer.join().expect("the server can be traced"))
    })
}

/// The tracer must be one thread; the kernel detaches its tracees when it ends.
struct Tracer {
    server: Pid,
    /// The threads, and whether each is in a system call.
    threads: BTreeMap<Pid, bool>,
    left: usize,
    /// Gets one message, when every thread waits in a system call.
    ready: Option<Sender<()>>,
}

impl Tracer {
    fn new(server: Pid, stop: usize, ready: Sender<()>) -> Self {
        Self { server, threads: BTreeMap::new(), left: stop, ready: Some(ready) }
    }

    fn run(mut self, done: &AtomicBool) -> bool {
        self.seize_all();
        let mut killed = false;
        loop {
            let status = match waitpid(None, Some(WaitPidFlag::__WALL | WaitPidFlag::__WNOTHREAD)) {
                Err(Errno::EINTR) => continue,
                // All of its threads are gone.
                Err(Errno::ECHILD) => return killed,
                status => status.expect("tracees"),
            };
            if done.load(Ordering::Acquire) && !killed {
                return false;
            }
            let (thread, signal) = match status {
                WaitStatus::PtraceSyscall(thread) => {
                    if self.ready.is_none() && !killed {
                        if self.left == 0 {
                            kill(self.server, Signal::SIGKILL).expect("it is there");
                            killed = true;
                        }
                        self.left = self.left.saturating_sub(1);
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
            // A thread that was killed meanwhile goes on by itself.
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
                    // A thread that was one too many has just ended.
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
    stat.rsplit_once(") ").is_none_or(|(_, rest)| rest.starts_with(['Z', 'X']))
}
