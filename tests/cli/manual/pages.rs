//! Manual pages: those that podfs writes, and those in `packaging/man`.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::Path;
use std::process::Command;

use tempfile::TempDir;

use crate::manual::help::{all_options, commands, exit_codes, inner, options, podfs, settings};

const HAND_WRITTEN: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/packaging/man");

/// The pages in a directory, by name.
fn read(directory: &Path) -> BTreeMap<String, String> {
    let entries = fs::read_dir(directory).expect("a directory").map(|entry| entry.expect("an entry").path());
    let name = |path: &Path| path.file_name().expect("a name").to_str().expect("text").to_owned();
    entries.map(|path| (name(&path), fs::read_to_string(&path).expect("a page"))).collect()
}

/// The pages that podfs writes.
pub fn written() -> BTreeMap<String, String> {
    let directory = TempDir::with_prefix("podfs-test-").expect("a directory");
    podfs(&["man", directory.path().join("new").to_str().expect("text")]);
    read(&directory.path().join("new"))
}

/// The pages in `packaging/man`.
pub fn hand_written() -> BTreeMap<String, String> {
    read(Path::new(HAND_WRITTEN))
}

/// A page's source, without its fonts and escapes.
fn plain(page: &str) -> String {
    page.replace("\\fB", "").replace("\\fI", "").replace("\\fR", "").replace("\\-", "-").replace("\\*(Aq", "'")
}

fn section<'a>(page: &'a str, heading: &str) -> &'a str {
    let begin = [format!(".SH {heading}\n"), format!(".SH \"{heading}\"\n"), format!(".Sh {heading}\n")];
    let text = begin.iter().find_map(|begin| page.split_once(begin.as_str())).map(|(_, text)| text);
    let text = text.unwrap_or_else(|| panic!("no section {heading} in:\n{page}"));
    text.split("\n.SH ").next().and_then(|text| text.split("\n.Sh ").next()).expect("a section")
}

/// The terms that a section defines: the first line of each entry.
fn defined(section: &str) -> Vec<&str> {
    section.split(".TP\n").skip(1).map(|entry| entry.lines().next().expect("a term")).collect()
}

#[test]
fn every_command_has_a_page_with_its_options_defaults_and_exit_codes() {
    let pages = written();
    let expected: BTreeSet<_> = commands().iter().map(|command| format!("podfs-{command}.8")).collect();
    let names: BTreeSet<_> = pages.keys().filter(|name| *name != "podfs.toml.5").cloned().collect();
    assert_eq!(names, expected);
    for command in commands() {
        let page = plain(&pages[&format!("podfs-{command}.8")]);
        let terms = defined(section(&page, "OPTIONS"));
        let find = |name: &str| {
            let is_it = |term: &str| term.split([' ', ',']).any(|word| word == format!("--{name}"));
            terms.iter().find(|term| is_it(term)).unwrap_or_else(|| panic!("no --{name} in the page of {command}"))
        };
        for option in options(&command) {
            if let Some(default) = option.default {
                assert!(find(&option.name).ends_with(&format!("[default: {default}]")), "{command}: {}", option.name);
            }
            if let Some(variable) = option.variable {
                assert!(defined(section(&page, "ENVIRONMENT")).contains(&variable.as_str()), "{command}: {variable}");
            }
        }
        let long = terms.iter().filter(|term| term.contains("--")).count();
        assert_eq!(long, options(&command).len() + ["config", "help"].len(), "{command}: {terms:?}");
        for inner in inner(&command) {
            let commands = section(&page, "COMMANDS");
            assert!(defined(commands).iter().any(|term| term.split(' ').next() == Some(&inner)), "{command} {inner}");
        }
        let codes: Vec<_> = section(&page, "EXIT STATUS").split(".TP\n").skip(1).map(str::trim_end).collect();
        let expected: Vec<_> = exit_codes(&command).iter().map(|(code, text)| format!("{code}\n{text}")).collect();
        assert_eq!(codes, expected, "{command}");
        for heading in ["NAME", "SYNOPSIS", "DESCRIPTION", "EXAMPLES", "SEE ALSO"] {
            section(&page, heading);
        }
    }
}

