//! Makes the kernel drop the inodes and names of one file system from its caches, as it does when memory gets scarce.

use std::path::Path;

use rustix::fs::CWD;
use rustix::mount::{FsPickFlags, fsconfig_reconfigure, fspick};

/// Lets the kernel forget all names and inodes of the file system mounted at `mount_point` that no process uses. A remount
/// does that (`reconfigure_super` in fs/super.c), and leaves other file systems and their caches alone.
pub fn forget_unused(mount_point: &Path) {
    let picked = fspick(CWD, mount_point, FsPickFlags::FSPICK_CLOEXEC).expect("a mount point");
    fsconfig_reconfigure(&picked).expect("a remount that changes nothing");
}
