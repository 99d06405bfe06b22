//! The user's documentation in `docs/`, compared with `--help`.

use std::collections::BTreeSet;
use std::fs;

use crate::common::packages::top;
use crate::manual::help::{all_options, commands, exit_codes, options, settings};

/// The README and all pages of the user's documentation, one after the other.
pub fn guide() -> String {
    let mut pages = vec![top().join("README.md")];
    for directory in ["docs/user", "docs/reference"] {
        let entries = fs::read_dir(top().join(directory)).expect(directory);
        pages.extend(entries.map(|entry| entry.expect("an entry").path()));
    }
    // The inventory describes the kubelet, not podfs.
    pages.retain(|page| !page.ends_with("kubelet-inventory.md"));
    pages.sort();
    pages.iter().map(|page| fs::read_to_string(page).expect("a page") + "\n").collect()
}

/// The synopsis of a command: the text after `podfs NAME` in blocks of code, up to the end of the block or the next command.
fn synopsis(guide: &str, command: &str) -> String {
    let blocks = guide.split("```text\n").skip(1).map(|text| text.split("```").next().unwrap_or_default());
    let mut synopsis = String::new();
    for block in blocks {
        let mut is_this = false;
        for line in block.lines() {
            if !line.starts_with(' ') {
                is_this = line.split(' ').take(2).eq(["podfs", command]);
            }
            if is_this {
                synopsis = synopsis + line.trim() + " ";
            }
        }
    }
    synopsis
}

/// The rows of the table below this heading line.
fn table<'a>(guide: &'a str, heading: &str) -> Vec<Vec<&'a str>> {
    let text = guide.split(heading).nth(1).unwrap_or_else(|| panic!("there is no table {heading}"));
    let rows = text.lines().skip(1).take_while(|line| line.starts_with('|'));
    rows.map(|row| row.trim_matches('|').split(" |").map(|cell| cell.trim().trim_matches('`')).collect()).collect()
}

fn long_options(text: &str) -> BTreeSet<String> {
    let words = text.split(|c: char| !c.is_ascii_alphanumeric() && c != '-');
    words.filter_map(|word| word.strip_prefix("--")).map(str::to_owned).collect()
}

#[test]
fn every_command_is_called_with_all_its_options() {
    let guide = guide();
    for command in commands() {
        let synopsis = synopsis(&guide, &command);
        assert!(!synopsis.is_empty(), "docs/ does not say how to call podfs {command}");
        let own = all_options(&command).into_iter().map(|option| option.name);
        // The documentation has only the short form of this option.
        let own: BTreeSet<_> = own.filter(|name| name != "file").collect();
        assert_eq!(long_options(&synopsis), own, "{synopsis}");
    }
}

#[test]
fn the_table_of_options_has_every_one_with_its_default() {
    let guide = guide();
    let rows = table(&guide, "| option | meaning | default |\n");
    let listed: BTreeSet<_> = rows.iter().flat_map(|row| long_options(row[0])).collect();
    let run = options("run");
    assert_eq!(listed, run.iter().map(|option| option.name.clone()).collect());
    for option in run {
        let row = rows.iter().find(|row| long_options(row[0]).contains(&option.name)).expect("a row");
        if let Some(default) = option.default {
            assert_eq!(row[2], default, "--{}", option.name);
        }
    }
}

#[test]
fn the_table_of_settings_is_that_of_podfs() {
    let guide = guide();
    let rows = table(&guide, "| key, and option | variable | default |\n");
    let expected: Vec<_> = settings()
        .into_iter()
        .map(|setting| {
            let default = setting.default.unwrap_or_default();
            // A flag that is not given is false.
            let flags = ["in-cluster", "release-when-gone", "report-volumes-in-use", "register-csi-drivers"];
            let is_flag = flags.contains(&setting.name.as_str());
            let default = if is_flag { "false".to_owned() } else { default };
            vec![setting.name, setting.variable.expect("a variable"), default]
        })
        .collect();
    assert_eq!(rows, expected);
}

#[test]
fn the_table_of_exit_codes_is_that_of_run() {
    let guide = guide();
    let rows = table(&guide, "| exit code | meaning |\n");
    let codes: Vec<_> = exit_codes("run").into_iter().map(|(code, _)| code).collect();
    assert_eq!(rows.iter().map(|row| row[0]).collect::<Vec<_>>(), codes);
}
