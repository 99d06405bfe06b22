//! Sockets in the run directory, however long the path of that is. The address of a socket has room for a path of 107
//! bytes (`unix(7)`). So podfs opens the directory, and uses a path below `/proc/self/fd`, which is always short
//! enough.

use std::fs::{self, File, Permissions};
use std::io::{self, ErrorKind};
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

use nix::sys::socket::{AddressFamily, SockFlag, SockType, UnixAddr, bind, connect, socket};

/// Binds a socket to which only the user of this process, and root, may connect. Replaces a file of that name. The
/// socket does not listen yet, so no process can connect before the mode of its file is set.
///
/// # Errors
/// When the socket cannot be made.
pub(crate) fn make(directory: &Path, name: &str) -> io::Result<OwnedFd> {
    match fs::remove_file(directory.join(name)) {
        Err(error) if error.kind() != ErrorKind::NotFound => return Err(error),
        _ => {}
    }
    let opened = File::open(directory)?;
    let socket = stream()?;
    bind(socket.as_raw_fd(), &address(&opened, name)?)?;
    fs::set_permissions(directory.join(name), Permissions::from_mode(0o600))?;
    Ok(socket)
}

/// Connects `socket` to the process that listens on the socket `name` in this directory.
///
/// # Errors
/// When no process listens.
pub(crate) fn connect_to(socket: &OwnedFd, directory: &Path, name: &str) -> io::Result<()> {
    let opened = File::open(directory)?;
    Ok(connect(socket.as_raw_fd(), &address(&opened, name)?)?)
}

/// A stream socket that is not connected yet.
///
/// # Errors
/// When there are no descriptors left.
pub(crate) fn stream() -> io::Result<OwnedFd> {
    Ok(socket(AddressFamily::Unix, SockType::Stream, SockFlag::SOCK_CLOEXEC, None)?)
}

/// The address of the socket `name` in an open directory.
fn address(directory: &File, name: &str) -> io::Result<UnixAddr> {
    Ok(UnixAddr::new(&PathBuf::from(format!("/proc/self/fd/{}/{name}", directory.as_raw_fd())))?)
}
