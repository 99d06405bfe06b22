//! From the start of `podfs run` to its end: readiness, identity, ways to give the pod, a clean stop.

use std::fs::{self, File};
use std::io::{Read, Write};
use std::os::unix::fs::{FileExt, MetadataExt, OpenOptionsExt};
use std::os::unix::net::UnixDatagram;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::mpsc::{TryRecvError, channel};
use std::thread;

use crate::common::outcome::finish;
use crate::common::*;
use nix::sys::signal::{Signal, kill, killpg};
use nix::sys::stat::Mode;
use nix::unistd::mkfifo;
use serde_json::{Value, json};

/// A pod with one volume of each kind.
fn pod_of_all_kinds() -> String {
    pod("[{name: config, configMap: {name: app}}, {name: keys, secret: {secretName: tls}},
      {name: about, downwardAPI: {items: [{path: labels, fieldRef: {fieldPath: metadata.labels}}]}},
      {name: all, projected: {sources: [{configMap: {name: app}}, {secret: {name: tls}}]}}]")
}

/// The command of a podfs that serves the pod of the fixture with another run directory.
fn with_other_run_directory(fixture: &Fixture) -> Command {
    let mut command = Command::new(PODFS);
    command.arg("run").arg("--pod").arg(fixture.pod()).arg("--objects").arg(fixture.objects());
    command.arg("--root-dir").arg(fixture.path("root")).arg("--run-dir").arg(fixture.path("other"));
    command
}

fn fixture_of_all_kinds() -> Fixture {
    let fixture = Fixture::new(&pod_of_all_kinds());
    fixture.write("objects/app.json", &config_map("app", &[("app.conf", "a=1")]));
    fixture.write("objects/tls.json", &secret("tls", &[("key", "pem")]));
    fixture
}

/// A pod whose one volume `config` has the file `a` with content 1.
fn small_fixture() -> Fixture {
    let fixture = Fixture::new(&config_pod());
    fixture.write("objects/app.json", &config_map("app", &[("a", "1")]));
    fixture
}

#[test]
fn fu_09_a_mount_shows_its_files_from_the_start_and_is_there_at_readiness() {
    let fixture = small_fixture();
    let mut first = fixture.run();
    let volume = first.volume("config");
    first.stop();
    let device = |path: &Path| fs::metadata(path).map(|metadata| metadata.dev());
    let host = device(&fixture.path("")).expect("a device");
    for _ in 0..10 {
        let mut running = fixture.start();
        while !running.is_ready() {
            if device(&volume).is_ok_and(|device| device != host) {
                assert_eq!(fs::read_to_string(volume.join("a")).expect("the volume's file"), "1");
            }
        }
        assert_ne!(device(&volume).expect("a device"), host, "podfs is ready, and the volume is not mounted");
        running.stop();
    }
}

