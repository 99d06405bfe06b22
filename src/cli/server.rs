//! `podfs server`: the process that a supervisor starts to answer FUSE requests. Not for people.

use std::os::unix::net::UnixStream;

use anyhow::Context;
use clap::Args;
use podfs_fuse::server::{process, secrecy};

use super::exit::Failure;
use super::log::LogFormat;

/// Answer FUSE requests for a supervisor, which is at the other end of standard input.
#[derive(Args)]
pub(super) struct Server {
    /// Whose volumes these are, for people who list processes.
    #[arg(long)]
    pod: String,
    /// How log lines on standard error look: as the supervisor's.
    #[arg(long, value_enum, default_value_t)]
    log_format: LogFormat,
}

impl Server {
    pub(super) fn execute(self) -> Result<(), Failure> {
        let Self { pod, log_format } = self;
        log_format.start();
        // The supervisor has locked its own memory and warned when it could not.
        let _unlocked = secrecy::protect_memory();
        let control = rustix::io::dup(rustix::stdio::stdin()).map_err(Failure::general)?;
        let served = process::serve(&UnixStream::from(control));
        served.with_context(|| format!("the server of pod {pod} lost its supervisor")).map_err(Failure::general)
    }
}
