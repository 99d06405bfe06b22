//! A confined server can use only the descriptors that it got from the supervisor.
//!
//! A probe is a process that confines itself like a server, and then tries the system calls that an attacker in control
//! of the server would try.

mod probe;

use std::ffi::CStr;
use std::fs::{self, File};
use std::io::Write;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use crate::common::namespace::{on_a_host_that_shares_mounts, open_directories, way_out};
use crate::common::passthrough::disk_directory;
use crate::common::*;
use nix::errno::Errno;
use nix::sys::signal::{Signal, kill};
use nix::unistd::{Pid, getppid};
use podfs_fuse::confinement::Profile;
use podfs_fuse::mount::enclosed::SourceWithMounts;
use probe::*;
use tempfile::TempDir;

#[test]
fn a_server_of_projections_reaches_no_file_network_or_process() {
    let given = File::open("/").expect("a directory");
    let parent = Pid::this();
    let probed = probe(Profile::Projection, |recorder| {
        try_forbidden_calls(recorder, parent);
        try_forbidden_arguments(recorder);
        let given = given.as_raw_fd();
        // SAFETY: the calls read strings that end with a zero byte, or write to memory that outlives them.
        unsafe {
            let mut stat = std::mem::zeroed::<libc::stat>();
            recorder.call("openat", libc::open(c"/etc/passwd".as_ptr(), libc::O_RDONLY));
            recorder.call("from a directory", libc::openat(given, c"etc/passwd".as_ptr(), libc::O_RDONLY));
            recorder.call("stat", libc::stat(c"/etc/passwd".as_ptr(), &raw mut stat));
            recorder.call("processes", libc::stat(c"/proc/self".as_ptr(), &raw mut stat));
            recorder.call("unshare", libc::unshare(libc::CLONE_NEWUSER));
            recorder.call("ioctl", libc::ioctl(0, libc::TCGETS));
            recorder.call("capset", libc::syscall(libc::SYS_capset, 0, 0));
            recorder.call("another process", libc::kill(getppid().as_raw(), 0));
        }
        do_usual_work(recorder);
    });
    probed.assert_all(&["missing"], "[]");
    probed.assert_all(&FORBIDDEN_CALLS, "EPERM");
    probed.assert_all(&["connect"], "EPERM");
    probed.assert_all(&FORBIDDEN_ARGUMENTS, "EPERM");
    probed.assert_all(&["openat", "from a directory", "unshare", "ioctl", "capset", "another process"], "EPERM");
    probed.assert_all(&["stat", "processes"], "ENOENT");
    probed.assert_all(&["clone3"], "ENOSYS");
    probed.assert_logged_once(&FORBIDDEN_CALLS);
    probed.assert_logged_once(&[
        "openat",
        "unshare",
        "ioctl",
        "capset",
        "clone",
        "mmap",
        "mprotect",
        "prctl",
        "prlimit64",
    ]);
    assert!(!probed.log.contains("clone3"), "{}", probed.log);
    probed.assert_all(&["a thread"], "100000");
    probed.assert_all(&USUAL_WORK, "done");
}

#[test]
fn a_server_of_audited_projections_may_only_look_at_processes_besides() {
    let parent = Pid::this();
    let probed = probe(Profile::Audit, |recorder| {
        try_forbidden_calls(recorder, parent);
        try_forbidden_arguments(recorder);
        let opens = |recorder: &mut Recorder, name: &str, path: &str, flags: libc::c_int| {
            let path = std::ffi::CString::new(path).expect("a path");
            // SAFETY: the path is a string that outlives the call.
            recorder.call(name, unsafe { libc::open(path.as_ptr(), flags) });
        };
        let of_parent = |name: &str| format!("/proc/{parent}/{name}");
        opens(recorder, "a file of the host", "/etc/passwd", libc::O_RDONLY);
        opens(recorder, "a setting of the kernel", "/proc/sys/kernel/core_pattern", libc::O_RDONLY);
        opens(recorder, "memory of another", &of_parent("mem"), libc::O_RDONLY);
        opens(recorder, "environment of another", &of_parent("environ"), libc::O_RDONLY);
        opens(recorder, "root of another", &of_parent("root/etc/passwd"), libc::O_RDONLY);
        opens(recorder, "openat", &of_parent("comm"), libc::O_WRONLY);
        opens(recorder, "status of another", &of_parent("status"), libc::O_RDONLY);
        opens(recorder, "cgroup of another", &of_parent("cgroup"), libc::O_RDONLY);
        // SAFETY: the call takes numbers.
        unsafe { recorder.call("another process", libc::kill(parent.as_raw(), 0)) };
        do_usual_work(recorder);
    });
    probed.assert_all(&["missing"], "[]");
    probed.assert_all(&FORBIDDEN_CALLS, "EPERM");
    probed.assert_all(&["connect"], "EPERM");
    probed.assert_all(&FORBIDDEN_ARGUMENTS, "EPERM");
    probed.assert_all(&["openat", "another process"], "EPERM");
    probed.assert_all(&["a file of the host", "a setting of the kernel"], "ENOENT");
    probed.assert_all(&["memory of another", "environment of another", "root of another"], "EACCES");
    probed.assert_all(&["status of another", "cgroup of another"], "done");
    probed.assert_logged_once(&FORBIDDEN_CALLS);
    probed.assert_logged_once(&["openat"]);
    probed.assert_all(&["a thread"], "100000");
    probed.assert_all(&USUAL_WORK, "done");
}

