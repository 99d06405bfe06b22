//! `--help`, with which the other texts are compared.

use std::collections::{BTreeMap, BTreeSet};
use std::process::Command;
use std::sync::LazyLock;

use crate::common::PODFS;
use crate::common::outcome::{Outcome, finish};

/// An option of a command.
#[derive(Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct CommandOption {
    /// The long name, without the dashes.
    pub name: String,
    pub variable: Option<String>,
    pub default: Option<String>,
}

/// The output of podfs, without the settings of the machine that runs the tests.
#[track_caller]
pub fn podfs(arguments: &[&str]) -> String {
    let mut command = Command::new(PODFS);
    let Outcome { code, stdout, stderr } =
        finish(command.args(arguments).env("PODFS_CONFIG", "/dev/null").env_remove("RUST_LOG"));
    assert_eq!(code, Some(0), "podfs {arguments:?}: {stderr}");
    stdout
}

/// The helps of all commands.
static HELPS: LazyLock<BTreeMap<String, String>> =
    LazyLock::new(|| commands().into_iter().map(|command| (command.clone(), podfs(&[&command, "--help"]))).collect());

/// The commands that `podfs --help` lists.
pub fn commands() -> Vec<String> {
    static HELP: LazyLock<String> = LazyLock::new(|| podfs(&["--help"]));
    listed(&HELP)
}

/// The commands that a help lists.
fn listed(help: &str) -> Vec<String> {
    let list = help.split("\nCommands:\n").nth(1).and_then(|text| text.split("\n\n").next()).unwrap_or_default();
    let names = list.lines().map(|line| line.split_whitespace().next().expect("a name").to_owned());
    names.filter(|name| name != "help").collect()
}

/// The helps of the subcommands of a command.
fn inner_helps(command: &str) -> Vec<String> {
    inner(command).iter().map(|inner| podfs(&[command, inner, "--help"])).collect()
}

/// The subcommands of a command, if it has some.
pub fn inner(command: &str) -> Vec<String> {
    listed(&HELPS[command])
}

/// The options of a command and of its subcommands, each once.
pub fn all_options(command: &str) -> Vec<CommandOption> {
    let mut all = options(command);
    for help in inner_helps(command) {
        all.extend(options_of(&help));
    }
    all.sort();
    all.dedup();
    all
}

/// The options of a command, without `--config` and `--help`, which all commands have.
pub fn options(command: &str) -> Vec<CommandOption> {
    options_of(&HELPS[command])
}

fn options_of(help: &str) -> Vec<CommandOption> {
    let mut options: Vec<CommandOption> = Vec::new();
    for line in help.lines().map(str::trim) {
        let long = line.strip_prefix('-').and_then(|line| line.split("--").nth(1).or(line.strip_prefix('-')));
        if let Some(long) = long {
            let name = long.split(' ').next().expect("a name").to_owned();
            options.push(CommandOption { name, variable: None, default: None });
        }
        let Some(last) = options.last_mut() else { continue };
        let bracketed =
            |prefix| line.strip_prefix(prefix).and_then(|text: &str| text.strip_suffix(']')).map(str::to_owned);
        last.variable = bracketed("[env: ").or(last.variable.take());
        last.default = bracketed("[default: ").or(last.default.take());
    }
    options.retain(|option| !["config", "help"].contains(&option.name.as_str()));
    options
}

/// The codes of `EXIT STATUS`, with their meanings.
pub fn exit_codes(command: &str) -> Vec<(String, String)> {
    let help = &HELPS[command];
    let section = help.split("EXIT STATUS:\n").nth(1).and_then(|text| text.split("\n\n").next()).expect("codes");
    let pair = |line: &str| line.trim().split_once("  ").map(|(code, text)| (code.to_owned(), text.to_owned()));
    section.lines().map(|line| pair(line).expect("a code and its meaning")).collect()
}

/// The settings, in their order.
pub fn settings() -> Vec<CommandOption> {
    static CONFIG: LazyLock<String> = LazyLock::new(|| podfs(&["config"]));
    let names = &*CONFIG;
    let names = names.lines().map(|line| line.trim_start_matches("# ").split(' ').next().expect("a name").to_owned());
    let all: Vec<_> = commands().iter().flat_map(|command| options(command)).collect();
    let find = |name: String| all.iter().find(|option| option.name == name).expect("an option");
    let copy = |option: &CommandOption| CommandOption {
        name: option.name.clone(),
        variable: option.variable.clone(),
        default: option.default.clone(),
    };
    names.map(|name| copy(find(name))).collect()
}

#[test]
fn every_command_says_what_its_exit_codes_mean_and_shows_examples() {
    for command in commands() {
        let codes: Vec<_> = exit_codes(&command).into_iter().map(|(code, _)| code).collect();
        assert!(codes.starts_with(&["0".to_owned()]) && codes.contains(&"2".to_owned()), "{command}: {codes:?}");
        let help = &HELPS[&command];
        let examples = help.split("EXAMPLES:\n").nth(1).unwrap_or_else(|| panic!("{command} has no examples"));
        let options: BTreeSet<_> = all_options(&command).into_iter().map(|option| option.name).collect();
        for word in examples.split_whitespace().filter_map(|word| word.strip_prefix("--")) {
            assert!(options.contains(word), "an example of {command} has --{word}");
        }
    }
}

#[test]
fn an_option_that_operators_may_set_is_the_same_in_every_command() {
    for setting in settings() {
        for command in commands() {
            for option in options(&command).into_iter().filter(|option| option.name == setting.name) {
                assert_eq!(option, setting, "of {command}");
            }
        }
        assert!(setting.variable.is_some(), "{}", setting.name);
    }
    // No other option has a variable.
    for command in commands() {
        let with_variable = options(&command).into_iter().filter(|option| option.variable.is_some());
        assert!(with_variable.into_iter().all(|option| settings().contains(&option)), "{command}");
    }
}
