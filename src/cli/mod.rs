//! The command line: one module for each subcommand, and their common options.

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

use std::ffi::OsString;
use std::path::PathBuf;
use std::process::ExitCode;

use clap::{Args, CommandFactory, Parser, Subcommand, ValueHint};
use podfs_fuse::memory_lock;

use crate::supervisor::program::machine::block_on;
use crate::supervisor::program::{become_supervisor, log};
use crate::supervisor::run::upgrade::roll_back;
use exit::Failure;

/// Kubernetes pod volumes as FUSE mounts, switched atomically.
#[derive(Parser)]
#[command(name = "podfs", disable_version_flag = true, arg_required_else_help = true)]
struct Cli {
    #[command(flatten)]
    global: GlobalOptions,
    #[command(subcommand)]
    command: Command,
}

/// Options of all commands.
#[derive(Args)]
struct GlobalOptions {
    /// Take the settings of the node from FILE instead of /etc/podfs/podfs.toml.
    #[arg(long, value_name = "FILE", global = true, value_hint = ValueHint::FilePath)]
    config: Option<PathBuf>,
}

#[derive(Subcommand)]
enum Command {
    Run(run::Run),
    Node(node::NodeCommand),
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
    Server(server::ServerCommand),
    #[command(hide = true)]
    MountNfs(mount_nfs::MountNfs),
}

/// The command line with only the command that the first word names; with all commands if it names none. To describe all
/// commands takes milliseconds, and a node starts podfs for each pod and each container.
fn command_line_for(words: &[OsString]) -> clap::Command {
    let Some(command) = words.get(1).and_then(|word| word.to_str()).and_then(described) else {
        return Cli::command();
    };
    let podfs = clap::Command::new("podfs").disable_version_flag(true).subcommand_required(true);
    GlobalOptions::augment_args(podfs).subcommand(command)
}

/// The description of the command with this name; `None` if the help does not show it.
fn described(name: &str) -> Option<clap::Command> {
    fn of<A: Args>(name: &'static str) -> Option<clap::Command> {
        Some(A::augment_args(clap::Command::new(name)))
    }
    match name {
        "run" => of::<run::Run>("run"),
        "node" => of::<node::NodeCommand>("node"),
        "mount" => of::<mount::Mount>("mount"),
        "render" => of::<render::Render>("render"),
        "view" => of::<view::View>("view"),
        "status" => of::<status::Status>("status"),
        "metrics" => of::<metrics::Metrics>("metrics"),
        "trace" => of::<trace::Trace>("trace"),
        "push" => of::<push::Push>("push"),
        "mounts" => of::<mounts::Mounts>("mounts"),
        "upgrade" => of::<upgrade::Upgrade>("upgrade"),
        "cleanup" => of::<cleanup::Cleaning>("cleanup"),
        "config" => of::<config::show::Show>("config"),
        "completions" => of::<completions::Completions>("completions"),
        "version" => of::<version::Version>("version"),
        _ => None,
    }
}

/// Runs the command in this process's arguments.
pub fn main() -> ExitCode {
    memory_lock::tune_allocator();
    if let Some(failure) = become_supervisor(std::env::args_os()) {
        roll_back(&failure.to_string());
        return failure.report();
    }
    match config::arguments().and_then(execute) {
        Ok(()) => ExitCode::SUCCESS,
        Err(failure) => failure.report(),
    }
}

fn execute(Cli { global, command }: Cli) -> Result<(), Failure> {
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
        Command::Config(show) => show.execute(global.config),
        Command::Completions(completions) => completions.execute(),
        Command::Version(version) => version.execute(),
        Command::Man(man) => man.execute(),
        Command::Server(server) => server.execute(),
        Command::MountNfs(mount) => mount.execute(),
    }
}

#[cfg(test)]
mod tests {
    use super::config::keys::visible;
    use super::*;

    #[test]
    fn a_command_has_the_same_description_alone_and_among_all() {
        let mut all = Cli::command();
        all.build();
        for command in visible(&all).filter(|command| command.get_name() != "help") {
            let name = command.get_name();
            let mut alone = command_line_for(&["podfs".into(), name.into()]);
            alone.build();
            assert_eq!(visible(&alone).count(), 2, "{name} and help");
            let description = |podfs: &clap::Command| {
                let mut command = podfs.find_subcommand(name).expect(name).clone();
                (command.render_long_help().to_string(), format!("{:?}", command.get_arguments().collect::<Vec<_>>()))
            };
            assert_eq!(description(&alone), description(&all), "{name}");
        }
        let misspelt = command_line_for(&["podfs".into(), "rum".into()]);
        assert!(visible(&misspelt).count() > 10, "all commands, for a suggestion");
    }
}
