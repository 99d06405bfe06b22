//! Several mounts of one directory, and the directory on the host: a write in one of these places is visible in the
//! others at once.

use std::collections::BTreeMap;
use std::ffi::c_void;
use std::fs::{self, File};
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::ptr::{self, NonNull};
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;

use podfs_fuse::passthrough::DataPath;
use rustix::io::Errno;
use rustix::mm::{MapFlags, ProtFlags, mmap, munmap};

use crate::common::passthrough::{Mounted, disk_directory};

pub fn open(directory: &Path) -> File {
    File::options().read(true).write(true).create(true).truncate(false).open(directory.join("file")).expect("opened")
}

#[test]
fn bytes_written_in_one_place_are_read_in_the_others_at_once() {
    let first = Mounted::new();
    let second = first.second();
    let files = [first.path(), second.path(), first.source()].map(open);
    for round in 0..50_u8 {
        for (writer, file) in files.iter().enumerate() {
            let bytes = [round * 3 + u8::try_from(writer).expect("three places"); 5000];
            file.write_all_at(&bytes, u64::from(round) * 100).expect("written");
            for (reader, file) in files.iter().enumerate() {
                let mut read = [0; 5000];
                file.read_exact_at(&mut read, u64::from(round) * 100).expect("read");
                assert_eq!(read, bytes, "round {round}: written in place {writer}, read in place {reader}");
            }
        }
    }
}

#[test]
fn a_file_cut_in_one_place_ends_there_in_the_others() {
    let first = Mounted::new();
    let second = first.second();
    let files = [first.path(), second.path(), first.source()].map(open);
    for (cutter, file) in files.iter().enumerate() {
        file.write_all_at(&[1; 10_000], 0).expect("written");
        file.set_len(4000).expect("cut");
        file.set_len(8000).expect("grown");
        for (reader, file) in files.iter().enumerate() {
            let mut read = [9; 9000];
            let length = file.read_at(&mut read, 0).expect("read");
            let sum: u32 = read[..length].iter().map(|byte| u32::from(*byte)).sum();
            assert_eq!((length, sum), (8000, 4000), "cut in place {cutter}, read in place {reader}");
        }
    }
}

#[test]
fn appends_from_every_place_are_all_there() {
    const RECORDS: usize = 2000;
    const WIDTH: usize = 64;
    let first = Mounted::new();
    let second = first.second();
    let places = [first.path(), second.path(), first.source(), first.path()];
    open(first.source());
    thread::scope(|scope| {
        for (writer, place) in places.into_iter().enumerate() {
            scope.spawn(move || {
                let file = File::options().append(true).open(place.join("file")).expect("opened");
                for record in 0..RECORDS {
                    let line = format!("{:<width$}\n", format!("{writer} {record}"), width = WIDTH - 1);
                    file.write_all_at(line.as_bytes(), 0).expect("appended");
                }
            });
        }
    });
    let text = fs::read_to_string(first.source().join("file")).expect("text");
    assert_eq!(text.len(), places.len() * RECORDS * WIDTH);
    let mut next = BTreeMap::<&str, usize>::new();
    for line in text.lines() {
        let (writer, record) = line.trim_end().split_once(' ').expect("a whole record");
        let expected = next.entry(writer).or_default();
        assert_eq!(record, expected.to_string(), "records of writer {writer} are in order");
        *expected += 1;
    }
    assert_eq!(next.into_values().collect::<Vec<_>>(), vec![RECORDS; places.len()]);
}

/// The first eight bytes of a file as a number, in a shared mapping.
pub struct SharedNumber(NonNull<c_void>);

impl SharedNumber {
    pub const LENGTH: usize = 4096;

    fn map(file: &File) -> Self {
        Self::try_map(file).expect("a mapping")
    }

