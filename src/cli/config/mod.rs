//! The settings of a node, and how they meet the command line.
//!
//! 1. A setting is an option that has a [`keys::Key`]. A flag wins over the environment, that over the file, that over the
//!    default. What conflicts with something that wins is left out, so `--in-cluster` wins over a `kubeconfig` of the file.
//! 2. What is left becomes the default of its option, before the command line is parsed. So types, checks, conflicts and
//!    `--help` are those of the option.
//! 3. A process reads the file once, and puts its settings into the environment. So the server of a pod, and the next version of
//!    podfs after an upgrade, have the same settings, whatever the file says by then.

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
use super::described_for;
use super::exit::Failure;
use super::kubectl;
use error::ConfigError;
use keys::{KEYS, Key};

/// Where the settings of a node are, unless another place is given.
pub(super) const FILE: &str = "/etc/podfs/podfs.toml";
/// The environment variable that names another place.
pub(super) const VARIABLE: &str = "PODFS_CONFIG";
/// A file that says nothing.
const NOTHING: &str = "/dev/null";

/// One setting that the environment or the file has.
struct Setting {
    key: &'static Key,
    /// As it would stand on the command line; of a flag `true` or `false`.
    value: OsString,
    /// An environment variable, or a file and its line.
    origin: String,
}

/// The arguments of this process, completed by the settings of the node.
///
/// # Errors
/// A setting that cannot be used. Bad arguments and `--help` end the process.
pub(super) fn arguments() -> Result<Cli, Failure> {
    let words = kubectl::words();
    let parse = |podfs: Command| podfs.try_get_matches_from(&words);
    let podfs = match settled(&words) {
        Ok(podfs) => podfs,
        Err(error) => {
            // `--help` works in spite of a mistake in the settings.
            let podfs = described_for(&words);
            if !parse(podfs.clone()).is_err_and(|error| is_help(&error)) {
                return Err(Failure::input(error));
            }
            podfs
        }
    };
    let matches = match parse(podfs.clone()) {
        Err(error) if is_help(&error) => parse(documented(podfs)),
        other => other,
    };
    Ok(matches.and_then(|matches| Cli::from_arg_matches(&matches)).unwrap_or_else(|error| error.exit()))
}

/// podfs as its help shows it, with the environment variables.
pub(super) fn documented(podfs: Command) -> Command {
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

/// podfs with the settings as defaults of the command that is called.
fn settled(words: &[OsString]) -> Result<Command, ConfigError> {
    let podfs = described_for(words);
    // The final parse reports mistakes and prints help.
    let help = Arg::new("help").short('h').long("help").action(ArgAction::SetTrue).global(true);
    let given = podfs.clone().disable_help_flag(true).arg(help).ignore_errors(true).try_get_matches_from(words);
    let Some((name, given, command)) = given.as_ref().ok().and_then(|given| called(given, &podfs)) else {
        return Ok(podfs);
    };
    if KEYS.iter().all(|key| key.of(command).is_none()) {
        return Ok(podfs);
    }
    let (path, named) = place(given.try_get_one("config").ok().flatten().cloned());
    let from_file = file::read(&path, named, Cli::command)?;
    let from_environment = environment(command)?;
    let is_given = |option: &&Arg| given.value_source(option.get_id().as_str()) == Some(ValueSource::CommandLine);
    let flags = command.get_arguments().filter(is_given).map(|option| Decision { option, is_on: true });
    let mut decided: Vec<_> = flags.collect();
    let mut settings = chosen(from_environment, command, &mut decided)?;
    let from_file = chosen(from_file, command, &mut decided)?;
    publish(&from_file);
    settings.extend(from_file);
    let name = name.to_owned();
    Ok(podfs.mut_subcommand(name, |command| settings.into_iter().fold(command, with_default)))
}

/// The command that is called, if it is one for people.
fn called<'a>(given: &'a ArgMatches, podfs: &'a Command) -> Option<(&'a str, &'a ArgMatches, &'a Command)> {
    let (name, given) = given.subcommand()?;
    keys::visible(podfs).find(|command| command.get_name() == name).map(|command| (name, given, command))
}

/// The path of the settings, and whether the flag or the variable names it.
fn place(flag: Option<PathBuf>) -> (PathBuf, bool) {
    match flag.or_else(|| variable(VARIABLE).map(PathBuf::from)) {
        Some(path) => (path, true),
        None => (PathBuf::from(FILE), false),
    }
}

/// An environment variable that says something.
fn variable(name: &str) -> Option<OsString> {
    env::var_os(name).filter(|value| !value.is_empty())
}

/// The settings of the environment that this command has.
fn environment(command: &Command) -> Result<Vec<Setting>, ConfigError> {
    let options = KEYS.iter().filter_map(|key| Some((key, key.of(command)?)));
    let settings = options.filter_map(|(key, option)| {
        let origin = key.variable.to_owned();
        variable(key.variable).map(|value| (Setting { key, value, origin }, option))
    });
    settings.map(|(setting, option)| check(&setting, option).map(|()| setting)).collect()
}

/// An option that a place of higher priority sets, and whether it takes effect. A flag that is `false` excludes no other.
struct Decision<'a> {
    option: &'a Arg,
    is_on: bool,
}

/// The settings of one place that apply: the command has them, and no decision of a place before conflicts. They become
/// decisions for the places after it.
fn chosen<'a>(
    settings: Vec<Setting>,
    command: &'a Command,
    decided: &mut Vec<Decision<'a>>,
) -> Result<Vec<Setting>, ConfigError> {
    let mut holding: Vec<(Setting, Decision<'a>)> = Vec::new();
    for setting in settings {
        let Some(option) = setting.key.of(command) else { continue };
        let decision = Decision { option, is_on: option.get_action().takes_values() || setting.value == "true" };
        let excludes = |other: &Decision<'_>| decision.is_on && other.is_on && exclude(command, option, other.option);
        if decided.iter().any(|other| other.option == option || excludes(other)) {
            continue;
        }
        if let Some((rival, _)) = holding.iter().find(|(_, other)| excludes(other)) {
            let (key, rival, there) = (setting.key.name, rival.key.name, rival.origin.clone());
            return Err(ConfigError::Conflict { origin: setting.origin, key, rival, there });
        }
        holding.push((setting, decision));
    }
    let (holding, decisions): (Vec<_>, Vec<_>) = holding.into_iter().unzip();
    decided.extend(decisions);
    Ok(holding)
}

/// Whether a command cannot have both.
fn exclude(command: &Command, one: &Arg, other: &Arg) -> bool {
    command.get_arg_conflicts_with(one).contains(&other) || command.get_arg_conflicts_with(other).contains(&one)
}

fn with_default(command: Command, setting: Setting) -> Command {
    let option = setting.key.of(&command).map(|option| option.get_id().clone());
    option.into_iter().fold(command, |command, id| {
        command.mut_arg(id, |option| option.default_value(clap::builder::OsStr::from(setting.value.clone())))
    })
}

/// Puts what the file says into the environment, in place of the file.
fn publish(settings: &[Setting]) {
    // SAFETY: the process has only looked at its arguments: no other thread runs yet.
    unsafe {
        settings.iter().for_each(|setting| env::set_var(setting.key.variable, &setting.value));
        env::set_var(VARIABLE, NOTHING);
    }
}

/// The option's own check.
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
        let objection = objection(&cause, value);
        ConfigError::Refused { origin: origin.clone(), key: key.name, objection, cause }
    })
}

/// Why an option refuses a value, without its usage.
fn objection(error: &clap::Error, value: &OsStr) -> String {
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
