//! Callers other than root. In Linux, each thread has its own credentials; only the C library sets them for all threads.

use std::any::Any;
use std::panic::resume_unwind;
use std::path::Path;
use std::thread;

use nix::sched::{CloneFlags, unshare};
use nix::sys::stat::{Mode, umask};

/// The ids of a caller.
#[derive(Clone, Copy, Debug)]
pub struct Caller {
    pub uid: u32,
    pub gid: u32,
    pub groups: &'static [u32],
}

impl Caller {
    pub const fn new(uid: u32) -> Self {
        Self { uid, gid: uid, groups: &[] }
    }

    pub const fn with_groups(uid: u32, groups: &'static [u32]) -> Self {
        Self { uid, gid: uid, groups }
    }

    /// Runs `act` in a thread with this identity and no capability. The thread enters its working directory `directory` before
    /// it takes on the identity, so the identity needs no right to the directories above. Its umask is 022.
    #[track_caller]
    pub fn run<T: Send>(self, directory: &Path, act: impl FnOnce() -> T + Send) -> T {
        in_thread(directory, || {
            self.become_this();
            act()
        })
    }

    /// Makes the calling thread take on this identity.
    pub fn become_this(self) {
        let (groups, uid, gid) = (self.groups, self.uid, self.gid);
        // SAFETY: the first call reads `groups.len()` ids, the others read no memory. They change this
        // thread alone, which ends with its closure.
        let results = unsafe {
            [
                libc::syscall(libc::SYS_setgroups, groups.len(), groups.as_ptr()),
                libc::syscall(libc::SYS_setresgid, gid, gid, gid),
                libc::syscall(libc::SYS_setresuid, uid, uid, uid),
            ]
        };
        assert_eq!(results, [0; 3], "root can become {self:?}");
    }
}

/// Runs `act` as root in a thread with its own working directory and umask (022).
#[track_caller]
pub fn in_thread<T: Send>(directory: &Path, act: impl FnOnce() -> T + Send) -> T {
    let inside = || {
        unshare(CloneFlags::CLONE_FS).expect("a working directory of its own");
        std::env::set_current_dir(directory).expect("a directory");
        umask(Mode::from_bits_truncate(0o022));
        act()
    };
    let ended: Result<T, Box<dyn Any + Send>> = thread::scope(|scope| scope.spawn(inside).join());
    ended.unwrap_or_else(|panic| resume_unwind(panic))
}
