//! Code that the benches share: the places that are compared, rounds in which they take turns, tables.

use std::fs::{self, File};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

use nix::mount::{MntFlags, umount2};
use podfs_fuse::client::MountedVolume;
use podfs_fuse::client::ServerClient;
use podfs_fuse::client::VolumeIdentity;
use podfs_fuse::confinement::{Profile, confine};
use podfs_fuse::log::LineFormat;
use podfs_fuse::memory_lock;
use podfs_fuse::mount::directories::Directories;
use podfs_fuse::mount::point::{MountPoint, OldMountPolicy};
use podfs_fuse::mount::private::{ContainerAccess, MountOptions};
use podfs_fuse::mount::visible::VisibleMount;
use podfs_fuse::passthrough::{CacheMode, PassthroughOptions};
use podfs_fuse::protocol::Greeting;
use podfs_fuse::server::process;
use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};
use tempfile::TempDir;

use super::choice::Choice;
use super::{disk, fuser_peer};

/// The argument that makes this program the server.
pub const SERVE: &str = "--serve";

/// Serves until the bench ends, as `podfs server` does.
pub fn serve() {
    memory_lock::tune_allocator();
    confine(Profile::Rings, LineFormat::Text);
    process::serve("bench", "bench").expect("the bench closes the socket");
}

/// A directory in which the bench makes calls.
pub struct Place {
    /// The name in tables.
    pub name: &'static str,
    /// The path at which calls use it.
    pub shown: PathBuf,
    /// Its directory on the disk.
    pub source: PathBuf,
    // Dropped before the directory is removed.
    _server: Option<Serving>,
    _base: TempDir,
}

/// The servers of a place. The mount ends before its server does.
enum Serving {
    Podfs { _visible: VisibleMount, _volume: MountedVolume, _server: Killed },
    Peer { at: PathBuf, _server: Killed },
}

impl Place {
    /// A directory of the disk as it is.
    pub fn native() -> Self {
        let (base, source, _) = directories();
        Self { name: "native", shown: source.clone(), source, _server: None, _base: base }
    }

    /// A directory of the disk, shown by podfs as a hostPath without annotations.
    pub fn auto() -> Self {
        Self::podfs("auto", PassthroughOptions::default())
    }

    /// A directory of the disk, shown by podfs as an emptyDir.
    pub fn empty_dir() -> Self {
        Self::podfs(
            "emptyDir",
            PassthroughOptions { cache: CacheMode::Always, exclusive: true, ..PassthroughOptions::default() },
        )
    }

    /// As [`Self::auto`], with requests over io_uring.
    pub fn auto_uring() -> Self {
        Self::over_io_uring(|| {
            Self::podfs("auto-uring", PassthroughOptions { io_uring: true, ..PassthroughOptions::default() })
        })
    }

    /// As [`Self::empty_dir`], with requests over io_uring.
    pub fn empty_dir_uring() -> Self {
        let options = PassthroughOptions {
            cache: CacheMode::Always,
            exclusive: true,
            io_uring: true,
            ..PassthroughOptions::default()
        };
        Self::over_io_uring(|| Self::podfs("emptyDir-uring", options))
    }

    /// A directory of the disk, shown by podfs with this number of session threads.
    pub fn with_threads(name: &'static str, threads: u8) -> Self {
        Self::podfs(name, PassthroughOptions { threads: Some(threads), ..PassthroughOptions::default() })
    }

    fn podfs(name: &'static str, options: PassthroughOptions) -> Self {
        let (base, source, shown) = directories();
        let (ours, theirs) = UnixStream::pair().expect("a socket pair");
        let server = Command::new("/proc/self/exe").arg(SERVE).stdin(Stdio::from(OwnedFd::from(theirs))).spawn();
        let server = Killed(server.expect("this program can be started again"));
        let options = PassthroughOptions { threads: options.threads.or_else(chosen_threads), ..options };
        let directory = File::open(&source).expect("a directory");
        let client = Arc::new(ServerClient::new(ours, Greeting::new("bench", "bench")).expect("the server answers"));
        let volume = MountedVolume::of_source(
            &client,
            directory.as_fd(),
            &options,
            &MountOptions::default(),
            &VolumeIdentity::default(),
        );
        let volume = volume.expect("a mount");
        assert_eq!(volume.is_over_io_uring(), options.io_uring, "the transport is the chosen one");
        let mut made = Directories::default();
        let point = MountPoint::prepare(&shown, OldMountPolicy::RemoveDead, &mut made).expect("a mount point");
        let visible = volume.show(&point, ContainerAccess::ReadWrite).expect("a visible mount");
        let serving = Serving::Podfs { _visible: visible, _volume: volume, _server: server };
        Self { name, shown, source, _server: Some(serving), _base: base }
    }

