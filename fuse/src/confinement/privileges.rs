//! Limits, uid and capabilities.

use std::io;

use nix::sys::resource::{RLIM_INFINITY, Resource, getrlimit, setrlimit};
use rustix::fs::{Gid, Uid};
use rustix::io::Errno;
use rustix::thread::{
    CapabilitiesSecureBits, CapabilitySet, CapabilitySets, capabilities, clear_ambient_capability_set,
    remove_capability_from_bounding_set, set_capabilities, set_capabilities_secure_bits, set_keep_capabilities,
    set_thread_groups, set_thread_res_gid, set_thread_res_uid,
};

use super::Profile;

/// The capabilities of a server that shows directories of the host.
const FOR_THE_HOST: &[CapabilitySet] = &[
    // `FUSE_DEV_IOC_BACKING_OPEN`, `trusted.` attributes, security labels.
    CapabilitySet::SYS_ADMIN,
    // open_by_handle_at(2), and linkat(2) of a descriptor.
    CapabilitySet::DAC_READ_SEARCH,
    // The kernel has checked the caller's permissions already. The source must not check those of the server.
    CapabilitySet::DAC_OVERRIDE,
    // Modes, times and `O_NOATIME` of files of other users, and their removal from sticky directories.
    CapabilitySet::FOWNER,
    // chown(2).
    CapabilitySet::CHOWN,
    // The kernel has decided already whether setuid and setgid bits stay.
    CapabilitySet::FSETID,
    // New files of the caller's user: setfsuid(2).
    CapabilitySet::SETUID,
    // New files of the caller's group: setfsgid(2).
    CapabilitySet::SETGID,
    // Device files.
    CapabilitySet::MKNOD,
    // The attribute `security.capability`.
    CapabilitySet::SETFCAP,
];

/// The first uid and gid of servers. By the conventions of systemd, ids from here to 2147483647 belong to no user of a host and
/// to no container with a user namespace.
const FIRST_ID: u32 = 0x7000_0000;
/// The overflow uid, for a user namespace that does not map the server's uid.
const OVERFLOW_ID: u32 = 65534;

/// Removes the limits on locked memory and threads, if this process may.
pub fn raise_limits() {
    for limit in [Resource::RLIMIT_MEMLOCK, Resource::RLIMIT_NPROC] {
        let _as_it_was = setrlimit(limit, RLIM_INFINITY, RLIM_INFINITY);
    }
}

/// Makes capabilities independent of uids: no change of uid adds or removes capabilities, and root has no special ones.
///
/// # Errors
/// Without `CAP_SETPCAP`.
pub fn fix_capabilities() -> io::Result<()> {
    use CapabilitiesSecureBits as Bits;
    let fixed = Bits::NO_SETUID_FIXUP | Bits::NO_ROOT | Bits::NO_CAP_AMBIENT_RAISE;
    set_capabilities_secure_bits(fixed).or_else(|errno| {
        // At least, the first change of uid keeps the capabilities.
        set_keep_capabilities(true)?;
        Err(errno.into())
    })
}

/// Changes to a uid and a gid that no other process in its pid namespace has. So it cannot signal or trace another process, and
/// shares no limits with one. The ids are made from the process id. Servers that are clones of this one have the same ids; no
/// process gets this process id meanwhile, because their keepers are in its process group.
///
/// # Errors
/// Without `CAP_SETUID` and `CAP_SETGID`.
pub fn give_up_root() -> io::Result<()> {
    set_thread_groups(&[])?;
    let own = FIRST_ID | rustix::process::getpid().as_raw_pid().cast_unsigned();
    // A user namespace may not map this id.
    become_user(own).or_else(|_| become_user(OVERFLOW_ID))?;
    Ok(())
}

fn become_user(id: u32) -> Result<(), Errno> {
    let (uid, gid) = (Uid::from_raw(id), Gid::from_raw(id));
    set_thread_res_gid(gid, gid, gid)?;
    set_thread_res_uid(uid, uid, uid)
}

/// Gives up all capabilities for ever, except those of `profile` that the process has.
///
/// # Errors
/// When the kernel refuses.
pub fn give_up_capabilities(profile: Profile) -> io::Result<()> {
    let needed: CapabilitySet = match profile {
        Profile::Projection | Profile::Audit => CapabilitySet::empty(),
        Profile::Passthrough | Profile::Rings => FOR_THE_HOST.iter().copied().collect(),
    };
    // This process locks its present and later memory, so with a limit, allocations would fail.
    let for_memory = if memory_is_limited()? { CapabilitySet::IPC_LOCK } else { CapabilitySet::empty() };
    let kept = capabilities(None)?.permitted & (needed | for_memory);
    empty_bounding_set()?;
    let _none_before_linux_4_3 = clear_ambient_capability_set();
    let sets = CapabilitySets { effective: kept, permitted: kept, inheritable: CapabilitySet::empty() };
    Ok(set_capabilities(None, sets)?)
}

fn memory_is_limited() -> io::Result<bool> {
    Ok(getrlimit(Resource::RLIMIT_MEMLOCK)?.0 != RLIM_INFINITY)
}

/// Empties the bounding set, so that execve(2) cannot add capabilities again. Needs `CAP_SETPCAP`.
fn empty_bounding_set() -> Result<(), Errno> {
    if !capabilities(None)?.effective.contains(CapabilitySet::SETPCAP) {
        // `no_new_privs` has the same effect here, and the server executes no program.
        return Ok(());
    }
    for number in 0..u64::BITS {
        let one = CapabilitySet::from_bits_retain(1 << number);
        match remove_capability_from_bounding_set(one) {
            // The kernel has no more capabilities.
            Err(Errno::INVAL) => break,
            removed => removed?,
        }
    }
    Ok(())
}
