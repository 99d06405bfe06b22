//! Faults of the processes of one pod affect no other pod (FU-16, FU-17).

use std::fs::{self, File};
use std::io;
use std::os::unix::fs::FileExt;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::thread;

use crate::common::limit::limit_files;
use crate::common::outcome::finish;
use crate::common::passthrough::within_timeout;
use crate::common::*;
use nix::errno::Errno;
use nix::fcntl::{Flock, FlockArg};
use nix::sys::resource::{Resource, setrlimit};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

/// A pod with a unique uid and these volumes, an object `app`, and a directory `source`.
pub fn fixture(volumes: &str) -> Fixture {
    let fixture = Fixture::new("");
    fs::create_dir(fixture.path("source")).expect("a directory");
    fixture.write("objects/app.json", &config_map("app", &[("a", "1")]));
    let volumes = volumes.replace("SOURCE", &fixture.path("source").display().to_string());
    let pod =
        pod(&volumes).replace("metadata: {name: web,", &format!("metadata: {{name: web, uid: {},", uid(&fixture)));
    fixture.write("pod.yaml", &pod);
    fixture
}

/// A uid that no other pod on this machine has: the name of the fixture's temporary directory.
fn uid(fixture: &Fixture) -> String {
    let directory = fixture.path("");
    let name = directory.file_name().and_then(|name| name.to_str()).expect("text");
    name.bytes().filter(u8::is_ascii_alphanumeric).map(char::from).collect::<String>().to_lowercase()
}

const CONFIG: &str = "[{name: config, configMap: {name: app}}]";
pub const HOST: &str = "[{name: host, hostPath: {path: SOURCE}}]";

/// The keeper of a running pod.
fn keeper(fixture: &Fixture) -> Pid {
    let is_keeper =
        |pid: &Pid| fs::read_to_string(format!("/proc/{pid}/comm")).is_ok_and(|comm| comm == "podfs-keeper\n");
    fixture.processes().into_iter().find(is_keeper).expect("a keeper")
}

#[track_caller]
fn assert_reads(running: &Running, content: &str) {
    assert_eq!(fs::read_to_string(running.volume("config").join("a")).expect("readable"), content);
}

/// Kills the server, and returns its successor.
#[track_caller]
fn kill_server(running: &Running) -> Pid {
    let killed = running.server();
    kill(killed, Signal::SIGKILL).expect("the server exists");
    running.wait_log("goes on");
    let next = running.server();
    assert_ne!(next, killed);
    next
}

/// The mount point of cgroup v2, if the test can make cgroups on this machine.
pub fn cgroups() -> Option<PathBuf> {
    let mounts = podfs_fuse::mount::table::mounts().expect("a mount table");
    let top = mounts.into_iter().find(|mount| mount.fs_type == "cgroup2").map(|mount| mount.at);
    let top = top.filter(|top| {
        let probe = top.join(format!("podfs-test-probe-{}-{:?}", std::process::id(), thread::current().id()));
        fs::create_dir(&probe).and_then(|()| fs::remove_dir(&probe)).is_ok()
    });
    if top.is_none() {
        eprintln!("skipped: this machine has no writable cgroups of version 2");
    }
    top
}

/// The cgroup that a process is in.
pub fn cgroup_of(top: &Path, process: Pid) -> PathBuf {
    let cgroups = fs::read_to_string(format!("/proc/{process}/cgroup")).expect("a process");
    let path = cgroups.lines().find_map(|line| line.strip_prefix("0::/")).expect("a cgroup of version 2");
    top.join(path)
}

