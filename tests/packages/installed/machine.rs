//! A machine of its own for each test: a fresh Debian in namespaces of its own, with systemd as its first process, or with
//! none as in a container. What happens in it changes no file outside, and ends with it.

use std::env;
use std::fs;
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use podfs_fuse::mount::table::mounts;
use tempfile::TempDir;

use crate::common::eventually;

/// The script of a machine's first process.
const BOOT: &str = include_str!("boot");

/// The program of a machine's first process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Init {
    Systemd,
    Nothing,
}

/// A running machine. It is switched off when dropped.
pub struct Machine {
    unshare: Child,
    init: Pid,
    cgroup: PathBuf,
    directory: TempDir,
}

/// The outcome of a command in a machine.
#[derive(Debug)]
pub struct Said {
    pub code: Option<i32>,
    pub out: String,
    pub err: String,
}

impl Machine {
    /// Starts a machine.
    ///
    /// # Errors
    /// When this host lacks a requirement, such as the unpacked Debian or cgroups of version 2.
    pub fn start(init: Init) -> Result<Machine, String> {
        let tree =
            Path::new(env!("CARGO_TARGET_TMPDIR")).parent().expect("it is in the target directory").join("debian");
        if !tree.exists() {
            return Err(format!("there is no {}", tree.display()));
        }
        let cgroups = mounts().expect("a mount table").into_iter().find(|mounted| mounted.fs_type == "cgroup2");
        let cgroups = cgroups.ok_or("no cgroups of version 2 are mounted")?.at;
        let directory = TempDir::with_prefix("podfs-test-").expect("a directory");
        let cgroup = cgroups.join(directory.path().file_name().expect("a name"));
        fs::create_dir(&cgroup).map_err(|error| format!("no cgroup can be made in {}: {error}", cgroups.display()))?;
        fs::write(directory.path().join("boot"), BOOT).expect("written");
        let at = directory.path().join("at");
        fs::create_dir(&at).expect("a directory");
        let mut command = Command::new("unshare");
        command.args([
            "--fork",
            "--kill-child",
            "--pid",
            "--mount",
            "--propagation",
            "private",
            "--uts",
            "--ipc",
            "--net",
        ]);
        command.arg("sh").arg(directory.path().join("boot")).args([&tree, &at, &cgroup]);
        command.arg(if init == Init::Systemd { "systemd" } else { "none" });
        let unshare = command.stdin(Stdio::null()).spawn().expect("unshare runs");
        let mut machine = Machine { unshare, init: Pid::from_raw(0), cgroup, directory };
        eventually("the machine has a first process", || {
            machine.init = machine.first().unwrap_or(machine.init);
            machine.init.as_raw() != 0
        });
        machine.wait_up(init);
        Ok(machine)
    }

    /// The process that is the first one inside.
    fn first(&self) -> Option<Pid> {
        let listed = |at: &Path| fs::read_to_string(at.join("cgroup.procs")).unwrap_or_default();
        // systemd goes to a cgroup of its own.
        let all = listed(&self.cgroup) + &listed(&self.cgroup.join("init.scope"));
        all.lines().next()?.parse().ok().map(Pid::from_raw)
    }

    #[track_caller]
    fn wait_up(&self, init: Init) {
        let is_up = match init {
            Init::Systemd => {
                "[ -e /run/machine ] && case $(systemctl is-system-running --wait) in running | degraded) ;; *) exit 1 ;; esac"
            }
            Init::Nothing => "[ -e /run/machine ]",
        };
        eventually("the machine is up", || self.command(is_up).output().is_ok_and(|done| done.status.success()));
    }

    /// A script that runs inside, from the root directory.
    pub fn command(&self, script: &str) -> Command {
        let mut command = Command::new("nsenter");
        command.arg(format!("--target={}", self.init)).args(["--all", "--root", "--wd", "sh", "-euc", script]);
        command.env_clear().stdin(Stdio::null());
        for (name, value) in [("PATH", "/usr/sbin:/usr/bin:/sbin:/bin"), ("LANG", "C.UTF-8"), ("HOME", "/root")] {
            command.env(name, value);
        }
        command.env("DEBIAN_FRONTEND", "noninteractive");
        command
    }

    /// Runs a script inside to its end.
    #[track_caller]
    pub fn run(&self, script: &str) -> Said {
        // `timeout` ends a command that hangs.
        let script = format!("exec timeout --kill-after=1 60 sh -euc '{}'", script.replace('\'', r"'\''"));
        let done = self.command(&script).output().expect("nsenter runs");
        assert_eq!(done.status.signal(), None, "nsenter is not killed");
        let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
        Said { code: done.status.code(), out: text(&done.stdout), err: text(&done.stderr) }
    }

    /// Runs a script that succeeds, and returns its output without the last newline.
    #[track_caller]
    pub fn does(&self, script: &str) -> String {
        let Said { code, out, err } = self.run(script);
        assert_eq!(code, Some(0), "{script}\n{out}{err}");
        out.trim_end_matches('\n').to_owned()
    }

    /// Waits until a script succeeds.
    #[track_caller]
    pub fn eventually(&self, script: &str) {
        eventually(script, || self.run(script).code == Some(0));
    }

    /// The path on the host for a path in the machine.
    pub fn path(&self, inside: &str) -> PathBuf {
        PathBuf::from(format!("/proc/{}/root{inside}", self.init))
    }

    /// Writes a file inside, with the directories that lead to it.
    #[track_caller]
    pub fn write(&self, inside: &str, content: impl AsRef<[u8]>) {
        let path = self.path(inside);
        fs::create_dir_all(path.parent().expect("a parent")).expect("directories");
        fs::write(path, content).expect("written");
    }

    /// Puts a file of the host inside.
    #[track_caller]
    pub fn copy(&self, from: &Path, inside: &str) {
        fs::copy(from, self.path(inside)).unwrap_or_else(|error| panic!("{}: {error}", from.display()));
    }
}

impl Drop for Machine {
    fn drop(&mut self) {
        if self.init.as_raw() != 0 {
            let _ = kill(self.init, Signal::SIGKILL);
        }
        let _ = self.unshare.kill();
        let _ = self.unshare.wait();
        // Without its first process, the kernel kills all others; the cgroups go when they are empty.
        let is_gone = || {
            remove_cgroups(&self.cgroup);
            !self.cgroup.exists()
        };
        let deadline = std::time::Instant::now() + crate::common::TIMEOUT;
        while !is_gone() && std::time::Instant::now() < deadline {
            std::thread::sleep(std::time::Duration::from_millis(5));
        }
        if self.cgroup.exists() {
            eprintln!("the cgroup {} of {} stays", self.cgroup.display(), self.directory.path().display());
        }
    }
}

/// Removes a cgroup and those below it that are empty.
fn remove_cgroups(top: &Path) {
    for entry in fs::read_dir(top).into_iter().flatten().flatten() {
        if entry.file_type().is_ok_and(|kind| kind.is_dir()) {
            remove_cgroups(&entry.path());
        }
    }
    let _ = fs::remove_dir(top);
}
