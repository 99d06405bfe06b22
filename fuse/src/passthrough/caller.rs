//! Acting for a caller: what is created belongs to the caller.
//!
//! Whether the caller may do something has been decided by the kernel, from modes, owners and ACLs
//! (`default_permissions`). A thread of the session then acts with root's privileges, and with the caller's uid, gid
//! and umask where something is created. The kernel keeps these for each thread by itself:
//!
//! 1. `CLONE_FS` is unshared, so that a thread has a umask of its own. The source then sees the caller's umask, and
//!    leaves it out where the directory has a default ACL.
//! 2. `SECBIT_NO_SETUID_FIXUP` keeps a change of `fsuid` from changing capabilities.
//! 3. `CAP_SYS_RESOURCE` is dropped, so that blocks reserved for root stay reserved, also for what the kernel writes through a
//!    backing file that the thread has registered.
//!
//! A source on another machine decides by itself what a caller may do there: it may map root to an unprivileged user. So there a
//! whole request is executed with its caller's ids and groups.

use std::cell::{Cell, RefCell};
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Mutex;

use rustix::fs::Mode;
use rustix::thread::{CapabilitySet, capabilities, set_capabilities};

use crate::nfs::callers::Callers;
use crate::nfs::options::Callers as As;
use crate::nfs::rpc::Credential;
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
    let _own = Borrowed::of(caller.uid, caller.gid);
    create()
}

/// The ids with which requests go to a source on another machine.
pub struct Identities(Mutex<Callers>);

impl Identities {
    /// `callers` says which ids callers have there.
    pub fn new(callers: As) -> Self {
        Self(Mutex::new(Callers::new(callers)))
    }

    /// Lets the calling thread act as `caller` in everything, until what this gives is dropped.
    pub fn acting_as(&self, caller: Caller) -> impl Drop + use<> {
        let credential = self.0.lock().expect("a thread that panics ends the process").credential(caller);
        let (uid, gid, groups) = match credential {
            Credential::User { uid, gid, groups } => (uid, gid, groups),
            Credential::Nobody => (caller.uid, caller.gid, Vec::new()),
        };
        set_groups(groups);
        Borrowed::of(uid, gid)
    }
}

/// Whether the caller has `CAP_SYS_ADMIN`, and not only in a user namespace of its own. Requests of a mount that may be ID-mapped
/// do not carry the caller's ids, so this looks at the process.
pub fn administers_system(caller: Caller) -> bool {
    const SYS_ADMIN: u64 = 1 << 21;
    let effective = field(&status_of(caller), "CapEff:").and_then(|set| u64::from_str_radix(set.trim(), 16).ok());
    let maps = || maps_of(&process(caller));
    effective.unwrap_or(0) & SYS_ADMIN != 0 && maps().is_some_and(|maps| Some(maps) == maps_of(Path::new("/proc/self")))
}

/// Whether the caller is in the group `gid`. A caller whose status cannot be read is in none.
pub fn is_in_group(caller: Caller, gid: u32) -> bool {
    let status = status_of(caller);
    let numbers = |key| field(&status, key).into_iter().flat_map(str::split_whitespace);
    // The fourth is the one for files (`fsgid`).
    numbers("Gid:").skip(3).chain(numbers("Groups:")).any(|group| group.parse() == Ok(gid))
}

fn process(caller: Caller) -> PathBuf {
    Path::new("/proc").join(caller.pid.to_string())
}

fn status_of(caller: Caller) -> String {
    fs::read_to_string(process(caller).join("status")).unwrap_or_default()
}

fn field<'a>(status: &'a str, key: &str) -> Option<&'a str> {
    status.lines().find_map(|line| line.strip_prefix(key))
}

/// Which ids of the system there are in the user namespace of a process. Another namespace than this process's own shows
/// other maps, unless it was given every user, every group and every project of the system on purpose. The namespaces
/// themselves could be compared only with `CAP_SYS_PTRACE`.
fn maps_of(process: &Path) -> Option<[Vec<u8>; 3]> {
    let map = |name| fs::read(process.join(name)).ok();
    Some([map("uid_map")?, map("gid_map")?, map("projid_map")?])
}

thread_local! {
    /// The ids that the calling thread acts with: podfs itself is root.
    static ACTING: Cell<(u32, u32)> = const { Cell::new((0, 0)) };
    /// The groups that it has besides, once they were set.
    static GROUPS: RefCell<Option<Vec<u32>>> = const { RefCell::new(None) };
}

/// Another identity, given back when this is dropped.
struct Borrowed {
    before: (u32, u32),
}

impl Borrowed {
    fn of(uid: u32, gid: u32) -> Self {
        Self { before: act_as(uid, gid) }
    }
}

impl Drop for Borrowed {
    fn drop(&mut self) {
        let (uid, gid) = self.before;
        act_as(uid, gid);
    }
}

/// Returns the ids that the thread had before.
fn act_as(uid: u32, gid: u32) -> (u32, u32) {
    let before = ACTING.replace((uid, gid));
    // The group first: changing it takes a privilege.
    if before.1 != gid {
        // SAFETY: it changes one number of the calling thread.
        unsafe { libc::setfsgid(gid) };
    }
    if before.0 != uid {
        // SAFETY: as above.
        unsafe { libc::setfsuid(uid) };
    }
    before
}

/// The system call, and not the function of libc, which is for all threads of a process. Where it is refused, the source
/// sees groups that are not the caller's, and can only refuse more: podfs has none that matter.
fn set_groups(groups: Vec<u32>) {
    GROUPS.with_borrow_mut(|own| {
        if own.as_ref() != Some(&groups) {
            // SAFETY: the kernel reads as many numbers as there are.
            unsafe { libc::syscall(libc::SYS_setgroups, groups.len(), groups.as_ptr()) };
            *own = Some(groups);
        }
    });
}
