//! Sources whose files have several device numbers in one mount: btrfs with subvolumes, and overlayfs with `xino=off`. Programs that
//! recognise files by number see the same tree as through a bind mount.

use std::collections::{BTreeMap, HashMap};
use std::fs::{self, File};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{DirEntryExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::process::Command;

use nix::mount::{MntFlags, MsFlags, mount, umount2};
use nix::sys::signal::{Signal, kill};
use tempfile::TempDir;

use crate::common::loop_device::LoopDevice;
use crate::common::passthrough::{Mounted, disk_directory};
use crate::common::twins::snapshot;
use crate::common::{Fixture, pod};

/// A mount of a test. Dropping it unmounts it.
struct TestMount(PathBuf);

impl TestMount {
    fn new(source: &Path, at: PathBuf, kind: &str, options: &str) -> Self {
        fs::create_dir_all(&at).expect("a directory");
        mount(Some(source), &at, Some(kind), MsFlags::empty(), Some(options)).expect(kind);
        Self(at)
    }

    fn bind(source: &Path, at: PathBuf) -> Self {
        fs::create_dir_all(&at).expect("a directory");
        mount(Some(source), &at, None::<&str>, MsFlags::MS_BIND, None::<&str>).expect("a bind mount");
        Self(at)
    }
}

impl Drop for TestMount {
    fn drop(&mut self) {
        let _ = umount2(&self.0, MntFlags::MNT_DETACH);
    }
}

/// A source with several devices. The fields are dropped in this order.
struct SeveralDevices {
    _mounts: Vec<TestMount>,
    _device: Option<LoopDevice>,
    source: PathBuf,
    base: TempDir,
}

#[track_caller]
fn run(program: &str, arguments: &[&Path]) -> String {
    let output = Command::new(program).args(arguments).output().expect("a program that tests/run installs");
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    assert!(output.status.success() && output.stderr.is_empty(), "{program} {arguments:?}: {}", text(&output.stderr));
    text(&output.stdout)
}

fn grow(root: &Path, name: &str) {
    fs::create_dir_all(root.join("directory/deep")).expect("directories");
    for file in ["first", "second", "directory/third", "directory/deep/fourth"] {
        fs::write(root.join(file), format!("{file} of {name}").repeat(100)).expect("written");
    }
    fs::hard_link(root.join("first"), root.join("directory/linked")).expect("linked");
    std::os::unix::fs::symlink("first", root.join("link")).expect("a link");
}

impl SeveralDevices {
    /// A btrfs with two subvolumes, a snapshot in one of them, and a subvolume deeper down.
    fn btrfs() -> Self {
        let (base, device) = (disk_directory(), LoopDevice::new(256));
        device.run("mkfs.btrfs", &["-q"]);
        let disk = TestMount::new(device.path(), base.path().join("disk"), "btrfs", "");
        let source = disk.0.join("source");
        fs::create_dir(&source).expect("a directory");
        let subvolume = |name: &str| {
            run("btrfs", &[Path::new("subvolume"), Path::new("create"), &source.join(name)]);
            grow(&source.join(name), name);
        };
        grow(&source, "the top");
        subvolume("one");
        subvolume("two");
        subvolume("directory/three");
        let command = [Path::new("subvolume"), Path::new("snapshot")];
        run("btrfs", &[command[0], command[1], &source.join("one"), &source.join("two/snapshot")]);
        fs::write(source.join("two/snapshot/first"), "changed").expect("written");
        run("sync", &[Path::new("-f"), &source]);
        Self { _mounts: vec![disk], _device: Some(device), source, base }
    }

    /// An overlay of two tmpfs, whose files have the same inode numbers.
    fn overlay() -> Self {
        let base = disk_directory();
        let tmpfs = |name: &str| TestMount::new(Path::new("tmpfs"), base.path().join(name), "tmpfs", "");
        let (lower, upper) = (tmpfs("lower"), tmpfs("upper"));
        grow(&lower.0, "below");
        ["files", "work"].iter().for_each(|name| fs::create_dir(upper.0.join(name)).expect("a directory"));
        let at = |path: PathBuf| path.to_str().expect("text").to_owned();
        let layers = (at(lower.0.clone()), at(upper.0.join("files")), at(upper.0.join("work")));
        let options = format!("lowerdir={},upperdir={},workdir={},xino=off", layers.0, layers.1, layers.2);
        let overlay = TestMount::new(Path::new("overlay"), base.path().join("overlay"), "overlay", &options);
        fs::create_dir(overlay.0.join("above")).expect("a directory");
        grow(&overlay.0.join("above"), "above");
        let source = overlay.0.clone();
        Self { _mounts: vec![overlay, upper, lower], _device: None, source, base }
    }

    fn at(&self, name: &str) -> PathBuf {
        self.base.path().join(name)
    }
}

/// The paths below `root` with their inode numbers.
fn numbers(root: &Path) -> BTreeMap<PathBuf, u64> {
    fn collect(root: &Path, below: &Path, numbers: &mut BTreeMap<PathBuf, u64>) {
        for entry in fs::read_dir(root.join(below)).expect("a listing") {
            let path = below.join(entry.expect("an entry").file_name());
            let found = fs::symlink_metadata(root.join(&path)).expect("attributes");
            numbers.insert(path.clone(), found.ino());
            if found.is_dir() {
                collect(root, &path, numbers);
            }
        }
    }
    let mut numbers = BTreeMap::new();
    collect(root, Path::new(""), &mut numbers);
    numbers
}

/// Fails if two files below `shown` have one number, but not one file in `source`, or the other way round.
#[track_caller]
fn assert_numbers_tell_files_apart(shown: &Path, source: &Path) {
    let mut files = HashMap::new();
    let mut shown_numbers = HashMap::new();
    for (path, number) in numbers(shown) {
        let native = fs::symlink_metadata(source.join(&path)).expect("attributes");
        let native = (native.dev(), native.ino());
        assert_eq!(*files.entry(number).or_insert(native), native, "another file has the number of {}", path.display());
        assert_eq!(*shown_numbers.entry(native).or_insert(number), number, "{} has two numbers", path.display());
    }
}

/// What programs make of the tree at `root`; `place` is an empty directory for their output.
fn programs(root: &Path, place: &Path) -> Vec<(String, String)> {
    fs::create_dir(place).expect("a directory");
    let sorted = |text: String| {
        let mut lines: Vec<_> = text.replace(root.to_str().expect("text"), "ROOT").lines().map(str::to_owned).collect();
        lines.sort_unstable();
        lines.join("\n")
    };
    let found = sorted(run("find", &[root]));
    let used = run("du", &[Path::new("-s"), Path::new("--block-size=1"), Path::new("--apparent-size"), root]);
    let used = used.split_whitespace().next().expect("a number").to_owned();
    let (archive, restored, copied) = (place.join("archive.tar"), place.join("restored"), place.join("copied"));
    fs::create_dir(&restored).expect("a directory");
    run("tar", &[Path::new("-C"), root, Path::new("-cf"), &archive, Path::new(".")]);
    run("tar", &[Path::new("-C"), &restored, Path::new("-xf"), &archive]);
    run("cp", &[Path::new("-a"), root, &copied]);
    let tree = |path: &Path| format!("{:#?}", snapshot(path));
    [("find", found), ("du", used), ("tar", tree(&restored)), ("cp -a", tree(&copied))]
        .map(|(program, outcome)| (program.to_owned(), outcome))
        .into()
}

#[track_caller]
fn assert_programs_see_the_source(devices: &SeveralDevices) {
    let bound = TestMount::bind(&devices.source, devices.at("bound"));
    let mounted = Mounted::of(&devices.source);
    let expected = programs(&bound.0, &devices.at("of-the-bind-mount"));
    for ((program, outcome), (_, expected)) in
        programs(mounted.path(), &devices.at("of-the-volume")).into_iter().zip(expected)
    {
        assert_eq!(outcome, expected, "{program}");
    }
    assert_numbers_tell_files_apart(mounted.path(), &devices.source);
}

#[test]
fn programs_see_all_files_of_btrfs_subvolumes_and_snapshots() {
    assert_programs_see_the_source(&SeveralDevices::btrfs());
}

#[test]
fn programs_see_all_files_of_an_overlay_without_common_inode_numbers() {
    let devices = SeveralDevices::overlay();
    assert_programs_see_the_source(&devices);
    // A listing has the numbers of the files.
    let mounted = Mounted::of(&devices.source);
    for directory in ["", "directory", "above"] {
        let directory = mounted.path().join(directory);
        for entry in fs::read_dir(&directory).expect("a listing").map(|entry| entry.expect("an entry")) {
            let found = entry.metadata().expect("attributes");
            assert!(found.is_dir() || found.ino() == entry.ino(), "{}", entry.path().display());
        }
    }
}

#[test]
fn a_subvolume_that_comes_later_has_numbers_of_its_own() {
    let devices = SeveralDevices::btrfs();
    let mounted = Mounted::of(&devices.source);
    let before = numbers(mounted.path());
    let (later, one) = (devices.source.join("later"), devices.source.join("one"));
    run("btrfs", &[Path::new("subvolume"), Path::new("snapshot"), &one, &later]);
    assert_numbers_tell_files_apart(mounted.path(), &devices.source);
    let mut after = numbers(mounted.path());
    after.retain(|path, _| !path.as_os_str().as_bytes().starts_with(b"later"));
    assert_eq!(after, before);
    // A file cannot be moved or linked to another subvolume, as on the source.
    let (from, to) = (mounted.path().join("one/first"), mounted.path().join("later/new"));
    assert_eq!(fs::rename(&from, &to).expect_err("two devices").raw_os_error(), Some(libc::EXDEV));
    assert_eq!(fs::hard_link(&from, &to).expect_err("two devices").raw_os_error(), Some(libc::EXDEV));
}

#[test]
fn files_of_subvolumes_keep_their_numbers_when_servers_are_killed() {
    let devices = SeveralDevices::btrfs();
    let volume = format!("[{{name: host, hostPath: {{path: {}}}}}]", devices.source.display());
    let fixture = Fixture::new(&pod(&volume));
    let mut running = fixture.run();
    let host = running.volume("host");
    let before = numbers(&host);
    assert_numbers_tell_files_apart(&host, &devices.source);
    kill(running.server(), Signal::SIGKILL).expect("it is there");
    assert_eq!(numbers(&host), before);
    assert_eq!(running.kill_server_and_keeper(|| numbers(&host)), before);
    assert!(running.stop().success(), "{}", running.log());
}

#[test]
fn a_limit_counts_the_files_of_all_layers_of_an_overlay() {
    let devices = SeveralDevices::overlay();
    fs::write(devices.source.join("large"), vec![1; 2 << 20]).expect("written");
    let mounted = Mounted::of_with_limit(&devices.source, 1 << 20);
    let written =
        File::create(mounted.path().join("more")).and_then(|_| fs::write(mounted.path().join("more"), "more"));
    assert_eq!(written.expect_err("the limit is exceeded").raw_os_error(), Some(libc::ENOSPC));
}
