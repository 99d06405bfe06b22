//! The content of files: each way to read, write, resize and map a file has the same results, and leaves the same bytes,
//! through a mount as on the disk.

use std::ffi::c_void;
use std::fs::{self, File};
use std::io::{IoSlice, IoSliceMut, Read, Seek, SeekFrom, Write};
use std::os::fd::AsFd;
use std::os::unix::fs::{FileExt, MetadataExt, OpenOptionsExt};
use std::path::Path;
use std::ptr::{self, NonNull};

use podfs_fuse::passthrough::DataPath;
use rustix::fs::{FallocateFlags, OFlags, copy_file_range, fallocate, sendfile};
use rustix::mm::{MapFlags, MprotectFlags, MsyncFlags, ProtFlags, mmap, mprotect, msync, munmap};

use crate::common::passthrough::Mounted;
use crate::common::scratch::Scratch;
use crate::common::twins::{Answers, the_kernel_does_as_the_disk, the_mount_does_as_the_disk};

const KIB: u64 = 1024;
const GIB: u64 = 1024 * 1024 * KIB;

fn create(path: &Path) -> File {
    File::options().read(true).write(true).create_new(true).open(path).expect("created")
}

/// A file of `blocks` blocks of 4 KiB, each filled with another letter.
fn lettered(path: &Path, blocks: u8) -> File {
    let file = create(path);
    for block in 0..blocks {
        file.write_all_at(&[b'a' + block; 4096], u64::from(block) * 4 * KIB).expect("written");
    }
    file
}

/// The offsets at which data and holes begin.
fn holes(file: &File) -> Vec<Result<u64, rustix::io::Errno>> {
    // Until the kernel writes data back, the file system may not have allocated blocks for it.
    file.sync_all().expect("synced");
    let seek = |from| rustix::fs::seek(file, from);
    let mut offsets = vec![seek(rustix::fs::SeekFrom::Hole(0)), seek(rustix::fs::SeekFrom::Data(0))];
    while let Some(Ok(offset)) = offsets.last().copied() {
        offsets.push(if offsets.len() % 2 == 0 {
            seek(rustix::fs::SeekFrom::Hole(offset))
        } else {
            seek(rustix::fs::SeekFrom::Data(offset))
        });
        if offsets.len() > 32 {
            break;
        }
    }
    offsets
}

#[test]
fn fallocate_reserves_punches_and_zeroes_as_on_the_disk() {
    the_mount_does_as_the_disk(|root, answers| {
        let (keep, punch, zero) = (FallocateFlags::KEEP_SIZE, FallocateFlags::PUNCH_HOLE, FallocateFlags::ZERO_RANGE);
        let cases = [
            ("reserve", FallocateFlags::empty(), 16, 16),
            ("reserve beyond the end", keep, 20, 20),
            ("reserve from the middle", FallocateFlags::empty(), 4, 1),
            ("punch", punch | keep, 4, 8),
            ("punch over the end", punch | keep, 12, 40),
            ("punch without keeping the size", punch, 4, 4),
            ("zero", zero, 4, 8),
            ("zero over the end", zero, 12, 20),
            ("zero over the end and keep the size", zero | keep, 12, 20),
            ("nothing", FallocateFlags::empty(), 0, 0),
        ];
        for (number, (case, mode, offset, length)) in cases.into_iter().enumerate() {
            let file = lettered(&root.join(format!("file{number}")), 4);
            answers.note(case, fallocate(&file, mode, offset * KIB, length * KIB));
            answers.note("odd bytes", fallocate(&file, mode, offset * KIB + 100, 3000));
            answers.see("size, blocks", file.metadata().map(|metadata| (metadata.len(), metadata.blocks())).ok());
            answers.see("holes", holes(&file));
        }
        let read_only = File::open(root.join("file0")).expect("a file");
        answers.note("for reading only", fallocate(&read_only, FallocateFlags::empty(), 0, 4096));
        let directory = File::open(root).expect("a directory");
        answers.note("of a directory", fallocate(&directory, FallocateFlags::empty(), 0, 4096));
    });
}

