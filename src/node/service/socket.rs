//! `RUN/node.sock`: one daemon for each run directory, and a socket for root only.
//!
//! 1. The daemon is the process that holds the lock on `RUN/node.lock`. The kernel drops the lock with its holder, so a killed
//!    daemon does not block the next one. No daemon removes the file: otherwise two daemons could each lock a file of their own.
//! 2. Only the holder of the lock makes and removes the socket. So a socket that exists when a daemon takes the lock is left from a
//!    killed daemon, and the daemon replaces it.
//! 3. Another process may delete the run directory. Then the daemon takes a new lock and makes a new socket, unless another daemon
//!    has done so first.
//! 4. The socket has mode 0600 before it listens. The daemon also checks the user of each peer, because a descriptor of the
//!    socket may get to another process.

use std::fs::{self, DirBuilder, File, OpenOptions};
use std::io::{self, ErrorKind, Read, Write};
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt};
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::thread::sleep;
use std::time::{Duration, Instant};

use nix::errno::Errno;
use nix::fcntl::{Flock, FlockArg};
use nix::sys::signal::kill;
use nix::sys::socket::{Backlog, listen};
use nix::unistd::Pid;

use crate::supervisor::run_dir::socket;
use crate::supervisor::run_dir::trust::{self, Untrusted};

/// The socket in the run directory.
pub const SOCKET: &str = "node.sock";
/// The locked file in the run directory.
pub const LOCK: &str = "node.lock";

/// How long a child of a dead daemon may hold its lock.
const LOCK_TIMEOUT: Duration = Duration::from_secs(3);
/// The pause before the next try to lock.
const PAUSE: Duration = Duration::from_millis(5);

/// Why this process cannot be the daemon of the run directory.
#[derive(Debug, thiserror::Error)]
pub enum DaemonError {
    /// Another process is the daemon.
    #[error("podfs node runs already here, as process {pid} ({} is locked); stop that one first, or give another --run-dir", .path.display())]
    Taken {
        /// The locked file.
        path: PathBuf,
        /// The process id in the locked file.
        pid: String,
    },
    /// Users other than root can change the run directory.
    #[error(transparent)]
    Untrusted(#[from] Untrusted),
    /// A file cannot be used.
    #[error("cannot use {}: {cause}", .path.display())]
    File {
        /// The file.
        path: PathBuf,
        /// The error of the system call.
        #[source]
        cause: io::Error,
    },
}

/// The right to be the daemon of a run directory. Dropping it releases the lock, and removes the socket if there is
/// one.
#[derive(Debug)]
pub struct DaemonLock {
    directory: PathBuf,
    has_socket: bool,
    lock: Flock<File>,
}

impl DaemonLock {
    /// Takes the lock. Makes the run directory if it does not exist.
    ///
    /// # Errors
    /// When another daemon holds the lock, and when the files cannot be used.
    pub fn take(run_directory: &Path) -> Result<DaemonLock, DaemonError> {
        // Later steps must not depend on the working directory.
        let directory = std::path::absolute(run_directory).unwrap_or_else(|_| run_directory.to_owned());
        let path = directory.join(LOCK);
        let failed = |cause| DaemonError::File { path: path.clone(), cause };
        trust::check(&directory)?;
        DirBuilder::new().recursive(true).mode(0o700).create(&directory).map_err(failed)?;
        // Another process may have made it first.
        trust::check(&directory)?;
        let open = || {
            let mut options = OpenOptions::new();
            options.read(true).write(true).create(true).truncate(false).mode(0o600);
            trust::open(&mut options, &path).map_err(failed)
        };
        let mut lock = lock(open, &path)?;
        let text = format!("{}\n", std::process::id());
        // The file keeps its block, so that a daemon can start while the disk is full.
        lock.write_all(text.as_bytes()).and_then(|()| lock.set_len(text.len() as u64)).map_err(failed)?;
        Ok(DaemonLock { directory, has_socket: false, lock })
    }

    /// Listens on the socket. Replaces a socket that a killed daemon has left.
    ///
    /// # Errors
    /// When the socket cannot be made.
    pub fn listen(&mut self) -> Result<UnixListener, DaemonError> {
        let listening = || {
            let socket = socket::make(&self.directory, SOCKET)?;
            listen(&socket, Backlog::MAXALLOWABLE)?;
            let listener = UnixListener::from(socket);
            listener.set_nonblocking(true)?;
            Ok(listener)
        };
        let listener = listening().map_err(|cause| DaemonError::File { path: self.directory.join(SOCKET), cause })?;
        self.has_socket = true;
        Ok(listener)
    }

    /// Whether the lock file and the socket are still at their paths. Another process may have deleted the run
    /// directory.
    pub fn is_in_place(&self) -> bool {
        self.has_lock_in_place() && self.directory.join(SOCKET).symlink_metadata().is_ok()
    }

    /// Takes the lock again, if its file was deleted, and listens on a new socket.
    ///
    /// # Errors
    /// When another daemon has taken the lock meanwhile, and when the files cannot be made.
    pub fn restore(&mut self) -> Result<UnixListener, DaemonError> {
        if !self.has_lock_in_place() {
            // A socket that exists now belongs to another daemon.
            self.has_socket = false;
            *self = DaemonLock::take(&self.directory)?;
        }
        self.listen()
    }

