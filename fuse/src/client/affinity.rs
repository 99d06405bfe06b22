//! Committing on one CPU with the server's threads.
//!
//! A commit is a handful of system calls that each wait for the server. Waking a thread on another,
//! idle CPU costs several times what the answer costs (measured on 2 CPUs: a commit of ten keys took
//! 0.6 ms when each message woke the other CPU, 0.08 ms when both shared one). So for the length of a
//! commit the committing thread, the volume's session thread and the server's control thread share
//! the CPU that the commit began on. Nothing depends on it: where the kernel refuses, commits are only
//! slower.

use rustix::thread::{CpuSet, Pid, sched_getaffinity, sched_getcpu, sched_setaffinity};

/// The CPUs this process may run on, as it was started.
pub(crate) struct Affinity(Option<CpuSet>);

impl Affinity {
    /// The present affinity of the calling thread.
    pub(crate) fn current() -> Self {
        Self(sched_getaffinity(None).ok().filter(|cpus| cpus.count() > 1))
    }

    /// Brings `threads` to the calling thread's CPU until the guard is dropped.
    pub(crate) fn together(&self, threads: impl IntoIterator<Item = Pid>) -> Together<'_> {
        let mut here = CpuSet::new();
        here.set(sched_getcpu());
        let threads = match self.0 {
            Some(_) => std::iter::once(None).chain(threads.into_iter().map(Some)).collect(),
            None => Vec::new(),
        };
        for thread in &threads {
            let _slower = sched_setaffinity(*thread, &here);
        }
        Together { affinity: self, threads }
    }
}

/// Threads that share a CPU for now.
pub(crate) struct Together<'a> {
    affinity: &'a Affinity,
    /// `None` is the thread that made the guard, which also drops it.
    threads: Vec<Option<Pid>>,
}

impl Drop for Together<'_> {
    fn drop(&mut self) {
        // Back to where the process started, not to what another commit had set meanwhile.
        if let Some(all) = &self.affinity.0 {
            for thread in &self.threads {
                let _gone = sched_setaffinity(*thread, all);
            }
        }
    }
}