#[test]
fn a_server_of_directories_reaches_those_and_no_network_or_process() {
    let directory = tempfile::tempdir().expect("a directory");
    fs::write(directory.path().join("file"), "given").expect("written");
    let given = File::open(directory.path()).expect("a directory");
    let parent = Pid::this();
    let limits_signals = kernel_can_limit_signals();
    let probed = probe(Profile::Passthrough, |recorder| {
        try_forbidden_calls(recorder, parent);
        try_forbidden_arguments(recorder);
        let of_parent = |name: &str| format!("/proc/{parent}/{name}");
        let opens = |recorder: &mut Recorder, name: &str, path: &str, flags: libc::c_int| {
            let path = std::ffi::CString::new(path).expect("a path");
            // SAFETY: the path is a string that outlives the call.
            recorder.call(name, unsafe { libc::open(path.as_ptr(), flags) });
        };
        opens(recorder, "a file of the host", "/etc/passwd", libc::O_RDONLY);
        opens(recorder, "a device", "/dev/null", libc::O_RDONLY);
        opens(recorder, "a setting of the kernel", "/proc/sys/kernel/core_pattern", libc::O_WRONLY);
        opens(recorder, "sysrq", "/proc/sysrq-trigger", libc::O_WRONLY);
        opens(recorder, "memory of another", &of_parent("mem"), libc::O_RDONLY);
        opens(recorder, "root of another", &of_parent("root/etc/passwd"), libc::O_RDONLY);
        opens(recorder, "descriptor of another", &of_parent("fd/0"), libc::O_RDONLY);
        opens(recorder, "status of another", &of_parent("status"), libc::O_RDONLY);
        opens(recorder, "environment of another", &of_parent("environ"), libc::O_RDONLY);
        opens(recorder, "own memory", "/proc/self/mem", libc::O_RDWR);
        opens(recorder, "a new file", "/new", libc::O_RDWR | libc::O_CREAT);
        let given = given.as_raw_fd();
        // SAFETY: the calls read strings that end with a zero byte, or take numbers.
        unsafe {
            recorder.call("a file that was given", libc::openat(given, c"file".as_ptr(), libc::O_RDONLY));
            recorder
                .call("a node", libc::mknodat(given, c"device".as_ptr(), libc::S_IFCHR | 0o600, libc::makedev(1, 3)));
            recorder.call("unshare", libc::unshare(libc::CLONE_NEWUSER));
            recorder.call("a umask of its own", libc::unshare(libc::CLONE_FS));
            recorder.call("ioctl", libc::ioctl(0, libc::TCGETS));
            recorder.call("another process", libc::kill(parent.as_raw(), 0));
        }
        do_usual_work(recorder);
    });
    probed.assert_all(&["missing"], "[]");
    probed.assert_all(&FORBIDDEN_CALLS, "EPERM");
    // The filter of this profile allows `connect` on descriptors that the server got from the supervisor. Descriptor 0
    // of the probe is no socket.
    probed.assert_all(&["connect"], "ENOTSOCK");
    probed.assert_all(&FORBIDDEN_ARGUMENTS, "EPERM");
    probed.assert_all(&["unshare", "ioctl"], "EPERM");
    probed.assert_all(&["a file of the host", "a device", "a setting of the kernel", "sysrq"], "ENOENT");
    probed.assert_all(&["memory of another", "root of another", "descriptor of another"], "EACCES");
    // A remaining gap: with its capabilities, a server can read the environment of root's processes on current kernels.
    probed.assert_all(&["environment of another"], if kernel_shows_environments() { "done" } else { "EACCES" });
    probed.assert_all(&["own memory", "a new file"], "EROFS");
    probed.assert_all(&["another process"], if limits_signals { "EPERM" } else { "done" });
    probed.assert_all(&["a file that was given", "a node", "a umask of its own", "status of another"], "done");
    probed.assert_logged_once(&FORBIDDEN_CALLS);
    probed.assert_logged_once(&["unshare", "ioctl"]);
    probed.assert_all(&["a thread"], "100000");
    probed.assert_all(&USUAL_WORK, "done");
}

