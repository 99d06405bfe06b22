//! A machine for each test: a fresh Debian in new namespaces, with systemd as its first process, or without an init as in a
//! container. Its processes change no file of the host, and end with the machine.

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
use crate::common::turn::Turn;

/// The script of a machine's first process.
const BOOT: &str = include_str!("boot");

/// The program of a machine's first process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Init {
    Systemd,
    Nothing,
}

/// A running machine. Dropping it ends all its processes.
pub struct Machine {
    unshare: Child,
    init: Pid,
    cgroup: PathBuf,
    directory: TempDir,
    _turn: Turn,
}

/// The outcome of a script in a machine.
#[derive(Debug)]
pub struct ScriptOutcome {
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
        let tree = Path::new(env!("CARGO_TARGET_TMPDIR")).parent().expect("the target directory").join("debian");
        if !tree.exists() {
            return Err(format!("there is no {}", tree.display()));
        }
        let turn = Turn::of_machine();
        let cgroups = mounts().expect("a mount table").into_iter().find(|mount| mount.fs_type == "cgroup2");
        let cgroups = cgroups.ok_or("no cgroups of version 2 are mounted")?.at;
        let directory = TempDir::with_prefix("podfs-test-").expect("a directory");
        let cgroup = cgroups.join(directory.path().file_name().expect("a name"));
        fs::create_dir(&cgroup).map_err(|error| format!("no cgroup can be made in {}: {error}", cgroups.display()))?;
        fs::write(directory.path().join("boot"), BOOT).expect("written");
        let mount_point = directory.path().join("at");
        fs::create_dir(&mount_point).expect("a directory");
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
        command.arg("sh").arg(directory.path().join("boot")).args([&tree, &mount_point, &cgroup]);
        command.arg(if init == Init::Systemd { "systemd" } else { "none" });
        let unshare = command.stdin(Stdio::null()).spawn().expect("unshare runs");
        let mut machine = Machine { unshare, init: Pid::from_raw(0), cgroup, directory, _turn: turn };
        eventually("the machine has a first process", || {
            machine.init = machine.first_process().unwrap_or(machine.init);
            machine.init.as_raw() != 0
        });
        machine.wait_up(init);
        Ok(machine)
    }

    /// The first process of the machine, with its pid on the host.
    fn first_process(&self) -> Option<Pid> {
        let processes = |cgroup: &Path| fs::read_to_string(cgroup.join("cgroup.procs")).unwrap_or_default();
        // systemd moves itself to the cgroup `init.scope`.
        let pids = processes(&self.cgroup) + &processes(&self.cgroup.join("init.scope"));
        pids.lines().next()?.parse().ok().map(Pid::from_raw)
    }

    #[track_caller]
    fn wait_up(&self, init: Init) {
        let is_up = match init {
            Init::Systemd => {
                "[ -e /run/machine ] && case $(systemctl is-system-running --wait) in running | degraded) ;; *) exit 1 ;; esac"
            }
            Init::Nothing => "[ -e /run/machine ]",
        };
        eventually("the machine is up", || self.command(is_up).output().is_ok_and(|output| output.status.success()));
    }

    /// A command that runs a script in the machine, in the root directory.
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

    /// Runs a script in the machine to its end.
    #[track_caller]
    pub fn run(&self, script: &str) -> ScriptOutcome {
        // `timeout` ends a command that hangs.
        let script = format!("exec timeout --kill-after=1 60 sh -euc '{}'", script.replace('\'', r"'\''"));
        let output = self.command(&script).output().expect("nsenter runs");
        assert_eq!(output.status.signal(), None, "nsenter is not killed");
        let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
        ScriptOutcome { code: output.status.code(), out: text(&output.stdout), err: text(&output.stderr) }
    }

    /// Runs a script that must succeed. Returns its output without the last newlines.
    #[track_caller]
    pub fn output_of(&self, script: &str) -> String {
        let ScriptOutcome { code, out, err } = self.run(script);
        assert_eq!(code, Some(0), "{script}\n{out}{err}");
        out.trim_end_matches('\n').to_owned()
    }

    /// Waits until a script succeeds.
    #[track_caller]
    pub fn eventually(&self, script: &str) {
        eventually(script, || self.run(script).code == Some(0));
    }

    /// The path on the host for a path in the machine.
    pub fn path(&self, path: &str) -> PathBuf {
        PathBuf::from(format!("/proc/{}/root{path}", self.init))
    }

    /// Writes a file in the machine, and creates the missing directories above it.
    #[track_caller]
    pub fn write(&self, path: &str, content: impl AsRef<[u8]>) {
        let path = self.path(path);
        fs::create_dir_all(path.parent().expect("a parent")).expect("directories");
        fs::write(path, content).expect("written");
    }

    /// Copies a file of the host to a path in the machine.
    #[track_caller]
    pub fn copy(&self, from: &Path, to: &str) {
        fs::copy(from, self.path(to)).unwrap_or_else(|error| panic!("{}: {error}", from.display()));
    }
}

impl Drop for Machine {
    fn drop(&mut self) {
        if self.init.as_raw() != 0 {
            let _ = kill(self.init, Signal::SIGKILL);
        }
        let _ = self.unshare.kill();
        let _ = self.unshare.wait();
        // When the first process ends, the kernel kills all other processes of the PID namespace. The cgroups can be removed
        // when they are empty.
        let is_gone = || {
            remove_cgroups(&self.cgroup);
            !self.cgroup.exists()
        };
        let deadline = std::time::Instant::now() + crate::common::TIMEOUT;
        while !is_gone() && std::time::Instant::now() < deadline {
            std::thread::sleep(std::time::Duration::from_millis(5));
        }
        if self.cgroup.exists() {
            eprintln!("cannot remove the cgroup {} of {}", self.cgroup.display(), self.directory.path().display());
        }
    }
}

/// Removes the cgroup `top` and the cgroups below it, as far as they have no processes.
fn remove_cgroups(top: &Path) {
    for entry in fs::read_dir(top).into_iter().flatten().flatten() {
        if entry.file_type().is_ok_and(|kind| kind.is_dir()) {
            remove_cgroups(&entry.path());
        }
    }
    let _ = fs::remove_dir(top);
}
