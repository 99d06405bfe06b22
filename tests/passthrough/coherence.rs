//! Changes of the source by processes of the host: the mount shows changes of content at once, and changes of names and
//! attributes within a second. `eventually` allows more, for a busy machine.

use std::fs::{self, File, Permissions};
use std::os::unix::fs::{FileExt, MetadataExt, PermissionsExt, symlink};
use std::path::Path;
use std::ptr;

use podfs_fuse::passthrough::CacheMode;
use rustix::fs::{AtFlags, CWD, StatxFlags, Timespec, Timestamps, statx, utimensat};
use rustix::mm::{MapFlags, MsyncFlags, ProtFlags, mmap, msync, munmap};

use crate::common::caller::in_thread;
use crate::common::kernel_is_at_least;
use crate::common::passthrough::{Mounted, disk_directory, within_timeout};
use crate::common::twins::names;
use crate::common::undisturbed::undisturbed;
use crate::common::{eventually, wait_content};

const EVERY_CACHE: [CacheMode; 3] = [CacheMode::None, CacheMode::Auto, CacheMode::Always];

#[test]
fn changes_of_content_are_visible_at_once_with_any_cache() {
    for cache in EVERY_CACHE {
        let mounted = Mounted::with_cache(cache);
        let (source, shown) = (mounted.source().join("file"), mounted.path().join("file"));
        fs::write(&source, "first").expect("written");
        let open = File::open(&shown).expect("a file");
        let writer = File::options().write(true).open(&source).expect("a file");
        for round in 0..100_u8 {
            let bytes = [b'a' + round % 26; 5];
            writer.write_all_at(&bytes, 0).expect("written");
            let mut read = [0; 5];
            open.read_exact_at(&mut read, 0).expect("read");
            assert_eq!(read, bytes, "{cache:?}: an open file");
            File::open(&shown).expect("a file").read_exact_at(&mut read, 0).expect("read");
            assert_eq!(read, bytes, "{cache:?}: opened now");
        }
    }
}

#[test]
fn a_file_that_grows_or_shrinks_is_read_to_its_end() {
    for cache in [CacheMode::None, CacheMode::Auto] {
        let mounted = Mounted::with_cache(cache);
        let (source, shown) = (mounted.source().join("file"), mounted.path().join("file"));
        fs::write(&source, "short").expect("written");
        assert_eq!(fs::read_to_string(&shown).expect("a file"), "short");
        fs::write(&source, "much longer than before").expect("written");
        assert_eq!(fs::read_to_string(&shown).expect("a file"), "much longer than before", "{cache:?}");
        fs::write(&source, "less").expect("written");
        assert_eq!(fs::read_to_string(&shown).expect("a file"), "less", "{cache:?}");
    }
}

#[test]
fn attributes_follow_the_source() {
    for cache in [CacheMode::None, CacheMode::Auto] {
        let mounted = Mounted::with_cache(cache);
        let (source, shown) = (mounted.source().join("file"), mounted.path().join("file"));
        fs::write(&source, "x").expect("written");
        let attributes = |path: &Path| {
            let stat = fs::metadata(path).expect("a file");
            (stat.mode(), stat.uid(), stat.size(), stat.nlink(), stat.mtime_nsec())
        };
        assert_eq!(attributes(&shown), attributes(&source));
        let changes: [&dyn Fn(); 4] = [
            &|| fs::set_permissions(&source, Permissions::from_mode(0o4711)).expect("set"),
            &|| std::os::unix::fs::chown(&source, Some(4711), None).expect("set"),
            &|| File::options().write(true).open(&source).expect("a file").set_len(12345).expect("sized"),
            &|| fs::hard_link(&source, mounted.source().join("link")).expect("a link"),
        ];
        for (number, change) in changes.into_iter().enumerate() {
            change();
            if cache == CacheMode::None {
                assert_eq!(attributes(&shown), attributes(&source), "change {number} is visible at once");
            }
            eventually(&format!("{cache:?}: change {number} is visible"), || attributes(&shown) == attributes(&source));
        }
    }
}

