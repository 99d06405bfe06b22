//! Shared parts of the end-to-end tests: manifests in a temporary directory, a running podfs, and guards that remove all mounts
//! and processes, also when a test fails.
#![allow(dead_code, reason = "each test program uses its part")]

pub mod builds;
pub mod caller;
pub mod cgroup;
pub mod chart;
pub mod control;
pub mod file_handle;
pub mod forgetting;
pub mod frozen;
pub mod fuse_user;
pub mod identity;
pub mod idmap;
pub mod io_uring;
pub mod kubelet;
pub mod limit;
pub mod load;
pub mod locker;
pub mod loop_device;
pub mod namespace;
pub mod network;
pub mod node;
pub mod operator;
pub mod outcome;
pub mod own_descriptors;
pub mod packages;
pub mod passthrough;
pub mod running;
pub mod runtime;
pub mod scratch;
pub mod served;
pub mod set_on_drop;
pub mod stoppable;
pub mod stopped;
pub mod terminal;
pub mod tracer;
pub mod tree;
pub mod turn;
pub mod twins;
pub mod undisturbed;
pub mod watch;

use std::collections::BTreeSet;
use std::fs::{self, File};
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::fs::symlink;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use nix::mount::{MntFlags, umount2};
use nix::sys::signal::{SigHandler, Signal, kill};
use nix::unistd::Pid;
use podfs_fuse::mount::table::mounts;
use serde_json::Value;
use tempfile::TempDir;

pub use running::Running;
pub use served::*;

pub const PODFS: &str = env!("CARGO_BIN_EXE_podfs");
/// The program of the server, in the directory of [`PODFS`].
pub const PODFS_FUSE: &str = env!("CARGO_BIN_EXE_podfs-fuse");
/// The program of the supervisors that `podfs node` starts.
pub const PODFS_SUPERVISOR: &str = env!("CARGO_BIN_EXE_podfs-supervisor");

/// The time limit for a wait of a test for something that must happen. On an idle machine, such waits take milliseconds; beside
/// emulated guests and other busy processes, they take seconds, and sometimes much longer.
pub const TIMEOUT: Duration = Duration::from_secs(180);
/// The time after which a call that must not wait for a process counts as one that does.
pub const HANG: Duration = Duration::from_secs(20);
/// A wait that takes longer than this is printed.
const LONG: Duration = Duration::from_secs(5);

/// Waits until `condition` holds.
#[track_caller]
pub fn eventually(what: &str, mut condition: impl FnMut() -> bool) {
    let began = Instant::now();
    while !condition() {
        assert!(began.elapsed() < TIMEOUT, "still not true after {} s: {what}", TIMEOUT.as_secs());
        std::thread::sleep(Duration::from_millis(2));
    }
    if began.elapsed() > LONG {
        println!("it took {:.1} s: {what}", began.elapsed().as_secs_f64());
    }
}

/// A directory with a pod manifest, a directory of objects, and podfs' own directories.
pub struct Fixture {
    directory: TempDir,
}

impl Fixture {
    pub fn new(pod: &str) -> Self {
        Self::new_in(&std::env::temp_dir(), pod)
    }

    /// As [`Self::new`], in the directory `parent`.
    pub fn new_in(parent: &Path, pod: &str) -> Self {
        let fixture = Self { directory: TempDir::with_prefix_in("podfs-test-", parent).expect("a directory") };
        fs::create_dir(fixture.objects()).expect("a directory");
        fixture.write("pod.yaml", pod);
        fixture
    }

    pub fn path(&self, name: &str) -> PathBuf {
        self.directory.path().join(name)
    }

    pub fn pod(&self) -> PathBuf {
        self.path("pod.yaml")
    }

    pub fn objects(&self) -> PathBuf {
        self.path("objects")
    }

    /// Writes a file under a temporary name and renames it, so that podfs never reads a part of the content.
    pub fn write(&self, name: &str, content: &str) {
        let new = self.path(".new");
        fs::write(&new, content).expect("written");
        fs::rename(new, self.path(name)).expect("renamed");
    }

