//! A volume with a size limit: podfs refuses data beyond the limit at once, and removed files make room.

use std::fs::{self, File, Permissions};
use std::io::{self, ErrorKind, Write};
use std::os::unix::fs::{FileExt, MetadataExt, OpenOptionsExt, PermissionsExt, symlink};
use std::path::Path;
use std::ptr;

use rustix::fs::{FallocateFlags, SeekFrom, XattrFlags, copy_file_range, fallocate, setxattr, statvfs};
use rustix::io::Errno;
use rustix::mm::{MapFlags, MsyncFlags, ProtFlags, mmap, msync, munmap};

use crate::common::caller::Caller;
use crate::common::eventually;
use crate::common::frozen::FreezableDisk;
use crate::common::loop_device::LoopDevice;
use crate::common::own_descriptors::with_own_descriptors;
use crate::common::passthrough::{Mounted, disk_directory};

const KIB: u64 = 1024;
const LIMIT: u64 = 1024 * KIB;

/// Writes until the volume is full. Returns the number of written bytes.
#[track_caller]
fn fill(file: &mut File) -> u64 {
    let mut written = 0;
    loop {
        match file.write(&[7; 4096]) {
            Ok(count) => written += count as u64,
            Err(full) => {
                assert_eq!(full.kind(), ErrorKind::StorageFull, "{full}");
                return written;
            }
        }
        assert!(written <= 2 * LIMIT, "the volume never gets full");
    }
}

fn is_full(result: io::Result<()>) -> bool {
    result.is_err_and(|error| error.kind() == ErrorKind::StorageFull)
}

/// Asserts that the files of a directory use no more disk space than the limit.
#[track_caller]
fn assert_within_limit(directory: &Path) {
    let entries = fs::read_dir(directory).expect("a listing").map(|entry| entry.expect("an entry"));
    let taken: u64 = entries.map(|entry| entry.metadata().expect("attributes").blocks() * 512).sum();
    assert!(taken <= LIMIT, "{taken} bytes are taken of {LIMIT}");
}

#[test]
fn writes_stop_at_the_limit_and_earlier_data_stays() {
    // ED-07: podfs refuses at once where the kubelet evicts the pod later.
    let mounted = Mounted::with_limit(LIMIT);
    let path = mounted.path().join("file");
    let written = fill(&mut File::create(&path).expect("created"));
    assert!((LIMIT - 64 * KIB..=LIMIT).contains(&written), "{written} bytes fit");
    assert_eq!(fs::read(&path).expect("a file"), vec![7; usize::try_from(written).expect("a size")]);
    File::open(mounted.source().join("file")).expect("a file").sync_all().expect("synced");
    assert_within_limit(mounted.source());
    let other = mounted.path().join("other");
    assert!(is_full(fs::write(&other, [1; 65536])), "another file has no more room");
}

#[test]
fn a_full_volume_can_be_read_overwritten_and_emptied() {
    let mounted = Mounted::with_limit(LIMIT);
    let volume = mounted.path();
    with_own_descriptors(|| fill_and_empty(volume));
}

fn fill_and_empty(volume: &Path) {
    let path = volume.join("file");
    let mut file = File::options().read(true).write(true).create_new(true).open(&path).expect("created");
    let written = fill(&mut file);
    for offset in (0..written).step_by(4096) {
        file.write_all_at(&[8; 4096], offset).expect("existing data can be overwritten");
    }
    file.set_len(written / 2).expect("cut");
    let mut half = File::create(volume.join("half")).expect("created");
    let fits = fill(&mut half);
    assert!(fits + 64 * KIB >= LIMIT / 2, "{fits} bytes fit into half of the volume");
    drop(half);
    fs::remove_file(volume.join("half")).expect("removed");
    // An open file uses space also after its name is removed.
    fs::remove_file(&path).expect("removed");
    let kept = fill(&mut File::create(volume.join("beside")).expect("created"));
    assert!(kept <= LIMIT - written / 2, "{kept} bytes fit beside a file that is open");
    fs::remove_file(volume.join("beside")).expect("removed");
    drop(file);
    eventually("everything is free again", || {
        let fits = fill(&mut File::create(volume.join("again")).expect("created"));
        fs::remove_file(volume.join("again")).expect("removed");
        fits + 64 * KIB >= LIMIT
    });
}