#[test]
fn ranges_that_the_kernel_lets_no_fuse_file_collapse_or_insert_stay_as_they_are() {
    let mounted = Mounted::new();
    let file = lettered(&mounted.path().join("file"), 4);
    let before = fs::read(mounted.source().join("file")).expect("a file");
    for mode in [FallocateFlags::COLLAPSE_RANGE, FallocateFlags::INSERT_RANGE] {
        assert_eq!(fallocate(&file, mode, 4 * KIB, 4 * KIB), Err(rustix::io::Errno::OPNOTSUPP), "{mode:?}");
    }
    assert_eq!(fs::read(mounted.source().join("file")).expect("a file"), before);
}

#[test]
fn holes_are_found_where_they_are_on_the_disk() {
    the_mount_does_as_the_disk(|root, answers| {
        let file = create(&root.join("file"));
        for block in [4, 5, 64, 200] {
            file.write_all_at(&[7; 4096], block * 4 * KIB).expect("written");
        }
        file.set_len(GIB).expect("grown");
        answers.see("holes", holes(&file));
        for at in [0, 4095, 16 * KIB, 24 * KIB, GIB - 1, GIB, GIB + 1] {
            answers.note("data from", rustix::fs::seek(&file, rustix::fs::SeekFrom::Data(at)));
            answers.note("a hole from", rustix::fs::seek(&file, rustix::fs::SeekFrom::Hole(at)));
        }
        let empty = create(&root.join("empty"));
        answers.note("nothing", rustix::fs::seek(&empty, rustix::fs::SeekFrom::Hole(0)));
        answers.see("blocks", file.metadata().expect("attributes").blocks());
        file.set_len(100 * KIB).expect("cut");
        answers.see("position", (&file).stream_position().ok());
        answers.note("from the end", (&file).seek(SeekFrom::End(-5)));
        answers.note("before the start", (&file).seek(SeekFrom::End(-(GIB as i64))));
    });
}

#[test]
fn files_are_as_large_as_on_the_disk() {
    the_mount_does_as_the_disk(|root, answers| {
        let file = create(&root.join("file"));
        for offset in [4 * GIB - 3, 5 * GIB, 1 << 43] {
            answers.note("write", file.write_at(b"far away", offset));
            let mut bytes = [0; 8];
            answers.note("read", file.read_at(&mut bytes, offset));
            answers.see("bytes", bytes);
            let metadata = file.metadata().expect("attributes");
            answers.see("size", metadata.len());
            answers.see("it is sparse", metadata.blocks() < 1000);
        }
        let mut bytes = [1; 16];
        answers.note("a hole", file.read_at(&mut bytes, 2 * GIB));
        answers.see("bytes", bytes);
        answers.note("too far", file.write_at(b"x", 1 << 45));
        answers.note("too large", file.set_len(1 << 50));
        answers.note("negative", file.set_len(u64::MAX));
        answers.note("cut", file.set_len(4 * GIB + 1));
        answers.see("size", file.metadata().expect("attributes").len());
        answers.note("cut", file.set_len(10));
    });
}

#[test]
fn truncation_cuts_and_grows_with_zeroes() {
    the_mount_does_as_the_disk(|root, answers| {
        let path = root.join("file");
        let file = lettered(&path, 2);
        let see = |answers: &mut Answers| {
            answers.note("size", fs::metadata(&path).map(|metadata| metadata.len()));
            answers.note("bytes", fs::read(&path).map(|bytes| bytes.iter().map(|byte| u64::from(*byte)).sum::<u64>()));
        };
        for size in [5000, 8192, 0, 3, 100_000, 1] {
            answers.note("by descriptor", file.set_len(size));
            see(answers);
        }
        answers.note("by path", nix::unistd::truncate(&path, 77));
        see(answers);
        answers.note("of a directory", nix::unistd::truncate(root, 77));
        answers.note("of nothing", nix::unistd::truncate(&root.join("absent"), 77));
        answers.note("for reading only", File::open(&path).expect("a file").set_len(5));
        answers.note("when opened", File::create(&path).map(drop));
        see(answers);
        // Truncation does not change the position of this descriptor, which is still zero.
        (&file).write_all(b"position zero").expect("written");
        see(answers);
    });
}