    pub fn remove(&self, name: &str) {
        fs::remove_file(self.path(name)).expect("removed");
    }

    /// `podfs run` on this directory's manifests.
    pub fn command(&self) -> Command {
        self.command_of(Path::new(PODFS))
    }

    /// As [`Self::command`], with the podfs at the path `program`.
    pub fn command_of(&self, program: &Path) -> Command {
        let mut command = Command::new(program);
        command.arg("run").arg("--pod").arg(self.pod()).arg("--objects").arg(self.objects());
        command.arg("--root-dir").arg(self.path("root")).arg("--run-dir").arg(self.path("run"));
        command
    }

    /// Starts podfs and waits until it is ready.
    pub fn run(&self) -> Running {
        let mut running = self.start();
        running.wait_ready();
        running
    }

    /// Starts podfs.
    pub fn start(&self) -> Running {
        self.start_command(self.command())
    }

    pub fn start_command(&self, command: Command) -> Running {
        self.start_with_input(command, Stdio::null())
    }

    /// Starts podfs with this standard input.
    pub fn start_with_input(&self, mut command: Command, input: impl Into<Stdio>) -> Running {
        let (ready, writer) = std::io::pipe().expect("a pipe");
        let writer = OwnedFd::from(writer);
        const READY_FD: i32 = 9;
        command.arg("--ready-fd").arg(READY_FD.to_string());
        let raw = writer.as_raw_fd();
        // SAFETY: both calls are async-signal-safe, and the descriptor is open until the child is started.
        unsafe {
            command.pre_exec(move || {
                // If the pipe already has the number READY_FD, dup2 does nothing, and exec would close the pipe.
                let result =
                    if raw == READY_FD { libc::fcntl(raw, libc::F_SETFD, 0) } else { libc::dup2(raw, READY_FD) };
                if result == -1 { Err(std::io::Error::last_os_error()) } else { Ok(()) }
            });
        }
        let mut running = self.spawn(command.stdin(input));
        running.ready = Some(ready);
        running
    }

    /// Starts a podfs without `--ready-fd`; its output goes to the files `out` and `log`.
    pub fn spawn(&self, command: &mut Command) -> Running {
        let log = self.path("log");
        let append = |path: &Path| File::options().create(true).append(true).open(path).expect("a file");
        let command = self.mark(command).stdout(append(&self.path("out"))).stderr(append(&log));
        let child = outcome::start(command);
        let directory = self.directory.path().to_owned();
        Running { child, is_reaped: false, ready: None, json: Value::Null, log, directory }
    }

    /// Lets [`Self::processes`] find the command and all processes that the command starts. Restores the default disposition
    /// of the signals that end programs: a shell that runs the tests in the background makes the tests ignore SIGINT, and the
    /// command would inherit that.
    pub fn mark<'a>(&self, command: &'a mut Command) -> &'a mut Command {
        // SAFETY: signal(2) is async-signal-safe.
        unsafe {
            command.pre_exec(|| {
                for signal in [Signal::SIGHUP, Signal::SIGINT, Signal::SIGQUIT, Signal::SIGTERM] {
                    nix::sys::signal::signal(signal, SigHandler::SigDfl)?;
                }
                Ok(())
            });
        }
        command.env(MARK, self.directory.path())
    }

    /// The processes that were started with this fixture, and their children.
    pub fn processes(&self) -> Vec<Pid> {
        processes_of(self.directory.path())
    }

    /// Kills every process that was started with this fixture, and waits until all have ended.
    #[track_caller]
    pub fn kill_all(&self) {
        // A supervisor may just have started another server.
        eventually("every process has ended", || {
            kill_all_of(self.directory.path());
            self.processes().is_empty()
        });
    }

    /// Mount points below this directory, outermost first.
    pub fn mounts(&self) -> Vec<PathBuf> {
        mounts_below(self.directory.path())
    }
}

/// The environment variable by which a test recognizes the processes of a fixture. Servers inherit this variable. Its values
/// other than `0` and `full` all have the same effect, so a path does not change what the processes do.
const MARK: &str = "RUST_BACKTRACE";