#[test]
fn a_server_its_keeper_and_its_successor_are_in_a_cgroup_that_goes_with_them() {
    // FU-16
    let Some(top) = cgroups() else { return };
    let fixture = fixture(CONFIG);
    let mut running = fixture.run();
    let cgroup = cgroup_of(&top, running.server());
    assert!(cgroup.ends_with(format!("podfs-{}", uid(&fixture))), "{}", cgroup.display());
    assert_eq!(cgroup_of(&top, keeper(&fixture)), cgroup);
    assert_eq!(cgroup.parent(), Some(&*cgroup_of(&top, running.pid())), "the supervisor stays outside");
    assert_eq!(cgroup_of(&top, kill_server(&running)), cgroup);
    assert_reads(&running, "1");
    assert_eq!(running.stop().code(), Some(0));
    assert!(!cgroup.exists());
    fixture.assert_nothing_left();
}

#[test]
fn a_cgroup_that_a_crash_has_left_is_removed_in_the_end() {
    let Some(top) = cgroups() else { return };
    let fixture = fixture(CONFIG);
    let mut running = fixture.run();
    let cgroup = cgroup_of(&top, running.server());
    let server = running.server();
    running.signal(Signal::SIGKILL);
    kill(server, Signal::SIGKILL).expect("the server exists");
    running.wait();
    eventually("the keeper ends, too", || fixture.processes().is_empty());
    assert!(cgroup.exists(), "no process has removed the cgroup");

    // The next podfs starts in another cgroup, so it does not use the old cgroup of the server again.
    let other_cgroup = OtherCgroup::new(&top, "podfs-test-elsewhere");
    let mut next = fixture.start_command(other_cgroup.command(&fixture));
    next.wait_ready();
    assert!(!cgroup.exists());
    assert!(cgroup_of(&top, next.server()).starts_with(&other_cgroup.0));
    assert_reads(&next, "1");
    assert_eq!(next.stop().code(), Some(0));
    fixture.assert_nothing_left();
}

#[test]
fn a_cgroup_that_a_crash_has_left_goes_with_the_rest_that_is_cleaned_up() {
    let Some(top) = cgroups() else { return };
    let fixture = fixture(CONFIG);
    let mut running = fixture.run();
    let cgroup = cgroup_of(&top, running.server());
    fixture.kill_both(&mut running);
    assert!(cgroup.exists(), "no process has removed the cgroup");
    assert_eq!(fixture.cleanup(&["--dry-run"]).code, Some(0));
    assert!(cgroup.exists());
    assert_eq!(fixture.cleanup(&[]).code, Some(0));
    assert!(!cgroup.exists());
}

#[test]
fn a_server_that_is_taken_over_stays_where_it_is() {
    let Some(top) = cgroups() else { return };
    let fixture = fixture(CONFIG);
    let mut running = fixture.run();
    let server = running.server();
    let cgroup = cgroup_of(&top, server);
    running.signal(Signal::SIGKILL);
    running.wait();
    let other_cgroup = OtherCgroup::new(&top, "podfs-test-adopter");
    let mut next = fixture.start_command(other_cgroup.command(&fixture));
    next.wait_ready();
    assert_eq!(cgroup_of(&top, server), cgroup);
    kill(server, Signal::SIGKILL).expect("the server exists");
    next.wait_log("goes on");
    assert_eq!(cgroup_of(&top, next.server()), cgroup, "the successor joins the cgroup of the killed server");
    assert_eq!(next.stop().code(), Some(0));
    assert!(!cgroup.exists());
}

/// A cgroup, other than that of the test, in which a test starts podfs. The drop removes it.
struct OtherCgroup(PathBuf);

impl OtherCgroup {
    fn new(top: &Path, name: &str) -> Self {
        let path = top.join(format!("{name}-{}", std::process::id()));
        fs::create_dir(&path).expect("a cgroup");
        Self(path)
    }

    fn command(&self, fixture: &Fixture) -> Command {
        let mut command = fixture.command();
        let processes = File::options().write(true).open(self.0.join("cgroup.procs")).expect("a writable file");
        // SAFETY: the closure makes one system call, on a descriptor that is open until the child is started.
        unsafe { command.pre_exec(move || Ok(rustix::io::write(&processes, b"0").map(drop)?)) };
        command
    }
}