    /// `None` if the volume refuses shared mappings.
    pub fn try_map(file: &File) -> Option<Self> {
        let protection = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: a new mapping at an address of the kernel's choice.
        let at = unsafe { mmap(ptr::null_mut(), Self::LENGTH, protection, MapFlags::SHARED, file, 0) };
        match at {
            Err(Errno::NODEV) => None,
            at => Some(Self(NonNull::new(at.expect("a mapping")).expect("no mapping is at zero"))),
        }
    }

    pub fn number(&self) -> &AtomicU64 {
        // SAFETY: the mapping starts at a page, is as long as the file, and stays until the drop.
        unsafe { &*self.0.as_ptr().cast::<AtomicU64>() }
    }
}

impl Drop for SharedNumber {
    fn drop(&mut self) {
        // SAFETY: exactly the mapping, which no code refers to any more.
        let _ = unsafe { munmap(self.0.as_ptr(), Self::LENGTH) };
    }
}

#[test]
fn mappings_in_every_place_are_the_same_memory() {
    let first = Mounted::new();
    let second = first.second();
    if first.data_path() == DataPath::Server {
        // If the server reads and writes, each mount has its own pages, as a network file system has.
        return;
    }
    let files = [first.path(), second.path(), first.source()].map(open);
    files[0].set_len(SharedNumber::LENGTH as u64).expect("sized");
    let numbers = files.each_ref().map(SharedNumber::map);
    for round in 0..1000 {
        for (writer, number) in numbers.iter().enumerate() {
            let before = number.number().fetch_add(1, Ordering::SeqCst);
            assert_eq!(before, round * 3 + writer as u64, "place {writer}");
        }
    }
    let mut bytes = [0; 8];
    files[1].read_exact_at(&mut bytes, 0).expect("read");
    assert_eq!(u64::from_ne_bytes(bytes), 3000);
    files[2].write_all_at(&7_u64.to_ne_bytes(), 0).expect("written");
    assert_eq!(numbers[0].number().load(Ordering::SeqCst), 7);
}

#[test]
fn a_shared_mapping_that_others_could_not_see_is_refused() {
    // With a limit, the kernel does not read and write the source itself, and other processes may use the source.
    let source = disk_directory();
    let mounted = Mounted::of_with_limit(source.path(), 1 << 30);
    assert_eq!(mounted.data_path(), DataPath::Server);
    let file = open(mounted.path());
    file.write_all_at(&[1; 4096], 0).expect("written");
    let protection = ProtFlags::READ | ProtFlags::WRITE;
    // SAFETY: new mappings at addresses of the kernel's choice.
    let map = |flags| unsafe { mmap(ptr::null_mut(), 4096, protection, flags, &file, 0) };
    assert_eq!(map(MapFlags::SHARED), Err(Errno::NODEV));
    let private = map(MapFlags::PRIVATE).expect("a private mapping");
    // SAFETY: exactly the mapping, which no code refers to.
    unsafe { munmap(private, 4096) }.expect("unmapped");
}

#[test]
fn names_made_in_one_mount_are_there_in_the_other() {
    let first = Mounted::new();
    let second = first.second();
    fs::create_dir(first.path().join("directory")).expect("a directory");
    crate::common::eventually("the directory is in the second mount", || second.path().join("directory").is_dir());
    fs::write(second.path().join("directory/file"), "from the second").expect("written");
    crate::common::eventually("the file is in the first mount", || first.path().join("directory/file").exists());
    assert_eq!(fs::read_to_string(first.path().join("directory/file")).expect("a file"), "from the second");
    fs::rename(first.path().join("directory/file"), first.path().join("moved")).expect("renamed");
    crate::common::eventually("the old name is gone from the second mount", || {
        !second.path().join("directory/file").exists()
    });
    fs::remove_dir(second.path().join("directory")).expect("the directory is empty");
}

#[test]
fn the_kernel_moves_the_bytes_where_it_can() {
    // FUSE_PASSTHROUGH came with Linux 6.9.
    let expected = if crate::common::kernel_is_at_least(6, 9) { DataPath::Kernel } else { DataPath::Server };
    assert_eq!(Mounted::new().data_path(), expected);
}