/// Whether a process of podfs may have this name. A server is executed through a descriptor, so the number of the descriptor is
/// its name until the server sets another one.
fn is_name_of_podfs(name: &str) -> bool {
    name.starts_with("podfs") || name.trim_end().bytes().all(|byte| byte.is_ascii_digit())
}

/// The processes that were started in the fixture at `directory`, and their children.
fn processes_of(directory: &Path) -> Vec<Pid> {
    let mark = format!("{MARK}={}\0", directory.display());
    let of_process = |entry: std::io::Result<fs::DirEntry>| {
        let directory = entry.ok()?.path();
        let pid = directory.file_name()?.to_str()?.parse().ok()?;
        // A read of the environment of a process whose exec hangs would block. Other tests may have such a process.
        let name = fs::read_to_string(directory.join("comm")).ok()?;
        is_name_of_podfs(&name).then_some(())?;
        let environment = fs::read(directory.join("environ")).ok()?;
        environment.windows(mark.len()).any(|part| part == mark.as_bytes()).then_some(Pid::from_raw(pid))
    };
    fs::read_dir("/proc").expect("processes").filter_map(of_process).collect()
}

/// The start time of a process, in clock ticks.
fn start_time(pid: Pid) -> u64 {
    stat_field(pid, 19).unwrap_or_default()
}

/// The parent of a process; process 0, which does not exist, if the process has ended.
fn parent(pid: Pid) -> Pid {
    Pid::from_raw(stat_field(pid, 1).and_then(|parent| i32::try_from(parent).ok()).unwrap_or_default())
}

/// A numeric field of `/proc/PID/stat`. The field after the name of the process, its state, has the index 0
/// (`proc_pid_stat(5)`).
pub fn stat_field(pid: Pid, index: usize) -> Option<u64> {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    stat.rsplit_once(") ")?.1.split(' ').nth(index)?.parse().ok()
}

/// Kills every process of the fixture at `directory`: a server outlives its supervisor.
pub fn kill_all_of(directory: &Path) {
    for pid in processes_of(directory) {
        let _ = kill(pid, Signal::SIGKILL);
    }
}

fn mounts_below(directory: &Path) -> Vec<PathBuf> {
    let directory = directory.canonicalize().unwrap_or_else(|_| directory.to_owned());
    let all = mounts().expect("a mount table").into_iter().map(|mounted| mounted.at);
    all.filter(|at| at.starts_with(&directory)).collect()
}

impl Drop for Fixture {
    fn drop(&mut self) {
        let processes = self.processes();
        let mut cgroups: BTreeSet<_> = processes.iter().copied().filter_map(own_cgroup).collect();
        cgroups.extend(cgroups_of_pods(self.directory.path()));
        // A supervisor may just have started another server.
        let deadline = Instant::now() + TIMEOUT;
        kill_all_of(self.directory.path());
        while !self.processes().is_empty() && Instant::now() < deadline {
            std::thread::sleep(Duration::from_millis(2));
            kill_all_of(self.directory.path());
        }
        unmount_below(self.directory.path());
        // The cgroup of a server is in that of its supervisor, so it is removed first.
        cgroups.iter().rev().for_each(|cgroup| remove_cgroup(cgroup, &processes));
    }
}

/// The cgroup that podfs has made for this server; `None` if the process is in another cgroup.
fn own_cgroup(process: Pid) -> Option<PathBuf> {
    let all = fs::read_to_string(format!("/proc/{process}/cgroup")).ok()?;
    let path = Path::new(all.lines().find_map(|line| line.strip_prefix("0::/"))?);
    let uid = path.file_name()?.to_str()?.strip_prefix("podfs-")?;
    if uid == "supervisors" {
        return None;
    }
    let top = mounts().ok()?.into_iter().find(|mounted| mounted.fs_type == "cgroup2")?;
    Some(top.at.join(path))
}

