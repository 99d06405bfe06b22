//! Containment: through the mount, no process reads or changes anything outside of the source, whatever happens to
//! names of the source during a lookup.
//!
//! The callers are in a mount namespace in which an empty tmpfs covers the directory `outside`. When the kernel follows
//! a symbolic link for a caller, the link leads to this tmpfs, as in a container. Only a server that follows the link
//! itself, or that looks up a name in a wrong directory, can reach the canary.

use std::fs::{self, File, Permissions};
use std::io::{Read, Write};
use std::os::fd::OwnedFd;
use std::os::unix::fs::{MetadataExt, PermissionsExt, symlink};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread;

use podfs_fuse::passthrough::CacheMode;
use rustix::fs::{AtFlags, CWD, Mode, OFlags, RenameFlags, XattrFlags, linkat, lsetxattr, openat, renameat_with};
use tempfile::TempDir;

use crate::common::namespace::{Container, Propagation, mount_tmpfs};
use crate::common::passthrough::{Mounted, disk_directory};
use crate::common::twins::{names, snapshot};

const CANARY: &str = "the canary sings";

/// The number of attempts of each caller.
const TRIES: usize = 250;

/// `base/source` is mounted; `base/outside` must stay out of reach.
///
/// ```text
/// source/a/b/victim       files that may be read and written
/// source/evil             a link to outside, absolute
/// source/relative         the same, relative
/// outside/victim          the canary
/// ```
struct Trap {
    base: TempDir,
    mounted: Mounted,
}

impl Trap {
    fn set(cache: CacheMode) -> Self {
        let base = disk_directory();
        let (source, outside) = (base.path().join("source"), base.path().join("outside"));
        for directory in [&source.join("a/b"), &source.join("c/b"), &outside.join("b")] {
            fs::create_dir_all(directory).expect("directories");
        }
        for directory in [&outside, &outside.join("b")] {
            fs::write(directory.join("victim"), CANARY).expect("written");
            fs::set_permissions(directory, Permissions::from_mode(0o777)).expect("set");
            fs::set_permissions(directory.join("victim"), Permissions::from_mode(0o666)).expect("set");
        }
        fs::write(source.join("a/b/victim"), "inside").expect("written");
        symlink(&outside, source.join("evil")).expect("a link");
        symlink("../outside", source.join("relative")).expect("a link");
        symlink(outside.join("victim"), source.join("evil-file")).expect("a link");
        let mounted = Mounted::of_with_cache(&source, cache);
        Self { base, mounted }
    }

    fn source(&self) -> PathBuf {
        self.base.path().join("source")
    }

    fn outside(&self) -> PathBuf {
        self.base.path().join("outside")
    }

    /// A mount namespace for callers, from which the canary cannot be reached.
    fn container(&self) -> Container {
        let container = Container::new(Propagation::Private);
        let outside = self.outside();
        container.run(move || mount_tmpfs(&outside));
        container
    }
}

/// The open directories in which the test exchanges names. They are open so that the exchange follows no symbolic link.
struct Directories {
    root: OwnedFd,
    a: OwnedFd,
    b: OwnedFd,
    c: OwnedFd,
}

impl Directories {
    fn of(root: &Path) -> Self {
        let open = |path: &str| {
            openat(CWD, root.join(path), OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::RDONLY, Mode::empty())
        };
        let open = |path| open(path).expect("a directory");
        Self { root: open("."), a: open("a"), b: open("a/b"), c: open("c") }
    }
}

fn swap(directory: &OwnedFd, name: &str, other_directory: &OwnedFd, other_name: &str) {
    let _ = renameat_with(directory, name, other_directory, other_name, RenameFlags::EXCHANGE);
}

/// The number of reads of all callers, by the file that they have read.
#[derive(Default)]
struct Reads {
    /// Reads of files in the source.
    inside: AtomicUsize,
    /// Reads of the canary.
    escaped: AtomicUsize,
}

