//! Only podfs changes a projection volume. The kernel refuses changes through the visible mount, which is read-only. If
//! a privileged container has made its bind mount of the volume writable, the server refuses the changes.

use std::ffi::CString;
use std::fs::{self, File, OpenOptions, Permissions};
use std::io::{self, Write};
use std::num::NonZeroUsize;
use std::os::fd::AsRawFd;
use std::os::unix::fs::{OpenOptionsExt, PermissionsExt, chown, symlink};
use std::path::{Path, PathBuf};
use std::sync::mpsc::{TryRecvError, channel};
use std::time::SystemTime;

use nix::mount::{MntFlags, MsFlags, umount2};
use tempfile::TempDir;

use crate::common::namespace::{bind, change_mount};
use crate::common::tree::{Files, files, names, parse};
use crate::common::{Served, eventually};

/// A call that tries to change a volume.
type Change = fn(&Path) -> io::Result<()>;

/// Changes that a process may try in a volume with `a` and `sub/b`.
const CHANGES: &[(&str, Change)] = &[
    ("create a file", |volume| File::create_new(volume.join("new")).map(drop)),
    ("create a file in a generation", |volume| File::create_new(volume.join("..data/new")).map(drop)),
    ("create a file below", |volume| File::create_new(volume.join("sub/new")).map(drop)),
    ("make a directory", |volume| fs::create_dir(volume.join("new"))),
    ("make a generation", |volume| fs::create_dir(volume.join("..2026_01_01_00_00_00.1"))),
    ("make a link", |volume| symlink("..data/a", volume.join("new"))),
    ("make the link of a commit", |volume| symlink("elsewhere", volume.join("..data_tmp"))),
    ("make a hard link", |volume| fs::hard_link(volume.join("..data/a"), volume.join("new"))),
    ("make a fifo", |volume| nix_io(nix::unistd::mkfifo(&volume.join("new"), nix::sys::stat::Mode::S_IRWXU))),
    ("make a device", make_device),
    ("rename a link", |volume| fs::rename(volume.join("a"), volume.join("z"))),
    ("rename a file", |volume| fs::rename(volume.join("..data/a"), volume.join("..data/z"))),
    ("take over the switch", |volume| fs::rename(volume.join("a"), volume.join("..data"))),
    ("exchange two links", |volume| exchange(&volume.join("a"), &volume.join("sub"))),
    ("unlink a link", |volume| fs::remove_file(volume.join("a"))),
    ("unlink the link to the generation", |volume| fs::remove_file(volume.join("..data"))),
    ("unlink a file", |volume| fs::remove_file(volume.join("..data/a"))),
    ("remove a directory", |volume| fs::remove_dir(volume.join("..data/sub"))),
    ("remove the generation", |volume| fs::remove_dir(fs::canonicalize(volume.join("..data"))?)),
    ("change a mode", |volume| fs::set_permissions(volume.join("a"), Permissions::from_mode(0o666))),
    ("change the mode of the generation", |volume| {
        fs::set_permissions(volume.join("..data"), Permissions::from_mode(0o700))
    }),
    ("change the mode of the root", |volume| fs::set_permissions(volume, Permissions::from_mode(0o700))),
    ("change an owner", |volume| chown(volume.join("a"), Some(1), Some(1))),
    ("change times", |volume| File::open(volume.join("a"))?.set_modified(SystemTime::UNIX_EPOCH)),
    ("truncate by path", |volume| nix_io(nix::unistd::truncate(&volume.join("a"), 0))),
    ("truncate by opening", |volume| OpenOptions::new().write(true).truncate(true).open(volume.join("a")).map(drop)),
    ("write", |volume| OpenOptions::new().write(true).open(volume.join("a"))?.write_all(b"changed")),
    ("append", |volume| OpenOptions::new().append(true).open(volume.join("a"))?.write_all(b"changed")),
    ("write without the page cache", |volume| {
        let mut file = OpenOptions::new().write(true).custom_flags(libc::O_DIRECT).open(volume.join("a"))?;
        file.write_all(b"changed")
    }),
    ("make a file longer", |volume| OpenOptions::new().write(true).open(volume.join("a"))?.set_len(1 << 20)),
    ("reserve space", |volume| {
        let file = OpenOptions::new().write(true).open(volume.join("a"))?;
        nix_io(nix::fcntl::fallocate(file, nix::fcntl::FallocateFlags::empty(), 0, 1 << 16))
    }),
];

fn nix_io(result: nix::Result<()>) -> io::Result<()> {
    result.map_err(io::Error::from)
}

fn make_device(volume: &Path) -> io::Result<()> {
    use nix::sys::stat::{Mode, SFlag, makedev, mknod};
    nix_io(mknod(&volume.join("new"), SFlag::S_IFCHR, Mode::S_IRWXU, makedev(1, 3)))
}