impl Drop for OtherCgroup {
    fn drop(&mut self) {
        // If the test failed, the cgroup may still have processes. The drop of the fixture kills them.
        for _ in 0..1000 {
            if fs::remove_dir(&self.0).is_ok() {
                return;
            }
            thread::sleep(std::time::Duration::from_millis(2));
        }
    }
}

#[test]
fn podfs_warns_if_it_runs_in_the_kubelets_cgroups() {
    // FU-16
    let Some(top) = cgroups() else { return };
    let fixture = fixture(CONFIG);
    let kubelets = OtherCgroup::new(&top, "kubepods-podfs-test");
    let mut running = fixture.start_command(kubelets.command(&fixture));
    running.wait_ready();
    assert_eq!(running.stop().code(), Some(0));
    let log = running.log();
    assert_eq!(log.matches("podfs runs in the cgroup").count(), 1, "{log}");
    assert!(log.contains("systemd-run"), "{log}");
}

#[test]
fn a_limit_of_memory_that_makes_no_sense_is_refused() {
    let fixture = fixture(CONFIG);
    for (limit, message) in [("much", "is not a quantity"), ("1Mi", "less than a server needs"), ("-1", "")] {
        let outcome = finish(fixture.command().arg(format!("--server-memory-max={limit}")));
        assert_eq!(outcome.code, Some(2), "{limit}: {}", outcome.stderr);
        assert!(outcome.stderr.contains(message), "{}", outcome.stderr);
    }
}

#[test]
fn podfs_replaces_a_server_that_the_kernel_killed_for_its_memory() {
    let Some(top) = cgroups() else { return };
    const LIMIT: &str = "64Mi";
    let (limited, other) = (fixture(HOST), fixture(CONFIG));
    let other_running = other.run();
    let other_server = other_running.server();
    let mut command = limited.command();
    command.args(["--server-memory-max", LIMIT]);
    let mut running = limited.start_command(command);
    running.wait_ready();
    if running.log().contains("podfs cannot limit the memory of the server") {
        eprintln!("skipped: this machine has no memory controller of version 2: {}", running.log());
        return;
    }
    let cgroup = cgroup_of(&top, running.server());
    assert_eq!(fs::read_to_string(cgroup.join("memory.max")).expect("a limit"), format!("{}\n", 64 << 20));
    let events = || fs::read_to_string(cgroup.join("memory.events")).expect("events");
    let has_oom_kill = |events: &str| !events.contains("oom_kill 0\n");
    assert!(!has_oom_kill(&events()));
    // This limit is lower than the memory that the server already uses. The writes make the server allocate more.
    fs::write(cgroup.join("memory.max"), "2M").expect("written");
    eventually("the kernel kills the server", || {
        let _ = fs::write(running.volume("host").join("file"), vec![0; 1 << 20]);
        has_oom_kill(&events())
    });
    fs::write(cgroup.join("memory.max"), "max").expect("written");
    running.wait_log("goes on");
    assert_reads(&other_running, "1");
    assert_eq!(other_running.server(), other_server);
    fs::write(running.volume("host").join("file"), "still there").expect("written");
    assert_eq!(running.stop().code(), Some(0));
    assert!(!cgroup.exists());
}

fn oom_score(process: Pid) -> i32 {
    let adjustment = fs::read_to_string(format!("/proc/{process}/oom_score_adj")).expect("a process");
    adjustment.trim().parse().expect("a number")
}

/// Whether this process and its children may lower their OOM score.
fn may_lower_scores() -> bool {
    let capabilities = rustix::thread::capabilities(None).expect("the capabilities of this thread");
    capabilities.effective.contains(rustix::thread::CapabilitySet::SYS_RESOURCE)
}

