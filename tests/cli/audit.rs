//! The access log: each open of a file in an audited volume is one line, whichever process of podfs dies meanwhile, and no open
//! waits for a reader of the log.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::{BufRead, BufReader, Read, Write};
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::fs::{OpenOptionsExt, PermissionsExt, symlink};
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use crate::common::builds::Builds;
use crate::common::cgroup::Cgroup;
use crate::common::idmap::id_mapped_clone;
use crate::common::outcome::finish;
use crate::common::terminal::with_standard_error;
use crate::common::undisturbed::undisturbed;
use crate::common::*;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use rustix::fs::{Mode, OFlags, openat};
use serde_json::{Value, json};
use tempfile::TempDir;

/// The first lines of each pod manifest here.
const AUDITED: &str = "apiVersion: v1\nkind: Pod\nmetadata: {name: web, annotations: {podfs.io/audit.db: open}}\n";
const KEYS: usize = 6;

/// A pod with an audited secret `db` and a configMap `config` that is not.
fn fixture() -> Fixture {
    let items: Vec<_> = (0..KEYS).map(|number| format!("{{key: key-{number}, path: key-{number}}}")).collect();
    let fixture = Fixture::new(&format!(
        "{AUDITED}spec:\n  containers: [{{name: web, image: web}}]\n  volumes:\n  - name: db\n    secret: {{secretName: db, \
         items: [{}, {{key: key-0, path: sub/deep}}, {{key: script, path: script, mode: 0755}}]}}\n  \
         - {{name: config, configMap: {{name: app}}}}\n",
        items.join(", ")
    ));
    let keys: Vec<_> = (0..KEYS).map(|number| format!("key-{number}")).collect();
    let mut data: Vec<_> = keys.iter().map(|key| (key.as_str(), "hidden")).collect();
    data.push(("script", "#!/bin/sh\nexit 7\n"));
    fixture.write("objects/db.json", &secret("db", &data));
    fixture.write("objects/app.json", &config_map("app", &[("a", "1")]));
    fixture
}

/// The lines of the access log in `log`. Fails the test if one is not whole.
#[track_caller]
fn lines(log: &str) -> Vec<Value> {
    log.lines().filter(|line| line.contains("\"audit\"")).map(|line| serde_json::from_str(line).expect(line)).collect()
}

#[track_caller]
fn read(path: impl AsRef<Path>) {
    assert_eq!(fs::read_to_string(path).expect("a key"), "hidden");
}

/// The entry of a volume in `podfs status`.
#[track_caller]
fn volume_status(fixture: &Fixture, name: &str) -> Value {
    let mut pods = fixture.pods();
    let volumes = pods[0]["volumes"].as_array_mut().expect("volumes");
    volumes.iter_mut().find(|volume| volume["name"] == name).expect("the volume").take()
}

/// The number of opens in `podfs status`, and of opens whose lines were lost.
#[track_caller]
fn counted(fixture: &Fixture) -> (u64, u64) {
    let audit = volume_status(fixture, "db")["audit"].take();
    (audit["opens"].as_u64().expect("a number"), audit["lost"].as_u64().expect("a number"))
}

/// Makes a command run as another user, which may have no access to its working directory.
fn become_user(command: &mut Command, uid: usize, gid: usize) {
    // SAFETY: the calls are async-signal-safe, and change a process that has one thread.
    unsafe {
        command.pre_exec(move || {
            let results = [
                libc::syscall(libc::SYS_setgroups, 0, std::ptr::null::<libc::gid_t>()),
                libc::syscall(libc::SYS_setresgid, gid, gid, gid),
                libc::syscall(libc::SYS_setresuid, uid, uid, uid),
            ];
            if results == [0; 3] { Ok(()) } else { Err(std::io::Error::last_os_error()) }
        });
    }
}