fn exchange(first: &Path, second: &Path) -> io::Result<()> {
    let path = |path: &Path| CString::new(path.as_os_str().as_encoded_bytes()).expect("a path");
    let (first, second) = (path(first), path(second));
    // SAFETY: both are C strings that outlive the call.
    let result = unsafe {
        libc::renameat2(libc::AT_FDCWD, first.as_ptr(), libc::AT_FDCWD, second.as_ptr(), libc::RENAME_EXCHANGE)
    };
    if result == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

fn write_through_mapping(volume: &Path) -> io::Result<()> {
    let file = OpenOptions::new().read(true).write(true).open(volume.join("a"))?;
    let page = NonZeroUsize::new(4096).expect("it is not zero");
    // SAFETY: the mapping is of a file of at least one byte, only its first byte is written, and it is
    // unmapped before the function returns.
    unsafe {
        let address = libc::mmap(
            std::ptr::null_mut(),
            page.get(),
            libc::PROT_READ | libc::PROT_WRITE,
            libc::MAP_SHARED,
            file.as_raw_fd(),
            0,
        );
        if address == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        address.cast::<u8>().write_volatile(b'X');
        let result = libc::msync(address, page.get(), libc::MS_SYNC);
        let error = io::Error::last_os_error();
        libc::munmap(address, page.get());
        if result == 0 { Ok(()) } else { Err(error) }
    }
}

fn served() -> Served {
    Served::with(&[("a", "first"), ("sub/b", "below")])
}

/// Tries all changes at the mount point `target`, and checks that each fails with `EROFS` and changes nothing at the
/// mount point `visible`.
fn assert_refused(target: &Path, visible: &Path) {
    let before = state(visible);
    for (name, change) in CHANGES {
        let error = change(target).expect_err(name);
        assert_eq!(error.raw_os_error(), Some(libc::EROFS), "{name}: {error}");
        assert_eq!(state(visible), before, "{name}");
    }
}

/// The names in the root directory, the target of `..data`, all files, and the mode of the root directory.
fn state(volume: &Path) -> (Vec<String>, PathBuf, Files, u32) {
    let mode = fs::metadata(volume).expect("a volume").permissions().mode();
    (names(volume), fs::read_link(volume.join("..data")).expect("a link"), files(volume), mode)
}

#[test]
fn root_cannot_change_the_visible_mount() {
    // FU-13, MT-03: the test runs with CAP_DAC_OVERRIDE, so the modes of the files do not stop it.
    let mut served = served();
    assert_refused(served.path(), served.path());
    let error = write_through_mapping(served.path()).expect_err("the file cannot be opened for writing");
    assert_eq!(error.raw_os_error(), Some(libc::EROFS));
    served.commit(&[("a", "second")]);
    assert_eq!(files(served.path()), parse("a=second"));
}

/// A second, writable mount of the volume. A privileged container can remount its bind mount of a volume like this.
struct WritableMount(TempDir);

impl WritableMount {
    fn of(served: &Served) -> Self {
        let mount_point = TempDir::new().expect("a directory");
        bind(served.path(), mount_point.path());
        let writable = Self(mount_point);
        change_mount(writable.0.path(), MsFlags::MS_REMOUNT | MsFlags::MS_BIND);
        writable
    }
}

impl Drop for WritableMount {
    fn drop(&mut self) {
        let _ = umount2(self.0.path(), MntFlags::MNT_DETACH);
    }
}

#[test]
fn the_server_refuses_every_change_through_a_mount_made_writable() {
    // FU-13
    let mut served = served();
    let writable = WritableMount::of(&served);
    assert_refused(writable.0.path(), served.path());
    served.commit(&[("a", "second"), ("c", "new")]);
    assert_eq!(files(served.path()), parse("a=second; c=new"));
}

#[test]
fn no_other_process_can_commit_while_podfs_does() {
    // FU-13: while the supervisor commits, the server refuses the same steps to every other process, and the commits
    // succeed.
    let mut served = served();
    let writable = WritableMount::of(&served);
    std::thread::scope(|scope| {
        let (stop, stopped) = channel::<()>();
        let mount_point = writable.0.path();
        let changer = scope.spawn(move || {
            while stopped.try_recv() == Err(TryRecvError::Empty) {
                let _ = fs::remove_file(mount_point.join("a"));
                let _ = fs::remove_file(mount_point.join("sub"));
                let _ = symlink("elsewhere", mount_point.join("..data_tmp"));
                let _ = fs::rename(mount_point.join("a"), mount_point.join("..data"));
            }
        });
        for round in 0..200 {
            served.commit(&[("a", &round.to_string()), ("sub/b", "below")]);
            assert_eq!(files(served.path()), parse(&format!("a={round}; sub/b=below")));
        }
        drop(stop);
        changer.join().expect("the thread that tries changes does not panic");
    });
}

#[test]
fn a_store_through_a_mapping_of_a_mount_made_writable_is_undone() {
    // FU-13: a store to a mapping changes a page of the kernel's page cache before the kernel asks the server, and all
    // other containers read this page. When the kernel writes the page back (here because of msync), the server refuses
    // the write and makes the kernel drop the page.
    let served = served();
    let writable = WritableMount::of(&served);
    let _error_or_success = write_through_mapping(writable.0.path());
    eventually("the volume shows the bytes of the payload again", || {
        files(served.path()) == parse("a=first; sub/b=below")
    });
}