#[test]
fn the_oom_order_is_containers_servers_supervisors() {
    if !may_lower_scores() {
        eprintln!("skipped: the test needs CAP_SYS_RESOURCE");
        return;
    }
    // The kubelet gives containers scores of -997 and higher, so the kernel kills containers before servers.
    let fixture = fixture(CONFIG);
    let running = fixture.run();
    let scores = |server: Pid| [oom_score(server), oom_score(running.pid()), oom_score(keeper(&fixture))];
    assert_eq!(scores(running.server()), [-998, -999, -1000]);
    let next = kill_server(&running);
    eventually("the successor has the same scores", || scores(next) == [-998, -999, -1000]);
}

#[test]
fn a_podfs_that_may_not_lower_oom_scores_still_serves() {
    const CAP_SYS_RESOURCE: libc::c_ulong = 24;
    let fixture = fixture(CONFIG);
    let mut command = fixture.command();
    command.env("RUST_LOG", "debug");
    // SAFETY: prctl is async-signal-safe. It fails without CAP_SETPCAP.
    unsafe {
        command.pre_exec(|| {
            let _ = libc::prctl(libc::PR_CAPBSET_DROP, CAP_SYS_RESOURCE, 0, 0, 0);
            Ok(())
        });
    }
    let mut running = fixture.start_command(command);
    running.wait_ready();
    let inherited = oom_score(Pid::this());
    assert_eq!([running.pid(), running.server(), keeper(&fixture)].map(oom_score), [inherited; 3]);
    running.wait_log("the OOM score of process");
    assert_reads(&running, "1");
}

#[test]
fn a_pod_whose_server_is_killed_leaves_the_other_alone() {
    // FU-17
    let (first, second) = (fixture(CONFIG), fixture(CONFIG));
    let (running, other) = (first.run(), second.run());
    let server = other.server();
    for _ in 0..3 {
        let killed = running.server();
        kill(killed, Signal::SIGKILL).expect("the server exists");
        assert_reads(&other, "1");
        assert_reads(&running, "1");
        eventually("another server serves", || running.servers().last().is_some_and(|server| *server != killed));
    }
    assert_eq!(other.server(), server);
    assert!(!other.log().contains("goes on"));
}

#[test]
fn a_pod_whose_server_hangs_delays_no_other() {
    // FU-17
    let (first, second) = (fixture(CONFIG), fixture(CONFIG));
    let hanging = first.run();
    let server = hanging.server();
    kill(server, Signal::SIGSTOP).expect("the server exists");
    // The other pod starts, commits and stops. The helpers of the tests limit the time of each step.
    let mut other = second.run();
    assert_reads(&other, "1");
    second.write("objects/app.json", &config_map("app", &[("a", "2")]));
    wait_content(&other.volume("config").join("a"), "2");
    assert_eq!(other.stop().code(), Some(0));
    second.assert_nothing_left();
    // The supervisor may already have killed the stopped server and started another one.
    let _ = kill(server, Signal::SIGCONT);
    assert_reads(&hanging, "1");
}

