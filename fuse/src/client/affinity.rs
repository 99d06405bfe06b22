//! Runs a commit and the server's threads on one CPU.
//!
//! A commit makes a few system calls, and each waits for the server. To wake a thread on another, idle CPU takes several times
//! as long as the answer (measured on 2 CPUs: a commit of ten keys took 0.6 ms when each message woke the other CPU, and 0.08 ms
//! on one CPU). So the committing thread, the volume's session thread and the server's control thread share the CPU on which the
//! commit began, until its end. If the kernel refuses, commits are only slower.

use rustix::thread::{CpuSet, Pid, sched_getaffinity, sched_getcpu, sched_setaffinity};

/// The CPUs on which this process may run, as of its start.
pub(crate) struct Affinity(Option<CpuSet>);

impl Affinity {
    /// The present affinity of the calling thread.
    pub(crate) fn current() -> Self {
        Self(sched_getaffinity(None).ok().filter(|cpus| cpus.count() > 1))
    }

    /// Moves `threads` to the calling thread's CPU until the guard is dropped.
    pub(crate) fn together(&self, threads: impl IntoIterator<Item = Pid>) -> SharedCpuGuard<'_> {
        let mut here = CpuSet::new();
        here.set(sched_getcpu());
        let threads = match self.0 {
            Some(_) => std::iter::once(None).chain(threads.into_iter().map(Some)).collect(),
            None => Vec::new(),
        };
        for thread in &threads {
            let _slower = sched_setaffinity(*thread, &here);
        }
        SharedCpuGuard { affinity: self, threads }
    }
}

/// A guard for threads that share a CPU.
pub(crate) struct SharedCpuGuard<'a> {
    affinity: &'a Affinity,
    /// The threads. `None` is the one that made the guard; it also drops the guard.
    threads: Vec<Option<Pid>>,
}

impl Drop for SharedCpuGuard<'_> {
    fn drop(&mut self) {
        // Restores the CPUs of the process's start, because a present setting may be that of another commit.
        if let Some(all) = &self.affinity.0 {
            for thread in &self.threads {
                let _gone = sched_setaffinity(*thread, all);
            }
        }
    }
}