#[test]
fn each_open_is_one_line_with_the_key_and_the_process() {
    const TIMES: usize = 5;
    let fixture = fixture();
    let running = fixture.run();
    let programs = TempDir::with_prefix("podfs-test-").expect("a directory");
    fs::set_permissions(programs.path(), fs::Permissions::from_mode(0o755)).expect("everybody may execute");
    let cgroups: Vec<_> = (0..KEYS).map(|number| Cgroup::new(&number.to_string())).collect();
    let readers: Vec<_> = (0..KEYS)
        .map(|number| {
            // The kernel names a process after its program.
            let program = programs.path().join(format!("reader-{number}"));
            symlink("/bin/cat", &program).expect("a link");
            let mut command = Command::new(program);
            command.stdout(Stdio::null()).current_dir(running.volume("db"));
            command.args([format!("key-{number}")].iter().cycle().take(TIMES));
            cgroups[number].iter().for_each(|cgroup| cgroup.holds(&mut command));
            become_user(&mut command, 1000 + number, 2000 + number);
            command.spawn().expect("a reader")
        })
        .collect();
    let pids: Vec<_> = readers.iter().map(|reader| reader.id()).collect();
    for mut reader in readers {
        assert!(running.freed(|| reader.wait()).expect("it ends").success());
    }
    let uid = running.uid();
    let mut lines = lines(&running.log());
    assert_eq!(lines.len(), KEYS * TIMES);
    for line in &mut lines {
        let time = line["time"].take();
        let time = time.as_str().expect("a time");
        assert!(
            time.len() == "2026-11-21T16:40:01.123456Z".len() && time.starts_with("20") && time.ends_with('Z'),
            "{time}"
        );
        if cgroups[0].is_none() {
            line["cgroup"].take();
        }
    }
    for number in 0..KEYS {
        let expected = json!({
            "audit": "open",
            "time": null,
            "pod": {"namespace": "default", "name": "web", "uid": uid},
            "volume": "db",
            "key": format!("key-{number}"),
            "pid": pids[number],
            "uid": 1000 + number,
            "gid": 2000 + number,
            "command": format!("reader-{number}"),
            "cgroup": cgroups[number].as_ref().map(|cgroup| &cgroup.path),
        });
        assert_eq!(lines.iter().filter(|line| **line == expected).count(), TIMES, "{expected} in {lines:#?}");
    }
    assert!(!running.log().contains("hidden"));
    let status = volume_status(&fixture, "db");
    assert_eq!(status["mode"], "audited");
    let expected = json!({"messagesPerOpen": 1, "messagesPerClose": 1, "opens": KEYS * TIMES, "lost": 0});
    assert_eq!(status["audit"], expected);
    let table = fixture.status(&[]).stdout;
    let cost = format!("audited: each open waits for 1 message, each close sends 1; opens so far: {}\n", KEYS * TIMES);
    assert!(table.contains(&cost), "{table}");
}

#[test]
fn threads_that_open_at_once_are_all_one_process() {
    const TIMES: usize = 50;
    let fixture = fixture();
    let running = fixture.run();
    let volume = running.volume("db");
    running.freed(|| {
        std::thread::scope(|scope| {
            for number in 0..KEYS {
                let key = volume.join(format!("key-{number}"));
                scope.spawn(move || (0..TIMES).for_each(|_| read(&key)));
            }
        });
    });
    let mut count = BTreeMap::new();
    for line in lines(&running.log()) {
        assert_eq!(line["pid"], std::process::id());
        *count.entry(line["key"].as_str().expect("a key").to_owned()).or_insert(0) += 1;
    }
    let expected = (0..KEYS).map(|number| (format!("key-{number}"), TIMES)).collect();
    assert_eq!(count, expected);
}

#[test]
fn a_key_goes_by_the_users_name_however_it_is_opened() {
    let fixture = fixture();
    let running = fixture.run();
    let volume = running.volume("db");
    let generation = generation(&volume);
    running.freed(|| {
        read(volume.join("key-1"));
        read(volume.join("..data/key-1"));
        read(volume.join(&generation).join("key-1"));
        read(volume.join("sub/deep"));
        let directory = File::open(volume.join("sub")).expect("a directory");
        let (flags, mode) = (OFlags::RDONLY | OFlags::NONBLOCK, Mode::empty());
        drop(openat(&directory, c"deep", flags, mode).expect("a file"));
        // These calls do not open a file.
        let paths_only = OFlags::PATH.bits().cast_signed();
        File::options().read(true).custom_flags(paths_only).open(volume.join("key-2")).expect("a path");
        fs::metadata(volume.join("key-2")).expect("it is there");
        fs::read_link(volume.join("key-2")).expect("a link");
        assert!(fs::read_dir(&volume).expect("a directory").count() > KEYS);
        File::open(volume.join("absent")).expect_err("it is not there");
    });
    let keys: Vec<_> = lines(&running.log()).iter_mut().map(|line| line["key"].take()).collect();
    assert_eq!(keys, ["key-1", "key-1", "key-1", "sub/deep", "sub/deep"]);
}

