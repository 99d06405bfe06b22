//! `podfs server`: executes podfs-fuse, the server of a pod. Not for people.
//!
//! A supervisor of another version starts the server of this version so when it upgrades: only this podfs knows where its
//! podfs-fuse is. The arguments are those of podfs-fuse.

use std::ffi::OsString;
use std::os::unix::process::CommandExt;
use std::process::Command;

use anyhow::{Context, anyhow};
use clap::Args;
use podfs_fuse::program::NAME;
use podfs_fuse::server::process;

use super::exit::Failure;
use crate::supervisor::server::program::{ServerProgram, this_podfs};

/// Answer FUSE requests for a supervisor, which is at the other end of standard input.
#[derive(Args)]
pub(super) struct Server {
    /// The arguments of podfs-fuse.
    #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
    arguments: Vec<OsString>,
}

impl Server {
    pub(super) fn execute(self) -> Result<(), Failure> {
        let program = ServerProgram::find().map_err(|error| {
            process::refuse(&error.to_string());
            Failure::machine(error)
        })?;
        let mut command = Command::new(program.executable());
        command.arg0(NAME).arg("server").args(self.arguments).arg(this_podfs().argument());
        Err(anyhow!(command.exec())).context(format!("{NAME} cannot be executed")).map_err(Failure::machine)
    }
}
