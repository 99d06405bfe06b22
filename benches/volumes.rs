//! Many volumes in one `podfs run`, and many pods: time from start to ready and from SIGTERM to the end, and memory:
//! `cargo bench --bench volumes`. Needs root and `/dev/fuse`.
//!
//! Memory is PSS, from `smaps_rollup`, of supervisor and server together: what two processes share is
//! split between them, so the sums add up to what the machine spends.

use std::fmt::Write;
use std::fs;
use std::io::Read;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use podfs_fuse::mount::table::mounts;

const PODFS: &str = env!("CARGO_BIN_EXE_podfs");
/// The numbers of volumes of two large pods: the figures show whether the time for a volume depends on the number.
const LARGE: [usize; 2] = [500, 2000];
/// How often each large pod is started and stopped; the medians count.
const ROUNDS: usize = 3;

fn main() {
    let directory = tempfile::tempdir().expect("a directory");

    println!("{:<44} {:>12} {:>14}", "podfs run", "to ready", "PSS");
    let first = Pod::start(directory.path(), "first", 3);
    let alone = first.pss();
    println!("{:<44} {:>9.1} ms {alone:>10} KiB", "first pod, 3 volumes", millis(first.ready_after));
    let second = Pod::start(directory.path(), "second", 3);
    let both = first.pss() + second.pss();
    println!("{:<44} {:>9.1} ms {:>10} KiB more", "second pod, 3 volumes", millis(second.ready_after), both - alone);
    drop((first, second));

    let large = LARGE.map(|volumes| LargePod::measure(directory.path(), volumes));
    for pod in &large {
        println!(
            "{:<44} {:>9.1} ms {:>10} KiB",
            format!("one pod, {} volumes", pod.volumes),
            millis(pod.steps[0]),
            pod.pss
        );
    }
    let added = (large[0].pss - alone) as f64 / (large[0].volumes - 3) as f64;
    println!("{:<44} {:>12} {added:>10.1} KiB", "memory per added volume", "");

    println!("\n{:<44} {:>12} {:>14}", "one pod", "in all", "per volume");
    for (step, what) in ["start to ready", "SIGTERM to the end"].into_iter().enumerate() {
        let each = large.each_ref().map(|pod| millis(pod.steps[step]) * 1e3 / pod.volumes as f64);
        for (pod, each) in large.iter().zip(each) {
            let what = format!("{what}, {} volumes", pod.volumes);
            println!("{what:<44} {:>9.1} ms {each:>11.1} us", millis(pod.steps[step]));
        }
        println!("{:<44} {:>12} {:>13.2}x", format!("{what}, the larger pod"), "", each[1] / each[0]);
    }
}

/// What a pod of many volumes took.
struct LargePod {
    volumes: usize,
    /// The times of its start and of its end.
    steps: [Duration; 2],
    pss: u64,
}

impl LargePod {
    /// The medians of all rounds.
    fn measure(directory: &Path, volumes: usize) -> Self {
        let (mut starts, mut stops, mut pss) = (Vec::new(), Vec::new(), 0);
        for round in 0..ROUNDS {
            let pod = Pod::start(directory, &format!("large-{volumes}-{round}"), volumes);
            pss = pod.pss();
            starts.push(pod.ready_after);
            stops.push(pod.stop());
        }
        Self { volumes, steps: [median(starts), median(stops)], pss }
    }
}

fn median(mut times: Vec<Duration>) -> Duration {
    times.sort_unstable();
    times[times.len() / 2]
}

/// A running `podfs run`; stopped when it is dropped.
struct Pod {
    child: Child,
    ready_after: Duration,
    root: PathBuf,
}

impl Pod {
    fn start(directory: &Path, name: &str, volumes: usize) -> Self {
        let manifest = directory.join(format!("{name}.yaml"));
        fs::write(&manifest, manifests(name, volumes)).expect("written");
        let root = directory.join(format!("{name}-root"));
        let (mut ready, theirs) = std::io::pipe().expect("a pipe");
        let began = Instant::now();
        let child = Command::new(PODFS)
            .args(["run", "--ready-fd", "1", "--pod"])
            .arg(manifest)
            .arg("--root-dir")
            .arg(&root)
            .arg("--run-dir")
            .arg(directory.join("run"))
            .env("RUST_LOG", "warn")
            .stdout(theirs)
            .stderr(Stdio::null())
            .spawn()
            .expect("podfs starts");
        let mut json = String::new();
        ready.read_to_string(&mut json).expect("readiness");
        let ready_after = began.elapsed();
        assert!(json.contains(name), "podfs must get ready");
        Self { child, ready_after, root }
    }

    /// From SIGTERM until the supervisor has ended, after everything is unmounted.
    fn stop(mut self) -> Duration {
        let began = Instant::now();
        self.end();
        began.elapsed()
    }

    fn end(&mut self) {
        let pid = nix::unistd::Pid::from_raw(self.child.id().cast_signed());
        let _ = nix::sys::signal::kill(pid, nix::sys::signal::Signal::SIGTERM);
        let _ = self.child.wait();
    }

    /// KiB of supervisor and server.
    fn pss(&self) -> u64 {
        let supervisor = self.child.id();
        let children = fs::read_to_string(format!("/proc/{supervisor}/task/{supervisor}/children")).expect("children");
        children.split_whitespace().map(pss).sum::<u64>() + pss(&supervisor.to_string())
    }
}

impl Drop for Pod {
    fn drop(&mut self) {
        if matches!(self.child.try_wait(), Ok(None)) {
            self.end();
        }
        let own = mounts().expect("a mount table").into_iter().filter(|mounted| mounted.at.starts_with(&self.root));
        assert_eq!(own.count(), 0, "podfs must unmount what it mounted");
    }
}

/// KiB of one process.
fn pss(pid: &str) -> u64 {
    let rollup = fs::read_to_string(format!("/proc/{pid}/smaps_rollup")).expect("a rollup");
    let line = rollup.lines().find(|line| line.starts_with("Pss:")).expect("a Pss line");
    line.split_whitespace().nth(1).expect("a number").parse().expect("a number")
}

/// A pod with this many configMap volumes, and their ConfigMaps of three small keys.
fn manifests(name: &str, volumes: usize) -> String {
    let mut text = format!(
        "apiVersion: v1\nkind: Pod\nmetadata: {{name: {name}}}\nspec:\n  containers: [{{name: c, image: c}}]\n  volumes:\n"
    );
    for number in 0..volumes {
        writeln!(text, "  - {{name: v{number}, configMap: {{name: c{number}}}}}").expect("text");
    }
    for number in 0..volumes {
        let data = format!("{{a: 'value {number}', b: 'two', c: 'three'}}");
        writeln!(text, "---\n{{apiVersion: v1, kind: ConfigMap, metadata: {{name: c{number}}}, data: {data}}}")
            .expect("text");
    }
    text
}

fn millis(duration: Duration) -> f64 {
    duration.as_secs_f64() * 1e3
}