#[test]
fn a_program_in_the_volume_can_be_executed() {
    // A process in execve(2) holds locks that some files of /proc wait for.
    let fixture = fixture();
    let running = fixture.run();
    let script = running.volume("db").join("script");
    let status = running.freed(|| Command::new(script).status()).expect("it starts");
    assert_eq!(status.code(), Some(7));
    let lines = lines(&running.log());
    assert!(
        lines.len() >= 2 && lines.iter().all(|line| line["key"] == "script"),
        "the kernel and the shell: {lines:?}"
    );
}

#[test]
fn only_opens_and_closes_of_the_audited_volume_cost_messages() {
    const TIMES: u64 = 20;
    let fixture = fixture();
    let running = fixture.run();
    let (audited, other) = (running.volume("db").join("key-0"), running.volume("config").join("a"));
    let requests = |name: &str| volume_status(&fixture, name)["requests"].as_u64().expect("a number");
    undisturbed(|| {
        let round = || [&audited, &other].map(|path| fs::read(path).expect("a key"));
        (0..2).for_each(|_| drop(round()));
        let before = (requests("db"), requests("config"));
        (0..TIMES).for_each(|_| drop(round()));
        // The kernel sends RELEASE some time after the close.
        eventually("all closes have arrived", || requests("db") >= before.0 + 2 * TIMES);
        match (requests("db") - before.0, requests("config") - before.1) {
            (audited, 0) if audited == 2 * TIMES => Ok(()),
            sent => Err(format!("{sent:?}")),
        }
    });
    assert_eq!(volume_status(&fixture, "config")["mode"], "zero-message");
    assert_eq!(volume_status(&fixture, "config").get("audit"), None);
}

#[test]
fn a_container_is_known_by_its_process_on_the_host() {
    let fixture = fixture();
    let running = fixture.run();
    let place = TempDir::with_prefix("podfs-test-").expect("a directory");
    let script = "mount --make-rprivate / && mount --bind \"$0\" \"$1\" && exec sh -c 'exec 3<\"$0/key-3\"; echo; read end' \"$1\"";
    let mut container = Command::new("unshare")
        .args(["--pid", "--fork", "--kill-child", "--mount", "sh", "-c", script])
        .args([&running.volume("db"), place.path()])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .expect("a container");
    let mut opened = String::new();
    BufReader::new(container.stdout.as_mut().expect("a pipe")).read_line(&mut opened).expect("it opens the key");
    let line = lines(&running.log()).pop().expect("a line");
    assert_eq!((&line["key"], &line["command"], &line["uid"]), (&json!("key-3"), &json!("sh"), &json!(0)));
    let status = fs::read_to_string(format!("/proc/{}/status", line["pid"])).expect("a process of the host");
    let numbers = status.lines().find_map(|line| line.strip_prefix("NSpid:")).expect("its numbers");
    assert_eq!(numbers.split_whitespace().last(), Some("1"), "it is the first of the container");
    drop(container.stdin.take());
    container.wait().expect("it ends");
}

#[test]
fn the_user_is_known_through_an_id_mapped_mount() {
    // The kernel does not send the caller's ids for a mount of another user namespace; the server reads them from /proc.
    let fixture = fixture();
    let running = fixture.run();
    let clone = id_mapped_clone(&running.volume("db"));
    let key = || openat(&clone, c"..data/key-0", OFlags::RDONLY, Mode::empty()).expect("a key");
    running.freed(|| drop(key()));
    let line = lines(&running.log()).pop().expect("a line");
    assert_eq!((&line["uid"], &line["gid"]), (&json!(0), &json!(0)));
}

/// Sets the flag when it is dropped.
struct Ends<'a>(&'a AtomicBool);

impl Drop for Ends<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

#[test]
fn no_open_goes_without_a_line_while_servers_are_killed() {
    const KILLS: usize = 5;
    let fixture = fixture();
    let running = fixture.run();
    let key = running.volume("db").join("key-0");
    let over = AtomicBool::new(false);
    let opens = std::thread::scope(|scope| {
        let reader = scope.spawn(|| {
            let mut opens = 0;
            while !over.load(Ordering::Relaxed) {
                read(&key);
                opens += 1;
                // Keeps the log short, because this test parses all of it many times.
                std::thread::sleep(Duration::from_micros(500));
            }
            opens
        });
        // Ends the reader also when the test fails: the scope waits for the reader.
        let _ends = Ends(&over);
        running.freed(|| {
            for number in 1..=KILLS {
                let before = lines(&running.log()).len();
                eventually("some opens are in the log", || lines(&running.log()).len() > before + 20);
                kill(running.server(), Signal::SIGKILL).expect("it is there");
                running.wait_log_times("another one (pid", number);
            }
            over.store(true, Ordering::Relaxed);
            reader.join().expect("every open succeeds")
        })
    });
    let lines = lines(&running.log());
    let again = lines.iter().filter(|line| line["again"] == true).count();
    assert!((opens..=opens + again).contains(&lines.len()), "{opens} opens, {} lines, {again} again", lines.len());
    assert!(again <= KILLS, "{again}");
    assert!(lines.iter().all(|line| line["pid"] == std::process::id()), "every server knows the process: {lines:?}");
    let (counted, lost) = counted(&fixture);
    // A server may be killed after it has counted an open and before it has written the line, or the other way round.
    assert!(counted.abs_diff(lines.len() as u64) <= KILLS as u64 && lost == 0, "{counted} for {}", lines.len());
}