#[test]
fn the_room_of_a_removed_file_is_there_at_once() {
    let mounted = Mounted::with_limit(LIMIT);
    let path = mounted.path().join("file");
    with_own_descriptors(|| {
        for _ in 0..3000 {
            let file = File::create_new(&path).expect("there is room for a name");
            fallocate(&file, FallocateFlags::empty(), 0, LIMIT - 64 * KIB).expect("there is room");
            // The kernel does not wait for the answer to the RELEASE of the file.
            drop(file);
            fs::remove_file(&path).expect("removed");
        }
    });
}

#[test]
fn every_way_to_grow_is_refused_when_it_does_not_fit() {
    let mounted = Mounted::with_limit(LIMIT);
    let path = |name: &str| mounted.path().join(name);
    let source = File::create_new(path("source")).expect("created");
    source.write_all_at(&vec![1; 400 * 1024], 0).expect("written");
    let source = File::open(path("source")).expect("a file");
    let file = File::options().read(true).write(true).create_new(true).open(path("file")).expect("created");
    let full = |result: rustix::io::Result<()>| is_full(result.map_err(Into::into));
    assert!(full(fallocate(&file, FallocateFlags::empty(), 0, 2 * LIMIT)));
    assert!(full(fallocate(&file, FallocateFlags::KEEP_SIZE, 0, 2 * LIMIT)));
    assert!(full(fallocate(&file, FallocateFlags::ZERO_RANGE, 0, 2 * LIMIT)));
    assert_within_limit(mounted.source());
    // A hole uses no space.
    file.set_len(100 * LIMIT).expect("a hole");
    file.write_all_at(b"end", 100 * LIMIT).expect("written");

    let copy = |to: u64| copy_file_range(&source, Some(&mut 0), &file, Some(&mut { to }), 400 * 1024);
    // Copies succeed until the limit is reached.
    let refused = (0..1000).find_map(|_| copy(file.metadata().expect("attributes").len()).err());
    assert_eq!(refused, Some(rustix::io::Errno::NOSPC));
    assert!(is_full(fs::copy(path("source"), path("copy")).map(drop)));
    file.sync_all().expect("synced");
    assert_within_limit(mounted.source());
}

#[test]
fn many_small_files_are_counted_by_their_blocks() {
    let mounted = Mounted::with_limit(LIMIT);
    let full = (0..1000).find(|number| is_full(fs::write(mounted.path().join(format!("file{number}")), "x")));
    let count = full.expect("the volume gets full");
    assert!((200..=256).contains(&count), "{count} files of one block fit");
    assert!(is_full(fs::create_dir(mounted.path().join("directory"))), "a directory takes a block");
    // A file with several names counts once.
    for number in 0..100 {
        fs::remove_file(mounted.path().join(format!("file{number}"))).expect("removed");
    }
    for number in 0..300 {
        fs::hard_link(mounted.path().join("file100"), mounted.path().join(format!("link{number}"))).expect("a link");
    }
    fs::write(mounted.path().join("one more"), "x").expect("there is room");
}

/// The number of bytes that a directory and everything in it use on the disk, as `du(1)` counts them.
fn disk_usage(directory: &Path) -> u64 {
    let entries = fs::read_dir(directory).expect("a listing").map(|entry| entry.expect("an entry"));
    let below: u64 = entries
        .map(|entry| match entry.metadata().expect("attributes") {
            metadata if metadata.is_dir() => disk_usage(&entry.path()),
            metadata => metadata.blocks() * 512,
        })
        .sum();
    below + fs::metadata(directory).expect("attributes").blocks() * 512
}

/// Asserts that as much data fits into the volume as into a new one.
#[track_caller]
fn assert_everything_fits(mounted: &Mounted) {
    let path = mounted.path().join("everything");
    let fits = fill(&mut File::create(&path).expect("created"));
    fs::remove_file(path).expect("removed");
    assert!(fits + 64 * KIB >= LIMIT, "{fits} bytes fit");
}

