//! `podfs server`: executes podfs-fuse, the server of a pod. Not for people.
//!
//! A supervisor of another version starts the server of this version so when it upgrades: only this podfs knows where its
//! podfs-fuse is. The arguments are those of podfs-fuse.

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