#[test]
fn names_come_go_and_change_as_on_the_source() {
    for cache in [CacheMode::None, CacheMode::Auto] {
        let mounted = Mounted::with_cache(cache);
        let (source, shown) = (mounted.source(), mounted.path());
        let assert_visible = |change: &str, is_visible: &dyn Fn() -> bool| {
            if cache == CacheMode::None {
                assert!(is_visible(), "at once: {change}");
            }
            eventually(&format!("{cache:?}: {change}"), is_visible);
        };
        // After this lookup, the kernel may cache that the name is absent.
        assert!(!shown.join("new").exists());
        fs::write(source.join("new"), "one").expect("written");
        assert_visible("a new file", &|| shown.join("new").exists());
        assert_eq!(names(shown), ["new"]);
        fs::rename(source.join("new"), source.join("renamed")).expect("renamed");
        assert_visible("a renamed file", &|| !shown.join("new").exists() && shown.join("renamed").exists());
        fs::write(source.join("next"), "two").expect("written");
        fs::rename(source.join("next"), source.join("renamed")).expect("renamed");
        wait_content(&shown.join("renamed"), "two");
        fs::remove_file(source.join("renamed")).expect("removed");
        assert_visible("a removed file", &|| !shown.join("renamed").exists());
        assert!(names(shown).is_empty());
        // Files of other kinds get the same name.
        fs::create_dir(source.join("thing")).expect("a directory");
        assert_visible("a directory", &|| shown.join("thing").is_dir());
        fs::remove_dir(source.join("thing")).expect("removed");
        symlink("elsewhere", source.join("thing")).expect("a link");
        assert_visible("a link", &|| {
            fs::read_link(shown.join("thing")).is_ok_and(|target| target == Path::new("elsewhere"))
        });
        fs::remove_file(source.join("thing")).expect("removed");
        symlink("other", source.join("thing")).expect("a link");
        assert_visible("another link", &|| {
            fs::read_link(shown.join("thing")).is_ok_and(|target| target == Path::new("other"))
        });
    }
}

#[test]
fn listings_follow_the_source() {
    let mounted = Mounted::new();
    for round in 0..20 {
        fs::write(mounted.source().join(format!("file{round}")), "").expect("written");
        eventually("the new file is listed", || names(mounted.path()) == names(mounted.source()));
    }
    for round in 0..20 {
        fs::remove_file(mounted.source().join(format!("file{round}"))).expect("removed");
        eventually("the removed file is not listed", || names(mounted.path()) == names(mounted.source()));
    }
}

#[test]
fn an_open_file_is_the_file_that_was_opened() {
    for cache in EVERY_CACHE {
        let mounted = Mounted::with_cache(cache);
        let (source, shown) = (mounted.source().join("file"), mounted.path().join("file"));
        fs::write(&source, "old").expect("written");
        let file = File::options().read(true).write(true).open(&shown).expect("a file");
        // The file is replaced many times. The file system of the source uses inode numbers again, but the new file is another
        // file.
        for round in 0..50 {
            fs::remove_file(&source).expect("removed");
            fs::write(&source, format!("new {round}")).expect("written");
            file.write_all_at(b"OLD", 0).expect("written");
            let mut read = [0; 3];
            file.read_exact_at(&mut read, 0).expect("read");
            assert_eq!(&read, b"OLD", "{cache:?}");
            if cache != CacheMode::Always {
                wait_content(&shown, &format!("new {round}"));
            }
            assert_eq!(fs::read_to_string(&source).expect("a file"), format!("new {round}"));
        }
        assert_eq!(file.metadata().expect("attributes").len(), 3);
    }
}

#[test]
fn an_inode_number_that_is_used_again_is_another_file() {
    // The kernel caches nothing, so it looks each name up. It must not take the new file for the old one with the same inode
    // number.
    let mounted = Mounted::with_cache(CacheMode::None);
    let (source, shown) = (mounted.source().join("file"), mounted.path().join("file"));
    for round in 0..500 {
        let content = "x".repeat(round);
        fs::write(&source, &content).expect("written");
        assert_eq!(fs::metadata(&shown).expect("a file").len(), content.len() as u64);
        assert_eq!(fs::read_to_string(&shown).expect("a file"), content);
        fs::remove_file(&source).expect("removed");
        assert!(!shown.exists());
        fs::create_dir(&source).expect("a directory");
        assert!(shown.is_dir());
        fs::remove_dir(&source).expect("removed");
    }
}