#[test]
fn extended_attributes_ask_for_room() {
    let mounted = Mounted::with_limit(LIMIT);
    let flood = |directory: &Path| {
        (0..2000u32).find(|number| {
            // Each value is different, because file systems let files with equal attributes share a block.
            let value: Vec<u8> = (0..3000u32).map(|index| (index.wrapping_mul(31) ^ number) as u8).collect();
            let path = directory.join(number.to_string());
            let created = File::create_new(&path);
            let set = |_: File| Ok(setxattr(&path, c"user.flood", &value, XattrFlags::empty())?);
            is_full(created.and_then(set))
        })
    };
    let full = flood(mounted.path()).expect("the volume gets full");
    assert!((200..=260).contains(&full), "{full} attributes of one block fit");
    let taken = disk_usage(mounted.source());
    assert!(taken <= LIMIT + 16 * KIB, "{taken} bytes are taken of {LIMIT}");
    let first = mounted.path().join("0");
    setxattr(&first, c"user.flood", b"less", XattrFlags::empty()).expect("a shorter value needs no room");
    for entry in fs::read_dir(mounted.path()).expect("a listing") {
        fs::remove_file(entry.expect("an entry").path()).expect("removed");
    }
    assert_everything_fits(&mounted);

    // A directory keeps the blocks for its removed names until the directory itself is removed; podfs counts them until
    // then.
    let below = mounted.path().join("below");
    fs::create_dir(&below).expect("a directory");
    flood(&below).expect("the volume gets full");
    fs::remove_dir_all(&below).expect("removed");
    assert_everything_fits(&mounted);
}

#[test]
fn empty_files_with_long_names_ask_for_room_and_give_it_back() {
    let mounted = Mounted::with_limit(LIMIT);
    let name = |round: u32, number: u32| mounted.path().join(format!("{round}{number:0>200}"));
    for round in 0..3 {
        let created = (0..15_000).take_while(|number| File::create_new(name(round, *number)).is_ok()).count();
        let taken = disk_usage(mounted.source());
        assert!(taken <= 2 * LIMIT + 64 * KIB, "{taken} bytes are taken of {LIMIT} in round {round}");
        assert!(created > 1000, "{created} files were created in round {round}");
        (0..created).for_each(|number| fs::remove_file(name(round, number as u32)).expect("removed"));
        assert_everything_fits(&mounted);
    }
}

#[test]
fn nothing_new_fits_into_a_full_volume() {
    let mounted = Mounted::with_limit(LIMIT);
    let path = |name: &str| mounted.path().join(name);
    fs::create_dir(path("directory")).expect("a directory");
    fill(&mut File::create(path("file")).expect("created"));
    assert!(is_full(File::create_new(path("empty")).map(drop)));
    assert!(is_full(File::options().write(true).custom_flags(libc::O_TMPFILE).open(mounted.path()).map(drop)));
    assert!(is_full(fs::create_dir(path("other"))));
    assert!(is_full(symlink("target", path("link"))));
    assert!(is_full(fs::hard_link(path("file"), path("linked"))));
    fs::rename(path("file"), path("directory/moved")).expect("a name can move");
    fs::remove_file(path("directory/moved")).expect("removed");
    assert_everything_fits(&mounted);
}

#[test]
fn stores_through_a_mapping_are_counted_too() {
    let mounted = Mounted::with_limit(LIMIT);
    let path = mounted.path().join("file");
    let file = File::options().read(true).write(true).create_new(true).open(path).expect("created");
    let length = usize::try_from(4 * LIMIT).expect("a size");
    file.set_len(4 * LIMIT).expect("a hole");
    // SAFETY: the new mapping is as long as the file; it is used as bytes, and unmapped below.
    let failed = unsafe {
        let protection = ProtFlags::READ | ProtFlags::WRITE;
        let at = mmap(ptr::null_mut(), length, protection, MapFlags::SHARED, &file, 0).expect("a mapping");
        at.cast::<u8>().write_bytes(9, length);
        let synced = msync(at, length, MsyncFlags::SYNC);
        munmap(at, length).expect("unmapped");
        synced.is_err()
    };
    assert!(failed || file.sync_all().is_err(), "fsync(2) reports that not all of it was written");
    assert_within_limit(mounted.source());
}

