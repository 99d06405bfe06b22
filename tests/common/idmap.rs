//! ID-mapped mounts, as a runtime makes them for pods with `hostUsers: false`.

use std::fs::{self, File};
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use nix::sched::{CloneFlags, unshare};
use rustix::fs::CWD;
use rustix::mount::{OpenTreeFlags, open_tree};

/// A clone of the mount at `path` that shows every id 100000 higher.
pub fn id_mapped_clone(path: &Path) -> OwnedFd {
    let flags = OpenTreeFlags::OPEN_TREE_CLONE | OpenTreeFlags::OPEN_TREE_CLOEXEC;
    let clone = open_tree(CWD, path, flags).expect("a clone");
    let namespace = user_namespace();
    let attributes = libc::mount_attr {
        attr_set: libc::MOUNT_ATTR_IDMAP,
        attr_clr: 0,
        propagation: 0,
        userns_fd: namespace.as_raw_fd().try_into().expect("a descriptor"),
    };
    // SAFETY: the path is an empty C string, the struct outlives the call, and its size is given.
    let result = unsafe {
        libc::syscall(
            libc::SYS_mount_setattr,
            clone.as_raw_fd(),
            c"".as_ptr(),
            libc::AT_EMPTY_PATH,
            &raw const attributes,
            size_of::<libc::mount_attr>(),
        )
    };
    assert_eq!(result, 0, "{}", std::io::Error::last_os_error());
    clone
}

/// A user namespace whose ids start at 100000 outside.
fn user_namespace() -> File {
    let mut command = Command::new("cat");
    // SAFETY: unshare is async-signal-safe.
    unsafe { command.pre_exec(|| unshare(CloneFlags::CLONE_NEWUSER).map_err(std::io::Error::from)) };
    let mut child = command.stdin(Stdio::piped()).spawn().expect("a process in a user namespace");
    let process = PathBuf::from(format!("/proc/{}", child.id()));
    let namespace = ["uid_map", "gid_map"]
        .iter()
        .try_for_each(|map| fs::write(process.join(map), "0 100000 65536\n"))
        .and_then(|()| File::open(process.join("ns/user")));
    drop(child.stdin.take());
    child.wait().expect("cat ends with its input");
    namespace.expect("a namespace")
}
