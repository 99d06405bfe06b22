//! Paths that always exist, while a process of the host replaces what they lead to: no call fails that would not fail on the host. Calls in a
//! directory that the host has removed and made anew act in the new one.

use std::collections::BTreeMap;
use std::fs::{self, File, Permissions};
use std::io;
use std::os::unix::fs::{OpenOptionsExt, PermissionsExt, symlink};
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;

use nix::sys::stat::Mode;
use podfs_fuse::passthrough::CacheMode;
use rustix::fs::{CWD, RenameFlags, access, renameat_with};

use crate::common::caller::in_thread;
use crate::common::load::number;
use crate::common::loop_device::LoopDevice;
use crate::common::passthrough::{Mounted, disk_directory};
use crate::common::scratch::Scratch;
use crate::common::set_on_drop::SetOnDrop;
use crate::common::twins::names;

/// The calls of each scenario, unless `PODFS_REPLACED_CALLS` sets another number.
const CALLS: u64 = 4_000;

type Act = fn(&Path) -> io::Result<()>;

/// Replaces the path again and again, in the directory of the first argument, with the second as a number.
type Replace = fn(&Path, usize);

const OF_FILES: [(&str, Act); 8] = [
    ("open", |path| File::open(path).map(drop)),
    ("stat", |path| fs::metadata(path).map(drop)),
    ("open for writing", |path| File::options().read(true).write(true).open(path).map(drop)),
    ("O_CREAT", |path| File::options().append(true).create(true).open(path).map(drop)),
    ("read", |path| fs::read(path).map(drop)),
    ("chmod", |path| fs::set_permissions(path, Permissions::from_mode(0o644))),
    ("access", |path| Ok(access(path, rustix::fs::Access::READ_OK)?)),
    ("getxattr", |path| match rustix::fs::getxattr(path, "user.none", &mut [0_u8; 10]) {
        Err(rustix::io::Errno::NODATA) => Ok(()),
        got => Ok(got.map(drop)?),
    }),
];
const OF_LINKS: [(&str, Act); 3] = [
    ("readlink", |path| fs::read_link(path).map(drop)),
    ("lstat", |path| fs::symlink_metadata(path).map(drop)),
    ("open through it", |path| File::open(path).map(drop)),
];
const OF_DIRECTORIES: [(&str, Act); 3] = [
    ("list", |path| fs::read_dir(path).map(drop)),
    ("stat", |path| fs::metadata(path).map(drop)),
    ("open", |path| File::options().read(true).custom_flags(libc::O_DIRECTORY).open(path).map(drop)),
];

fn replace_file(root: &Path, round: usize) {
    fs::write(root.join("next"), round.to_string()).expect("written");
    fs::rename(root.join("next"), root.join("path")).expect("renamed");
}

fn replace_link(root: &Path, round: usize) {
    symlink(["one", "other"][round % 2], root.join("next")).expect("a link");
    fs::rename(root.join("next"), root.join("path")).expect("renamed");
}

fn replace_directory(root: &Path, _: usize) {
    fs::create_dir(root.join("next")).expect("made");
    fs::rename(root.join("next"), root.join("path")).expect("renamed");
}

