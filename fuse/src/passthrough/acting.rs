//! Acting for a caller: files that a request creates belong to its caller.
//!
//! The kernel has checked the caller's permissions, from modes, owners and ACLs (`default_permissions`). A thread of the session
//! then acts with root's privileges, and creates files with the caller's uid, gid and umask. The kernel keeps these for each thread
//! separately. So each thread of the session begins with these steps:
//!
//! 1. It unshares `CLONE_FS`, so that it has a umask of its own. The source then applies the caller's umask, except in a
//!    directory with a default ACL.
//! 2. It sets `SECBIT_NO_SETUID_FIXUP`, so that a change of `fsuid` does not change its capabilities.
//! 3. It drops `CAP_SYS_RESOURCE`, because a process with it may use the blocks that a file system reserves for root.
//!
//! ext4 also gives these blocks to processes with root's uid. So the thread has another uid while it writes data, and while it
//! registers a backing file: the kernel then writes with this uid. The kernel does not say which user writes. A store through a
//! mapping allocates with the ids of its process.
//!
//! If the source is on another machine, the file server there checks permissions itself: it may map root to an unprivileged
//! user. So for such a source the session executes each whole request with its caller's ids and groups.

use std::cell::{Cell, RefCell};
use std::sync::Mutex;

use podfs_nfs::rpc::Credential;
use rustix::fs::{Gid, Mode};
use rustix::thread::{
    CapabilitiesSecureBits, CapabilitySet, capabilities, set_capabilities, set_capabilities_secure_bits,
    set_thread_groups,
};

use crate::caller::Caller;
use crate::caller::credentials::{ActAs, Credentials};
use crate::memory_lock::forbid_dumps_again;

/// Makes the calling thread ready to act for callers. Skips a step that this process has no right to do: then the source
/// checks permissions once more, and can only refuse more requests.
pub fn begin_thread() {
    // SAFETY: the thread has no working directory, root or umask that another relies on.
    let _shared = unsafe { rustix::thread::unshare_unsafe(rustix::thread::UnshareFlags::FS) };
    // A confined process has set this bit already, and may not set it again.
    let _ = set_capabilities_secure_bits(CapabilitiesSecureBits::NO_SETUID_FIXUP);
    if let Ok(mut own) = capabilities(None) {
        own.effective -= CapabilitySet::SYS_RESOURCE;
        // A thread may always drop its own capabilities.
        let _ = set_capabilities(None, own);
    }
}

/// Runs `create` with the caller's uid, gid and umask.
pub fn acting_for<T>(caller: Caller, umask: u32, create: impl FnOnce() -> T) -> T {
    // The umask belongs to this thread alone, and only this function changes it.
    if UMASK.replace(Some(umask)) != Some(umask) {
        rustix::process::umask(Mode::from_raw_mode(umask));
    }
    let _own = AssumedIdentity::of(caller.uid, caller.gid);
    create()
}

/// Lets the calling thread use no blocks that the source reserves for root, until the returned guard is dropped. The thread keeps
/// its capabilities, so the source refuses nothing else.
pub fn without_reserved_blocks() -> impl Drop + use<> {
    AssumedIdentity::of(ORDINARY_USER, ACTING.get().1)
}

/// The ids and groups with which requests call a source on another machine.
pub struct Identities(Mutex<Credentials>);

impl Identities {
    /// `act_as` says which ids callers have at the source.
    pub fn new(act_as: ActAs) -> Self {
        Self(Mutex::new(Credentials::new(act_as)))
    }

    /// Lets the calling thread act as `caller` until the returned guard is dropped.
    pub fn acting_as(&self, caller: Caller) -> impl Drop + use<> {
        let credential = self.0.lock().expect("a thread that panics ends the process").of(caller);
        let (uid, gid, groups) = match credential {
            Credential::User { uid, gid, groups } => (uid, gid, groups),
            Credential::Anonymous => (caller.uid, caller.gid, Vec::new()),
        };
        set_groups(groups);
        AssumedIdentity::of(uid, gid)
    }
}

/// The uid of a thread that writes. No administrator gives it to an account, so no file system reserves blocks for it; -1 is no uid, and
/// some systems call -2 `nobody`.
const ORDINARY_USER: u32 = u32::MAX - 3;

thread_local! {
    /// The umask of the calling thread, once it was set.
    static UMASK: Cell<Option<u32>> = const { Cell::new(None) };
    /// The ids that the calling thread acts with: podfs itself is root.
    static ACTING: Cell<(u32, u32)> = const { Cell::new((0, 0)) };
    /// The supplementary groups of the calling thread, once they were set.
    static GROUPS: RefCell<Option<Vec<u32>>> = const { RefCell::new(None) };
}

/// Another identity of the calling thread, until this is dropped.
struct AssumedIdentity {
    before: (u32, u32),
}

impl AssumedIdentity {
    fn of(uid: u32, gid: u32) -> Self {
        Self { before: act_as(uid, gid) }
    }
}

impl Drop for AssumedIdentity {
    fn drop(&mut self) {
        let (uid, gid) = self.before;
        act_as(uid, gid);
    }
}

/// Sets the ids with which the calling thread acts. Returns those that it had before.
fn act_as(uid: u32, gid: u32) -> (u32, u32) {
    let before = ACTING.replace((uid, gid));
    // The group first: changing it takes a privilege.
    if before.1 != gid {
        nix::unistd::setfsgid(nix::unistd::Gid::from_raw(gid));
    }
    if before.0 != uid {
        nix::unistd::setfsuid(nix::unistd::Uid::from_raw(uid));
        forbid_dumps_again();
    }
    before
}

/// Sets the groups of the calling thread alone. If the kernel refuses that, the source sees the groups of podfs, which give access
/// to nothing: so the source can only refuse more requests.
fn set_groups(groups: Vec<u32>) {
    GROUPS.with_borrow_mut(|own| {
        if own.as_ref() != Some(&groups) {
            let ids: Vec<_> = groups.iter().copied().map(Gid::from_raw_unchecked).collect();
            let _ = set_thread_groups(&ids);
            *own = Some(groups);
        }
    });
}