impl Reads {
    fn count(&self, content: &str) {
        let counter = if content.contains(CANARY) { &self.escaped } else { &self.inside };
        counter.fetch_add(1, Ordering::Relaxed);
    }

    fn file(&self, path: &Path) {
        let mut content = String::new();
        if File::open(path).and_then(|mut file| file.read_to_string(&mut content)).is_ok() {
            self.count(&content);
        }
    }
}

/// Makes every operation of a caller on the names that the test exchanges.
fn try_everything(root: &Path, caller: usize, reads: &Reads) {
    let own = format!("by-{caller}");
    for round in 0..TRIES {
        for path in ["a/b/victim", "a/victim", "evil/b/victim", "evil/victim", "relative/victim", "evil-file"] {
            reads.file(&root.join(path));
        }
        for directory in ["a", "a/b", "evil", "relative", "a/b/../../evil"] {
            let at = |name: &str| root.join(directory).join(name);
            match (round + caller) % 9 {
                0 => drop(File::options().write(true).open(at("victim")).and_then(|mut file| file.write(b"inside"))),
                1 => drop(fs::write(at(&own), "inside")),
                2 => drop(fs::remove_file(at(&own))),
                3 => drop(fs::set_permissions(at("victim"), Permissions::from_mode(0o640))),
                4 => drop(lsetxattr(at("victim"), "user.escaped", b"yes", XattrFlags::empty())),
                5 => drop(linkat(CWD, at("victim"), CWD, root.join(&own), AtFlags::SYMLINK_FOLLOW)),
                6 => drop(fs::rename(root.join(&own), at(&own))),
                7 => drop(fs::create_dir(at(&own)).and_then(|()| fs::remove_dir(at(&own)))),
                _ => drop(nix::unistd::truncate(&at("victim"), 6)),
            }
            let _ = fs::read_dir(root.join(directory)).map(Iterator::count);
        }
        reads.file(&root.join(&own));
        climb(root, reads);
    }
}

/// Opens a directory, and looks up paths with `..` from it while the directory moves.
fn climb(root: &Path, reads: &Reads) {
    let flags = OFlags::DIRECTORY | OFlags::RDONLY;
    let Ok(directory) = openat(CWD, root.join("a/b"), flags, Mode::empty()) else { return };
    for path in ["victim", "../b/victim", "../../a/b/victim", "../../c/b/victim", "../../evil/victim"] {
        if let Ok(file) = openat(&directory, path, OFlags::RDONLY | OFlags::NONBLOCK, Mode::empty()) {
            let mut content = String::new();
            if File::from(file).read_to_string(&mut content).is_ok() {
                reads.count(&content);
            }
        }
    }
}

#[track_caller]
fn assert_no_caller_escapes(cache: CacheMode) {
    let trap = Trap::set(cache);
    let before = snapshot(&trap.outside());
    let (reads, ended) = (Arc::new(Reads::default()), AtomicBool::new(false));
    let shown = trap.mounted.path().to_owned();
    // Directories are exchanged with links, on the source and through the mount, and their parents move.
    let (source, through) = (Directories::of(&trap.source()), Directories::of(&shown));
    let swaps: [&(dyn Fn() + Sync); 5] = [
        &|| swap(&source.root, "a", &source.root, "evil"),
        &|| swap(&source.a, "b", &source.root, "evil"),
        &|| swap(&through.root, "c", &through.root, "relative"),
        &|| swap(&source.a, "b", &source.c, "b"),
        &|| swap(&through.b, "victim", &through.root, "evil-file"),
    ];
    let containers: Vec<_> = (0..3).map(|_| trap.container()).collect();
    thread::scope(|scope| {
        for swap in swaps {
            scope.spawn(|| {
                while !ended.load(Ordering::Relaxed) {
                    swap();
                }
            });
        }
        let callers: Vec<_> = containers
            .iter()
            .enumerate()
            .map(|(number, container)| {
                let (root, reads) = (shown.clone(), Arc::clone(&reads));
                scope.spawn(move || container.run(move || try_everything(&root, number, &reads)))
            })
            .collect();
        let outcomes: Vec<_> = callers.into_iter().map(|caller| caller.join()).collect();
        ended.store(true, Ordering::Relaxed);
        outcomes.into_iter().for_each(|outcome| outcome.expect("a caller makes all its attempts"));
    });
    assert_eq!(reads.escaped.load(Ordering::Relaxed), 0, "the canary was read");
    assert!(reads.inside.load(Ordering::Relaxed) > TRIES, "the callers have hardly ever read a file");
    assert_eq!(snapshot(&trap.outside()), before, "something outside was changed");
}

