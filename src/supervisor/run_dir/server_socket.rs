//! The socket on which the next supervisor of a pod finds the server.
//!
//! A supervisor that renews the socket may be killed at any moment, and the server listens on one socket only. So the supervisor binds
//! the new socket to a second name, makes the server listen, and then renames the socket. The next supervisor tries both names.

use std::fs;
use std::io;
use std::os::fd::OwnedFd;
use std::path::Path;

use super::file_names::{NEXT_SERVER, SERVER};
use super::socket;

/// Makes a new socket in the pod's run directory, on which `listen` makes the server listen.
///
/// # Errors
/// When the socket cannot be made or renamed, and those of `listen`. The socket before stays.
pub fn renew(directory: &Path, listen: impl FnOnce(OwnedFd) -> io::Result<()>) -> io::Result<()> {
    let rename = || fs::rename(directory.join(NEXT_SERVER), directory.join(SERVER));
    if connect_to(directory, SERVER).is_err() && connect_to(directory, NEXT_SERVER).is_ok() {
        // A supervisor was killed before it had renamed the socket.
        rename()?;
    }
    listen(socket::make(directory, NEXT_SERVER)?)?;
    rename()
}

/// A connection to the server that listens in the pod's run directory.
///
/// # Errors
/// When no server listens.
pub fn connect(directory: &Path) -> io::Result<OwnedFd> {
    connect_to(directory, SERVER).or_else(|error| connect_to(directory, NEXT_SERVER).map_err(|_| error))
}

fn connect_to(directory: &Path, name: &str) -> io::Result<OwnedFd> {
    let socket = socket::stream()?;
    socket::connect_to(&socket, directory, name).map(|()| socket)
}

#[cfg(test)]
mod tests {
    use rustix::net::listen;

    use super::*;

    #[test]
    fn the_server_is_found_wherever_its_supervisor_was_killed() {
        let run = tempfile::tempdir().expect("a directory");
        let mut listeners = Vec::new();
        assert!(connect(run.path()).is_err());
        let mut renew_until = |is_killed: bool| {
            renew(run.path(), |socket| {
                listen(&socket, 4)?;
                // The server closes the socket before.
                listeners.clear();
                listeners.push(socket);
                if is_killed { Err(io::ErrorKind::Interrupted.into()) } else { Ok(()) }
            })
        };
        for is_killed in [true, true, false, true, false] {
            assert_eq!(renew_until(is_killed).is_err(), is_killed);
            connect(run.path()).expect("found");
        }
        // Killed before the server listens, in each state of the names.
        for is_killed in [false, true] {
            assert_eq!(renew_until(is_killed).is_err(), is_killed);
            let killed = renew(run.path(), |_| Err(io::ErrorKind::Interrupted.into()));
            assert!(killed.is_err());
            connect(run.path()).expect("found");
        }
    }
}
