//! ID-mapped mounts, as a runtime makes them for pods with `hostUsers: false`.

use std::fs::{self, File};
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

use nix::sched::{CloneFlags, setns, unshare};
use rustix::fs::CWD;
use rustix::mount::{OpenTreeFlags, open_tree};

use super::caller::Caller;

/// The first id of the pod: a kubelet gives each pod 65536 of them, from a multiple of that on.
pub const FIRST_ID: u32 = 2 << 16;

/// A user namespace of a pod, and a volume as it is shown there.
pub struct Inside {
    namespace: File,
    volume: OwnedFd,
}

impl Inside {
    /// A new namespace with the volume at `path`.
    pub fn of(path: &Path) -> Self {
        let namespace = user_namespace();
        Self { volume: clone_for(path, &namespace), namespace }
    }

    /// Runs a shell script with the volume as working directory, in the user namespace, as `caller`. The caller's ids
    /// are ids of the namespace.
    pub fn run(&self, caller: Caller, script: &str) -> Output {
        let mut command = Command::new("sh");
        command.args(["-c", script]);
        let (namespace, volume) = (self.namespace.try_clone().expect("a copy"), self.volume.as_raw_fd());
        let enter = move || {
            // SAFETY: fchdir takes a number. The descriptor is open until the process is started.
            if unsafe { libc::fchdir(volume) } != 0 {
                return Err(io::Error::last_os_error());
            }
            setns(&namespace, CloneFlags::CLONE_NEWUSER)?;
            caller.become_this();
            Ok(())
        };
        // SAFETY: the closure makes only system calls.
        unsafe { command.pre_exec(enter) };
        command.output().expect("sh runs")
    }

    /// Runs a script as [`Self::run`] does, and returns its standard output. Fails the test if the script fails.
    #[track_caller]
    pub fn get(&self, caller: Caller, script: &str) -> String {
        let output = self.run(caller, script);
        assert!(output.status.success(), "{script}: {}", String::from_utf8_lossy(&output.stderr));
        String::from_utf8(output.stdout).expect("text")
    }
}

/// A clone of the mount at `path` that shows every id [`FIRST_ID`] higher.
pub fn id_mapped_clone(path: &Path) -> OwnedFd {
    clone_for(path, &user_namespace())
}

fn clone_for(path: &Path, namespace: &File) -> OwnedFd {
    let flags = OpenTreeFlags::OPEN_TREE_CLONE | OpenTreeFlags::OPEN_TREE_CLOEXEC;
    let clone = open_tree(CWD, path, flags).expect("a clone");
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
    assert_eq!(result, 0, "{}", io::Error::last_os_error());
    clone
}

/// A user namespace whose ids start at [`FIRST_ID`] outside.
fn user_namespace() -> File {
    let mut command = Command::new("cat");
    // SAFETY: unshare is async-signal-safe.
    unsafe { command.pre_exec(|| unshare(CloneFlags::CLONE_NEWUSER).map_err(io::Error::from)) };
    let mut child = command.stdin(Stdio::piped()).spawn().expect("a process in a user namespace");
    let process = PathBuf::from(format!("/proc/{}", child.id()));
    let namespace = ["uid_map", "gid_map"]
        .iter()
        .try_for_each(|map| fs::write(process.join(map), format!("0 {FIRST_ID} 65536\n")))
        .and_then(|()| File::open(process.join("ns/user")));
    drop(child.stdin.take());
    child.wait().expect("cat ends with its input");
    namespace.expect("a namespace")
}