/// The cgroups that daemons have made for the supervisors of the fixture's pods, and the cgroups of servers in them. They are
/// left when all processes of a pod were killed.
fn cgroups_of_pods(directory: &Path) -> Vec<PathBuf> {
    let Some(top) = mounts().ok().and_then(|all| all.into_iter().find(|mounted| mounted.fs_type == "cgroup2")) else {
        return Vec::new();
    };
    let pods = fs::read_dir(directory.join("root/pods")).into_iter().flatten().flatten();
    let names = pods.filter_map(|pod| pod.file_name().into_string().ok());
    let both = |uid: String| {
        let of_supervisor = top.at.join(format!("podfs-pod-{uid}"));
        [of_supervisor.join(format!("podfs-{uid}")), of_supervisor]
    };
    names.flat_map(both).filter(|cgroup| cgroup.is_dir()).collect()
}

/// Removes a cgroup when the processes `ours` in it have ended. Keeps a cgroup with other processes: those of another fixture
/// that has a pod with the same uid.
fn remove_cgroup(cgroup: &Path, ours: &[Pid]) {
    let deadline = Instant::now() + TIMEOUT;
    let is_ours = |line: &str| ours.iter().any(|pid| line == pid.to_string());
    let only_ours = || fs::read_to_string(cgroup.join("cgroup.procs")).is_ok_and(|all| all.lines().all(is_ours));
    while fs::remove_dir(cgroup).is_err_and(|error| error.kind() == std::io::ErrorKind::ResourceBusy)
        && only_ours()
        && Instant::now() < deadline
    {
        std::thread::sleep(Duration::from_millis(2));
    }
}

/// Unmounts every mount below `directory`, innermost first.
pub fn unmount_below(directory: &Path) {
    for mount in mounts_below(directory).iter().rev() {
        let _ = umount2(mount, MntFlags::MNT_DETACH);
    }
}

/// The target of `..data` of a volume.
#[track_caller]
pub fn generation(volume: &Path) -> String {
    let target = fs::read_link(volume.join("..data")).expect("a link");
    target.into_os_string().into_string().expect("text")
}

/// Waits until `path` has this content.
#[track_caller]
pub fn wait_content(path: &Path, content: &str) {
    eventually(&format!("{} is {content:?}", path.display()), || {
        fs::read_to_string(path).is_ok_and(|is| is == content)
    });
}

/// Whether the kernel has at least this version.
pub fn kernel_is_at_least(major: u32, minor: u32) -> bool {
    let release = fs::read_to_string("/proc/sys/kernel/osrelease").expect("a release");
    let mut numbers = release.split(['.', '-']).map_while(|number| number.parse::<u32>().ok());
    let version = (numbers.next().expect("a major version"), numbers.next().unwrap_or_default());
    version >= (major, minor)
}

/// A ConfigMap manifest.
pub fn config_map(name: &str, data: &[(&str, &str)]) -> String {
    object("ConfigMap", name, "data", data)
}

/// A Secret manifest.
pub fn secret(name: &str, data: &[(&str, &str)]) -> String {
    object("Secret", name, "stringData", data)
}

fn object(kind: &str, name: &str, field: &str, data: &[(&str, &str)]) -> String {
    let data: serde_json::Map<_, _> = data.iter().map(|(key, value)| ((*key).to_owned(), (*value).into())).collect();
    serde_json::json!({"apiVersion": "v1", "kind": kind, "metadata": {"name": name}, field: data}).to_string()
}

/// A pod manifest with these volumes (a YAML or JSON sequence).
pub fn pod(volumes: &str) -> String {
    format!(
        "apiVersion: v1\nkind: Pod\nmetadata: {{name: web, labels: {{app: web}}}}\n\
         spec:\n  containers: [{{name: web, image: web}}]\n  volumes: {volumes}\n"
    )
}

/// A pod with one configMap volume `config` of ConfigMap `app`.
pub fn config_pod() -> String {
    pod("[{name: config, configMap: {name: app}}]")
}

/// Replaces a symbolic link by rename, as tools do that switch from one directory to another at once.
pub fn switch_link(link: &Path, target: &str) {
    let new = link.with_file_name(".new-link");
    symlink(target, &new).expect("a link");
    fs::rename(new, link).expect("renamed");
}
