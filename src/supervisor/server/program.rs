//! The server's program, podfs-fuse, which podfs executes by its descriptor.
//!
//! The supervisor opens the program at its start, and executes the descriptor for each server. So a package upgrade
//! that replaces the files changes nothing for a running supervisor: its next server is of the supervisor's own
//! version.

use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::path::PathBuf;

use podfs_fuse::program::{StartedBy, version};

use crate::supervisor::exec_state;
use crate::supervisor::installed::{ProgramError, find_server, own_path};

/// The program podfs-fuse of this podfs.
#[derive(Debug)]
pub struct ServerProgram(OwnedFd);

impl ServerProgram {
    /// The program that a newer podfs left open when it rolled an upgrade back to this one; without a rollback, the
    /// program on disk: beside podfs, or where a package has it.
    ///
    /// # Errors
    /// When the program is not installed, or cannot be executed.
    pub fn find() -> Result<Self, ProgramError> {
        if let Some(left) = exec_state::server_program_left() {
            return Ok(Self(left));
        }
        find_server().map(|(_, program)| Self(program))
    }

    /// The path to execute. It is valid in this process, and in a child that has copies of the descriptors of this
    /// process.
    pub fn executable(&self) -> PathBuf {
        format!("/proc/self/fd/{}", self.0.as_raw_fd()).into()
    }
}

impl AsFd for ServerProgram {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

/// The version and path that this podfs passes to podfs-fuse.
pub fn this_podfs() -> StartedBy {
    StartedBy { version: version().to_owned(), path: own_path().unwrap_or_else(|_| "podfs".into()) }
}
