//! Live parts of projection volumes (`podfs.io/sub-path.<volume>: live`): in running containers, and when the server or
//! the supervisor is killed between any two of its system calls while the live parts change.

use std::fs::{self, File};
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};

use nix::sys::signal::{Signal, kill};
use serde_json::Value;

use crate::common::outcome::finish;
use crate::common::runtime::{Runtime, RuntimeContainer, SharedDirectory};
use crate::common::tracer::killed_at;
use crate::common::tree::{files, parse};
use crate::common::watch::Watcher;
use crate::common::*;

const UID: &str = "d0a4f2c7-6f0e-4f0b-9a3d-8a1f6f0b7c21";

/// More system calls than the server or the supervisor makes for an update.
const STOPS: usize = 2000;

/// A pod with a container that mounts a key and a directory of its ConfigMap live. Fields are dropped in this order.
struct Pod {
    running: Running,
    fixture: Fixture,
    _shared: SharedDirectory,
}

impl Pod {
    fn new(arguments: &[&str]) -> Pod {
        Self::with_spec(arguments, "")
    }

    /// The same with additional fields in the pod's spec.
    fn with_spec(arguments: &[&str], spec: &str) -> Pod {
        let shared = SharedDirectory::new();
        let live = if arguments.is_empty() { ", annotations: {podfs.io/sub-path.config: live}" } else { "" };
        let fixture = Fixture::new_in(
            &shared.path(),
            &format!(
                "apiVersion: v1\nkind: Pod\nmetadata: {{name: web, uid: {UID}{live}}}\nspec:\n  containers:\n  - name: web\n    \
                 volumeMounts:\n    - {{name: config, mountPath: /app.conf, subPath: app.conf}}\n    \
                 - {{name: config, mountPath: /conf.d, subPath: conf.d}}\n    - {{name: out, mountPath: /out}}\n  \
                 volumes:\n  - name: config\n    projected:\n      sources:\n      - configMap: {{name: app, items: \
                 [{{key: setting, path: app.conf}}, {{key: setting, path: conf.d/setting}}]}}\n      \
                 - configMap: {{name: more, optional: true, items: [{{key: extra, path: conf.d/extra}}]}}\n  \
                 - {{name: out, emptyDir: {{}}}}\n{spec}"
            ),
        );
        write(&fixture, "1");
        let mut command = fixture.command();
        command.args(arguments);
        let mut running = fixture.start_command(command);
        running.wait_ready();
        Pod { running, fixture, _shared: shared }
    }

    /// Requests the mounts of the container, as an agent does.
    #[track_caller]
    fn mounts(&self) -> Vec<Value> {
        let outcome = finish(self.fixture.operator("mounts").args(["prepare", "--pod", UID, "--container", "web"]));
        assert_eq!(outcome.code, Some(0), "{}", outcome.stderr);
        serde_json::from_str(&outcome.stdout).expect("JSON")
    }

    /// The mount points of the key and the directory for the container.
    #[track_caller]
    fn parts(&self) -> [PathBuf; 2] {
        let mounts = self.mounts();
        ["/app.conf", "/conf.d"].map(|destination| {
            let mount = mounts.iter().find(|mount| mount["destination"] == destination).expect("a mount");
            mount["source"].as_str().expect("a path").into()
        })
    }
}

fn write(fixture: &Fixture, content: &str) {
    fixture.write("objects/app.json", &config_map("app", &[("setting", content)]));
}