/// The errors of `calls` calls on `path` of `shown`, while a thread replaces it in `source`.
fn errors_while(
    shown: &Path,
    source: &Path,
    replace: Replace,
    acts: &[(&'static str, Act)],
) -> BTreeMap<String, usize> {
    for name in ["one", "other"] {
        fs::write(source.join(name), name).expect("written");
    }
    replace(source, 0);
    let stopped = AtomicBool::new(false);
    let mut errors = BTreeMap::new();
    thread::scope(|scope| {
        let stop = SetOnDrop(&stopped);
        scope.spawn(|| (1..).take_while(|_| !stopped.load(Ordering::SeqCst)).for_each(|round| replace(source, round)));
        for call in 0..number("PODFS_REPLACED_CALLS").unwrap_or(CALLS) as usize {
            let (what, act) = acts[call % acts.len()];
            if let Err(error) = act(&shown.join("path")) {
                *errors.entry(format!("{what}: {error}")).or_default() += 1;
            }
        }
        drop(stop);
    });
    errors
}

/// Directories of file systems that use inode numbers again in different ways.
fn with_each_file_system(act: impl Fn(&str, &Path)) {
    act("ext4", disk_directory().path());
    act("tmpfs", Scratch::tmpfs("").path());
    let device = LoopDevice::new(512);
    device.run("mkfs.xfs", &["-q"]);
    act("xfs", Scratch::of_device(device.path(), "xfs").path());
}

#[track_caller]
fn always_there(replace: Replace, acts: &[(&'static str, Act)]) {
    with_each_file_system(|kind, base| {
        for cache in [CacheMode::Auto, CacheMode::None] {
            let [native, source] = ["native", "source"].map(|name| base.join(format!("{name}-{cache:?}")));
            [&native, &source].into_iter().for_each(|directory| fs::create_dir(directory).expect("made"));
            let mounted = Mounted::of_with_cache(&source, cache);
            let expected = errors_while(&native, &native, replace, acts);
            assert_eq!(expected, BTreeMap::new(), "{kind}: without a volume");
            assert_eq!(errors_while(mounted.path(), &source, replace, acts), BTreeMap::new(), "{kind}, {cache:?}");
        }
    });
}

#[test]
fn a_file_that_the_host_replaces_all_the_time_is_always_there() {
    always_there(replace_file, &OF_FILES);
}

#[test]
fn a_link_that_the_host_replaces_all_the_time_is_always_there() {
    always_there(replace_link, &OF_LINKS);
}

#[test]
fn a_directory_that_the_host_replaces_all_the_time_is_always_there() {
    always_there(replace_directory, &OF_DIRECTORIES);
}

/// Makes names in a directory.
const MAKERS: [(&str, Act); 8] = [
    ("create", |at| File::create(at.join("file")).map(drop)),
    ("exclusive", |at| File::options().write(true).create_new(true).open(at.join("exclusive")).map(drop)),
    ("mkdir", |at| fs::create_dir(at.join("directory"))),
    ("symlink", |at| symlink("target", at.join("link"))),
    ("mkfifo", |at| Ok(nix::unistd::mkfifo(&at.join("fifo"), Mode::S_IRWXU)?)),
    ("link", |at| fs::hard_link(at.join("../other"), at.join("second"))),
    ("rename", |at| fs::rename(at.join("../moved"), at.join("moved"))),
    ("O_TMPFILE", |at| File::options().write(true).custom_flags(libc::O_TMPFILE).open(at).map(drop)),
];

/// Looks at names that a directory has, and changes them.
const USERS: [(&str, Act); 7] = [
    ("open", |at| File::open(at.join("there")).map(drop)),
    ("stat", |at| fs::metadata(at.join("there")).map(drop)),
    ("O_CREAT", |at| File::options().append(true).create(true).open(at.join("there")).map(drop)),
    ("chmod", |at| fs::set_permissions(at.join("there"), Permissions::from_mode(0o600))),
    ("rename", |at| fs::rename(at.join("there"), at.join("here"))),
    ("unlink", |at| fs::remove_file(at.join("there"))),
    ("list", |at| match names(at)[..] {
        [_] => Ok(()),
        ref other => Err(io::Error::other(format!("{other:?}"))),
    }),
];

/// The path of a directory that the host removes and makes anew.
const DEEP: &str = "above/directory";

fn make(root: &Path) {
    fs::create_dir_all(root.join(DEEP)).expect("made");
    fs::write(root.join(DEEP).join("there"), "x").expect("written");
    fs::write(root.join("above/other"), "x").expect("written");
    fs::write(root.join("above/moved"), "x").expect("written");
}

type Remake = fn(&Path);

/// The ways of the host to make a directory anew.
const REMAKES: [(&str, Remake); 3] = [
    ("removed and made anew", |root| {
        fs::remove_dir_all(root.join(DEEP)).expect("removed");
        make(root);
    }),
    ("removed with the directory above, and made anew", |root| {
        fs::remove_dir_all(root.join("above")).expect("removed");
        make(root);
    }),
    ("exchanged, and the old one removed", |root| {
        let next = root.join("next");
        fs::create_dir(&next).expect("made");
        fs::write(next.join("there"), "y").expect("written");
        renameat_with(CWD, &next, CWD, root.join(DEEP), RenameFlags::EXCHANGE).expect("exchanged");
        fs::remove_dir_all(&next).expect("removed");
    }),
];

#[test]
fn calls_in_a_directory_that_the_host_has_just_made_anew_act_in_the_new_one() {
    with_each_file_system(|kind, base| {
        let mounted = Mounted::of(base);
        for (how, remake) in REMAKES {
            for (what, act) in MAKERS.into_iter().chain(USERS) {
                make(base);
                let shown = mounted.path().join(DEEP);
                // From now on the kernel has the names cached, for a second.
                assert!(fs::metadata(&shown).expect("a directory").is_dir());
                remake(base);
                act(&shown).unwrap_or_else(|error| panic!("{kind}, {how}: {what}: {error}"));
                fs::remove_dir_all(base.join("above")).expect("removed");
                fs::metadata(mounted.path().join("above")).err();
            }
        }
    });
}

#[test]
fn a_directory_that_a_caller_has_renamed_is_not_taken_for_the_next_one_with_its_name() {
    let mounted = Mounted::new();
    let at = |path: &str| mounted.path().join(path);
    for flags in [RenameFlags::empty(), RenameFlags::EXCHANGE] {
        fs::create_dir(at("a")).expect("made");
        fs::create_dir(at("b")).expect("made");
        assert!(fs::metadata(at("a")).expect("there").is_dir() && fs::metadata(at("b")).expect("there").is_dir());
        renameat_with(CWD, at("a"), CWD, at("b"), flags).expect("renamed");
        let _exchanged = fs::create_dir(at("a"));
        fs::create_dir(at("a/x")).expect("made");
        assert!(!at("b/x").exists());
        fs::create_dir(at("b/x")).expect("made");
        fs::create_dir(at("a/y")).expect("made");
        fs::hard_link(file_in(&at("b")), at("b/y")).expect("linked");
        ["a", "b"].into_iter().for_each(|name| fs::remove_dir_all(at(name)).expect("removed"));
    }
}

fn file_in(directory: &Path) -> std::path::PathBuf {
    fs::write(directory.join("file"), "x").expect("written");
    directory.join("file")
}

#[test]
fn a_working_directory_that_the_host_has_removed_stays_without_names() {
    with_each_file_system(|kind, base| {
        let mounted = Mounted::of(base);
        for is_remade in [false, true] {
            for (what, act) in MAKERS.into_iter().chain(USERS) {
                if ["link", "rename", "list"].contains(&what) {
                    continue;
                }
                let errors = ["native", "shown"].map(|place| {
                    // The kernel has no names of this directory cached.
                    let name = format!("{is_remade} {what} {place}");
                    fs::create_dir(base.join(&name)).expect("made");
                    make(&base.join(&name));
                    let root = if place == "native" { base } else { mounted.path() };
                    in_thread(&root.join(&name).join(DEEP), || {
                        assert_eq!(names(Path::new(".")), ["there"]);
                        fs::remove_dir_all(base.join(&name).join(DEEP)).expect("removed");
                        if is_remade {
                            make(&base.join(&name));
                        }
                        [(); 2].map(|()| act(Path::new("")).map_err(|error| error.to_string()))
                    })
                });
                assert_eq!(errors[1], errors[0], "{kind}: {what}, made anew: {is_remade}");
            }
        }
    });
}
