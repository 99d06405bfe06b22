//! File handles, with which a program opens a file without its path (`name_to_handle_at(2)`).

use std::ffi::CString;
use std::fs::File;
use std::io;
use std::os::fd::{AsRawFd, FromRawFd};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

/// A file handle, as the system calls take it.
#[repr(C)]
#[derive(Clone)]
pub struct FileHandle {
    size: u32,
    kind: i32,
    bytes: [u8; 128],
}

impl FileHandle {
    /// The handle of the file at `path`.
    pub fn of(path: &Path) -> Self {
        let mut handle = Self { size: 128, kind: 0, bytes: [0; 128] };
        let (at, mut mount) = (CString::new(path.as_os_str().as_bytes()).expect("a path"), 0);
        // SAFETY: the path ends with a zero byte, and the handle has room for as many bytes as it says.
        let result = unsafe {
            libc::name_to_handle_at(libc::AT_FDCWD, at.as_ptr(), (&raw mut handle).cast(), &raw mut mount, 0)
        };
        assert_eq!(result, 0, "{}: {}", path.display(), io::Error::last_os_error());
        handle
    }

    /// Opens the file with this handle in the file system that is mounted at `mount`.
    pub fn open(&self, mount: &Path, flags: libc::c_int) -> io::Result<File> {
        let mount = File::open(mount).expect("the mount opens");
        let mut handle = self.clone();
        // SAFETY: the handle has the size that its first field says.
        let opened =
            unsafe { libc::open_by_handle_at(mount.as_raw_fd(), (&raw mut handle).cast(), flags | libc::O_CLOEXEC) };
        if opened < 0 {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: the kernel just made this descriptor for this process alone.
        Ok(unsafe { File::from_raw_fd(opened) })
    }

    /// The error number of [`open`](Self::open), if it fails.
    pub fn refused(&self, mount: &Path) -> Option<i32> {
        self.open(mount, libc::O_RDONLY).err()?.raw_os_error()
    }
}