fn read(path: &Path) -> String {
    fs::read_to_string(path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

#[test]
fn a_running_container_sees_its_live_parts_change() {
    for (runtime, arguments) in [(Runtime::Runc, &[][..]), (Runtime::Crun, &["--sub-path", "live"])] {
        let pod = Pod::new(arguments);
        let mut container = RuntimeContainer::start(runtime, &pod.mounts());
        assert_eq!(container.says("cat /app.conf /conf.d/*"), "11", "{runtime:?}");
        let root = PathBuf::from(format!("/proc/{}/root", container.pid()));
        let (file, directory) = (root.join("app.conf"), root.join("conf.d"));
        let (open, inode) = (File::open(&file).expect("a file"), fs::metadata(&file).expect("a file").ino());
        let mut watcher = Watcher::on("file", &file);
        watcher.add("dir", &directory);
        write(&pod.fixture, "2");
        wait_content(&file, "2");
        let mut events = Vec::new();
        eventually("the watcher gets the last event of the update", || {
            events.extend(watcher.events());
            events.contains(&"dir ATTRIB setting".to_owned())
        });
        for event in ["file MODIFY", "file CLOSE_WRITE", "file ATTRIB", "dir MODIFY setting", "dir CLOSE_WRITE setting"]
        {
            assert!(events.iter().any(|received| received == event), "{runtime:?}: {event}: {events:?}");
        }
        let mut bytes = [0; 4];
        assert_eq!(open.read_at(&mut bytes, 0).expect("an open file can be read"), 1);
        assert_eq!((bytes[0], fs::metadata(&file).expect("a file").ino()), (b'2', inode));
        pod.fixture.write("objects/more.json", &config_map("more", &[("extra", "x")]));
        eventually("a new key appears", || container.says("cat /conf.d/extra") == "x");
        pod.fixture.remove("objects/more.json");
        eventually("a key vanishes", || container.says("ls /conf.d") == "setting");
        assert!(container.says("echo y >/app.conf").contains("Read-only file system"));
        // A container that starts again gets mounts of the same inodes.
        let before = pod.parts().map(|path| fs::metadata(path).expect("attributes").ino());
        assert_eq!(pod.parts().map(|path| fs::metadata(path).expect("attributes").ino()), before);
        drop(container);
    }
}

#[test]
fn live_parts_have_the_ids_of_a_container_with_a_user_namespace() {
    // FU-04. The test uses crun: runc maps ids of mounts only from 1.2 on, and Debian 12 has an older version.
    let pod = Pod::with_spec(&[], "  hostUsers: false\n");
    let mut container = RuntimeContainer::start_in_user_namespace(Runtime::Crun, &pod.mounts());
    assert_eq!(container.says("cat /app.conf /conf.d/*"), "11");
    assert_eq!(container.says("ls -ln /app.conf /conf.d/setting").matches(" 0        0 ").count(), 2);
    write(&pod.fixture, "2");
    eventually("the container sees the change", || container.says("cat /app.conf /conf.d/*") == "22");
    assert!(container.says("echo x >/app.conf").contains("Read-only file system"));
}

#[test]
fn no_call_of_a_container_fails_when_live_parts_change_and_processes_are_killed() {
    for runtime in Runtime::ALL {
        let Pod { mut running, fixture, _shared } = Pod::new(&[]);
        let mounts = finish(fixture.operator("mounts").args(["prepare", "--pod", UID, "--container", "web"]));
        let mounts: Vec<Value> = serde_json::from_str(&mounts.stdout).expect("JSON");
        let mut container = RuntimeContainer::start(runtime, &mounts);
        // Each file contains one digit, which changes during the test.
        container.begin(
            "while [ ! -e /out/stop ]; do a=$(cat /app.conf) && b=$(cat /conf.d/setting) && ls /conf.d/extra /conf.d >/out/ls; \
             case $a$b in [0-9][0-9]) echo x >>/out/rounds;; *) echo \"$a$b\" >>/out/failures;; esac; done; \
             echo x >/out/stopped",
        );
        let out = running.volume("out");
        let rounds = || fs::metadata(out.join("rounds")).map_or(0, |rounds| rounds.len());
        let wait_for_rounds = |condition: &str| {
            let before = rounds();
            eventually(condition, || rounds() > before + 10);
        };
        let file = PathBuf::from(format!("/proc/{}/root/app.conf", container.pid()));
        wait_for_rounds("the container reads");
        for content in ["2", "3", "4"] {
            kill(running.server(), Signal::SIGKILL).expect("the server exists");
            write(&fixture, content);
            wait_content(&file, content);
            wait_for_rounds("the container reads with another server");
        }
        fixture.kill_supervisor(&mut running);
        write(&fixture, "5");
        wait_for_rounds("the container reads without a supervisor");
        let running = fixture.run();
        wait_content(&file, "5");
        wait_for_rounds("the container reads with another supervisor");
        running.kill_server_and_keeper(|| rustix::fs::statvfs(&out).expect("a server answers"));
        write(&fixture, "6");
        wait_content(&file, "6");
        fs::write(out.join("stop"), "").expect("written");
        eventually("the loop ends", || out.join("stopped").exists());
        let failures = fs::read_to_string(out.join("failures")).unwrap_or_default();
        assert_eq!(failures, "", "{runtime:?}: a call failed\n{}", running.log());
        drop(container);
    }
}

#[test]
fn a_kill_of_the_server_while_live_parts_change_is_not_noticed() {
    let pod = Pod::new(&[]);
    let [file, directory] = pod.parts();
    let watcher = Watcher::on("file", &file);
    let inode = fs::metadata(&file).expect("a file").ino();
    for stop in 0..STOPS {
        let content = format!("{stop:0width$}", width = 1 + stop % 7);
        let act = || {
            write(&pod.fixture, &content);
            let mut events = Vec::new();
            eventually("the watcher gets the last event of the update", || {
                events.extend(watcher.events());
                events.contains(&"file ATTRIB".to_owned())
            });
            assert_eq!(read(&file), content);
            eventually("the directory changes", || files(&directory) == parse(&format!("setting={content}")));
            let is_change = |event: &&String| {
                ["MODIFY", "CLOSE_WRITE", "ATTRIB"].iter().any(|word| **event == format!("file {word}"))
            };
            let changes: Vec<_> = events.iter().filter(is_change).cloned().collect();
            assert_eq!(changes, ["file MODIFY", "file CLOSE_WRITE", "file ATTRIB"], "killed at stop {stop}");
        };
        let (_, killed) = pod.running.freed(|| killed_at(pod.running.server(), stop, act));
        assert_eq!(fs::metadata(&file).expect("a file").ino(), inode);
        if !killed {
            println!("{stop} kills");
            assert!(stop > 3, "an update causes requests to the server");
            assert!(!pod.running.log().contains("cannot commit"), "{}", pod.running.log());
            return;
        }
    }
    panic!("an update does not end after {STOPS} system calls");
}

#[test]
fn an_update_whose_supervisor_is_killed_is_completed_by_the_next_one() {
    /// The test kills the supervisor only before every ninth system call, because a supervisor makes many of them.
    const STRIDE: usize = 9;
    let mut pod = Pod::new(&[]);
    let [file, directory] = pod.parts();
    let watcher = Watcher::on("file", &file);
    for stop in (0..STOPS).step_by(STRIDE) {
        let content = format!("{stop:0width$}", width = 1 + stop % 7);
        let mut events = Vec::new();
        let supervisor = pod.running.pid();
        let (_, killed) = killed_at(supervisor, stop, || {
            write(&pod.fixture, &content);
            eventually("the update is complete, or the supervisor is dead", || {
                events.extend(watcher.events());
                events.contains(&"file ATTRIB".to_owned()) || !is_alive(supervisor)
            });
        });
        // The server answers also without a supervisor.
        assert!(read(&file).parse::<usize>().is_ok());
        if killed {
            let next = pod.fixture.run();
            // The tracer has reaped the supervisor, so its pid may belong to another process. The drop of `Running`
            // would kill that process.
            let _ended = std::mem::ManuallyDrop::new(std::mem::replace(&mut pod.running, next));
        }
        wait_content(&file, &content);
        eventually("the watcher has got the last event of the update", || {
            events.extend(watcher.events());
            events.contains(&"file ATTRIB".to_owned())
        });
        for event in ["file MODIFY", "file CLOSE_WRITE"] {
            assert!(events.iter().any(|received| received == event), "killed at stop {stop}: {events:?}");
        }
        eventually("the directory changes", || files(&directory) == parse(&format!("setting={content}")));
        if !killed {
            println!("{} kills", stop / STRIDE);
            assert!(stop > 10 * STRIDE, "a supervisor makes system calls for an update");
            return;
        }
    }
    panic!("an update does not end after {STOPS} system calls");
}

/// Whether a process exists and has not ended.
fn is_alive(pid: nix::unistd::Pid) -> bool {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    stat.rsplit_once(") ").is_some_and(|(_, state)| !state.starts_with(['Z', 'X']))
}