#[test]
fn opens_are_written_down_without_a_supervisor_and_by_the_next_one() {
    let fixture = fixture();
    let mut running = fixture.run();
    let key = running.volume("db").join("key-0");
    read(&key);
    let server = fixture.kill_supervisor(&mut running);
    read(&key);
    assert_eq!(lines(&running.log()).len(), 2);
    // The removal of an annotation does not change mounted volumes.
    fixture.write("pod.yaml", &fs::read_to_string(fixture.pod()).expect("a manifest").replace("audit.db", "other"));
    let running = fixture.run();
    assert_eq!(running.server(), server);
    running.wait_log("volume \"db\" is still audited, as it was mounted");
    read(&key);
    kill(server, Signal::SIGKILL).expect("it is there");
    read(&key);
    let lines = lines(&running.log());
    assert_eq!(lines.len(), 4);
    assert!(lines.iter().all(|line| line["pid"] == std::process::id()), "{lines:?}");
    assert_eq!((volume_status(&fixture, "db")["mode"].take(), counted(&fixture)), (json!("audited"), (4, 0)));
}

#[test]
fn opens_are_written_down_after_an_upgrade() {
    let fixture = fixture();
    let mut builds = Builds::new(&fixture);
    let running = builds.run(&fixture);
    let key = running.volume("db").join("key-0");
    read(&key);
    for count in 2..5 {
        builds.upgrade(&fixture);
        read(&key);
        let lines = lines(&running.log());
        assert_eq!((lines.len(), &lines[count - 1]["pid"]), (count, &json!(std::process::id())));
    }
    assert_eq!((volume_status(&fixture, "db")["mode"].take(), counted(&fixture)), (json!("audited"), (4, 0)));
}

/// `podfs run` whose standard error is this descriptor.
fn command_with_log(fixture: &Fixture, log: impl AsFd) -> Command {
    let mut command = fixture.command();
    with_standard_error(&mut command, log);
    command
}

#[test]
fn a_log_without_a_reader_delays_no_open_and_lost_lines_are_counted() {
    const LOST: u64 = 30;
    let fixture = fixture();
    let (mut log, writer) = std::io::pipe().expect("a pipe");
    let mut running = fixture.start_command(command_with_log(&fixture, &writer));
    running.wait_ready();
    let key = running.volume("db").join("key-0");
    // Fills the pipe. Opens it anew, because O_NONBLOCK must not affect the open file that podfs writes to.
    let own = format!("/proc/self/fd/{}", writer.as_raw_fd());
    let mut full = File::options().write(true).custom_flags(libc::O_NONBLOCK).open(own).expect("the pipe");
    let mut filled = 0;
    for size in [4096, 1] {
        while let Ok(written) = full.write(&vec![b'\n'; size]) {
            filled += written;
        }
    }
    running.freed(|| (0..LOST).for_each(|_| read(&key)));
    assert_eq!(counted(&fixture), (LOST, LOST));
    // A successor knows how many lines its predecessor has lost.
    kill(running.server(), Signal::SIGKILL).expect("it is there");
    running.freed(|| read(&key));
    let mut all = vec![0; 1 << 20];
    let length = log.read(&mut all).expect("the content of the pipe");
    assert!(length >= filled);
    eventually("a line reaches the log again", || {
        running.freed(|| read(&key));
        let (opens, lost) = counted(&fixture);
        opens > lost
    });
    let (_, lost) = counted(&fixture);
    let length = log.read(&mut all).expect("a line");
    let reported =
        lines(&String::from_utf8_lossy(&all[..length])).iter().filter_map(|line| line["lost"].as_u64()).sum::<u64>();
    assert_eq!(reported, lost);
}

