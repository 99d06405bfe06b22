//! `podfs man`: the manual pages with the help texts of the command line. The other pages are in `packaging/man`.

mod page;

use std::fs;
use std::path::PathBuf;

use anyhow::anyhow;
use clap::{Arg, ArgAction, Args, Command, CommandFactory, ValueHint};

use super::Cli;
use super::config::keys::visible;
use super::exit::Failure;

/// Write the manual pages of all commands, and that of the settings, into a directory.
#[derive(Args)]
pub(super) struct Man {
    /// It is made if it does not exist.
    #[arg(value_name = "DIR", value_hint = ValueHint::DirPath)]
    directory: PathBuf,
}

impl Man {
    pub(super) fn execute(self) -> Result<(), Failure> {
        let podfs = in_sentences(Cli::command());
        let commands = visible(&podfs).map(|command| (page::name(command), page::of_command(command, &podfs)));
        let settings = ("podfs.toml.5".to_owned(), page::of_settings(&podfs));
        fs::create_dir_all(&self.directory)
            .and_then(|()| {
                let mut pages = commands.chain([settings]);
                pages.try_for_each(|(name, text)| fs::write(self.directory.join(name), text))
            })
            .map_err(|error| Failure::general(anyhow!("cannot write to {}: {error}", self.directory.display())))
    }
}

/// The command line with a full stop after each help text, for manual pages.
fn in_sentences(podfs: Command) -> Command {
    let sentence = |option: Arg| match option.get_long_help().or(option.get_help()).map(|help| format!("{help}.")) {
        Some(help) => option.help(help.clone()).long_help(help),
        None => option,
    };
    let description = |command: Command| match command.get_about().map(|about| format!("{about}.")) {
        Some(about) if command.get_long_about().is_none() => command.long_about(about),
        _ => command,
    };
    let help = Arg::new("help").short('h').long("help").action(ArgAction::SetTrue).global(true).help("Print help.");
    let podfs = podfs.disable_help_subcommand(true).disable_help_flag(true).mut_args(sentence).arg(help);
    let inner = |command: Command| description(command.mut_args(sentence));
    let mut podfs = podfs.mut_subcommands(|command| inner(command).mut_subcommands(inner));
    podfs.build();
    podfs
}