/// A temporary directory, and the directory `source` in it. The file `outside`, beside `source`, is a file of the host
/// that a server of `source` must not reach.
fn source_and_outside() -> (TempDir, PathBuf) {
    let parent = disk_directory();
    let source = parent.path().join("source");
    fs::create_dir(&source).expect("a directory");
    fs::write(source.join("file"), "given").expect("written");
    fs::write(parent.path().join("outside"), "the host's").expect("written");
    (parent, source)
}

#[test]
fn a_server_of_directories_does_not_get_above_them() {
    on_a_host_that_shares_mounts(|| {
        let (parent, source) = source_and_outside();
        let given = File::open(&source).expect("a directory");
        let enclosed = SourceWithMounts::of(given.as_fd(), "data").expect("a source");
        drop(given);
        let outside = File::open(parent.path().join("outside")).expect("a file");
        let mut handle = Handle { size: 128, kind: 0, bytes: [0; 128] };
        let mut mount = 0;
        // SAFETY: the handle has space for as many bytes as its size says.
        let result = unsafe {
            let handle = (&raw mut handle).cast();
            libc::name_to_handle_at(outside.as_raw_fd(), c"".as_ptr(), handle, &raw mut mount, libc::AT_EMPTY_PATH)
        };
        assert_eq!(result, 0, "{}", Errno::last());
        drop(outside);
        let probed = probe(Profile::Passthrough, |recorder| {
            let given = enclosed.source.as_raw_fd();
            let mut opens = |name: &str, path: &CStr, flags: libc::c_int| {
                // SAFETY: the path is a string that outlives the call.
                let opened = unsafe { libc::openat(given, path.as_ptr(), flags) };
                recorder.call(name, opened);
                opened
            };
            let file = opens("a file that was given", c"file", libc::O_RDONLY);
            opens("beside the source", c"../outside", libc::O_RDONLY);
            opens("a file of the host", c"../../../../../../../../etc/passwd", libc::O_RDONLY);
            opens("a new file above", c"../new", libc::O_RDWR | libc::O_CREAT);
            opens("the way back", c"../source/file", libc::O_RDONLY);
            // SAFETY: the kernel has filled in the handle.
            recorder
                .call("by handle", unsafe { libc::open_by_handle_at(file, (&raw mut handle).cast(), libc::O_RDONLY) });
        });
        probed.assert_all(&["missing"], "[]");
        probed.assert_all(&["a file that was given", "the way back"], "done");
        probed.assert_all(&["beside the source", "a file of the host"], "ENOENT");
        probed.assert_all(&["a new file above"], "EROFS");
        // A remaining gap: a file handle gives access to every file of the file system of a source.
        probed.assert_all(&["by handle"], "done");
    });
}

/// `struct file_handle`, with space for the longest handle.
#[repr(C)]
struct Handle {
    size: u32,
    kind: libc::c_int,
    bytes: [u8; 128],
}

#[test]
fn no_descriptor_of_a_server_of_directories_leads_to_the_hosts_mounts() {
    on_a_host_that_shares_mounts(|| {
        let (_parent, source) = source_and_outside();
        fs::create_dir_all(source.join("below/deep")).expect("directories");
        crate::common::namespace::mount_tmpfs(&source.join("below/deep"));
        fs::write(source.join("below/deep/file"), "").expect("written");
        let volumes =
            format!("[{{name: host, hostPath: {{path: {}}}}}, {{name: scratch, emptyDir: {{}}}}]", source.display());
        let fixture = Fixture::new_in(source.parent().expect("a directory"), &pod(&volumes));
        let mut running = fixture.run();
        let volume = running.volume("host");
        let _open = ["file", "below/deep/file"].map(|name| File::open(volume.join(name)).expect("a file"));
        let assert_enclosed = |server: Pid| {
            assert!(open_directories(server).iter().any(|directory| directory.join("below/deep/file").exists()));
            assert_eq!(way_out(server, "outside"), None);
            assert_eq!(way_out(server, "etc/passwd"), None);
        };
        assert_enclosed(running.server());
        // The same holds for successors, and for servers that another supervisor has adopted.
        running.kill_server_and_keeper(|| rustix::fs::statvfs(&volume).expect("a server answers"));
        assert_enclosed(running.server());
        let server = fixture.kill_supervisor(&mut running);
        let mut next = fixture.run();
        assert_eq!(next.server(), server);
        kill(server, Signal::SIGKILL).expect("the server exists");
        eventually("another server answers", || next.server() != server && volume.join("file").exists());
        assert_enclosed(next.server());
        assert_eq!(next.stop().code(), Some(0), "{}", next.log());
    });
}

