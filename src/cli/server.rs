//! `podfs server`: the process that a supervisor starts to answer FUSE requests. Not for people.

use anyhow::Context;
use clap::{Args, ValueEnum};
use podfs_fuse::confinement::{self, confine};
use podfs_fuse::server::audit::output::Output;
use podfs_fuse::server::keeper::close_strangers;
use podfs_fuse::server::{process, secrecy};

use super::exit::Failure;
use super::log::LogFormat;

/// Answer FUSE requests for a supervisor, which is at the other end of standard input.
#[derive(Args)]
pub(super) struct Server {
    /// Whose volumes these are, for people who list processes.
    #[arg(long)]
    pod: String,
    /// The pod's uid: no supervisor of another pod is obeyed.
    #[arg(long)]
    uid: String,
    /// What it is for, which decides what it may do.
    #[arg(long, value_enum)]
    profile: Profile,
    /// How log lines on standard error look: as the supervisor's.
    #[arg(long, value_enum, default_value_t)]
    log_format: LogFormat,
}

/// What a server is for.
#[derive(Clone, Copy, Debug, ValueEnum)]
enum Profile {
    /// Projections only.
    Projection,
    /// Projections only, with some whose opens are written down.
    Audit,
    /// Directories of the host, and perhaps projections too.
    Passthrough,
}

impl From<Profile> for confinement::Profile {
    fn from(profile: Profile) -> Self {
        match profile {
            Profile::Projection => Self::Projection,
            Profile::Audit => Self::Audit,
            Profile::Passthrough => Self::Passthrough,
        }
    }
}

impl Server {
    pub(super) fn execute(self) -> Result<(), Failure> {
        let Self { pod, uid, profile, log_format } = self;
        // SAFETY: a process that has only read its arguments has nothing open.
        unsafe { close_strangers() };
        log_format.start();
        // The supervisor has locked its own memory and warned when it could not.
        let _unlocked = secrecy::protect_memory();
        let output = Output::standard_error();
        // Before there is another thread, and before anything comes from outside.
        confine(profile.into(), log_format.lines());
        let served = process::serve(env!("CARGO_PKG_VERSION"), &uid, output);
        served.with_context(|| format!("the server of pod {pod} cannot go on")).map_err(Failure::general)
    }
}