#[test]
fn appends_ignore_the_position() {
    the_mount_does_as_the_disk(|root, answers| {
        let path = root.join("file");
        let one = File::options().append(true).read(true).create(true).open(&path).expect("created");
        let two = File::options().append(true).open(&path).expect("opened");
        let plain = File::options().read(true).write(true).open(&path).expect("opened");
        answers.note("one", (&one).write(b"one "));
        answers.note("two", (&two).write(b"two "));
        answers.note("one again, elsewhere", one.write_at(b"one ", 0));
        answers.note("plain", (&plain).write(b"ONE"));
        // fcntl(2) can set O_APPEND later.
        answers.note("from now on", rustix::fs::fcntl_setfl(&plain, OFlags::APPEND));
        answers.note("plain", (&plain).write(b"end "));
        answers.note("everything", fs::read_to_string(&path));
        answers.note("position", (&plain).stream_position());
    });
}

#[test]
fn a_file_opened_for_appending_is_appended_to_until_it_is_closed() {
    // On the disk, F_SETFL removes O_APPEND. If the kernel itself reads and writes the source, its file of the source keeps the
    // flags with which it was opened.
    let mounted = Mounted::new();
    let path = mounted.path().join("file");
    fs::write(&path, "one two").expect("written");
    let file = File::options().append(true).open(&path).expect("opened");
    rustix::fs::fcntl_setfl(&file, OFlags::empty()).expect("set");
    file.write_all_at(b"ONE", 0).expect("written");
    let expected = if mounted.data_path() == DataPath::Kernel { "one twoONE" } else { "ONE two" };
    assert_eq!(fs::read_to_string(&path).expect("a file"), expected);
}

#[test]
fn vectors_pipes_and_sockets_move_bytes_as_on_the_disk() {
    the_mount_does_as_the_disk(|root, answers| {
        let mut file = create(&root.join("file"));
        answers.note("write", file.write_vectored(&[IoSlice::new(b"one "), IoSlice::new(b""), IoSlice::new(b"two ")]));
        answers.note("at", rustix::io::pwritev(&file, &[IoSlice::new(b"three "), IoSlice::new(b"four")], 8));
        let (mut first, mut second) = ([0; 4], [0; 64]);
        let mut buffers = [IoSliceMut::new(&mut first), IoSliceMut::new(&mut second)];
        answers.note("read", rustix::io::preadv(&file, &mut buffers, 0));
        answers.see("bytes", (first, second));
        answers.note("at the end", file.read(&mut [0; 8]));
        answers.note("beyond it", file.read_at(&mut [0; 8], GIB));

        let (mut reader, writer) = std::io::pipe().expect("a pipe");
        let mut from = 4;
        answers.note("sendfile", sendfile(&writer, &file, Some(&mut from), 9));
        let splice = |from: &dyn AsFd, to: &dyn AsFd, offset: Option<&mut u64>, length| {
            rustix::pipe::splice(from.as_fd(), offset, to.as_fd(), None, length, rustix::pipe::SpliceFlags::empty())
        };
        let mut at = 8;
        answers.note("splice", splice(&file, &writer, Some(&mut at), 5));
        let mut received = [0; 14];
        answers.note("received", reader.read_exact(&mut received));
        answers.see("bytes", received);
        let target = create(&root.join("target"));
        (&writer).write_all(b"through a pipe").expect("written");
        answers.note("splice", splice(&reader, &target, None, 14));
        answers.note("target", fs::read_to_string(root.join("target")));
    });
}

#[test]
fn copies_inside_the_kernel_have_every_byte() {
    the_mount_does_as_the_disk(|root, answers| {
        let from = lettered(&root.join("from"), 8);
        let to = create(&root.join("to"));
        let copy = |answers: &mut Answers, from: &File, mut start: u64, to: &File, mut at: u64, mut length: usize| {
            while length > 0 {
                match copy_file_range(from, Some(&mut start), to, Some(&mut at), length) {
                    Ok(copied) if copied > 0 => length -= copied,
                    result => {
                        answers.note("copy", result);
                        return;
                    }
                }
            }
        };
        copy(answers, &from, 100, &to, 0, 10_000);
        copy(answers, &from, 0, &to, 50_000, 4096);
        copy(answers, &from, 30_000, &to, 0, 10_000);
        copy(answers, &from, 0, &from, 20_000, 4096);
        copy(answers, &from, 0, &from, 100, 4096);
        copy(answers, &from, GIB, &to, 0, 10);
        let read_only = File::open(root.join("to")).expect("a file");
        copy(answers, &from, 0, &read_only, 0, 10);
        answers.note("a whole file", fs::copy(root.join("from"), root.join("copy")));
        let elsewhere = tempfile::NamedTempFile::new().expect("a file");
        answers.note("to elsewhere", fs::copy(root.join("from"), elsewhere.path()));
        answers.note("and back", fs::copy(elsewhere.path(), root.join("back")));
    });
}