/// Whether this kernel can forbid a process to send signals to others: Landlock scopes signals from ABI version 6 on.
fn kernel_can_limit_signals() -> bool {
    const VERSION_ONLY: libc::c_uint = 1;
    // SAFETY: with this flag the call takes no memory.
    unsafe { libc::syscall(libc::SYS_landlock_create_ruleset, 0_usize, 0_usize, VERSION_ONLY) >= 6 }
}

/// Whether this kernel shows the environment of any process to `CAP_SYS_ADMIN`: from Linux 6.14 on.
fn kernel_shows_environments() -> bool {
    let release = rustix::system::uname().release().to_string_lossy().into_owned();
    let mut numbers = release.split(['.', '-']).map_while(|part| part.parse::<u32>().ok());
    (numbers.next(), numbers.next()) >= (Some(6), Some(14))
}

/// A field of `/proc/PID/status`.
#[track_caller]
fn status(pid: Pid, field: &str) -> String {
    let status = fs::read_to_string(format!("/proc/{pid}/status")).expect("a status");
    let line = status.lines().find_map(|line| line.strip_prefix(field)?.strip_prefix(':'));
    line.expect("the field").trim().to_owned()
}

/// Checks that a server has exactly these capabilities, given by their numbers.
#[track_caller]
fn assert_capabilities(pid: Pid, numbers: &[u32]) {
    // If podfs cannot raise the limit of locked memory, the server also keeps the capability to lock memory.
    const IPC_LOCK: u32 = 14;
    let expected = numbers.iter().fold(0_u64, |all, number| all | 1 << number);
    for set in ["CapEff", "CapPrm"] {
        let actual = u64::from_str_radix(&status(pid, set), 16).expect("a set");
        let actual = if memory_can_be_unlimited() { actual } else { actual & !(1 << IPC_LOCK) };
        assert_eq!(actual, expected, "{set} {actual:#x}");
    }
    for set in ["CapInh", "CapBnd", "CapAmb"] {
        assert_eq!(u64::from_str_radix(&status(pid, set), 16), Ok(0), "{set}");
    }
}

fn memory_can_be_unlimited() -> bool {
    const SYS_RESOURCE: u64 = 1 << 24;
    let hard = nix::sys::resource::getrlimit(nix::sys::resource::Resource::RLIMIT_MEMLOCK).expect("a limit").1;
    let own = u64::from_str_radix(&status(Pid::this(), "CapPrm"), 16).expect("a set");
    hard == nix::sys::resource::RLIM_INFINITY || own & SYS_RESOURCE != 0
}

/// Checks that a server has a network namespace and a mount namespace of its own, the latter with exactly these mounts,
/// and that it has the other restrictions of a confined process.
#[track_caller]
fn assert_own_namespaces(pid: Pid, mounts: &[&str]) {
    for kind in ["net", "mnt"] {
        let namespace = |of: &str| fs::read_link(format!("/proc/{of}/ns/{kind}")).expect("a namespace");
        assert_ne!(namespace(&pid.to_string()), namespace("self"), "{kind}");
    }
    let table = fs::read_to_string(format!("/proc/{pid}/mountinfo")).expect("a table");
    let at: Vec<_> = table.lines().filter_map(|line| line.split(' ').nth(4)).collect();
    assert_eq!(at, mounts, "{table}");
    assert!(table.lines().all(|line| line.contains(" ro,nosuid,nodev,noexec")), "{table}");
    let network = fs::read_to_string(format!("/proc/{pid}/net/dev")).expect("network devices");
    assert!(network.lines().skip(2).all(|line| line.trim().starts_with("lo:")), "{network}");
    for (field, value) in [("NoNewPrivs", "1"), ("Seccomp", "2"), ("Groups", "")] {
        assert_eq!(status(pid, field), value, "{field}");
    }
}

