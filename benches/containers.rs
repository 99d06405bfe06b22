//! The cost of containers: `cargo bench --bench containers`. Needs root and `/dev/fuse`.
//!
//! Measured are `podfs mounts prepare` and `release` for a container with ten mounts, five of them subPaths: as a command, and as
//! a question to the control socket, as agents do it. Then a live subPath: opening, reading and closing it, beside a file on
//! tmpfs in the same rounds, and the time from the change of an object's file until a watcher of the subPath gets the event.

#[path = "../tests/common/mod.rs"]
mod common;

use std::fs::{self, File};
use std::hint::black_box;
use std::io::Read;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use common::outcome::finish;
use common::{Fixture, PODFS, Running, config_map};
use nix::sys::inotify::{AddWatchFlags, InitFlags, Inotify};
use podfs::mounts::{AgentFacts, MountSource};
use podfs::supervisor::control::{ContainerRequest, ControlAnswer, ControlQuestion, ask};

const UID: &str = "5d1f6f0a-6f0e-4a51-8f6d-0c1b8b2c9a77";
const ROUNDS: usize = 101;
/// Opens of a file in one round.
const BATCH: u32 = 1_000;
/// The length of the file that is read, in bytes.
const LENGTH: usize = 1024;

fn main() {
    let pod = Pod::start();
    pod.prepare_and_release();
    pod.read_live();
    pod.change_live();
}

/// A pod with a container of ten mounts.
struct Pod {
    _running: Running,
    fixture: Fixture,
}

impl Pod {
    fn start() -> Pod {
        let whole = (0..5).map(|i| format!("\n    - {{name: v{i}, mountPath: /whole/{i}}}"));
        let parts = (0..5).map(|i| format!("\n    - {{name: v{i}, mountPath: /part/{i}, subPath: key}}"));
        let volume = |i: usize| {
            let object = if i == 0 { "live" } else { "app" };
            format!("\n  - {{name: v{i}, configMap: {{name: {object}}}}}")
        };
        let fixture = Fixture::new(&format!(
            "apiVersion: v1\nkind: Pod\nmetadata: {{name: web, uid: {UID}, annotations: {{podfs.io/sub-path.v0: live}}}}\n\
             spec:\n  containers:\n  - name: web\n    volumeMounts:{}\n  volumes:{}\n",
            whole.chain(parts).collect::<String>(),
            (0..5).map(volume).collect::<String>()
        ));
        for object in ["live", "app"] {
            fixture.write(&format!("objects/{object}.json"), &config_map(object, &[("key", &content(0))]));
        }
        let running = fixture.run();
        Pod { _running: running, fixture }
    }

    fn prepare_and_release(&self) {
        let directory = self.fixture.path("run").join(UID);
        let request = || ContainerRequest {
            container: "web".to_owned(),
            environment: AgentFacts::default(),
            recursive_read_only: false,
            only_volumes: false,
        };
        let prepare = || match ask(&directory, &ControlQuestion::PrepareContainer(request()), None).expect("an answer")
        {
            ControlAnswer::Prepared(mounts) => assert!(mounts.len() >= 10, "{mounts:?}"),
            other => panic!("{other:?}"),
        };
        let release = || {
            let released = ControlQuestion::ReleaseContainer { container: Some("web".to_owned()) };
            assert!(matches!(ask(&directory, &released, None).expect("an answer"), ControlAnswer::Released));
        };
        in_turn("asked on the control socket", prepare, release);
        let command = |word: &str| {
            let mut command = Command::new(PODFS);
            command.args(["mounts", word, "--pod", UID, "--container", "web"]);
            let outcome = finish(command.arg("--run-dir").arg(self.fixture.path("run")));
            assert_eq!(outcome.code, Some(0), "{}", outcome.stderr);
        };
        in_turn("podfs mounts", || command("prepare"), || command("release"));
    }

    /// The path of the live part on the host.
    fn live(&self) -> PathBuf {
        let request = ContainerRequest {
            container: "web".to_owned(),
            environment: AgentFacts::default(),
            recursive_read_only: false,
            only_volumes: false,
        };
        let asked = ask(&self.fixture.path("run").join(UID), &ControlQuestion::PrepareContainer(request), None);
        let ControlAnswer::Prepared(mounts) = asked.expect("an answer") else { panic!("no mounts") };
        let live = mounts.into_iter().find(|mount| mount.container_path == "/part/0").expect("the live part");
        let MountSource::HostPath(path) = live.source else { panic!("no path") };
        path
    }

    fn read_live(&self) {
        let (live, tmpfs) = (self.live(), tempfile::tempdir_in("/dev/shm").expect("a tmpfs"));
        let peer = tmpfs.path().join("key");
        fs::write(&peer, content(0)).expect("written");
        let (mut ours, mut theirs) = (Vec::new(), Vec::new());
        for _ in 0..ROUNDS {
            ours.push(per_read(&live));
            theirs.push(per_read(&peer));
        }
        let (ours, theirs) = (median(ours), median(theirs));
        let ratio = ours.as_secs_f64() / theirs.as_secs_f64();
        println!("live subPath, open + read + close: {ours:.2?}, tmpfs {theirs:.2?}, ratio {ratio:.2}");
    }

    fn change_live(&self) {
        let live = self.live();
        let inotify = Inotify::init(InitFlags::IN_CLOEXEC).expect("an inotify instance");
        inotify.add_watch(&live, AddWatchFlags::IN_MODIFY).expect("a watch");
        let open = File::open(&live).expect("the part");
        let mut times = Vec::new();
        for serial in 1..=ROUNDS {
            let expected = content(serial);
            let began = Instant::now();
            self.fixture.write("objects/live.json", &config_map("live", &[("key", &expected)]));
            loop {
                inotify.read_events().expect("events");
                let mut bytes = vec![0; LENGTH];
                open.read_exact_at(&mut bytes, 0).expect("read");
                if bytes == expected.as_bytes() {
                    break;
                }
            }
            times.push(began.elapsed());
        }
        println!("live subPath, from a change to its event, {ROUNDS} changes: median {:.2?}", median(times));
    }
}

fn in_turn(what: &str, prepare: impl Fn(), release: impl Fn()) {
    let (mut prepared, mut released) = (Vec::new(), Vec::new());
    for _ in 0..ROUNDS {
        prepared.push(timed(&prepare));
        released.push(timed(&release));
    }
    println!(
        "ten mounts, five of them subPaths, {what}: prepare {:.2?}, release {:.2?}",
        median(prepared),
        median(released)
    );
}

fn timed(call: impl Fn()) -> Duration {
    let began = Instant::now();
    call();
    began.elapsed()
}

fn per_read(path: &Path) -> Duration {
    let mut buffer = [0; 2 * LENGTH];
    let began = Instant::now();
    for _ in 0..BATCH {
        let mut file = File::open(path).expect("the file");
        assert_eq!(file.read(black_box(&mut buffer)).expect("read"), LENGTH);
    }
    began.elapsed() / BATCH
}

fn content(serial: usize) -> String {
    format!("{serial:>LENGTH$}")
}

fn median(mut samples: Vec<Duration>) -> Duration {
    samples.sort_unstable();
    samples[samples.len() / 2]
}