#[test]
fn readiness_names_every_volume_at_the_kubelets_path_with_its_generation() {
    // FU-11
    let fixture = fixture_of_all_kinds();
    let running = fixture.run();
    let uid = running.json()["pod"]["uid"].as_str().expect("a uid");
    let volumes = fixture.path("root/pods").join(uid).join("volumes");
    let volume = |name: &str, kind: &str, directory: &str| {
        let path = volumes.join(directory).join(name);
        json!({"name": name, "kind": kind, "path": path, "mode": "zero-message", "generation": generation(&path)})
    };
    let expected = json!({
        "pod": {"namespace": "default", "name": "web", "uid": uid},
        "volumes": [
            volume("config", "configMap", "kubernetes.io~configmap"),
            volume("keys", "secret", "kubernetes.io~secret"),
            volume("about", "downwardAPI", "kubernetes.io~downward-api"),
            volume("all", "projected", "kubernetes.io~projected"),
        ],
    });
    assert_eq!(*running.json(), expected);
    for (volume, file, content) in [
        ("config", "app.conf", "a=1"),
        ("keys", "key", "pem"),
        ("about", "labels", r#"app="web""#),
        ("all", "app.conf", "a=1"),
        ("all", "key", "pem"),
    ] {
        let read = fs::read_to_string(running.volume(volume).join(file)).expect("readable once podfs is ready");
        assert_eq!(read, content, "{volume}/{file}");
    }
}

#[test]
fn readiness_is_one_line_on_standard_error() {
    let fixture = fixture_of_all_kinds();
    let mut running = fixture.run();
    running.stop();
    let log = running.log();
    let lines: Vec<_> = log.lines().filter_map(|line| line.split_once("Z  INFO podfs: ")).collect();
    let [(time, line)] = lines.as_slice() else { panic!("not one line: {log}") };
    assert!(time.starts_with("20") && time.contains('T'), "{time}");
    assert!(line.starts_with("pod default/web is ready: "), "{line}");
    for part in ["config in ", "/kubernetes.io~configmap", "keys in ", "about in ", "all in "] {
        assert!(line.contains(part), "{part:?} is not in: {line}");
    }
}

#[test]
fn systemd_gets_the_reason_of_a_waiting_volume_then_readiness_and_the_end() {
    let fixture = Fixture::new(&config_pod());
    let socket = UnixDatagram::bind(fixture.path("notify")).expect("a socket");
    socket.set_read_timeout(Some(TIMEOUT)).expect("a timeout");
    // All lines until one that starts like this.
    let receive_until = |wanted: &str| {
        let mut lines = Vec::new();
        let mut message = [0; 4096];
        while !lines.iter().any(|line: &String| line.starts_with(wanted)) {
            let length = socket.recv(&mut message).unwrap_or_else(|_| panic!("no {wanted} after {lines:?}"));
            lines.extend(String::from_utf8_lossy(&message[..length]).lines().map(str::to_owned));
        }
        lines
    };
    let mut command = fixture.command();
    command.env("NOTIFY_SOCKET", fixture.path("notify"));
    command.env("WATCHDOG_USEC", "20000");
    let mut running = fixture.start_command(command);
    let waiting = r#"STATUS=0 of 1 volumes are up; config waits: configmap "app" not found"#;
    assert!(!receive_until(waiting).contains(&"READY=1".to_owned()), "ready without a volume");
    fixture.write("objects/app.json", &config_map("app", &[("a", "1")]));
    let lines = receive_until("READY=1");
    assert!(lines.contains(&"STATUS=1 of 1 volumes are up".to_owned()), "{lines:?}");
    running.wait_ready();
    receive_until("WATCHDOG=1");
    receive_until("WATCHDOG=1");
    running.signal(Signal::SIGTERM);
    receive_until("STOPPING=1");
    let lines = receive_until("EXTEND_TIMEOUT_USEC=");
    assert!(lines.contains(&"STATUS=unmounting; 1 volumes are left".to_owned()), "{lines:?}");
    assert_eq!(running.wait().code(), Some(0));
}

#[test]
fn a_pods_uid_is_taken_from_the_manifest_or_always_derived_the_same() {
    let uid_of_one_run = |fixture: &Fixture| {
        let running = fixture.run();
        let uid = running.json()["pod"]["uid"].as_str().expect("a uid").to_owned();
        assert!(running.volume("config").starts_with(fixture.path("root/pods").join(&uid)));
        uid
    };
    let (first, second) = (small_fixture(), small_fixture());
    let derived = uid_of_one_run(&first);
    assert_eq!(uid_of_one_run(&first), derived, "the uid differs from run to run");
    assert_eq!(uid_of_one_run(&second), derived, "the uid depends on the directory");
    let given = config_pod().replace("name: web, labels", "name: web, uid: 0f-given, labels");
    second.write("pod.yaml", &given);
    assert_eq!(uid_of_one_run(&second), "0f-given");
}

#[test]
fn the_pod_may_come_from_standard_input() {
    let fixture = small_fixture();
    let mut command = fixture.command();
    replace_argument(&mut command, &fixture.pod(), "-");
    let mut running = fixture.start_with_input(command, File::open(fixture.pod()).expect("a manifest"));
    running.wait_ready();
    wait_content(&running.volume("config").join("a"), "1");
    // podfs still watches the objects.
    fixture.write("objects/app.json", &config_map("app", &[("a", "2")]));
    wait_content(&running.volume("config").join("a"), "2");
}

#[test]
fn the_pod_may_be_json_or_in_a_list_or_among_documents_that_count_as_objects() {
    let json_pod = json!({
        "apiVersion": "v1", "kind": "Pod", "metadata": {"name": "web"},
        "spec": {"containers": [], "volumes": [{"name": "config", "configMap": {"name": "app"}}]},
    });
    let object = config_map("app", &[("a", "from the pod's file")]);
    let list = json!({
        "apiVersion": "v1", "kind": "List",
        "items": [serde_json::from_str::<Value>(&object).expect("JSON"), json_pod.clone()],
    });
    let documents = format!("{object}\n---\n{}\n---\n{}", config_pod(), config_map("other", &[]));
    for (name, manifest, content) in [
        ("pod.json", format!("{json_pod:#}"), "1"),
        ("list.json", list.to_string(), "from the pod's file"),
        ("list.yaml", format!("# A list.\n{list}"), "from the pod's file"),
        ("documents.yaml", documents, "from the pod's file"),
    ] {
        let fixture = Fixture::new("");
        if content == "1" {
            fixture.write("objects/app.json", &config_map("app", &[("a", "1")]));
        }
        fixture.write(name, &manifest);
        let mut command = fixture.command();
        replace_argument(&mut command, &fixture.pod(), fixture.path(name));
        let mut running = fixture.start_command(command);
        running.wait_ready();
        let read = fs::read_to_string(running.volume("config").join("a")).expect(name);
        assert_eq!(read, content, "{name}");
    }
}

#[test]
fn with_json_logs_every_line_on_standard_error_is_json() {
    let fixture = Fixture::new(&config_pod());
    let mut command = fixture.command();
    command.args(["--log-format", "json"]);
    let mut running = fixture.start_command(command);
    running.wait_log("SetUp failed");
    fixture.write("objects/app.json", &config_map("app", &[("a", "1")]));
    running.wait_ready();
    // The thread that reads the manifests writes the next line.
    fixture.write("objects/broken.json", "{");
    running.wait_log("broken.json");
    running.stop();
    let log = running.log();
    let lines: Vec<Value> = log.lines().map(|line| serde_json::from_str(line).expect(line)).collect();
    let message = |line: &Value| line["fields"]["message"].as_str().expect("a message").to_owned();
    assert!(lines.iter().any(|line| message(line).contains("pod default/web is ready: config in ")), "{log}");
    let find = |words: &str| lines.iter().find(|line| message(line).contains(words)).expect(words);
    assert_eq!(find("SetUp failed")["level"], "WARN");
    // The fields of each line name its pod and its volume.
    let about = |words: &str| ["pod", "volume"].map(|field| find(words)["fields"][field].as_str().unwrap_or_default());
    assert_eq!(about("SetUp failed"), ["default/web", "config"]);
    assert_eq!(about("volume is current"), ["default/web", "config"]);
    assert_eq!(about("unmounting"), ["default/web", ""]);
    assert_eq!(about("broken.json"), ["default/web", ""]);
    assert!(find("volume is current")["fields"]["generation"].as_str().expect("text").starts_with("..20"), "{log}");
    assert_eq!(find("volume is current")["target"], "podfs::supervisor::volume");
}

#[test]
fn both_stop_signals_end_podfs_with_nothing_left() {
    // FU-10
    for signal in [Signal::SIGTERM, Signal::SIGINT] {
        let fixture = fixture_of_all_kinds();
        let mut running = fixture.run();
        assert_eq!((fixture.mounts().len(), fixture.processes().len()), (4, 3), "the checks below see something");
        running.signal(signal);
        assert_eq!(running.wait().code(), Some(0), "{signal}: {}", running.log());
        fixture.assert_nothing_left();
    }
}

#[test]
fn podfs_goes_on_under_nohup_when_its_terminal_is_closed() {
    let fixture = fixture_of_all_kinds();
    let podfs = fixture.command();
    let mut command = Command::new("nohup");
    command.arg(podfs.get_program()).args(podfs.get_args());
    let mut running = fixture.start_command(command);
    running.wait_ready();
    running.signal(Signal::SIGHUP);
    // A later signal is handled later.
    running.signal(Signal::SIGTERM);
    assert_eq!(running.wait().code(), Some(0), "{}", running.log());
    assert!(running.log().contains("SIGTERM received") && !running.log().contains("SIGHUP"), "{}", running.log());
    fixture.assert_nothing_left();
}

#[test]
fn a_stop_of_all_processes_at_once_ends_podfs_with_nothing_left() {
    // A service manager signals all processes if it does not know the main process.
    for signal in [Signal::SIGTERM, Signal::SIGHUP] {
        let fixture = fixture_of_all_kinds();
        let mut running = fixture.run();
        let supervisor = running.pid();
        let others = fixture.processes().into_iter().filter(|pid| *pid != supervisor);
        others.for_each(|pid| kill(pid, signal).expect("it is there"));
        assert!(fs::read_dir(running.volume("config")).expect("a server answers").count() > 0);
        running.signal(signal);
        assert_eq!(running.wait().code(), Some(0), "{signal}: {}", running.log());
        assert!(!running.log().contains("another one (pid "), "the first server served to the end");
        fixture.assert_nothing_left();
    }
}

#[test]
fn the_unmount_does_not_wait_for_a_server_that_hangs_and_dies() {
    let fixture = fixture_of_all_kinds();
    let mut running = fixture.run();
    let server = running.server();
    kill(server, Signal::SIGSTOP).expect("it is there");
    running.signal(Signal::SIGTERM);
    running.wait_log("unmounting");
    // podfs may have continued the server, which then has ended.
    let _ = kill(server, Signal::SIGKILL);
    assert_eq!(running.wait().code(), Some(0), "{}", running.log());
    fixture.assert_nothing_left();
}

#[test]
fn a_server_that_is_stopped_while_volumes_are_unmounted_is_continued() {
    let fixture = fixture_of_all_kinds();
    let mut running = fixture.run();
    let server = running.server();
    kill(server, Signal::SIGSTOP).expect("it is there");
    running.signal(Signal::SIGTERM);
    assert_eq!(running.wait().code(), Some(0), "{}", running.log());
    let (log, stopped) = (running.log(), format!("because their server (pid {server}) is stopped; podfs continues it"));
    assert!(log.contains(&stopped) && !log.contains("the server ended while"), "{log}");
    fixture.assert_nothing_left();
}

#[test]
fn a_server_that_is_kept_stopped_while_volumes_are_unmounted_delays_the_end_only() {
    let fixture = fixture_of_all_kinds();
    let mut running = fixture.run();
    let server = running.server();
    let (ended, ends) = channel::<()>();
    thread::scope(|scope| {
        scope.spawn(move || {
            while ends.try_recv() == Err(TryRecvError::Empty) && kill(server, Signal::SIGSTOP).is_ok() {
                thread::yield_now();
            }
        });
        running.signal(Signal::SIGTERM);
        assert_eq!(running.wait().code(), Some(0), "{}", running.log());
        drop(ended);
    });
    fixture.assert_nothing_left();
}

#[test]
fn a_volume_that_still_waits_leaves_nothing_either() {
    let fixture = Fixture::new(&config_pod());
    let mut running = fixture.start();
    running.wait_log(r#"configmap "app" not found"#);
    assert_eq!(running.stop().code(), Some(0));
    fixture.assert_nothing_left();
}

#[test]
fn directories_of_others_and_foreign_files_stay() {
    // OR-02
    let fixture = small_fixture();
    fs::create_dir_all(fixture.path("root/pods")).expect("a directory");
    let mut running = fixture.run();
    let volume = running.volume("config");
    let pod_directory = volume.ancestors().nth(3).expect("volumes, kind and volume lie below").to_owned();
    fs::write(pod_directory.join("foreign"), "mine").expect("written");
    assert_eq!(running.stop().code(), Some(0));
    assert_eq!(fixture.mounts(), [] as [&Path; 0]);
    let names: Vec<_> =
        fs::read_dir(&pod_directory).expect("it stays").map(|entry| entry.expect("an entry").file_name()).collect();
    assert_eq!(names, ["foreign"], "podfs removes the directories that it made");
    fs::remove_file(pod_directory.join("foreign")).expect("removed");
    let mut running = fixture.run();
    running.stop();
    assert!(pod_directory.is_dir(), "the second run did not make it");
    fs::remove_dir(&pod_directory).expect("it is empty");
    assert!(fixture.path("root/pods").is_dir() && !fixture.path("run").exists());
}

#[test]
fn a_busy_volume_leaves_its_path_and_open_files_stay_readable() {
    // FU-10
    let fixture = small_fixture();
    let mut running = fixture.run();
    let volume = running.volume("config");
    let mut file = File::open(volume.join("a")).expect("a file");
    let mut content = String::new();
    file.read_to_string(&mut content).expect("readable");
    let inside = Inside::start(&volume);
    assert_eq!(running.stop().code(), Some(0), "{}", running.log());
    fixture.assert_nothing_left();
    let mut again = [0; 8];
    let read = file.read_at(&mut again, 0).expect("what the kernel has cached stays readable");
    assert_eq!(&again[..read], b"1");
    drop(inside);
}

#[test]
fn ctrl_c_reaches_the_whole_foreground_group_and_still_ends_cleanly() {
    let fixture = small_fixture();
    let mut command = fixture.command();
    command.process_group(0);
    let mut running = fixture.start_command(command);
    running.wait_ready();
    killpg(running.pid(), Signal::SIGINT).expect("a group");
    assert_eq!(running.wait().code(), Some(0), "{}", running.log());
    fixture.assert_nothing_left();
}

/// A process whose working directory is inside a volume.
struct Inside(std::process::Child);

impl Inside {
    fn start(directory: &Path) -> Self {
        // `cat` waits for an end of input that does not come before the guard is dropped.
        let mut command = Command::new("cat");
        Self(command.current_dir(directory).stdin(Stdio::piped()).stdout(Stdio::null()).spawn().expect("cat starts"))
    }
}

impl Drop for Inside {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Replaces the argument `old` of a command by `new`.
fn replace_argument(command: &mut Command, old: &Path, new: impl AsRef<std::ffi::OsStr>) {
    let arguments: Vec<_> = command.get_args().map(|argument| argument.to_owned()).collect();
    let mut changed = Command::new(command.get_program());
    let replace = |argument: std::ffi::OsString| if argument == old { new.as_ref().to_owned() } else { argument };
    changed.args(arguments.into_iter().map(replace));
    *command = changed;
}

#[test]
fn a_run_directory_that_another_process_deletes_is_made_again_and_the_next_podfs_adopts_the_server() {
    let fixture = small_fixture();
    let mut running = fixture.run();
    let server = running.server();
    fs::remove_dir_all(fixture.path("run")).expect("the run directory is lost");
    eventually("podfs status knows the pod again", || {
        let pods = fixture.pods();
        pods.len() == 1 && pods[0]["state"] == "running"
    });
    running.wait_log("the server can be found at");
    fixture.kill_supervisor(&mut running);
    let mut next = fixture.run();
    assert_eq!(next.server(), server);
    assert!(next.stop().success(), "{}", next.log());
    fixture.assert_nothing_left();
}

#[test]
fn a_reader_of_the_log_that_stands_still_delays_neither_volumes_nor_the_end() {
    let fixture = small_fixture();
    let pipe = fixture.path("pipe");
    mkfifo(&pipe, Mode::S_IRWXU).expect("a pipe");
    let mut command = Command::new("sh");
    command.args(["-c", "exec \"$@\" 2<>\"$0\""]).arg(&pipe);
    let podfs = fixture.command();
    command.arg(podfs.get_program()).args(podfs.get_args());
    let mut running = fixture.start_command(command);
    running.wait_ready();
    let volume = running.volume("config");
    let mut reader =
        File::options().read(true).write(true).custom_flags(libc::O_NONBLOCK).open(&pipe).expect("the same pipe");
    while reader.write(&[b'x'; 4096]).is_ok() {}
    while reader.write(b"x").is_ok() {}
    for content in ["2", "3", "4"] {
        fixture.write("objects/app.json", &config_map("app", &[("a", content)]));
        wait_content(&volume.join("a"), content);
        fixture.write("objects/other.json", "{");
        kill(running.server(), Signal::SIGKILL).expect("a server");
        fixture.write("objects/other.json", "{}");
    }
    let mut text = Vec::new();
    let _would_block = reader.read_to_end(&mut text);
    let has_report = |text: &[u8]| String::from_utf8_lossy(text).contains("line(s) of this log are lost");
    assert!(!has_report(&text));
    eventually("podfs says that lines are lost", || {
        kill(running.server(), Signal::SIGKILL).expect("a server");
        let _would_block = reader.read_to_end(&mut text);
        has_report(&text)
    });
    while reader.write(&[b'x'; 4096]).is_ok() {}
    while reader.write(b"x").is_ok() {}
    running.stop();
}

#[test]
fn one_podfs_at_a_time_has_the_volumes_of_a_pod_in_a_root_directory() {
    let fixture = Fixture::new(&pod("[{name: scratch, emptyDir: {}}]"));
    let mut first = fixture.run();
    let file = first.volume("scratch").join("file");
    fs::write(&file, "1").expect("written");
    let refused = finish(&mut with_other_run_directory(&fixture));
    let pid = format!("or whose run directory was deleted (pid {})", first.pid());
    refused.says(1, &["is already served by a podfs with another --run-dir", &pid, "stop that one first"]);
    assert!(!refused.stderr.contains("a disk that is slow"), "{}", refused.stderr);
    assert!(!fixture.path("other").exists(), "the second one leaves nothing");
    assert_eq!(fs::read_to_string(&file).expect("kept"), "1");
    assert!(first.stop().success());
    let mut second = fixture.start_command(with_other_run_directory(&fixture));
    second.wait_ready();
    assert!(second.stop().success());
    assert!(!fixture.path("other").exists());
    fixture.assert_nothing_left();
}
