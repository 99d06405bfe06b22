//! What the benches share: the places that are compared, rounds that take turns, tables.

use std::fs::{self, File};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

use nix::mount::{MntFlags, umount2};
use podfs_fuse::audit::output::AuditOutput;
use podfs_fuse::client::MountedVolume;
use podfs_fuse::client::ServerClient;
use podfs_fuse::confinement::{Profile, confine};
use podfs_fuse::log::Lines;
use podfs_fuse::memory_lock;
use podfs_fuse::mount::directories::Directories;
use podfs_fuse::mount::private::{Access, MountOptions};
use podfs_fuse::mount::visible::{Leftovers, MountPoint, VisibleMount};
use podfs_fuse::passthrough::Options;
use podfs_fuse::protocol::Greeting;
use podfs_fuse::server::process;
use serde_json::Value;
use tempfile::TempDir;

/// The argument that makes this program the server.
pub const SERVE: &str = "--serve";

/// Serves until the bench ends, as `podfs server` does.
pub fn serve() {
    memory_lock::tune_allocator();
    confine(Profile::Passthrough, Lines::Text);
    process::serve("bench", "bench", AuditOutput::standard_error()).expect("the bench closes the socket");
}

/// A directory that calls are made in.
pub struct Place {
    /// What it is called in tables.
    pub name: String,
    /// Where it is used.
    pub shown: PathBuf,
    /// What is behind it on the disk.
    pub source: PathBuf,
    // Dropped before the directory goes.
    _server: Option<Serving>,
    _base: TempDir,
}

/// What serves a place. What is mounted goes before its server does.
enum Serving {
    Podfs { _visible: VisibleMount, _volume: MountedVolume, _server: Killed },
    Bindfs { at: PathBuf, _server: Killed },
}

impl Place {
    /// A directory of the disk as it is.
    pub fn native() -> Self {
        let (base, source, _) = directories();
        Self { name: "native".to_owned(), shown: source.clone(), source, _server: None, _base: base }
    }

    /// A directory of the disk, shown by podfs with so many session threads.
    pub fn podfs(threads: Option<u8>) -> Self {
        let (base, source, shown) = directories();
        let (ours, theirs) = UnixStream::pair().expect("a socket pair");
        let server = Command::new("/proc/self/exe").arg(SERVE).stdin(Stdio::from(OwnedFd::from(theirs))).spawn();
        let server = Killed(server.expect("this program can be started again"));
        let options = Options { name: "bench".to_owned(), threads, ..Options::default() };
        let directory = File::open(&source).expect("a directory");
        let client = Arc::new(ServerClient::new(ours, Greeting::new("bench", "bench")).expect("the server answers"));
        let volume =
            MountedVolume::of_source(&client, directory.as_fd(), &options, &MountOptions::default(), Value::Null);
        let volume = volume.expect("a mount");
        let mut made = Directories::default();
        let point = MountPoint::prepare(&shown, Leftovers::RemoveDead, &mut made).expect("a mount point");
        let visible = volume.show(&point, Access::ReadWrite).expect("a visible mount");
        let serving = Serving::Podfs { _visible: visible, _volume: volume, _server: server };
        let name = threads.map_or("podfs".to_owned(), |threads| format!("{threads} threads"));
        Self { name, shown, source, _server: Some(serving), _base: base }
    }

    /// A directory of the disk, shown by bindfs.
    pub fn bindfs() -> Self {
        let (base, source, shown) = directories();
        let child = Command::new("bindfs").arg("-f").args([&source, &shown]).spawn();
        let server = Killed(child.expect("bindfs is installed (apt-get install bindfs)"));
        let outside = device(&base.path().join("source"));
        while device(&shown) == outside {
            std::thread::sleep(Duration::from_millis(5));
        }
        let serving = Serving::Bindfs { at: shown.clone(), _server: server };
        Self { name: "bindfs".to_owned(), shown, source, _server: Some(serving), _base: base }
    }

    /// The native directory, podfs and bindfs.
    pub fn all() -> [Self; 3] {
        let threads = std::env::var("PODFS_THREADS").ok();
        let threads = threads.map(|threads| threads.parse().expect("PODFS_THREADS is a number"));
        [Self::native(), Self { name: "podfs".to_owned(), ..Self::podfs(threads) }, Self::bindfs()]
    }
}

impl Drop for Serving {
    fn drop(&mut self) {
        if let Self::Bindfs { at, .. } = self {
            let _ = umount2(&**at, MntFlags::MNT_DETACH);
        }
    }
}

/// A process that ends with the bench.
struct Killed(Child);

impl Drop for Killed {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// A directory on the disk that holds a directory to show and one to show it at.
fn directories() -> (TempDir, PathBuf, PathBuf) {
    let base = TempDir::with_prefix_in("podfs-bench-", env!("CARGO_TARGET_TMPDIR")).expect("a directory");
    let (source, shown) = (base.path().join("source"), base.path().join("shown"));
    fs::create_dir(&source).expect("a directory");
    fs::create_dir(&shown).expect("a directory");
    (base, source, shown)
}

fn device(path: &Path) -> u64 {
    std::os::unix::fs::MetadataExt::dev(&fs::metadata(path).expect("a directory"))
}

/// Makes `count` files of 1 KiB in a new directory.
pub fn fill(directory: &Path, count: usize) {
    fs::create_dir(directory).expect("a directory");
    for number in 0..count {
        fs::write(file(directory, number), [b'x'; 1024]).expect("written");
    }
}

pub fn file(directory: &Path, number: usize) -> PathBuf {
    directory.join(format!("file-{number:06}"))
}

/// Lets the kernel forget the names and inodes that are unused. What they were read from stays cached.
pub fn forget_names() {
    fs::write("/proc/sys/vm/drop_caches", "2").expect("root may");
}

/// Median of each place. The places take turns, so that what else the machine does meets all alike.
pub fn medians(places: &[Place], rounds: usize, measure: impl Fn(&Place) -> f64) -> Vec<f64> {
    let mut samples = vec![Vec::with_capacity(rounds); places.len()];
    // The first round warms everything.
    for round in 0..=rounds {
        for (place, samples) in places.iter().zip(&mut samples) {
            let sample = measure(place);
            if round > 0 {
                samples.push(sample);
            }
        }
    }
    samples.into_iter().map(median).collect()
}

fn median(mut samples: Vec<f64>) -> f64 {
    samples.sort_unstable_by(f64::total_cmp);
    samples[samples.len() / 2]
}

/// Microseconds of one call, from `count` of them.
pub fn per_call(count: usize, call: impl FnMut(usize)) -> f64 {
    let began = Instant::now();
    (0..count).for_each(call);
    began.elapsed().as_secs_f64() * 1e6 / count as f64
}

/// What larger figures mean.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Figure {
    /// Time: less is better.
    Time,
    /// Work done: more is better.
    Rate,
}

pub fn header(title: &str) {
    println!("\n{title:<44} {:>11} {:>11} {:>11} {:>9} {:>9}", "native", "podfs", "bindfs", "native", "bindfs");
}

/// A row of the three places; the last columns say how much faster podfs is than each of the others.
pub fn row(what: &str, figure: Figure, medians: &[f64]) {
    let &[native, podfs, bindfs] = medians else { panic!("three places are compared") };
    let faster = |peer: f64| if figure == Figure::Time { peer / podfs } else { podfs / peer };
    let (to_native, to_bindfs) = (faster(native), faster(bindfs));
    println!("{what:<44} {native:>11.2} {podfs:>11.2} {bindfs:>11.2} {to_native:>8.2}x {to_bindfs:>8.2}x");
}