#[test]
fn nothing_outside_is_reached_while_names_are_swapped() {
    assert_no_caller_escapes(CacheMode::Auto);
}

#[test]
fn nothing_outside_is_reached_while_names_are_swapped_and_nothing_is_remembered() {
    assert_no_caller_escapes(CacheMode::None);
}

#[test]
fn a_link_to_outside_leads_where_the_caller_is() {
    let trap = Trap::set(CacheMode::Auto);
    let root = trap.mounted.path().to_owned();
    assert_eq!(fs::read_link(root.join("evil")).expect("a link"), trap.outside());
    let shown = root.clone();
    trap.container().run(move || {
        for path in ["evil/victim", "evil-file", "relative/victim", "evil/../outside/victim"] {
            File::open(shown.join(path)).expect_err("the caller's directory `outside` is empty");
        }
        // A file that is created through the link is created at its target.
        fs::write(shown.join("evil/new"), "x").expect("written");
    });
    assert_eq!(names(&trap.outside()), ["b", "victim"]);
    // A process of the host, outside of the container, follows the link to the canary.
    assert_eq!(fs::read_to_string(root.join("evil/victim")).expect("a file"), CANARY);
}

#[test]
fn hard_links_and_renames_end_at_the_mount() {
    let trap = Trap::set(CacheMode::Auto);
    let root = trap.mounted.path();
    let outside = trap.outside().join("victim");
    let refused = |operation: &str, result: std::io::Result<()>| {
        assert_eq!(result.expect_err(operation).raw_os_error(), Some(libc::EXDEV), "{operation}");
    };
    refused("link in", fs::hard_link(&outside, root.join("stolen")));
    refused("link out", fs::hard_link(root.join("a/b/victim"), trap.outside().join("given")));
    refused("rename in", fs::rename(&outside, root.join("stolen")));
    refused("rename out", fs::rename(root.join("a/b/victim"), trap.outside().join("given")));
    let follow = linkat(CWD, root.join("evil-file"), CWD, root.join("stolen"), AtFlags::SYMLINK_FOLLOW);
    refused("link through a link", follow.map_err(Into::into));
    // The parent of the volume's root is the parent of the mount point.
    let identity = |path: &Path| fs::metadata(path).map(|stat| (stat.dev(), stat.ino())).expect("a directory");
    assert_eq!(identity(&root.join("..")), identity(root.parent().expect("a parent")));
    assert!(!root.join("../outside").exists());
}

#[test]
fn a_directory_that_leaves_the_source_does_not_take_callers_along() {
    let trap = Trap::set(CacheMode::None);
    let root = trap.mounted.path().to_owned();
    let inside = openat(CWD, root.join("a/b"), OFlags::DIRECTORY | OFlags::RDONLY, Mode::empty()).expect("opened");
    fs::rename(trap.source().join("a/b"), trap.outside().join("moved")).expect("renamed");
    trap.container().run(move || {
        for path in ["../victim", "../b/victim", "../../victim", "../moved/../victim", "../../outside/victim"] {
            if let Ok(file) = openat(&inside, path, OFlags::RDONLY, Mode::empty()) {
                let mut content = String::new();
                File::from(file).read_to_string(&mut content).expect("text");
                assert_ne!(content, CANARY, "{path}");
            }
        }
    });
}
