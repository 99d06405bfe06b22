//! `podfs server`: executes podfs-fuse, the server of a pod, with the same arguments. Supervisors start it; it is not for people.
//!
//! During an upgrade, a supervisor of another version starts this version's server by this command: only this podfs knows the
//! path of its podfs-fuse.

use std::ffi::OsString;

use clap::Args;

use super::exit::Failure;
use crate::supervisor::program::become_server;

/// Answer FUSE requests for a supervisor, which is at the other end of standard input.
#[derive(Args)]
pub(super) struct ServerCommand {
    /// The arguments of podfs-fuse.
    #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
    arguments: Vec<OsString>,
}

impl ServerCommand {
    pub(super) fn execute(self) -> Result<(), Failure> {
        Err(become_server(self.arguments.into_iter()))
    }
}
