//! The rights of a caller that the kernel has not checked already.

use std::fs;
use std::path::Path;

use super::Caller;
use super::status::ThreadStatus;

/// Whether the caller has `CAP_SYS_ADMIN`, and not only in a user namespace of its own. On an ID-mapped mount the kernel does
/// not tell the caller's user, so this looks at the process.
pub fn administers_system(caller: Caller) -> bool {
    const SYS_ADMIN: u64 = 1 << 21;
    let effective = ThreadStatus::of(caller.pid).map_or(0, |status| status.bits("CapEff"));
    let maps = || maps_of(&caller.pid.to_string());
    effective & SYS_ADMIN != 0 && maps().is_some_and(|maps| Some(maps) == maps_of("self"))
}

/// Whether the caller is in the group `gid`. A caller that cannot be looked at is in none.
pub fn is_in_group(caller: Caller, gid: u32) -> bool {
    let Some(status) = ThreadStatus::of(caller.pid) else { return false };
    // The fourth is the one for files (`fsgid`).
    status.numbers("Gid").skip(3).chain(status.numbers("Groups")).any(|group| group == gid)
}

/// Which ids of the system there are in the user namespace of a process. Another namespace than this process's own shows
/// other maps, unless it was given every user, every group and every project of the system on purpose. The namespaces
/// themselves could be compared only with `CAP_SYS_PTRACE`.
fn maps_of(process: &str) -> Option<[Vec<u8>; 3]> {
    let directory = Path::new("/proc").join(process);
    let map = |name| fs::read(directory.join(name)).ok();
    Some([map("uid_map")?, map("gid_map")?, map("projid_map")?])
}
