//! Locks: the client refuses them, or with local locks the kernel handles them.

use std::fs::File;
use std::os::fd::AsRawFd;

use crate::mounted::Mounted;
use crate::nfs_rig::Ganesha;
use podfs_fuse::nfs::options::LocalLocks;

/// The error of flock(2), if it fails.
fn flock(file: &File, operation: libc::c_int) -> Option<i32> {
    // SAFETY: the call gets numbers only.
    let result = unsafe { libc::flock(file.as_raw_fd(), operation | libc::LOCK_NB) };
    (result != 0).then(|| std::io::Error::last_os_error().raw_os_error().expect("an error"))
}

/// The error of a POSIX write lock of the whole file, if it fails.
fn posix(file: &File) -> Option<i32> {
    let lock = libc::flock { l_type: libc::F_WRLCK as i16, l_whence: 0, l_start: 0, l_len: 0, l_pid: 0 };
    // SAFETY: the struct outlives the call.
    let result = unsafe { libc::fcntl(file.as_raw_fd(), libc::F_SETLK, &raw const lock) };
    (result != 0).then(|| std::io::Error::last_os_error().raw_os_error().expect("an error"))
}

#[test]
fn locks_are_refused_unless_they_may_be_local() {
    let server = Ganesha::start();
    for (posix_local, flock_local) in [(false, false), (true, false), (false, true), (true, true)] {
        let mounted = Mounted::with(&server, |options| {
            options.local_locks = LocalLocks { posix: posix_local, flock: flock_local };
        });
        let (one, other) =
            (File::create(mounted.at("file")).expect("created"), File::create(mounted.at("file")).expect("created"));
        let refused = Some(libc::ENOLCK);
        assert_eq!(posix(&one), if posix_local { None } else { refused });
        assert_eq!(flock(&one, libc::LOCK_EX), if flock_local { None } else { refused });
        assert_eq!(flock(&other, libc::LOCK_EX), if flock_local { Some(libc::EAGAIN) } else { refused });
        assert_eq!(flock(&one, libc::LOCK_UN), None);
    }
}

#[test]
fn local_locks_are_those_of_one_volume() {
    let server = Ganesha::start();
    let volumes = [(); 2]
        .map(|()| Mounted::with(&server, |options| options.local_locks = LocalLocks { posix: true, flock: true }));
    let files = [0, 1].map(|number| File::create(volumes[number].at("file")).expect("created"));
    assert_eq!(files.each_ref().map(|file| flock(file, libc::LOCK_EX)), [None, None]);
}
