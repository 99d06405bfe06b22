//! Makes the kernel drop the inodes and names of one file system from its caches, as the kernel does when memory gets scarce.

use std::path::Path;

use rustix::fs::CWD;
use rustix::mount::{FsPickFlags, fsconfig_reconfigure, fspick};

/// Makes the kernel forget all unused names and inodes of the file system mounted at `mount_point`. A remount does that
/// (`reconfigure_super` in fs/super.c). It does not affect the caches of other file systems.
pub fn forget_unused(mount_point: &Path) {
    let picked = fspick(CWD, mount_point, FsPickFlags::FSPICK_CLOEXEC).expect("a mount point");
    fsconfig_reconfigure(&picked).expect("a remount that changes nothing");
}