/// A buffer that starts at a page boundary.
#[repr(align(4096))]
struct Page([u8; 8192]);

#[test]
fn direct_reads_and_writes_ask_for_alignment_and_bypass_caches() {
    the_kernel_does_as_the_disk(|root, answers| {
        let path = root.join("file");
        let buffered = lettered(&path, 4);
        let direct = OFlags::DIRECT.bits().cast_signed();
        let file = File::options().read(true).write(true).custom_flags(direct).open(&path).expect("opened");
        let mut page = Page([b'X'; 8192]);
        answers.note("write", file.write_at(&page.0[..4096], 4096));
        answers.note("odd offset", file.write_at(&page.0[..4096], 4097));
        answers.note("odd length", file.write_at(&page.0[..4095], 4096));
        answers.note("odd buffer", file.write_at(&page.0[1..4097], 4096));
        answers.note("beyond the end", file.write_at(&page.0[..4096], 64 * KIB));
        let mut byte = [0; 2];
        answers.note("read with buffers", buffered.read_at(&mut byte, 4096));
        answers.see("bytes", byte);
        buffered.write_all_at(b"buffered", 8192).expect("written");
        answers.note("read", file.read_at(&mut page.0, 8192));
        answers.see("bytes", &page.0[..12]);
        answers.note("at the end", file.read_at(&mut page.0, 68 * KIB));
        answers.note("size", fs::metadata(&path).map(|metadata| metadata.len()));
        answers.note("sync", file.sync_data());
    });
}

/// A mapping. Dropping it unmaps it.
struct Mapped(NonNull<c_void>, usize);

impl Mapped {
    fn new(file: &File, length: usize, protection: ProtFlags, flags: MapFlags) -> Result<Self, rustix::io::Errno> {
        // SAFETY: a new mapping at an address of the kernel's choice.
        let at = unsafe { mmap(ptr::null_mut(), length, protection, flags, file, 0) }?;
        Ok(Self(NonNull::new(at).expect("no mapping is at zero"), length))
    }

    fn store(&self, at: usize, bytes: &[u8]) {
        assert!(at + bytes.len() <= self.1);
        // SAFETY: within the mapping, which is writable and has the file behind all of it.
        unsafe { ptr::copy_nonoverlapping(bytes.as_ptr(), self.0.as_ptr().cast::<u8>().add(at), bytes.len()) }
    }

    fn load(&self, at: usize) -> u8 {
        assert!(at < self.1);
        // SAFETY: within the mapping, as above.
        unsafe { self.0.as_ptr().cast::<u8>().add(at).read_volatile() }
    }

    fn sync(&self) -> Result<(), rustix::io::Errno> {
        // SAFETY: exactly the mapping.
        unsafe { msync(self.0.as_ptr(), self.1, MsyncFlags::SYNC) }
    }

    fn protect(&self, flags: MprotectFlags) -> Result<(), rustix::io::Errno> {
        // SAFETY: exactly the mapping.
        unsafe { mprotect(self.0.as_ptr(), self.1, flags) }
    }
}

impl Drop for Mapped {
    fn drop(&mut self) {
        // SAFETY: exactly the mapping, which no code refers to any more.
        let _ = unsafe { munmap(self.0.as_ptr(), self.1) };
    }
}

