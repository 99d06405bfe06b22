//! Waking queues: requests that came while no entry could take them.
//!
//! The kernel looks for such requests when a request of the same queue is answered, but not when the queue gets an entry. So
//! after a takeover, and when a request is going to wait for long, a child process makes one more request on the queue's CPU:
//! `fstatfs(2)` on the private mount.
//!
//! The child has the mount and a pipe as its only descriptors. If the server dies meanwhile, the child waits for the next one like
//! any caller, and neither the server's end nor the connection's depends on the child. The child ends when the pipe is closed.

use std::io;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::sync::Mutex;
use std::sync::atomic::{AtomicU32, Ordering};

use nix::fcntl::OFlag;
use nix::unistd::pipe2;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::mm::{MapFlags, ProtFlags, mmap_anonymous};

use crate::child;

/// Most children. A child waits only for answers to other requests, so there are so many only when as many callers wait for locks.
const MOST: usize = 1024;

/// Makes requests on chosen CPUs. The lock is held while a child is started.
pub(super) struct Waker {
    mount: OwnedFd,
    /// The number of requests that each child has finished. The children share the page, which is never unmapped.
    finished: &'static [AtomicU32; MOST],
    children: Mutex<Vec<WakeProcess>>,
}

struct WakeProcess {
    /// The write end of the pipe, from which the child reads CPU numbers.
    pipe: OwnedFd,
    /// The number of requests that the child has been ordered to make.
    ordered: u32,
}

impl WakeProcess {
    /// Whether it was killed, perhaps while it made a request.
    fn is_dead(&self) -> bool {
        let mut state = [PollFd::new(&self.pipe, PollFlags::empty())];
        let polled = poll(&mut state, Some(&Timespec { tv_sec: 0, tv_nsec: 0 }));
        polled.is_ok() && state[0].revents().contains(PollFlags::ERR)
    }
}

impl Waker {
    /// Starts without children. `mount` shows the file system, so that children can make requests.
    ///
    /// # Errors
    /// When there is no memory.
    pub(super) fn new(mount: OwnedFd) -> io::Result<Self> {
        let (prot, length) = (ProtFlags::READ | ProtFlags::WRITE, size_of::<[AtomicU32; MOST]>());
        // SAFETY: the kernel chooses addresses where nothing is.
        let page = unsafe { mmap_anonymous(std::ptr::null_mut(), length, prot, MapFlags::SHARED) }?;
        // SAFETY: it has this length, is aligned and zeroed, and is never unmapped; all that use it see atomics.
        let finished = unsafe { &*page.cast() };
        Ok(Self { mount, finished, children: Mutex::default() })
    }

    /// Makes a request on each of `cpus` soon, also if requests that were made before wait.
    ///
    /// # Errors
    /// When there are no more processes or descriptors.
    pub(super) fn wake(&self, cpus: &[usize]) -> io::Result<()> {
        let mut children = self.children.lock().expect("a thread that panics ends the process");
        for cpu in cpus {
            let cpu = u32::try_from(*cpu).map_err(io::Error::other)?.to_ne_bytes();
            let is_idle =
                |(child, finished): (&WakeProcess, &AtomicU32)| child.ordered == finished.load(Ordering::Relaxed);
            let idle = children.iter().zip(self.finished).position(is_idle);
            let place = idle.or_else(|| children.iter().position(WakeProcess::is_dead)).unwrap_or(children.len());
            if place == MOST {
                return Err(io::ErrorKind::QuotaExceeded.into());
            }
            if place == children.len() {
                children.push(WakeProcess { pipe: self.start(place)?, ordered: 0 });
            }
            children[place].ordered += 1;
            if nix::unistd::write(&children[place].pipe, &cpu).is_err() {
                // The child was killed.
                self.finished[place].store(0, Ordering::Relaxed);
                children[place] = WakeProcess { pipe: self.start(place)?, ordered: 1 };
                nix::unistd::write(&children[place].pipe, &cpu)?;
            }
        }
        Ok(())
    }

    /// Starts a child; returns the write end of its pipe.
    fn start(&self, place: usize) -> io::Result<OwnedFd> {
        const PIPE: libc::c_int = 0;
        const MOUNT: libc::c_int = 1;
        let (theirs, ours) = pipe2(OFlag::O_CLOEXEC | OFlag::O_NONBLOCK)?;
        let (pipe, mount) = (theirs.as_raw_fd(), self.mount.as_fd().as_raw_fd());
        let life = || {
            // SAFETY: system calls only, with memory that outlives them; this process has its own table of descriptors.
            unsafe {
                libc::prctl(libc::PR_SET_NAME, c"podfs-wake".as_ptr());
                // Copies above 0 and 1, so that the dup3 calls below overwrite neither.
                let (pipe, mount) = (libc::fcntl(pipe, libc::F_DUPFD, 2), libc::fcntl(mount, libc::F_DUPFD, 2));
                libc::dup3(pipe, PIPE, libc::O_CLOEXEC);
                libc::dup3(mount, MOUNT, libc::O_CLOEXEC);
                libc::syscall(libc::SYS_close_range, 2, libc::c_uint::MAX, 0);
                libc::fcntl(PIPE, libc::F_SETFL, 0);
                let mut cpu = 0_u32;
                while libc::read(PIPE, (&raw mut cpu).cast(), size_of::<u32>()) == size_of::<u32>() as isize {
                    let mut own: libc::cpu_set_t = std::mem::zeroed();
                    if cpu < libc::CPU_SETSIZE as u32 {
                        libc::CPU_SET(cpu as usize, &mut own);
                    }
                    // If this process may not use the CPU, the next call on that CPU wakes the queue.
                    if libc::sched_setaffinity(0, size_of::<libc::cpu_set_t>(), &raw const own) == 0 {
                        let mut found: libc::statfs = std::mem::zeroed();
                        libc::fstatfs(MOUNT, &raw mut found);
                    }
                    self.finished[place].fetch_add(1, Ordering::Relaxed);
                }
            }
        };
        // SAFETY: the child makes system calls only.
        unsafe { child::start_alone(life) }?;
        Ok(ours)
    }
}

#[cfg(test)]
mod tests {
    use std::fs::File;

    use super::*;

    #[test]
    fn a_child_that_was_killed_while_it_worked_is_replaced() {
        let directory = tempfile::tempdir().expect("a directory");
        let waker = Waker::new(File::open(directory.path()).expect("a directory").into()).expect("memory");
        {
            let (reader, pipe) = pipe2(OFlag::O_CLOEXEC).expect("a pipe");
            drop(reader);
            waker.children.lock().expect("no panic").push(WakeProcess { pipe, ordered: 1 });
        }
        waker.wake(&[0]).expect("a child");
        assert_eq!(waker.children.lock().expect("no panic").len(), 1);
        while waker.finished[0].load(Ordering::Relaxed) == 0 {
            std::thread::yield_now();
        }
    }
}
