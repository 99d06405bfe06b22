//! Rights of a caller that the kernel does not check.

use std::fs;
use std::path::Path;

use rustix::thread::CapabilitySet;

use super::Caller;
use super::status::ThreadStatus;

/// Whether the caller has this capability in the server's user namespace. It reads `/proc`, because requests from an ID-mapped
/// mount do not have the caller's user.
pub fn has_capability(caller: Caller, capability: CapabilitySet) -> bool {
    let effective = ThreadStatus::of(caller.pid).map_or(0, |status| status.bits("CapEff"));
    effective & capability.bits() != 0 && has_namespace_of_server(caller)
}

/// Whether the caller is in the server's user namespace. Returns `false` if podfs cannot read its maps.
pub fn has_namespace_of_server(caller: Caller) -> bool {
    maps_of(&caller.pid.to_string()).is_some_and(|maps| Some(maps) == maps_of("self"))
}

/// Whether the caller acts as the user `uid`. Returns `false` if podfs cannot read its status. The kernel sends the uid only with
/// requests that make files.
pub fn is_user(caller: Caller, uid: u32) -> bool {
    // The fourth id is that for files (`fsuid`).
    ThreadStatus::of(caller.pid).is_some_and(|status| status.numbers("Uid").nth(3) == Some(uid))
}

/// Whether the caller is in the group `gid`. Returns `false` if podfs cannot read its status.
pub fn is_in_group(caller: Caller, gid: u32) -> bool {
    let Some(status) = ThreadStatus::of(caller.pid) else { return false };
    // The fourth id is that for files (`fsgid`).
    status.numbers("Gid").skip(3).chain(status.numbers("Groups")).any(|group| group == gid)
}

/// The maps of the user namespace of a process, to compare namespaces: to compare the namespaces themselves needs
/// `CAP_SYS_PTRACE`. Another namespace has other maps, unless it maps every user, group and project of the system.
fn maps_of(process: &str) -> Option<[Vec<u8>; 3]> {
    let directory = Path::new("/proc").join(process);
    let map = |name| fs::read(directory.join(name)).ok();
    Some([map("uid_map")?, map("gid_map")?, map("projid_map")?])
}
