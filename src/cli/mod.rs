//! The command line: one file per subcommand, and what they share.

mod cleanup;
mod completions;
mod config;
mod exit;
mod kubectl;
mod manual;
mod metrics;
mod mount;
mod mount_nfs;
mod mounts;
mod node;
mod pod;
mod push;
mod render;
mod run;
mod server;
mod source;
mod status;
mod trace;
mod upgrade;
mod version;
mod view;

use std::path::PathBuf;
use std::process::ExitCode;

use clap::{Parser, Subcommand, ValueHint};
use podfs_fuse::memory_lock;

use crate::supervisor::program::machine::block_on;
use crate::supervisor::program::{follow_earlier, log};
use exit::Failure;

/// Kubernetes pod volumes as FUSE mounts, switched atomically.
#[derive(Parser)]
#[command(name = "podfs", disable_version_flag = true, arg_required_else_help = true)]
struct Cli {
    /// Take the settings of the node from FILE instead of /etc/podfs/podfs.toml.
    #[arg(long, value_name = "FILE", global = true, value_hint = ValueHint::FilePath)]
    config: Option<PathBuf>,
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    Run(run::Run),
    Node(node::Node),
    Mount(mount::Mount),
    Render(render::Render),
    View(view::View),
    Status(status::Status),
    Metrics(metrics::Metrics),
    Trace(trace::Trace),
    Push(push::Push),
    Mounts(mounts::Mounts),
    Upgrade(upgrade::Upgrade),
    Cleanup(cleanup::Cleaning),
    Config(config::show::Show),
    Completions(completions::Completions),
    Version(version::Version),
    #[command(hide = true)]
    Man(manual::Man),
    #[command(hide = true)]
    Server(server::Server),
    #[command(hide = true)]
    MountNfs(mount_nfs::MountNfs),
}

/// Runs the command of this process's arguments.
pub fn main() -> ExitCode {
    memory_lock::tune_allocator();
    if let Some(failure) = follow_earlier(std::env::args_os()) {
        return failure.report();
    }
    match config::arguments().and_then(execute) {
        Ok(()) => ExitCode::SUCCESS,
        Err(failure) => failure.report(),
    }
}

fn execute(Cli { config, command }: Cli) -> Result<(), Failure> {
    match command {
        Command::Run(run) => run.execute(),
        Command::Node(node) => node.execute(),
        Command::Mount(mount) => mount.execute(),
        Command::Render(render) => render.execute(),
        Command::View(view) => view.execute(),
        Command::Status(status) => status.execute(),
        Command::Metrics(metrics) => metrics.execute(),
        Command::Trace(trace) => trace.execute(),
        Command::Push(push) => push.execute(),
        Command::Mounts(mounts) => mounts.execute(),
        Command::Upgrade(upgrade) => upgrade.execute(),
        Command::Cleanup(cleanup) => cleanup.execute(),
        Command::Config(show) => show.execute(config),
        Command::Completions(completions) => completions.execute(),
        Command::Version(version) => version.execute(),
        Command::Man(man) => man.execute(),
        Command::Server(server) => server.execute(),
        Command::MountNfs(mount) => mount.execute(),
    }
}
