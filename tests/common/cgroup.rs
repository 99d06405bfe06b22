//! Cgroups that tests make.

use std::fs::{self, File};
use std::os::fd::OwnedFd;
use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::process::Command;

use podfs_fuse::mount::table::mounts;

use super::eventually;

/// A cgroup that is removed when the test ends.
pub struct Cgroup {
    directory: PathBuf,
    /// Its path in `/proc/PID/cgroup`.
    pub path: String,
}

impl Cgroup {
    /// An empty cgroup; `None` on machines without cgroups of version 2.
    pub fn new(name: &str) -> Option<Self> {
        let top = mounts().expect("a table").into_iter().find(|mounted| mounted.fs_type == "cgroup2")?.at;
        let name = format!("podfs-test-{}-{name}", std::process::id());
        let directory = top.join(&name);
        fs::create_dir(&directory).ok()?;
        Some(Self { directory, path: format!("/{name}") })
    }

    /// Makes a command run in the cgroup.
    pub fn holds(&self, command: &mut Command) {
        let members = File::options().write(true).open(self.directory.join("cgroup.procs")).expect("a file");
        let members = OwnedFd::from(members);
        // SAFETY: the call is async-signal-safe.
        unsafe { command.pre_exec(move || Ok(rustix::io::write(&members, b"0").map(drop)?)) };
    }

    /// Kills every process in the cgroup at once.
    pub fn kill(&self) {
        fs::write(self.directory.join("cgroup.kill"), "1").expect("Linux 5.14 and newer kill a cgroup");
    }
}

impl Drop for Cgroup {
    fn drop(&mut self) {
        // A second panic would abort the test program, which leaves the mounts and processes of all its tests.
        if std::thread::panicking() {
            let _ = fs::remove_dir(&self.directory);
        } else {
            eventually("the cgroup is empty", || fs::remove_dir(&self.directory).is_ok());
        }
    }
}