#[test]
fn a_closed_log_loses_all_lines_and_no_open_fails() {
    let (log, writer) = std::io::pipe().expect("a pipe");
    drop(log);
    let nowhere = File::options().write(true).open("/dev/null").expect("a device");
    for standard_error in [OwnedFd::from(writer), OwnedFd::from(nowhere)] {
        let fixture = fixture();
        let mut running = fixture.start_command(command_with_log(&fixture, &standard_error));
        running.wait_ready();
        let key = running.volume("db").join("key-0");
        running.freed(|| (0..3).for_each(|_| read(&key)));
        assert_eq!(counted(&fixture), (3, 3));
        let table = fixture.status(&[]).stdout;
        assert!(table.contains("opens so far: 3, lines lost: 3"), "{table}");
        assert_eq!(running.stop().code(), Some(0));
    }
}

#[test]
fn a_log_that_is_a_socket_gets_the_lines_too() {
    // systemd connects the standard error of a service to a socket of the journal.
    let fixture = fixture();
    let (log, of_podfs) = std::os::unix::net::UnixStream::pair().expect("a socket pair");
    let mut running = fixture.start_command(command_with_log(&fixture, &of_podfs));
    drop(of_podfs);
    running.wait_ready();
    read(running.volume("db").join("key-4"));
    let mut log = BufReader::new(log).lines();
    let line = log.find_map(|line| lines(&line.expect("a line")).pop()).expect("an open");
    assert_eq!((&line["key"], &line["pid"]), (&json!("key-4"), &json!(std::process::id())));
}

#[test]
fn a_pod_with_a_directory_of_the_host_is_audited_as_well() {
    let source = TempDir::with_prefix("podfs-test-").expect("a directory");
    let fixture = fixture();
    let pod = fs::read_to_string(fixture.pod()).expect("a manifest");
    fixture.write("pod.yaml", &format!("{pod}  - {{name: host, hostPath: {{path: {}}}}}\n", source.path().display()));
    let running = fixture.run();
    let key = running.volume("db").join("key-0");
    read(&key);
    kill(running.server(), Signal::SIGKILL).expect("it is there");
    running.freed(|| read(&key));
    let pids: Vec<_> = lines(&running.log()).iter_mut().map(|line| line["pid"].take()).collect();
    assert_eq!(pids, [std::process::id(), std::process::id()]);
}

#[test]
fn an_audited_server_has_no_privilege_and_sees_processes_only() {
    let fixture = fixture();
    let running = fixture.run();
    let server = running.server();
    let status = fs::read_to_string(format!("/proc/{server}/status")).expect("a status");
    let field = |name: &str| status.lines().find_map(|line| line.strip_prefix(name)).expect("the field").trim();
    assert_eq!((field("CapBnd:"), field("Seccomp:")), ("0000000000000000", "2"));
    assert_ne!(field("Uid:").split_whitespace().next(), Some("0"));
    let table = fs::read_to_string(format!("/proc/{server}/mountinfo")).expect("a table");
    assert_eq!(table.lines().filter_map(|line| line.split(' ').nth(4)).collect::<Vec<_>>(), ["/", "/proc"]);
    assert!(table.lines().all(|line| line.contains(" ro,nosuid,nodev,noexec")), "{table}");
    read(running.volume("db").join("key-0"));
    assert!(!running.log().contains("WARN"), "{}", running.log());
}

#[test]
fn podfs_mount_audits_a_volume_of_files_and_refuses_others() {
    let fixture = fixture();
    fixture.write("volume.yaml", "name: keys\nsecret: {secretName: db}\n");
    fixture.write("scratch.yaml", "name: scratch\nemptyDir: {}\n");
    let command = |volume: &str| {
        let mut command = Command::new(PODFS);
        command.args(["mount", "--audit", "--objects"]).arg(fixture.objects()).stdin(Stdio::null());
        command.arg("--volume").arg(fixture.path(volume)).arg(fixture.path("at"));
        command
    };
    let refused = finish(&mut command("scratch.yaml"));
    refused.says(2, &["--audit is for files that podfs assembles", "\"scratch\" is of kind emptyDir"]);
    let mut running = fixture.spawn(&mut command("volume.yaml"));
    running.wait_log("is ready");
    read(fixture.path("at/key-5"));
    let line = lines(&running.log()).pop().expect("a line");
    assert_eq!((&line["volume"], &line["key"]), (&json!("keys"), &json!("key-5")));
    assert_eq!(line["pid"], std::process::id());
    kill(Pid::from_raw(running.pid().as_raw()), Signal::SIGINT).expect("it is there");
    assert_eq!(running.wait().code(), Some(0), "{}", running.log());
}
