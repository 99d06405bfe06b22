//! `podfs config`: the settings of this node, and the source of each.

use std::collections::BTreeSet;
use std::path::PathBuf;

use clap::{Args, Command, CommandFactory};

use super::error::ConfigError;
use super::keys::{KEYS, Key, visible};
use super::{Setting, applicable, environment, example, file, path_of_settings};
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
  1  standard output cannot be written
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
    let (path, named) = path_of_settings(config);
    let of_file = file::read(&path, named, || podfs.clone())?;
    let (mut settings, mut excluded) = (Vec::new(), BTreeSet::new());
    for command in visible(podfs) {
        let of_environment = environment(command)?;
        let given = [of_environment.clone(), of_file.clone()].concat();
        let mut decided = Vec::new();
        let mut applied = applicable(of_environment, command, &mut decided)?;
        applied.extend(applicable(of_file.clone(), command, &mut decided)?);
        let is_applied = |setting: &&Setting| applied.iter().any(|other| other.key.name == setting.key.name);
        let of_command = given.iter().filter(|setting| setting.key.of(command).is_some());
        excluded.extend(of_command.filter(|setting| !is_applied(setting)).map(|setting| setting.key.name));
        settings.extend(applied);
    }
    let line = |key: &Key| match settings.iter().find(|setting| setting.key.name == key.name) {
        _ if excluded.contains(key.name) => format!("# {} is excluded by a setting of higher precedence\n", key.name),
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