#[test]
fn the_page_of_the_settings_has_each_with_its_variable_and_default() {
    let page = plain(&written()["podfs.toml.5"]);
    let entries: Vec<_> = section(&page, "SETTINGS").split(".TP\n").skip(1).collect();
    assert_eq!(entries.len(), settings().len());
    for (entry, setting) in entries.iter().zip(settings()) {
        assert!(entry.starts_with(&format!("{} = ", setting.name)), "{entry}");
        assert!(entry.contains(&format!("Environment: {}.", setting.variable.expect("a variable"))), "{entry}");
        if let Some(default) = setting.default {
            assert!(entry.contains(&format!("= \"{default}\"\n")), "{entry}");
        }
        let users = commands().into_iter().filter(|command| options(command).iter().any(|o| o.name == setting.name));
        let users: Vec<_> = users.map(|command| format!("podfs-{command}(8)")).collect();
        assert!(entry.contains(&format!("Used by {}.", users.join(", "))), "{entry}");
    }
}

#[test]
fn the_overview_names_every_command_and_every_variable() {
    let page = &hand_written()["podfs.8"];
    let listed = section(page, "COMMANDS").lines().filter_map(|line| line.strip_prefix(".It Xr podfs-"));
    let listed: Vec<_> = listed.map(|line| line.split(' ').next().expect("a name").to_owned()).collect();
    assert_eq!(listed, commands());
    let environment = section(page, "ENVIRONMENT");
    for setting in settings() {
        let variable = setting.variable.expect("a variable");
        assert!(environment.contains(&format!("Ev {variable}")), "{variable}");
    }
}

#[test]
fn exit_codes_mean_the_same_everywhere() {
    let run: Vec<_> = exit_codes("run").into_iter().map(|(code, _)| code).collect();
    for name in ["podfs.8", "podfs-agent.7"] {
        let page = &hand_written()[name];
        let codes = section(page, "EXIT STATUS").lines().filter_map(|line| line.strip_prefix(".It "));
        let codes: Vec<_> = codes.filter(|code| code.chars().all(|c| c.is_ascii_digit())).map(str::to_owned).collect();
        assert_eq!(codes, run, "{name}");
    }
    for command in commands() {
        for (code, meaning) in exit_codes(&command) {
            let word = ["", "", "bad arguments", "missing"][code.parse::<usize>().expect("a number")];
            assert!(meaning.contains(word), "{command}: {code} is {meaning:?}");
        }
    }
}

#[test]
fn pages_refer_to_pages_and_options_that_exist() {
    let (written, hand_written) = (written(), hand_written());
    let own = |name: &str| name.starts_with("podfs");
    let exists = |name: &str, section: &str| {
        let file = format!("{name}.{section}");
        written.contains_key(&file) || hand_written.contains_key(&file)
    };
    let all: BTreeSet<_> =
        commands().iter().flat_map(|command| all_options(command)).map(|option| option.name).collect();
    for (page, text) in &hand_written {
        let words: Vec<_> = text.split_whitespace().collect();
        for three in words.windows(3).filter(|three| three[0] == "Xr" || three[0] == ".Xr") {
            let section = three[2].trim_end_matches([',', '.', ';']);
            assert!(!own(three[1]) || exists(three[1], section), "{page} refers to {}({section})", three[1]);
        }
        for two in words.windows(2).filter(|two| two[0] == "Fl" || two[0] == ".Fl") {
            let option = two[1].trim_start_matches('-');
            assert!(option == "config" || all.contains(option), "{page} has {}", two[1]);
        }
    }
    for (page, text) in &written {
        let text = plain(text);
        for reference in section(&text, "SEE ALSO").trim().split(", ") {
            let (name, section) = reference.trim_end_matches(')').split_once('(').expect("a page and its section");
            assert!(exists(name, section), "{page} refers to {reference}");
        }
    }
}

#[test]
fn pages_are_clean() {
    let directory = TempDir::with_prefix("podfs-test-").expect("a directory");
    for (name, text) in written().into_iter().chain(hand_written()) {
        let path = directory.path().join(&name);
        fs::write(&path, text).expect("written");
        let linted = Command::new("mandoc").args(["-T", "lint", "-W", "warning"]).arg(&path).output();
        let linted = linted.expect("mandoc");
        assert!(linted.status.success(), "{}", String::from_utf8_lossy(&linted.stdout));
        let shown = Command::new("man").args(["--warnings", "-E", "UTF-8", "-l"]).arg(&path).output().expect("man");
        let warnings = String::from_utf8_lossy(&shown.stderr);
        assert!(shown.status.success() && warnings.is_empty(), "{name}: {warnings}");
        assert!(shown.stdout.len() > 500, "{name} is empty");
    }
}
