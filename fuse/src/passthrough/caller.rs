//! Acting for a caller: what is created belongs to who asked for it.
//!
//! Whether the caller may do something has been decided by the kernel, from modes, owners and ACLs
//! (`default_permissions`). A thread of the session then acts with root's privileges, and with the caller's uid, gid
//! and umask where something is created. The kernel keeps these for each thread by itself:
//!
//! 1. `CLONE_FS` is unshared, so that a thread has a umask of its own. The source then sees the caller's umask, and
//!    leaves it out where the directory has a default ACL.
//! 2. `SECBIT_NO_SETUID_FIXUP` keeps a change of `fsuid` from changing capabilities.
//! 3. `CAP_SYS_RESOURCE` is put down, so that blocks reserved for root stay reserved, also for what the kernel writes
//!    through a backing file that the thread has registered.

use std::fs;
use std::path::Path;

use rustix::fs::Mode;
use rustix::thread::{CapabilitySet, capabilities, set_capabilities};

use crate::session::Caller;

/// Makes the calling thread ready to act for callers. What this process may not do is left out: then the source
/// checks permissions once more, which can only refuse more.
pub fn begin_thread() {
    // SAFETY: the thread has no working directory, root or umask that another relies on.
    let _shared = unsafe { rustix::thread::unshare_unsafe(rustix::thread::UnshareFlags::FS) };
    const NO_SETUID_FIXUP: libc::c_ulong = 1 << 2;
    // A process that is confined has set it already, and may not set it again.
    // SAFETY: securebits are numbers, and belong to the calling thread alone.
    unsafe { libc::prctl(libc::PR_SET_SECUREBITS, NO_SETUID_FIXUP, 0, 0, 0) };
    if let Ok(mut own) = capabilities(None) {
        own.effective -= CapabilitySet::SYS_RESOURCE;
        // Putting down what one has is always allowed.
        let _ = set_capabilities(None, own);
    }
}

/// Runs `create` with the caller's uid, gid and umask.
pub fn acting_for<T>(caller: Caller, umask: u32, create: impl FnOnce() -> T) -> T {
    // The umask is this thread's own, and every creation sets it.
    rustix::process::umask(Mode::from_raw_mode(umask));
    let _own = Borrowed::from(caller);
    create()
}

/// Whether the caller has `CAP_SYS_ADMIN`, and not only in a user namespace of its own. The kernel tells of no caller
/// whose mount may be ID-mapped who it is, so this looks at the process.
pub fn administers_system(caller: Caller) -> bool {
    const SYS_ADMIN: u64 = 1 << 21;
    let process = Path::new("/proc").join(caller.pid.to_string());
    let status = fs::read_to_string(process.join("status")).unwrap_or_default();
    let effective = status.lines().find_map(|line| line.strip_prefix("CapEff:"));
    let effective = effective.and_then(|set| u64::from_str_radix(set.trim(), 16).ok()).unwrap_or(0);
    effective & SYS_ADMIN != 0 && maps_of(&process).is_some_and(|maps| Some(maps) == maps_of(Path::new("/proc/self")))
}

/// Which ids of the system there are in the user namespace of a process. Another namespace than this process's own shows
/// other maps, unless it was given every user, every group and every project of the system on purpose. The namespaces
/// themselves could be compared only with `CAP_SYS_PTRACE`.
fn maps_of(process: &Path) -> Option<[Vec<u8>; 3]> {
    let map = |name| fs::read(process.join(name)).ok();
    Some([map("uid_map")?, map("gid_map")?, map("projid_map")?])
}

/// The caller's identity, given back when this is dropped. podfs itself is root.
struct Borrowed(Caller);

impl From<Caller> for Borrowed {
    fn from(caller: Caller) -> Self {
        // The group first: changing it takes a privilege.
        if caller.gid != 0 {
            set_group(caller.gid);
        }
        if caller.uid != 0 {
            set_user(caller.uid);
        }
        Self(caller)
    }
}

impl Drop for Borrowed {
    fn drop(&mut self) {
        if self.0.uid != 0 {
            set_user(0);
        }
        if self.0.gid != 0 {
            set_group(0);
        }
    }
}

fn set_user(uid: u32) {
    // SAFETY: it changes one number of the calling thread.
    unsafe { libc::setfsuid(uid) };
}

fn set_group(gid: u32) {
    // SAFETY: as above.
    unsafe { libc::setfsgid(gid) };
}