#[test]
fn mappings_share_stores_with_the_file_or_keep_them() {
    the_mount_does_as_the_disk(|root, answers| {
        let path = root.join("file");
        let file = lettered(&path, 2);
        let both = ProtFlags::READ | ProtFlags::WRITE;
        let shared = Mapped::new(&file, 8192, both, MapFlags::SHARED).expect("a mapping");
        let private = Mapped::new(&file, 8192, both, MapFlags::PRIVATE).expect("a mapping");
        shared.store(10, b"shared");
        private.store(4096, b"private");
        answers.note("sync", shared.sync());
        let mut bytes = [0; 8];
        answers.note("read", file.read_at(&mut bytes, 9));
        answers.see("bytes", bytes);
        answers.see("in the file", fs::read(&path).expect("a file")[4096]);
        file.write_all_at(b"W", 20).expect("written");
        answers.see("seen in both", (shared.load(20), private.load(20)));
        answers.see("kept", (shared.load(4096), private.load(4096)));

        let read_only = File::open(&path).expect("a file");
        let refused = |flags| Mapped::new(&read_only, 4096, both, flags).map(drop);
        answers.note("writable without the right", refused(MapFlags::SHARED));
        answers.note("private needs none", refused(MapFlags::PRIVATE));
        let looking = Mapped::new(&read_only, 4096, ProtFlags::READ, MapFlags::SHARED).expect("a mapping");
        answers.note("the right cannot be had later", looking.protect(MprotectFlags::READ | MprotectFlags::WRITE));
        // A mapping stays after its descriptor is closed and the file is removed.
        drop((file, read_only));
        fs::remove_file(&path).expect("removed");
        shared.store(0, b"late");
        answers.see("after all are gone", (shared.load(0), looking.load(0)));
    });
}

#[test]
fn synchronising_succeeds_on_everything() {
    the_mount_does_as_the_disk(|root, answers| {
        let file = lettered(&root.join("file"), 1);
        answers.note("fsync", file.sync_all());
        answers.note("fdatasync", file.sync_data());
        answers.note("of a read-only descriptor", File::open(root.join("file")).expect("a file").sync_all());
        answers.note("of a directory", File::open(root).expect("a directory").sync_all());
        answers.note("of the file system", rustix::fs::syncfs(&file));
        let synced = File::options().write(true).custom_flags(libc::O_SYNC).open(root.join("file"));
        answers.note("O_SYNC", synced.expect("opened").write(b"x"));
    });
}

#[test]
fn a_full_disk_is_enospc_and_loses_nothing() {
    let disk = Scratch::tmpfs("size=256k");
    let mounted = Mounted::of(disk.path());
    fs::write(mounted.path().join("kept"), "kept").expect("written");
    let mut file = create(&mounted.path().join("file"));
    let full = (0..100).find_map(|_| file.write_all(&[1; 16384]).err()).expect("the disk gets full");
    assert_eq!(full.raw_os_error(), Some(libc::ENOSPC));
    let reserve = fallocate(&file, FallocateFlags::empty(), 0, GIB).expect_err("the disk is full");
    assert_eq!(reserve, rustix::io::Errno::NOSPC);
    assert_eq!(rustix::fs::statvfs(mounted.path()).expect("figures").f_bavail, 0);

    let source = disk.path().join("file");
    assert_eq!(file.metadata().expect("attributes").len(), fs::metadata(source).expect("attributes").len());
    fs::remove_file(mounted.path().join("file")).expect("removed");
    drop(file);
    assert_eq!(fs::read_to_string(mounted.path().join("kept")).expect("a file"), "kept");
    crate::common::eventually("there is space again", || fs::write(mounted.path().join("new"), [2; 16384]).is_ok());
}

#[test]
fn missing_inodes_are_enospc() {
    let disk = Scratch::tmpfs("nr_inodes=20");
    let mounted = Mounted::of(disk.path());
    let full = (0..30).find_map(|number| fs::create_dir(mounted.path().join(format!("{number}"))).err());
    assert_eq!(full.expect("the disk gets full").raw_os_error(), Some(libc::ENOSPC));
    let file = File::create(mounted.path().join("file")).expect_err("the disk is full");
    assert_eq!(file.raw_os_error(), Some(libc::ENOSPC));
    assert_eq!(rustix::fs::statvfs(mounted.path()).expect("figures").f_ffree, 0);
}