    /// A directory of the disk, shown by bindfs.
    pub fn bindfs() -> Self {
        Self::peer("bindfs", Command::new("bindfs").arg("-f"))
    }

    /// A directory of the disk, shown by a file system of the crate `fuser`.
    pub fn fuser() -> Self {
        Self::peer("fuser", Command::new("/proc/self/exe").arg(fuser_peer::SERVE))
    }

    /// A directory of the disk, shown by libfuse's example `passthrough_hp` (`fuse/benches/passthrough/libfuse` builds it).
    pub fn hp() -> Self {
        Self::peer("hp", Command::new(hp_program()).arg("--foreground"))
    }

    /// The same over io_uring.
    pub fn hp_uring() -> Self {
        Self::over_io_uring(|| {
            Self::peer("hp-uring", Command::new(hp_program()).args(["--foreground", "-o", "io_uring"]))
        })
    }

    /// Starts a place whose server asks for io_uring. The kernel offers that meanwhile: the server has asked for it when it answers
    /// the first call.
    fn over_io_uring(place: impl FnOnce() -> Self) -> Self {
        let allowed = fs::read_to_string(ENABLE_URING).expect("Linux 6.14 or newer");
        fs::write(ENABLE_URING, "Y").expect("root may");
        let place = place();
        fs::write(ENABLE_URING, allowed).expect("root may");
        place
    }

    fn peer(name: &'static str, command: &mut Command) -> Self {
        let (base, source, shown) = directories();
        let child = command.args([&source, &shown]).stdout(Stdio::null()).spawn();
        let server = Killed(child.unwrap_or_else(|error| panic!("{name} cannot be started: {error}")));
        let outside = device(&base.path().join("source"));
        while device(&shown) == outside {
            std::thread::sleep(Duration::from_millis(5));
        }
        let serving = Serving::Peer { at: shown.clone(), _server: server };
        Self { name, shown, source, _server: Some(serving), _base: base }
    }

    /// The places that this machine can have and that are chosen: the native directory, podfs as hostPath and as emptyDir (both
    /// also over io_uring), and the peers.
    pub fn all() -> Vec<Self> {
        type Start = fn() -> Place;
        let (has_rings, has_hp) = (Path::new(ENABLE_URING).exists(), hp_program().exists());
        let known: [(&str, bool, Start); 9] = [
            ("native", true, Self::native),
            ("auto", true, Self::auto),
            ("emptyDir", true, Self::empty_dir),
            ("bindfs", true, Self::bindfs),
            ("fuser", true, Self::fuser),
            ("auto-uring", has_rings, Self::auto_uring),
            ("emptyDir-uring", has_rings, Self::empty_dir_uring),
            ("hp", has_hp, Self::hp),
            ("hp-uring", has_rings && has_hp, Self::hp_uring),
        ];
        let chosen = known.into_iter().filter(|(name, there, _)| *there && Choice::of_arguments().has_place(name));
        chosen.map(|(_, _, start)| start()).collect()
    }
}

const ENABLE_URING: &str = "/sys/module/fuse/parameters/enable_uring";

fn hp_program() -> PathBuf {
    Path::new(env!("CARGO_TARGET_TMPDIR")).join("../libfuse/passthrough_hp")
}

fn chosen_threads() -> Option<u8> {
    let threads = std::env::var("PODFS_THREADS").ok()?;
    Some(threads.parse().expect("PODFS_THREADS is a number"))
}