#[test]
fn a_working_directory_stays_when_the_source_moves_it() {
    let mounted = Mounted::new();
    fs::create_dir_all(mounted.source().join("a/b")).expect("directories");
    in_thread(&mounted.path().join("a/b"), || {
        fs::rename(mounted.source().join("a/b"), mounted.source().join("moved")).expect("renamed");
        fs::rename(mounted.source().join("a"), mounted.source().join("other")).expect("renamed");
        fs::write("file", "here").expect("written");
        assert_eq!(fs::read_to_string(mounted.source().join("moved/file")).expect("a file"), "here");
        assert_eq!(names(Path::new(".")), ["file"]);
    });
    eventually("the new path exists", || mounted.path().join("moved/file").exists());
    eventually("the old path does not exist", || !mounted.path().join("a").exists());
}

#[test]
fn a_source_that_is_removed_is_an_error_and_no_hang() {
    let directory = disk_directory();
    let source = directory.path().join("source");
    fs::create_dir_all(source.join("sub")).expect("directories");
    fs::write(source.join("file"), "content").expect("written");
    fs::write(source.join("sub/file"), "content").expect("written");
    let mounted = Mounted::of(&source);
    let path = mounted.path().to_owned();
    let open = File::open(path.join("file")).expect("a file");
    assert!(path.join("sub/file").exists());
    fs::remove_dir_all(&source).expect("removed");

    within_timeout("use of a mount whose source is gone", move || {
        let is_gone = |operation: &str, result: std::io::Result<()>| {
            let error = result.expect_err(operation).raw_os_error();
            assert!([Some(libc::ENOENT), Some(libc::ESTALE)].contains(&error), "{operation}: {error:?}");
        };
        eventually("names are gone", || !path.join("file").exists() && !path.join("sub").exists());
        is_gone("open", File::open(path.join("file")).map(drop));
        is_gone("create", File::create(path.join("new")).map(drop));
        is_gone("mkdir", fs::create_dir(path.join("new")));
        is_gone("in a directory", fs::write(path.join("sub/new"), ""));
        is_gone("rename", fs::rename(path.join("file"), path.join("new")));
        match fs::read_dir(&path) {
            Ok(listing) => assert_eq!(listing.count(), 0),
            Err(error) => is_gone("list", Err(error)),
        }
        let _ = fs::metadata(&path);
        let _ = rustix::fs::statvfs(&path);
        // An open file stays usable.
        let mut bytes = [0; 7];
        open.read_exact_at(&mut bytes, 0).expect("read");
        assert_eq!(&bytes, b"content");
    });
    // The volume does not show another directory that gets the name of its source.
    fs::create_dir(&source).expect("a directory");
    fs::write(source.join("file"), "other").expect("written");
    assert!(!mounted.path().join("file").exists());
}

/// The mtime and the ctime of a file. statx(2) requests no other attributes, because the kernel decides for each attribute
/// whether its cached value is valid.
fn times(path: &Path) -> [(i64, u32); 2] {
    let mask = StatxFlags::MTIME | StatxFlags::CTIME;
    let attributes = statx(CWD, path, AtFlags::empty(), mask).expect("a file");
    [attributes.stx_mtime, attributes.stx_ctime].map(|time| (time.tv_sec, time.tv_nsec))
}

