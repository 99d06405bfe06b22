//! Many volumes in one `podfs run`, and many pods: time from start to ready, and memory.
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

const VOLUMES: usize = 500;

pub fn run() {
    let podfs = build();
    let directory = tempfile::tempdir().expect("a directory");

    println!("\n{:<44} {:>12} {:>14}", "podfs run", "to ready", "PSS");
    let first = Pod::start(&podfs, directory.path(), "first", 3);
    let alone = first.pss();
    println!("{:<44} {:>9.1} ms {alone:>10} KiB", "first pod, 3 volumes", millis(first.ready_after));
    let second = Pod::start(&podfs, directory.path(), "second", 3);
    let both = first.pss() + second.pss();
    println!("{:<44} {:>9.1} ms {:>10} KiB more", "second pod, 3 volumes", millis(second.ready_after), both - alone);
    drop((first, second));

    let large = Pod::start(&podfs, directory.path(), "large", VOLUMES);
    let pss = large.pss();
    let what = format!("one pod, {VOLUMES} volumes");
    println!("{what:<44} {:>9.1} ms {pss:>10} KiB", millis(large.ready_after));
    let added = (pss - alone) as f64 / (VOLUMES - 3) as f64;
    println!("{:<44} {:>12} {added:>10.1} KiB", "memory per added volume", "");
}

fn build() -> PathBuf {
    let workspace = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    let status = Command::new(env!("CARGO"))
        .args(["build", "--release", "--quiet", "--package", "podfs", "--manifest-path"])
        .arg(workspace.join("Cargo.toml"))
        .status()
        .expect("cargo runs");
    assert!(status.success(), "podfs must build");
    let target = std::env::var_os("CARGO_TARGET_DIR").map_or(workspace.join("target"), PathBuf::from);
    target.join("release/podfs")
}

/// A running `podfs run`; stopped when it is dropped.
struct Pod {
    child: Child,
    ready_after: Duration,
    root: PathBuf,
}

impl Pod {
    fn start(podfs: &Path, directory: &Path, name: &str, volumes: usize) -> Self {
        let manifest = directory.join(format!("{name}.yaml"));
        fs::write(&manifest, manifests(name, volumes)).expect("written");
        let root = directory.join(format!("{name}-root"));
        let (mut ready, theirs) = std::io::pipe().expect("a pipe");
        let began = Instant::now();
        let child = Command::new(podfs)
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

    /// KiB of supervisor and server.
    fn pss(&self) -> u64 {
        let supervisor = self.child.id();
        let children = fs::read_to_string(format!("/proc/{supervisor}/task/{supervisor}/children")).expect("children");
        children.split_whitespace().map(pss).sum::<u64>() + pss(&supervisor.to_string())
    }
}

impl Drop for Pod {
    fn drop(&mut self) {
        let pid = nix::unistd::Pid::from_raw(self.child.id().cast_signed());
        let _ = nix::sys::signal::kill(pid, nix::sys::signal::Signal::SIGTERM);
        let _ = self.child.wait();
        let left = mounts().expect("a mount table").into_iter().filter(|mounted| mounted.at.starts_with(&self.root));
        assert_eq!(left.count(), 0, "podfs must unmount what it mounted");
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
