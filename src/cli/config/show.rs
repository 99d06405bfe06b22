//! `podfs config`: the settings of this node, and the source of each.

use std::path::PathBuf;

use clap::{Args, Command, CommandFactory};

use super::error::ConfigError;
use super::keys::{KEYS, Key, visible};
use super::{Setting, environment, example, file, place};
use crate::cli::Cli;
use crate::cli::exit::Failure;
use crate::cli::status::print;

/// Show the settings of this node, and where they come from.
///
/// Prints a file of settings with the same effect as the environment, the file and the defaults have now.
/// Flags of a command win over all of them. podfs.toml(5) describes the settings and their variables.
#[derive(Args)]
#[command(after_help = "\
EXIT STATUS:
  0  the settings are shown
  2  bad arguments, or a setting that cannot be used

EXAMPLES:
  podfs config
  PODFS_RUN_DIR=/run/other podfs config
  podfs config --example >/etc/podfs/podfs.toml")]
pub(in crate::cli) struct Show {
    /// Print a file that describes every setting instead, and sets none.
    #[arg(long)]
    example: bool,
}

impl Show {
    pub(in crate::cli) fn execute(self, config: Option<PathBuf>) -> Result<(), Failure> {
        let podfs = Cli::command();
        let text = if self.example { Ok(example::text(&podfs)) } else { in_effect(config, &podfs) };
        print(&text.map_err(Failure::input)?)
    }
}

fn in_effect(config: Option<PathBuf>, podfs: &Command) -> Result<String, ConfigError> {
    let (path, named) = place(config);
    let mut settings: Vec<Setting> = Vec::new();
    for command in visible(podfs) {
        settings.extend(environment(command)?);
    }
    settings.extend(file::read(&path, named, || podfs.clone())?);
    let line = |key: &Key| match settings.iter().find(|setting| setting.key.name == key.name) {
        Some(Setting { value, origin, .. }) => {
            let is_flag = !key.option(podfs).get_action().takes_values();
            let value = value.to_string_lossy();
            let value = if is_flag { value.into_owned() } else { format!("{value:?}") };
            format!("{} = {value} # {origin}\n", key.name)
        }
        None if key.has_default(podfs) => format!("{} = {} # the default\n", key.name, key.example(podfs)),
        None => format!("# {} is not set\n", key.name),
    };
    Ok(KEYS.iter().map(line).collect())
}