#[test]
fn a_store_through_a_mapping_moves_the_times_of_stat() {
    // xfstests generic/080 and 215
    const LENGTH: usize = 8192;
    let limited = Mounted::with_limit(1 << 30);
    let kernel_caches =
        [Mounted::with_cache(CacheMode::Always), Mounted::alone(), Mounted::exclusive(), Mounted::new()];
    for mounted in kernel_caches.iter().chain([&limited]) {
        let (shown, source) = (mounted.path().join("file"), mounted.source().join("file"));
        fs::write(&shown, vec![1; LENGTH]).expect("written");
        let assert_same = |when: &str| assert_eq!(times(&shown), times(&source), "{when}");
        let set_old_times = || {
            let then = Timespec { tv_sec: 1000, tv_nsec: 0 };
            let then = Timestamps { last_access: then, last_modification: then };
            utimensat(CWD, &shown, &then, AtFlags::empty()).expect("set");
            assert_eq!(times(&shown)[0], (1000, 0));
        };
        set_old_times();
        let file = File::options().read(true).write(true).open(&shown).expect("a file");
        let protection = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: a new mapping at an address of the kernel's choice.
        let at = unsafe { mmap(ptr::null_mut(), LENGTH, protection, MapFlags::SHARED, &file, 0) }.expect("a mapping");
        let store = |byte: u8| {
            // SAFETY: within the mapping, which exists until the end of this round.
            unsafe {
                at.cast::<u8>().write_volatile(byte);
                msync(at, LENGTH, MsyncFlags::SYNC).expect("synchronised");
            }
        };
        set_old_times();
        store(2);
        assert_ne!(times(&shown)[0], (1000, 0), "the store moves the time");
        assert_same("after msync");
        set_old_times();
        store(3);
        drop(file);
        assert_same("after close");
        // A mapping exists without a descriptor of its file.
        set_old_times();
        store(4);
        assert_ne!(times(&shown)[0], (1000, 0), "the store moves the time");
        assert_same("after a store without a descriptor");
        set_old_times();
        // SAFETY: within the mapping, and exactly the mapping.
        unsafe {
            at.cast::<u8>().write_volatile(5);
            munmap(at, LENGTH).expect("unmapped");
        }
        assert_same("after munmap");
    }
}

#[test]
fn a_file_that_was_open_for_reading_and_writing_and_is_not_mapped_is_remembered_again() {
    if !kernel_is_at_least(6, 18) {
        return;
    }
    let mounted = Mounted::with_cache(CacheMode::Always);
    let shown = mounted.path().join("file");
    let file = File::options().read(true).write(true).create_new(true).open(&shown).expect("created");
    file.write_all_at(b"content", 0).expect("written");
    drop(file);
    // Soon after the close, the kernel drops the file from its caches, and looks it up again at the next stat(2).
    eventually("stat(2) causes no request", || {
        fs::metadata(&shown).expect("a file");
        let before = mounted.requests();
        (0..100).for_each(|_| assert_eq!(fs::metadata(&shown).expect("a file").len(), 7));
        mounted.requests() == before
    });
}

/// Reads the attributes of each file by its path.
fn stat_all(root: &Path) {
    for name in ["file", "sub", "sub/file"] {
        fs::symlink_metadata(root.join(name)).expect("the file exists");
    }
}

#[test]
fn a_name_that_is_cached_for_ever_is_looked_up_once() {
    let mounted = Mounted::with_cache(CacheMode::Always);
    fs::create_dir(mounted.source().join("sub")).expect("a directory");
    fs::write(mounted.source().join("file"), "x").expect("written");
    fs::write(mounted.source().join("sub/file"), "x").expect("written");
    undisturbed(|| {
        stat_all(mounted.path());
        let before = mounted.requests();
        for _ in 0..100 {
            stat_all(mounted.path());
        }
        let requests = mounted.requests() - before;
        if requests == 0 { Ok(()) } else { Err(format!("{requests} requests")) }
    });
}

#[test]
fn a_name_that_is_not_cached_is_looked_up_each_time() {
    let mounted = Mounted::with_cache(CacheMode::None);
    fs::create_dir(mounted.source().join("sub")).expect("a directory");
    fs::write(mounted.source().join("file"), "x").expect("written");
    fs::write(mounted.source().join("sub/file"), "x").expect("written");
    stat_all(mounted.path());
    let before = mounted.requests();
    for _ in 0..10 {
        stat_all(mounted.path());
    }
    assert!(mounted.requests() - before >= 30, "each stat(2) causes a request");
}
