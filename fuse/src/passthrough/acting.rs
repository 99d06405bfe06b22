//! Acting for a caller: files that a request creates belong to its caller.
//!
//! The kernel has checked the caller's permissions, from modes, owners and ACLs (`default_permissions`). A thread of the session
//! then acts with root's privileges, and creates files with the caller's uid, gid and umask. The kernel keeps these for each thread
//! separately:
//!
//! 1. `CLONE_FS` is unshared, so that a thread has a umask of its own. The source then sees the caller's umask, and
//!    leaves it out where the directory has a default ACL.
//! 2. `SECBIT_NO_SETUID_FIXUP` keeps a change of `fsuid` from changing capabilities.
//! 3. `CAP_SYS_RESOURCE` is dropped, so that blocks reserved for root stay reserved, also for what the kernel writes through a
//!    backing file that the thread has registered.
//!
//! The server of a source on another machine checks permissions itself: it may map root to an unprivileged user. So there the
//! session executes a whole request with its caller's ids and groups.

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

/// Makes the calling thread ready to act for callers. What this process may not do is left out: then the source
/// checks permissions once more, which can only refuse more.
pub fn begin_thread() {
    // SAFETY: the thread has no working directory, root or umask that another relies on.
    let _shared = unsafe { rustix::thread::unshare_unsafe(rustix::thread::UnshareFlags::FS) };
    // A process that is confined has set it already, and may not set it again.
    let _ = set_capabilities_secure_bits(CapabilitiesSecureBits::NO_SETUID_FIXUP);
    if let Ok(mut own) = capabilities(None) {
        own.effective -= CapabilitySet::SYS_RESOURCE;
        // Putting down what one has is always allowed.
        let _ = set_capabilities(None, own);
    }
}

/// Runs `create` with the caller's uid, gid and umask.
pub fn acting_for<T>(caller: Caller, umask: u32, create: impl FnOnce() -> T) -> T {
    // The umask is this thread's own, and only this changes it.
    if UMASK.replace(Some(umask)) != Some(umask) {
        rustix::process::umask(Mode::from_raw_mode(umask));
    }
    let _own = AssumedIdentity::of(caller.uid, caller.gid);
    create()
}

/// The users that a source on another machine sees.
pub struct Identities(Mutex<Credentials>);

impl Identities {
    /// Callers appear there as `act_as` says.
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

thread_local! {
    /// The umask of the calling thread, once it was set.
    static UMASK: Cell<Option<u32>> = const { Cell::new(None) };
    /// The ids that the calling thread acts with: podfs itself is root.
    static ACTING: Cell<(u32, u32)> = const { Cell::new((0, 0)) };
    /// The groups that it has besides, once they were set.
    static GROUPS: RefCell<Option<Vec<u32>>> = const { RefCell::new(None) };
}

/// Another identity, given back when this is dropped.
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

/// Returns the ids that the thread had before.
fn act_as(uid: u32, gid: u32) -> (u32, u32) {
    let before = ACTING.replace((uid, gid));
    // The group first: changing it takes a privilege.
    if before.1 != gid {
        nix::unistd::setfsgid(nix::unistd::Gid::from_raw(gid));
    }
    if before.0 != uid {
        nix::unistd::setfsuid(nix::unistd::Uid::from_raw(uid));
    }
    before
}

/// Sets the groups of the calling thread alone. Where the kernel refuses that, the source sees groups that are not the caller's,
/// and can only refuse more: podfs has none that matter.
fn set_groups(groups: Vec<u32>) {
    GROUPS.with_borrow_mut(|own| {
        if own.as_ref() != Some(&groups) {
            let ids: Vec<_> = groups.iter().copied().map(Gid::from_raw_unchecked).collect();
            let _ = set_thread_groups(&ids);
            *own = Some(groups);
        }
    });
}