impl Drop for Serving {
    fn drop(&mut self) {
        if let Self::Peer { at, .. } = self {
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
    let base = TempDir::new_in(disk::path()).expect("a directory");
    let (source, shown) = (base.path().join("source"), base.path().join("shown"));
    fs::create_dir(&source).expect("a directory");
    fs::create_dir(&shown).expect("a directory");
    (base, source, shown)
}

fn device(path: &Path) -> u64 {
    std::os::unix::fs::MetadataExt::dev(&fs::metadata(path).expect("a directory"))
}

/// Bytes of a file.
pub const SIZE: usize = 4096;

/// Makes `count` files of [`SIZE`] bytes in a new directory.
pub fn fill(directory: &Path, count: usize) {
    fs::create_dir(directory).expect("a directory");
    for number in 0..count {
        fs::write(file(directory, number), [b'x'; SIZE]).expect("written");
    }
}

pub fn file(directory: &Path, number: usize) -> PathBuf {
    directory.join(format!("file-{number:06}"))
}

/// Makes the kernel forget unused names and inodes. The blocks of the disk stay cached.
pub fn forget_names() {
    fs::write("/proc/sys/vm/drop_caches", "2").expect("root may");
}

/// The result of one measurement at one place.
struct Figures {
    median: f64,
    /// Half of the distance between the quartiles.
    spread: f64,
}

/// The figures of each place. The places take turns, so that other work of the machine affects all of them alike.
fn take_turns(places: &[Place], rounds: usize, measure: impl Fn(&Place) -> f64) -> Vec<Figures> {
    let mut samples = vec![Vec::with_capacity(rounds); places.len()];
    // The first round warms everything.
    for round in 0..=rounds {
        for (place, samples) in places.iter().zip(&mut samples) {
            let sample = on_chosen_cpu(|| measure(place));
            if round > 0 {
                samples.push(sample);
            }
        }
    }
    samples.into_iter().map(Figures::of).collect()
}

/// Calls `measure` on the chosen CPU, with the programs that it starts. Servers run on any CPU.
fn on_chosen_cpu(measure: impl FnOnce() -> f64) -> f64 {
    let Some(cpu) = Choice::of_arguments().cpu() else { return measure() };
    let before = sched_getaffinity(None).expect("the CPUs of this thread");
    let mut chosen = CpuSet::new();
    chosen.set(cpu);
    sched_setaffinity(None, &chosen).expect("this CPU may be used");
    let sample = measure();
    sched_setaffinity(None, &before).expect("they were allowed before");
    sample
}

impl Figures {
    fn of(mut samples: Vec<f64>) -> Self {
        samples.sort_unstable_by(f64::total_cmp);
        let last = samples.len() - 1;
        let spread = (samples[last * 3 / 4] - samples[last / 4]) / 2.0;
        Self { median: samples[samples.len() / 2], spread }
    }
}

/// Milliseconds of a call.
pub fn millis(call: impl FnOnce()) -> f64 {
    let began = Instant::now();
    call();
    began.elapsed().as_secs_f64() * 1e3
}

/// The microseconds of one call: the mean of `count` calls.
pub fn per_call(count: usize, call: impl FnMut(usize)) -> f64 {
    let began = Instant::now();
    (0..count).for_each(call);
    began.elapsed().as_secs_f64() * 1e6 / count as f64
}

/// The first line of a table: one column for each place.
pub fn header(title: &str, places: &[Place]) {
    print!("\n{title:<44}");
    places.iter().for_each(|place| print!(" {:>14}", place.name));
    println!();
}

/// Takes a measurement at each place in `rounds` rounds, if it is chosen. Prints a line of a table: the median of each place,
/// and its spread in percent.
pub fn row(what: &str, places: &[Place], rounds: usize, measure: impl Fn(&Place) -> f64) {
    let choice = Choice::of_arguments();
    if !choice.has_row(what) {
        return;
    }
    let figures = take_turns(places, choice.rounds(rounds), measure);
    print!("{what:<44}");
    for Figures { median, spread } in figures {
        let digits = if median < 10.0 { 2 } else { 0 };
        print!(" {median:>8.digits$} {:>4.0}%", spread / median * 100.0);
    }
    println!();
}
