//! How much one busy pod slows down another: `cargo bench --bench storm`.
//!
//! Two pods run side by side. On the volumes of the first, the threads of a *storm* make and remove files, stat them and read them
//! as fast as they can, on every CPU. Meanwhile the bench times calls on the volumes of the second. It does the same with plain
//! directories in place of volumes (a tmpfs for a projection, the disk for a passthrough). Every CPU has as many threads of the
//! storm in both cases, but the same number of calls keeps it busy differently: a call on a volume waits for a server, which takes
//! CPU time, too. So the two ratios show how much each slows down, and their difference is not what podfs alone adds. Needs root
//! and `/dev/fuse`.

use std::fs::{self, File};
use std::hint::black_box;
use std::io::Read;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use nix::mount::{MntFlags, MsFlags, mount, umount2};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde_json::Value;
use tempfile::TempDir;

/// Timed calls of each kind, alone and beside the storm.
const CALLS: usize = 20_000;
/// Threads of the storm for each CPU.
const THREADS: usize = 2;

fn main() {
    let places = [Pair::plain(), Pair::podfs()];
    println!("{:<44} {:>10} {:>10} {:>10} {:>10} {:>8}", "us", "alone p50", "p99", "storm p50", "p99", "p50");
    for pair in &places {
        let alone = pair.quiet.measure();
        let (beside, rounds) = pair.stormy.storm(|| pair.quiet.measure());
        for ((what, alone), (_, beside)) in alone.iter().zip(&beside) {
            let [a50, a99, b50, b99] = [(alone, 50), (alone, 99), (beside, 50), (beside, 99)].map(percentile);
            let what = format!("{}: {what}", pair.name);
            println!("{what:<44} {a50:>10.2} {a99:>10.2} {b50:>10.2} {b99:>10.2} {:>7.2}x", b50 / a50);
        }
        println!("{:<44} {rounds:>10} rounds", format!("{}: the storm did", pair.name));
    }
    let [_, podfs] = places;
    // Another volume of the pod under storm.
    let other = &podfs.stormy;
    let alone = other.read_config();
    let (beside, _) = other.storm(|| other.read_config());
    let [a50, a99, b50, b99] = [(&alone, 50), (&alone, 99), (&beside, 50), (&beside, 99)].map(percentile);
    let what = "podfs: projection of the pod under storm";
    println!("{what:<44} {a50:>10.2} {a99:>10.2} {b50:>10.2} {b99:>10.2} {:>7.2}x", b50 / a50);
}

/// Two places of a kind.
struct Pair {
    name: &'static str,
    quiet: Place,
    stormy: Place,
}

/// A file of configuration, and a directory to work in.
struct Place {
    config: PathBuf,
    work: PathBuf,
    // The mounts end before the directory is deleted.
    _mounted: Mounted,
    _base: TempDir,
}

enum Mounted {
    Tmpfs(PathBuf),
    Podfs(Child),
}

impl Pair {
    fn plain() -> Self {
        Self { name: "plain", quiet: Place::plain(), stormy: Place::plain() }
    }

    fn podfs() -> Self {
        Self { name: "podfs", quiet: Place::podfs("quiet"), stormy: Place::podfs("stormy") }
    }
}

impl Place {
    fn plain() -> Self {
        let base = base();
        let (config, work) = (base.path().join("config"), base.path().join("work"));
        [&config, &work].into_iter().for_each(|path| fs::create_dir(path).expect("a directory"));
        mount(Some("tmpfs"), &config, Some("tmpfs"), MsFlags::empty(), None::<&str>).expect("a tmpfs");
        fs::write(config.join("a"), [b'x'; 1024]).expect("written");
        fs::write(work.join("file"), [b'x'; 4096]).expect("written");
        Self { _mounted: Mounted::Tmpfs(config.clone()), config: config.join("a"), work, _base: base }
    }

