//! The settings of a node, and their precedence over the defaults of the command line.
//!
//! 1. A setting is an option that has a [`keys::Key`]. A flag wins over the environment, the environment over the file, and the
//!    file over the default. podfs ignores a setting that conflicts with one that wins, so `--in-cluster` wins over a
//!    `kubeconfig` of the file.
//! 2. The other settings become defaults of their options, before clap parses the command line. So types, checks, conflicts
//!    and `--help` are those of the option.
//! 3. A process reads the file once, and puts its settings into the environment. So the server of a pod, and the next version of
//!    podfs after an upgrade, have the same settings, even if the file has changed since.

mod error;
mod example;
mod file;
pub(super) mod keys;
pub(super) mod show;

use std::env;
use std::error::Error;
use std::ffi::{OsStr, OsString};
use std::path::PathBuf;

use clap::error::{ContextKind, ContextValue, ErrorKind};
use clap::parser::ValueSource;
use clap::{Arg, ArgAction, ArgMatches, Command, CommandFactory, FromArgMatches};

use super::Cli;
use super::command_line_for;
use super::exit::Failure;
use super::kubectl;
use crate::supervisor::run::upgrade;
use error::ConfigError;
use keys::{KEYS, Key};

/// The file of settings, unless `--config` or [`VARIABLE`] names another one.
pub(super) const FILE: &str = "/etc/podfs/podfs.toml";
/// The environment variable that names another file.
pub(super) const VARIABLE: &str = "PODFS_CONFIG";
/// Most bytes that podfs reads of a file of settings.
const LONGEST: u64 = 1 << 20;
/// An empty file.
const NOTHING: &str = "/dev/null";

/// A setting of the environment or the file.
#[derive(Clone)]
struct Setting {
    key: &'static Key,
    /// The value in the form that it has on the command line; for a flag, `true` or `false`.
    value: OsString,
    /// An environment variable, or a file and its line.
    origin: String,
}

/// The arguments of this process, with the settings of the node as defaults.
///
/// # Errors
/// A setting that cannot be used. Bad arguments and `--help` end the process.
pub(super) fn arguments() -> Result<Cli, Failure> {
    let words = kubectl::words();
    // In an upgrade, the program before the upgrade goes on if this one refuses its arguments.
    let roll_back = |reason: &str| {
        if words.get(1).is_some_and(|word| word == "run") {
            upgrade::roll_back(reason);
        }
    };
    let parse = |podfs: Command| podfs.try_get_matches_from(&words);
    let podfs = match with_settings(&words) {
        Ok(podfs) => podfs,
        Err(error) => {
            // `--help` works in spite of a mistake in the settings.
            let podfs = command_line_for(&words);
            if !parse(podfs.clone()).is_err_and(|error| is_help(&error)) {
                roll_back(&error.to_string());
                return Err(Failure::input(error));
            }
            podfs
        }
    };
    let matches = match parse(podfs.clone()) {
        Err(error) if is_help(&error) => parse(with_variables(podfs)),
        other => other,
    };
    Ok(matches.and_then(|matches| Cli::from_arg_matches(&matches)).unwrap_or_else(|error| {
        roll_back(&error.to_string());
        error.exit()
    }))
}

/// The command line with the environment variables, for help texts.
pub(super) fn with_variables(podfs: Command) -> Command {
    let commands: Vec<_> = podfs.get_subcommands().map(|command| command.get_name().to_owned()).collect();
    let with_variable =
        |command: Command, key: &'static Key| match key.of(&command).map(|option| option.get_id().clone()) {
            Some(id) => command.mut_arg(id, |option| option.env(key.variable).hide_env_values(true)),
            None => command,
        };
    let podfs = podfs.mut_arg("config", |option| option.env(VARIABLE).hide_env_values(true));
    commands
        .into_iter()
        .fold(podfs, |podfs, name| podfs.mut_subcommand(name, |command| KEYS.iter().fold(command, with_variable)))
}

fn is_help(error: &clap::Error) -> bool {
    matches!(error.kind(), ErrorKind::DisplayHelp | ErrorKind::DisplayHelpOnMissingArgumentOrSubcommand)
}

/// The command line with the settings as defaults of the called command.
fn with_settings(words: &[OsString]) -> Result<Command, ConfigError> {
    let podfs = command_line_for(words);
    // The final parse reports mistakes and prints help.
    let help = Arg::new("help").short('h').long("help").action(ArgAction::SetTrue).global(true);
    let given = podfs.clone().disable_help_flag(true).arg(help).ignore_errors(true).try_get_matches_from(words);
    let Some((name, given, command)) = given.as_ref().ok().and_then(|given| called_command(given, &podfs)) else {
        return Ok(podfs);
    };
    if KEYS.iter().all(|key| key.of(command).is_none()) {
        return Ok(podfs);
    }
    let (path, named) = path_of_settings(given.try_get_one("config").ok().flatten().cloned());
    let from_file = file::read(&path, named, Cli::command)?;
    let from_environment = environment(command)?;
    let is_given = |option: &&Arg| given.value_source(option.get_id().as_str()) == Some(ValueSource::CommandLine);
    let flags = command.get_arguments().filter(is_given).map(|option| Decision { option, is_on: true });
    let mut decided: Vec<_> = flags.collect();
    let mut settings = applicable(from_environment, command, &mut decided)?;
    let from_file = applicable(from_file, command, &mut decided)?;
    publish(&from_file);
    settings.extend(from_file);
    let name = name.to_owned();
    Ok(podfs.mut_subcommand(name, |command| settings.into_iter().fold(command, with_default)))
}