#[track_caller]
fn names_in(directory: impl AsRef<Path>) -> Vec<String> {
    let entries = fs::read_dir(directory).expect("a directory");
    entries.map(|entry| entry.expect("an entry").file_name().into_string().expect("a name")).collect()
}

#[test]
fn the_server_of_a_pod_with_projections_has_no_privilege_and_an_empty_root() {
    let fixture = Fixture::new(&config_pod());
    fixture.write("objects/app.yaml", &config_map("app", &[("key", "value")]));
    let mut running = fixture.run();
    let server = running.server();
    assert_capabilities(server, &[]);
    assert_own_namespaces(server, &["/"]);
    assert!(names_in(format!("/proc/{server}/root")).is_empty());
    let uids = status(server, "Uid");
    assert_eq!(uids, status(server, "Gid"));
    let uid = uids.split_whitespace().next().expect("a uid");
    assert!(uid.parse::<u32>().expect("a number") >= 65534 && uids.split_whitespace().all(|id| id == uid), "{uids}");
    // The server answers requests, and commits still work.
    wait_content(&running.volume("config").join("key"), "value");
    fixture.write("objects/app.yaml", &config_map("app", &[("key", "other")]));
    wait_content(&running.volume("config").join("key"), "other");
    assert_eq!(running.stop().code(), Some(0), "{}", running.log());
    assert!(!running.log().contains("WARN"), "{}", running.log());
}

#[test]
fn the_server_of_a_pod_with_a_host_path_has_the_capabilities_it_needs_and_processes_in_its_root() {
    const NEEDED: [u32; 10] = [0, 1, 2, 3, 4, 6, 7, 21, 27, 31];
    let fixture = Fixture::new("");
    let source = fixture.path("source");
    fs::create_dir(&source).expect("a directory");
    fs::write(source.join("file"), "shown").expect("written");
    fixture.write("pod.yaml", &pod(&format!("[{{name: host, hostPath: {{path: {}}}}}]", source.display())));
    let mut running = fixture.run();
    let server = running.server();
    assert_capabilities(server, &NEEDED);
    assert_own_namespaces(server, &["/", "/proc"]);
    assert_eq!(names_in(format!("/proc/{server}/root")), ["proc"]);
    let names = names_in(format!("/proc/{server}/root/proc"));
    let not_processes = names.into_iter().filter(|name| name.parse::<u32>().is_err());
    assert!(not_processes.eq(["self", "thread-self"]), "/proc of the server shows only processes");
    wait_content(&running.volume("host").join("file"), "shown");
    assert_eq!(running.stop().code(), Some(0), "{}", running.log());
    assert!(!running.log().contains("WARN"), "{}", running.log());
}

#[test]
fn a_server_that_cannot_be_confined_serves_and_logs_what_is_missing() {
    const SYS_ADMIN: libc::c_ulong = 21;
    let (test_end, server_end) = UnixStream::pair().expect("a socket pair");
    let mut command = Command::new(PODFS_FUSE);
    command.args(["server", "--pod", "test/test", "--uid", "test", "--profile", "projection"]);
    // SAFETY: the call is async-signal-safe.
    unsafe {
        command.pre_exec(|| match libc::prctl(libc::PR_CAPBSET_DROP, SYS_ADMIN, 0, 0, 0) {
            0 => Ok(()),
            _ => Err(std::io::Error::last_os_error()),
        });
    }
    let server =
        command.stdin(Stdio::from(OwnedFd::from(server_end))).stderr(Stdio::piped()).spawn().expect("a server");
    // These bytes are no valid message, so the server ends when it reads them. By then it has logged the result of the
    // confinement.
    (&test_end).write_all(&[1, 0, 0, 0, b'x']).expect("the server has the other end open");
    let output = server.wait_with_output().expect("the server ends");
    let log = String::from_utf8(output.stderr).expect("text");
    let missing = "but without a network of its own (Operation not permitted (os error 1)), \
                   an empty root directory (Operation not permitted (os error 1)); podfs continues";
    assert!(
        log.contains("WARN podfs_fuse::confinement: the server is confined, with ") && log.contains(missing),
        "{log}"
    );
    assert_eq!(log.matches("WARN podfs_fuse::confinement: the server").count(), 1, "{log}");
}