    fn podfs(name: &str) -> Self {
        let base = base();
        let source = base.path().join("source");
        fs::create_dir(&source).expect("a directory");
        fs::write(source.join("file"), [b'x'; 4096]).expect("written");
        let object = serde_json::json!({
            "apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "app"}, "data": {"a": "x".repeat(1024)},
        });
        fs::write(base.path().join("app.json"), object.to_string()).expect("written");
        let volumes = serde_json::json!([
            {"name": "config", "configMap": {"name": "app"}}, {"name": "work", "hostPath": {"path": source}},
        ]);
        let pod = serde_json::json!({
            "apiVersion": "v1", "kind": "Pod", "metadata": {"name": name},
            "spec": {"containers": [{"name": "web", "image": "web"}], "volumes": volumes},
        });
        fs::write(base.path().join("pod.json"), pod.to_string()).expect("written");
        let (child, ready) = start(base.path());
        let path = |name: &str| {
            let volumes = ready["volumes"].as_array().expect("volumes");
            let volume = volumes.iter().find(|volume| volume["name"] == name).expect("a volume");
            PathBuf::from(volume["path"].as_str().expect("a path"))
        };
        Self { config: path("config").join("a"), work: path("work"), _mounted: Mounted::Podfs(child), _base: base }
    }

    fn measure(&self) -> Vec<(&'static str, Vec<f64>)> {
        let file = self.work.join("file");
        let look = || {
            black_box(fs::metadata(&file).expect("a file"));
            let mut content = [0; 4096];
            File::open(&file).and_then(|mut file| file.read_exact(&mut content)).expect("read");
        };
        vec![("open + read of a configMap key", self.read_config()), ("stat + open + read of 4 KiB", timed(look))]
    }

    fn read_config(&self) -> Vec<f64> {
        timed(|| drop(black_box(fs::read(&self.config).expect("read"))))
    }

    /// Calls `measured` while the threads of a storm work in this place. Returns the result, and the number of their rounds.
    fn storm<T>(&self, measured: impl FnOnce() -> T) -> (T, u64) {
        let (over, rounds) = (AtomicBool::new(false), AtomicU64::new(0));
        let cpus = thread::available_parallelism().map_or(1, usize::from);
        let work = |number: usize| {
            let (made, file) = (self.work.join(format!("storm-{number}")), self.work.join("file"));
            while !over.load(Ordering::Relaxed) {
                fs::write(&made, [b'y'; 4096]).expect("written");
                black_box(fs::metadata(&file).expect("a file"));
                black_box(fs::read(&made).expect("read"));
                black_box(fs::read(&self.config).expect("read"));
                fs::remove_file(&made).expect("removed");
                rounds.fetch_add(1, Ordering::Relaxed);
            }
        };
        let outcome = thread::scope(|scope| {
            (0..cpus * THREADS).for_each(|number| drop(scope.spawn(move || work(number))));
            thread::sleep(Duration::from_millis(200));
            let outcome = measured();
            over.store(true, Ordering::Relaxed);
            outcome
        });
        (outcome, rounds.into_inner())
    }
}

impl Drop for Mounted {
    fn drop(&mut self) {
        match self {
            Self::Tmpfs(at) => drop(umount2(&**at, MntFlags::MNT_DETACH)),
            Self::Podfs(child) => {
                let _ = kill(Pid::from_raw(child.id().cast_signed()), Signal::SIGTERM);
                let _ = child.wait();
            }
        }
    }
}

/// A directory on the disk that the project is built on.
fn base() -> TempDir {
    TempDir::with_prefix_in("podfs-bench-", env!("CARGO_TARGET_TMPDIR")).expect("a directory")
}

/// Starts podfs on the manifests in `base`, and returns its readiness report.
fn start(base: &Path) -> (Child, Value) {
    let (mut ready, theirs) = std::io::pipe().expect("a pipe");
    let mut command = Command::new(env!("CARGO_BIN_EXE_podfs"));
    command.args(["run", "--ready-fd", "1"]).arg("--pod").arg(base.join("pod.json"));
    command.arg("--objects").arg(base.join("app.json"));
    command.arg("--root-dir").arg(base.join("root")).arg("--run-dir").arg(base.join("run"));
    let child = command.stdout(OwnedFd::from(theirs)).stderr(Stdio::null()).spawn().expect("podfs starts");
    // The command has the other end of the pipe, too.
    drop(command);
    let mut text = String::new();
    ready.read_to_string(&mut text).expect("readiness");
    (child, serde_json::from_str(&text).expect("podfs is ready"))
}

/// Microseconds of each call, in order.
fn timed(call: impl Fn()) -> Vec<f64> {
    (0..CALLS / 10).for_each(|_| call());
    let time = |_| {
        let began = Instant::now();
        call();
        began.elapsed().as_secs_f64() * 1e6
    };
    let mut all: Vec<_> = (0..CALLS).map(time).collect();
    all.sort_unstable_by(f64::total_cmp);
    all
}

fn percentile((sorted, percent): (&Vec<f64>, usize)) -> f64 {
    sorted[sorted.len() * percent / 100]
}