#[test]
fn a_volume_has_its_share_of_descriptors_and_the_other_volume_has_its_own() {
    /// The server's limit of descriptors. The server sets 600 aside for each of its two volumes, and divides the rest:
    /// 400 for each.
    const LIMIT: u64 = 2000;
    const SHARE: usize = 400;
    let fixture = fixture("[{name: host, hostPath: {path: SOURCE}}, {name: other, emptyDir: {}}]");
    fs::write(fixture.path("source/file"), "1").expect("written");
    let mut command = fixture.command();
    // SAFETY: setrlimit is async-signal-safe.
    unsafe { command.pre_exec(|| Ok(setrlimit(Resource::RLIMIT_NOFILE, LIMIT, LIMIT)?)) };
    let mut running = fixture.start_command(command);
    running.wait_ready();
    let file = running.volume("host").join("file");
    let open = || (0..SHARE + 1).map_while(|_| File::open(&file).ok()).collect::<Vec<_>>();
    let all = open();
    // The server counts its open root directory of the volume, too.
    assert_eq!(all.len(), SHARE - 1);
    assert_eq!(refusal(File::open(&file)), Errno::ENFILE);
    assert_eq!(refusal(fs::read_dir(running.volume("host"))), Errno::ENFILE, "directories are counted, too");
    assert_eq!(fs::metadata(&file).expect("stat(2) needs no descriptor").len(), 1);
    let other = running.volume("other");
    let others: Vec<_> = (0..SHARE / 2)
        .map(|n| File::create(other.join(n.to_string())).expect("this volume has its own share"))
        .collect();
    drop((all, others));
    eventually("after the close, as many files can be opened again", || open().len() == SHARE - 1);
    let log = running.log();
    assert_eq!(log.matches("its 400 descriptors are all in use").count(), 1, "{log}");
    assert!(log.contains(r#"volume "host""#), "{log}");
}

#[test]
fn open_files_stay_open_when_the_successor_has_a_smaller_share() {
    /// The first server's limit of descriptors, with a share of 400 for each of two volumes.
    const LIMIT_BEFORE: u64 = 2000;
    const SHARE: usize = 400;
    /// The successor's limit, which is so low that each volume gets the smallest possible share.
    const LIMIT_AFTER: u64 = 1500;
    const SMALLEST_SHARE: usize = 256;
    let fixture = fixture("[{name: limited, emptyDir: {sizeLimit: 1Gi}}, {name: other, emptyDir: {}}]");
    let mut command = fixture.command();
    // SAFETY: setrlimit is async-signal-safe.
    unsafe { command.pre_exec(|| Ok(setrlimit(Resource::RLIMIT_NOFILE, LIMIT_BEFORE, LIMIT_BEFORE)?)) };
    let mut running = fixture.start_command(command);
    running.wait_ready();
    let file = running.volume("limited").join("file");
    fs::write(&file, "").expect("written");
    let open = || File::options().read(true).write(true).open(&file);
    // The server counts its open root directory of the volume, too.
    let mut all: Vec<_> = (0..SHARE - 1).map(|_| open().expect("the share is not used up")).collect();
    assert_eq!(refusal(open()), Errno::ENFILE);

    limit_files(running.pid(), LIMIT_AFTER);
    kill_server(&running);
    // Each write goes through the server, and through its descriptor of the file.
    let text: Vec<_> = (0..all.len()).map(|n| b'a' + (n % 26) as u8).collect();
    for (n, file) in all.iter().enumerate() {
        file.write_all_at(&text[n..=n], n as u64).expect("written");
    }
    let pod = file.ancestors().nth(4).expect("the pod's directory");
    let content = pod.join("plugins/kubernetes.io~empty-dir/limited/content/file");
    assert_eq!(fs::read(content).expect("a file"), text);

    assert_eq!(refusal(open()), Errno::ENFILE, "more files are open than the share allows");
    // The kernel sends the request for a close a moment after the close.
    all.truncate(SMALLEST_SHARE);
    assert_eq!(
        refusal(open()),
        Errno::ENFILE,
        "with the root directory, still one more file is open than the share allows"
    );
    all.truncate(SMALLEST_SHARE - 2);
    eventually("after the close, a file can be opened again", || open().is_ok());
    let log = running.log();
    assert_eq!(log.matches("its 400 descriptors are all in use").count(), 1, "{log}");
    assert_eq!(log.matches("its 256 descriptors are all in use").count(), 1, "{log}");
    assert!(running.stop().success());
    fixture.assert_nothing_left();
}

#[test]
fn a_successor_without_enough_descriptors_logs_it_and_continues_when_it_has_them() {
    const FILES: usize = 300;
    let fixture = fixture("[{name: limited, emptyDir: {sizeLimit: 1Gi}}]");
    let mut running = fixture.run();
    let file = running.volume("limited").join("file");
    let all: Vec<_> = (0..FILES).map(|_| File::create(&file).expect("a file")).collect();
    let usual_limit = limit_files(running.pid(), FILES as u64);
    kill(running.server(), Signal::SIGKILL).expect("the server exists");
    // The server reserves the descriptors below 64, so a limit of 300 is too low for 300 open files.
    running.wait_log("may have no more than 300 (RLIMIT_NOFILE)");
    limit_files(running.pid(), usual_limit);
    running.wait_log("goes on");
    all.iter().enumerate().for_each(|(n, file)| file.write_all_at(b"x", n as u64).expect("written"));
    assert_eq!(fs::read(&file).expect("a file"), [b'x'; FILES]);
    drop(all);
    assert!(running.stop().success());
    fixture.assert_nothing_left();
}

#[track_caller]
fn refusal<T>(outcome: io::Result<T>) -> Errno {
    let Err(error) = outcome else { panic!("the call is not refused") };
    Errno::from_raw(error.raw_os_error().expect("an error of the kernel"))
}

#[test]
fn so_many_callers_of_a_volume_wait_for_locks_and_no_more() {
    const WAITS: usize = 512;
    let fixture = fixture(HOST);
    fs::write(fixture.path("source/file"), "1").expect("written");
    let running = fixture.run();
    let file = running.volume("host").join("file");
    let open = || File::open(&file).expect("a file");
    let lock = |file| Flock::lock(file, FlockArg::LockExclusive).map_err(|(_, errno)| errno);
    let holder = lock(open()).expect("the lock is free");
    let waiting_threads = || {
        let threads = fs::read_dir(format!("/proc/{}/task", running.server())).expect("threads").flatten();
        threads
            .filter(|thread| fs::read_to_string(thread.path().join("comm")).is_ok_and(|comm| comm == "lock\n"))
            .count()
    };
    thread::scope(|scope| {
        let waiters: Vec<_> = (0..WAITS)
            .map(|_| {
                let waiter = thread::Builder::new().stack_size(64 << 10);
                waiter.spawn_scoped(scope, || lock(open()).map(drop)).expect("a thread")
            })
            .collect();
        eventually("all of them wait", || waiting_threads() == WAITS);
        for _ in 0..3 {
            let file = open();
            let refused = within_timeout("one more", move || Flock::lock(file, FlockArg::LockExclusive).map(drop));
            assert_eq!(refused.map_err(|(_, errno)| errno), Err(Errno::ENOLCK));
        }
        assert_eq!(fs::read_to_string(&file).expect("the server refuses no other request"), "1");
        drop(holder);
        waiters.into_iter().for_each(|waiter| assert_eq!(waiter.join().expect("the call ends"), Ok(())));
    });
    eventually("no thread waits any more", || waiting_threads() == 0);
    lock(open()).expect("the lock is free");
    let log = running.log();
    assert_eq!(log.matches("512 callers wait for locks").count(), 1, "{log}");
}

#[test]
fn directories_can_be_read_however_many_are_open() {
    const FILES: usize = 300;
    // The server keeps entries that it has read ahead for at most 1024 open directories.
    const OPEN: usize = 1100;
    let fixture = fixture(HOST);
    (0..FILES)
        .for_each(|n| fs::write(fixture.path(&format!("source/a-file-with-a-long-name-{n}")), "").expect("written"));
    setrlimit(Resource::RLIMIT_NOFILE, 4096, 4096).expect("the limit can be set");
    let running = fixture.run();
    let host = running.volume("host");
    let mut all: Vec<_> = (0..OPEN).map(|_| fs::read_dir(&host).expect("a directory")).collect();
    all.iter_mut().for_each(|listing| drop(listing.next().expect("an entry").expect("read")));
    for listing in all {
        let mut names: Vec<_> = listing.map(|entry| entry.expect("read").file_name()).collect();
        names.sort_unstable();
        names.dedup();
        assert_eq!(names.len(), FILES - 1);
    }
}
