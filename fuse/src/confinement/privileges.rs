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
    // Handing files to the kernel (`FUSE_DEV_IOC_BACKING_OPEN`), `trusted.` attributes, security labels.
    CapabilitySet::SYS_ADMIN,
    // `open_by_handle_at`, and `linkat` of a file that is only known as a descriptor.
    CapabilitySet::DAC_READ_SEARCH,
    // The kernel has checked the caller's permissions already; the source is not to check those of the server.
    CapabilitySet::DAC_OVERRIDE,
    // Modes, times and `O_NOATIME` of files that belong to others; removing them from sticky directories.
    CapabilitySet::FOWNER,
    // Owners.
    CapabilitySet::CHOWN,
    // Setuid and setgid stay where the kernel has decided that they do.
    CapabilitySet::FSETID,
    // Creating files as the caller: `setfsuid`.
    CapabilitySet::SETUID,
    // And `setfsgid`.
    CapabilitySet::SETGID,
    // Devices.
    CapabilitySet::MKNOD,
    // The attribute `security.capability`.
    CapabilitySet::SETFCAP,
];

/// The first of the uids and gids that servers have. From here to 2147483647, no user of a host and no container with
/// a user namespace has any, by the conventions of systemd.
const FIRST_ID: u32 = 0x7000_0000;
/// The overflow uid, for a user namespace that has no others.
const NOBODY: u32 = 65534;

/// Memory can be locked and threads can be started from now on, as far as this process may decide on it.
pub fn raise_limits() {
    for limit in [Resource::RLIMIT_MEMLOCK, Resource::RLIMIT_NPROC] {
        let _as_it_was = setrlimit(limit, RLIM_INFINITY, RLIM_INFINITY);
    }
}

/// No change of uid gives or takes capabilities from now on, and root has no more of them than others.
///
/// # Errors
/// Without `CAP_SETPCAP`.
pub fn fix_capabilities() -> io::Result<()> {
    use CapabilitiesSecureBits as Bits;
    let fixed = Bits::NO_SETUID_FIXUP | Bits::NO_ROOT | Bits::NO_CAP_AMBIENT_RAISE;
    set_capabilities_secure_bits(fixed).or_else(|errno| {
        // The next best: the first change of uid leaves what may be needed.
        set_keep_capabilities(true)?;
        Err(errno.into())
    })
}

/// Takes a uid and a gid that no other process within its sight has, so that it can neither signal nor trace any, nor be
/// counted with any. The number is made of the process id, which is this process's alone in its pid namespace. It stays so for
/// servers that are clones of this one, since their keepers are in its process group.
///
/// # Errors
/// Without `CAP_SETUID` and `CAP_SETGID`.
pub fn give_up_root() -> io::Result<()> {
    set_thread_groups(&[])?;
    let own = FIRST_ID | rustix::process::getpid().as_raw_pid().cast_unsigned();
    // A user namespace may not have this one.
    become_user(own).or_else(|_| become_user(NOBODY))?;
    Ok(())
}

fn become_user(id: u32) -> Result<(), Errno> {
    let (uid, gid) = (Uid::from_raw(id), Gid::from_raw(id));
    set_thread_res_gid(gid, gid, gid)?;
    set_thread_res_uid(uid, uid, uid)
}

/// Keeps the capabilities that `profile` needs, as far as there are any, and gives up all others for good.
///
/// # Errors
/// When the kernel refuses.
pub fn give_up_capabilities(profile: Profile) -> io::Result<()> {
    let needed: CapabilitySet = match profile {
        Profile::Projection | Profile::Audit => CapabilitySet::empty(),
        Profile::Passthrough | Profile::Rings => FOR_THE_HOST.iter().copied().collect(),
    };
    // The memory of this process is locked, what comes later included: under a limit, allocations would begin to fail.
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

/// Without it, a program that is executed could be given what was given up. Needs `CAP_SETPCAP`.
fn empty_bounding_set() -> Result<(), Errno> {
    if !capabilities(None)?.effective.contains(CapabilitySet::SETPCAP) {
        // No program is executed, and none could gain anything: there are no new privileges.
        return Ok(());
    }
    for number in 0..u64::BITS {
        let one = CapabilitySet::from_bits_retain(1 << number);
        match remove_capability_from_bounding_set(one) {
            // The kernel has no more of them.
            Err(Errno::INVAL) => break,
            removed => removed?,
        }
    }
    Ok(())
}
