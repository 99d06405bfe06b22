//! Requests over io_uring (Linux 6.14): the second transport of a session.
//!
//! The kernel has a queue of requests for each possible CPU, and a caller's request goes to the queue of the CPU that the caller
//! runs on. A thread of the server waits on that CPU. So caller and server take turns on one CPU, without waking another one,
//! and one system call gives an answer and fetches the next request. INIT, FORGET, INTERRUPT and notifications stay with the
//! device.
//!
//! Why a kill fails no call, and no call waits for ever:
//!
//! 1. The kernel puts a request into memory that outlives the server ([`ring_memory`](super::ring_memory)), in a thread of the
//!    server. An entry of that memory says which request it has, and how far the answer came.
//! 2. A thread that is killed first takes the requests that the kernel has for it, and then gives its empty entries back, before
//!    it counts as exiting (`Ring::end_with_thread`). So the kernel gives no request to a dead thread: later requests wait in the
//!    queue.
//! 3. The kernel finds a request by its queue and its number, whichever process answers it. So the successor answers the open
//!    requests, by the same rules as on the device, and each commit makes the entry the successor's.
//! 4. If the kernel has an answer already, it knows the request no more (`ENOENT`). The successor then registers the entry.
//! 5. One request on each CPU wakes the requests that wait in its queue (`wake`).
//! 6. A takeover can be done again at any point: entries change only as in the life of any server.
//!
//! Before the kernel has an entry for each queue, no request comes through a ring. If anything fails before that, the session uses
//! the device alone.
//!
//! | module | owns |
//! |---|---|
//! | `cpus` | how many queues there are, and whether the kernel offers them |
//! | `ring` | the system calls of io_uring |
//! | `volume` | the state that the threads share, and the requests that they execute |
//! | `serve` | the thread of a ring |
//! | `workers` | threads for slow requests |
//! | `wake` | requests that waited while there was no server |

mod cpus;
mod ring;
mod serve;
mod volume;
mod wake;
mod workers;

use std::io;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread;

use rustix::thread::{CpuSet, sched_getaffinity};

pub use cpus::{are_offered, possible_cpus};
use serve::{IdleRing, RingShares, ThreadAssignment};
use volume::RingVolume;
use wake::Waker;

use super::Filesystem;
use super::ring_memory::{RingMemory, RingState};
use crate::region::Region;

/// Threads with rings, for one volume.
pub(super) struct Rings {
    memory: Arc<RingMemory>,
    threads: Vec<Sender<RingShares>>,
    begun: Receiver<io::Result<()>>,
    /// The CPUs that they run on.
    cpus: Vec<usize>,
}

impl Rings {
    /// Starts the threads. The kernel does not know their rings yet.
    ///
    /// # Errors
    /// When this process may have no rings, or not so many threads.
    pub(super) fn prepare(memory: Arc<RingMemory>) -> io::Result<Self> {
        let assignments = assignments(memory.queues(), &sched_getaffinity(None)?);
        let cpus = assignments.iter().filter_map(|assignment| assignment.cpu).collect();
        let (ready, started) = channel();
        let (begin, begun) = channel();
        let mut threads = Vec::new();
        for assignment in assignments {
            let (volume, receiver) = channel();
            let (ready, begin) = (ready.clone(), begin.clone());
            let work = move || match IdleRing::new(assignment) {
                Ok(idle) => {
                    let _given_up = ready.send(Ok(()));
                    drop(ready);
                    idle.serve(&receiver, &begin);
                }
                Err(error) => drop(ready.send(Err(error))),
            };
            thread::Builder::new().name("ring".to_owned()).spawn(work)?;
            threads.push(volume);
        }
        drop(ready);
        started.iter().take(threads.len()).collect::<io::Result<()>>()?;
        Ok(Self { memory, threads, begun, cpus })
    }

    /// Lets the threads serve. Returns whether the kernel sends requests to them from now on; if not, it never will.
    ///
    /// # Errors
    /// When a ring fails that the kernel relies on.
    pub(super) fn start(
        &self,
        device: &Arc<OwnedFd>,
        region: &Arc<Region>,
        service: &Arc<dyn Filesystem>,
        mount: Option<BorrowedFd<'_>>,
    ) -> io::Result<bool> {
        let waker = mount.map(|mount| mount.try_clone_to_owned().and_then(Waker::new)).transpose()?;
        let is_resumed = self.memory.in_use().next().is_some();
        let served = Arc::new(RingVolume {
            memory: Arc::clone(&self.memory),
            device: Arc::clone(device),
            region: Arc::clone(region),
            service: Arc::clone(service),
            waker,
        });
        let shares = RingShares { volume: Arc::clone(&served), workers: Arc::default() };
        for thread in &self.threads {
            // A thread that has ended has already sent its error.
            let _ended = thread.send(shares.clone());
        }
        let begun: io::Result<()> = self.begun.iter().take(self.threads.len()).collect();
        match (begun, self.memory.state()) {
            (Ok(()), _) => {
                if is_resumed {
                    served.wake(&self.cpus);
                }
                self.memory.set_state(RingState::InUse);
                Ok(true)
            }
            (Err(error), RingState::InUse) => Err(error),
            (Err(error), _) => {
                let volume = self.memory.volume();
                tracing::warn!(volume, "the kernel takes no ring ({error}); requests come through /dev/fuse");
                self.memory.set_state(RingState::Refused);
                Ok(false)
            }
        }
    }
}

/// The assignments of the threads: one thread for each CPU that this process may use. The queues of other CPUs are distributed
/// among the threads.
fn assignments(queues: usize, usable: &CpuSet) -> Vec<ThreadAssignment> {
    let is_usable = |queue: &usize| *queue < CpuSet::MAX_CPU && usable.is_set(*queue);
    let (own, others): (Vec<_>, Vec<_>) = (0..queues).partition(is_usable);
    let mut assignments: Vec<_> =
        own.into_iter().map(|cpu| ThreadAssignment { cpu: Some(cpu), queues: vec![cpu] }).collect();
    if assignments.is_empty() {
        assignments.push(ThreadAssignment { cpu: None, queues: Vec::new() });
    }
    let count = assignments.len();
    for (place, queue) in others.into_iter().enumerate() {
        assignments[place % count].queues.push(queue);
    }
    assignments
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_queue_has_one_thread_also_where_few_of_many_cpus_are_usable() {
        let mut usable = CpuSet::new();
        for queues in [1, 2, 64, 2000] {
            for cpus in [&[][..], &[0], &[1, 5], &[0, 1, 2, 3]] {
                usable.clear();
                cpus.iter().for_each(|cpu| usable.set(*cpu));
                let assignments = assignments(queues, &usable);
                let mut served: Vec<_> = assignments.iter().flat_map(|assignment| assignment.queues.clone()).collect();
                served.sort_unstable();
                assert_eq!(served, (0..queues).collect::<Vec<_>>());
                assert!(assignments.len() <= cpus.len().max(1));
                assert!(assignments.iter().all(|thread| thread.cpu.is_none_or(|cpu| thread.queues.contains(&cpu))));
            }
        }
    }
}