#[test]
fn df_shows_the_limit() {
    let mounted = Mounted::with_limit(LIMIT);
    let figures = || statvfs(mounted.path()).expect("figures");
    assert_eq!(figures().f_blocks * figures().f_frsize, LIMIT);
    let before = figures().f_bavail * figures().f_frsize;
    assert!(before <= LIMIT);
    fs::write(mounted.path().join("file"), vec![1; 256 * 1024]).expect("written");
    let after = figures().f_bavail * figures().f_frsize;
    assert!(before - after >= 256 * KIB, "{before} bytes were free, {after} are");
    fill(&mut File::create(mounted.path().join("rest")).expect("created"));
    assert!(figures().f_bavail * figures().f_frsize < 64 * KIB);
}

#[test]
fn content_from_before_the_mount_counts() {
    let source = disk_directory();
    fs::create_dir(source.path().join("directory")).expect("a directory");
    let file = File::create(source.path().join("directory/there")).expect("created");
    file.write_all_at(&vec![1; 512 * 1024], 0).expect("written");
    file.sync_all().expect("synced");
    let mounted = Mounted::of_with_limit(source.path(), LIMIT);
    let fits = fill(&mut File::create(mounted.path().join("file")).expect("created"));
    assert!((LIMIT / 2 - 64 * KIB..=LIMIT / 2).contains(&fits), "{fits} bytes fit");
}

#[test]
fn a_search_for_data_finds_what_a_process_has_stored_in_a_hole_through_a_mapping() {
    // cp and tar ask for holes, and copied zeros.
    let mounted = Mounted::with_limit(LIMIT);
    let path = mounted.path().join("sparse");
    let file = File::options().read(true).write(true).create_new(true).open(&path).expect("created");
    file.set_len(64 * KIB).expect("all of it is a hole");
    let seek = |whence| rustix::fs::seek(File::open(&path).expect("opened"), whence);
    let (length, protection) = (4096, ProtFlags::READ | ProtFlags::WRITE);
    // SAFETY: the mapping is within the file, and nothing else refers to it.
    unsafe {
        let at = mmap(ptr::null_mut(), length, protection, MapFlags::SHARED, &file, 32 * KIB).expect("a mapping");
        at.cast::<u8>().write_volatile(7);
        assert_eq!(seek(SeekFrom::Data(32 * KIB)), Ok(32 * KIB));
        assert_eq!(seek(SeekFrom::Hole(32 * KIB)), Ok(64 * KIB));
        assert_eq!(seek(SeekFrom::Data(64 * KIB)), Err(Errno::NXIO));
        munmap(at, length).expect("unmapped");
    }
    drop(file);
    // Once no process can store anything, the holes of the source count.
    eventually("the first data is found", || seek(SeekFrom::Data(0)) == Ok(32 * KIB));
}

#[test]
fn a_user_does_not_get_the_blocks_that_a_file_system_reserves_for_root() {
    let device = LoopDevice::new(64);
    let directory = disk_directory();
    let disk = FreezableDisk::mount_with(&device, &directory.path().join("disk"), &["-m", "40"]);
    fs::set_permissions(disk.at(), Permissions::from_mode(0o777)).expect("the mode is set");
    let reserved = |directory: &Path| {
        let space = statvfs(directory).expect("a file system");
        (space.f_bfree - space.f_bavail) * space.f_frsize
    };
    for mounted in [Mounted::of(disk.at()), Mounted::of_with_limit(disk.at(), 1 << 30)] {
        Caller::new(4711).run(mounted.path(), || {
            let mut file = File::create("file").expect("created");
            let full = std::iter::repeat_with(|| file.write_all(&[7; 65536])).find_map(Result::err);
            assert_eq!(full.map(|error| error.kind()), Some(ErrorKind::StorageFull));
            // The first allocation of blocks may come after write(2).
            let _ = file.sync_all();
        });
        assert!(reserved(disk.at()) > 20 << 20, "{} bytes are left", reserved(disk.at()));
        fs::remove_file(mounted.path().join("file")).expect("removed");
    }
}