/// The called command, if it is one for users.
fn called_command<'a>(given: &'a ArgMatches, podfs: &'a Command) -> Option<(&'a str, &'a ArgMatches, &'a Command)> {
    let (name, given) = given.subcommand()?;
    keys::visible(podfs).find(|command| command.get_name() == name).map(|command| (name, given, command))
}

/// The path of the file of settings, and whether the flag or the variable names it.
fn path_of_settings(flag: Option<PathBuf>) -> (PathBuf, bool) {
    match flag.or_else(|| variable(VARIABLE).map(PathBuf::from)) {
        Some(path) => (path, true),
        None => (PathBuf::from(FILE), false),
    }
}

/// The value of an environment variable; `None` if it is empty or not set.
fn variable(name: &str) -> Option<OsString> {
    env::var_os(name).filter(|value| !value.is_empty())
}

/// The settings in the environment that are options of this command.
fn environment(command: &Command) -> Result<Vec<Setting>, ConfigError> {
    let options = KEYS.iter().filter_map(|key| Some((key, key.of(command)?)));
    let settings = options.filter_map(|(key, option)| {
        let origin = key.variable.to_owned();
        variable(key.variable).map(|value| (Setting { key, value, origin }, option))
    });
    settings.map(|(setting, option)| check(&setting, option).map(|()| setting)).collect()
}

/// An option that a source of higher precedence sets, and whether it is on. A flag that is `false` excludes no other.
struct Decision<'a> {
    option: &'a Arg,
    is_on: bool,
}

/// The settings of one source that apply: they are options of the command, and no earlier decision sets or excludes them. They
/// become decisions for the sources of lower precedence.
fn applicable<'a>(
    settings: Vec<Setting>,
    command: &'a Command,
    decided: &mut Vec<Decision<'a>>,
) -> Result<Vec<Setting>, ConfigError> {
    let mut applied: Vec<(Setting, Decision<'a>)> = Vec::new();
    for setting in settings {
        let Some(option) = setting.key.of(command) else { continue };
        let decision = Decision { option, is_on: option.get_action().takes_values() || setting.value == "true" };
        let excludes = |other: &Decision<'_>| decision.is_on && other.is_on && exclude(command, option, other.option);
        if decided.iter().any(|other| other.option == option || excludes(other)) {
            continue;
        }
        if let Some((rival, _)) = applied.iter().find(|(_, other)| excludes(other)) {
            let (key, rival, rival_origin) = (setting.key.name, rival.key.name, rival.origin.clone());
            return Err(ConfigError::Conflict { origin: setting.origin, key, rival, rival_origin });
        }
        applied.push((setting, decision));
    }
    let (applied, decisions): (Vec<_>, Vec<_>) = applied.into_iter().unzip();
    decided.extend(decisions);
    Ok(applied)
}

/// Whether the command refuses the two options together.
fn exclude(command: &Command, one: &Arg, other: &Arg) -> bool {
    command.get_arg_conflicts_with(one).contains(&other) || command.get_arg_conflicts_with(other).contains(&one)
}

fn with_default(command: Command, setting: Setting) -> Command {
    let option = setting.key.of(&command).map(|option| option.get_id().clone());
    option.into_iter().fold(command, |command, id| {
        command.mut_arg(id, |option| option.default_value(clap::builder::OsStr::from(setting.value.clone())))
    })
}

/// Puts the settings of the file into the environment, and makes [`VARIABLE`] name an empty file.
fn publish(settings: &[Setting]) {
    // SAFETY: the process has only parsed its arguments, so no other thread runs yet.
    unsafe {
        settings.iter().for_each(|setting| env::set_var(setting.key.variable, &setting.value));
        env::set_var(VARIABLE, NOTHING);
    }
}

/// Checks a setting as its option does.
fn check(setting: &Setting, option: &Arg) -> Result<(), ConfigError> {
    let Setting { key, value, origin } = setting;
    if !option.get_action().takes_values() {
        let is_one = value == "true" || value == "false";
        return if is_one { Ok(()) } else { Err(ConfigError::Flag { origin: origin.clone(), key: key.name }) };
    }
    let alone = Arg::new(key.name).value_parser(option.get_value_parser().clone()).allow_hyphen_values(true);
    let alone = alone.value_delimiter(option.get_value_delimiter());
    let parsed = Command::new("podfs").no_binary_name(true).arg(alone).try_get_matches_from([value]);
    parsed.map(drop).map_err(|cause| {
        let value_error = value_error(&cause, value);
        ConfigError::Refused { origin: origin.clone(), key: key.name, value_error, cause }
    })
}

/// Why an option refuses a value, without the usage text.
fn value_error(error: &clap::Error, value: &OsStr) -> String {
    if let Some(cause) = error.source() {
        return cause.to_string();
    }
    match error.get(ContextKind::ValidValue) {
        Some(ContextValue::Strings(words)) => {
            format!("{:?} is none of {}", value.display().to_string(), words.join(", "))
        }
        _ => format!("{:?} cannot be used", value.display().to_string()),
    }
}