    fn has_lock_in_place(&self) -> bool {
        let (held, found) = (self.lock.metadata(), fs::symlink_metadata(self.directory.join(LOCK)));
        matches!((held, found), (Ok(held), Ok(found)) if (held.dev(), held.ino()) == (found.dev(), found.ino()))
    }
}

impl Drop for DaemonLock {
    fn drop(&mut self) {
        if self.has_socket {
            let _gone = fs::remove_file(self.directory.join(SOCKET));
        }
    }
}

/// Locks the file. Waits for a child of a killed daemon, which holds the lock until it executes its own program.
fn lock(open: impl Fn() -> Result<File, DaemonError>, path: &Path) -> Result<Flock<File>, DaemonError> {
    let until = Instant::now() + LOCK_TIMEOUT;
    loop {
        match Flock::lock(open()?, FlockArg::LockExclusiveNonblock) {
            Ok(lock) => return Ok(lock),
            Err((file, Errno::EWOULDBLOCK)) => {
                let pid = holder(file);
                if !is_gone(&pid) || Instant::now() > until {
                    return Err(DaemonError::Taken { pid, path: path.to_owned() });
                }
                sleep(PAUSE);
            }
            Err((_, errno)) => return Err(DaemonError::File { path: path.to_owned(), cause: errno.into() }),
        }
    }
}

/// Whether no process has this id.
fn is_gone(pid: &str) -> bool {
    pid.parse().is_ok_and(|pid| kill(Pid::from_raw(pid), None) == Err(Errno::ESRCH))
}

/// The process that wrote its id into the locked file. A daemon that has just started may not have written it yet.
fn holder(file: File) -> String {
    let mut text = String::new();
    let read = file.take(16).read_to_string(&mut text);
    match read.map(|_| text.trim().parse::<u32>()) {
        Ok(Ok(pid)) => pid.to_string(),
        _ => "unknown".to_owned(),
    }
}

/// Whether no process listens.
pub(super) fn is_absent(error: &io::Error) -> bool {
    matches!(error.kind(), ErrorKind::NotFound | ErrorKind::ConnectionRefused)
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;
    use std::os::unix::net::UnixStream;

    use super::*;

    #[test]
    fn a_run_directory_has_one_daemon_and_a_dead_one_does_not_block_the_next() {
        let run = tempfile::tempdir().expect("a directory");
        let run = run.path().join("made");
        let lock = DaemonLock::take(&run).expect("the first");
        let refused = DaemonLock::take(&run).expect_err("the second").to_string();
        let beginning =
            format!("podfs node runs already here, as process {} ({} is", std::process::id(), run.join(LOCK).display());
        assert!(refused.starts_with(&beginning), "{refused}");
        drop(lock);
        // As a daemon that is killed leaves it.
        let mut killed = DaemonLock::take(&run).expect("the lock is free");
        killed.listen().expect("it listens");
        killed.has_socket = false;
        drop(killed);
        let stale = UnixStream::connect(run.join(SOCKET)).expect_err("nothing listens");
        assert!(is_absent(&stale), "{stale}");

        let mut next = DaemonLock::take(&run).expect("the lock is free");
        let _listener = next.listen().expect("it listens");
        UnixStream::connect(run.join(SOCKET)).expect("something listens");
        let mode = fs::metadata(run.join(SOCKET)).expect("the socket").permissions().mode();
        assert_eq!(mode & 0o7777, 0o600);
        drop(next);
        assert!(!run.join(SOCKET).exists(), "a daemon that ends takes its socket away");
    }

    #[test]
    fn a_daemon_whose_directory_was_deleted_makes_it_again_unless_another_one_has() {
        let run = tempfile::tempdir().expect("a directory");
        let run = run.path().join("made");
        let mut lock = DaemonLock::take(&run).expect("the first");
        let _listener = lock.listen().expect("it listens");
        assert!(lock.is_in_place());
        fs::remove_dir_all(&run).expect("deleted");
        assert!(!lock.is_in_place());
        let _listener = lock.restore().expect("it is made again");
        UnixStream::connect(run.join(SOCKET)).expect("something listens");
        assert!(lock.is_in_place());

        fs::remove_dir_all(&run).expect("deleted");
        let mut other = DaemonLock::take(&run).expect("the lock is another one");
        let _listener = other.listen().expect("it listens");
        let refused = lock.restore().expect_err("the other one is the daemon").to_string();
        assert!(refused.starts_with("podfs node runs already here"), "{refused}");
        drop(lock);
        assert!(run.join(SOCKET).exists(), "it is that of the other one");
    }

    #[test]
    fn a_daemon_waits_for_the_lock_that_a_child_of_a_killed_daemon_holds() {
        let run = tempfile::tempdir().expect("a directory");
        let lock = DaemonLock::take(run.path()).expect("the first");
        // No process has the largest id.
        fs::write(run.path().join(LOCK), format!("{}\n", i32::MAX)).expect("written");
        std::thread::scope(|scope| {
            let next = scope.spawn(|| DaemonLock::take(run.path()).map(drop));
            drop(lock);
            next.join().expect("no panic").expect("the lock is free by now");
        });
    }

    #[test]
    fn an_error_names_the_path_that_is_no_socket() {
        let run = tempfile::tempdir().expect("a directory");
        fs::create_dir(run.path().join(SOCKET)).expect("a directory");
        let mut lock = DaemonLock::take(run.path()).expect("the lock");
        let refused = lock.listen().expect_err("a directory is there").to_string();
        assert!(refused.starts_with(&format!("cannot use {}: ", run.path().join(SOCKET).display())), "{refused}");
    }
}
