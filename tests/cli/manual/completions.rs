//! Completions of shells.

use std::fs;
use std::process::Command;

use tempfile::TempDir;

use crate::manual::help::{all_options, commands, inner, podfs};

/// Writes the name of an option as the completion script of a shell has it.
type Spelling = fn(&str) -> String;

const SHELLS: [(&str, &[&str], Spelling); 3] = [
    ("bash", &["-n"], |name| format!("--{name}")),
    ("zsh", &["-n"], |name| format!("--{name}")),
    ("fish", &["--no-execute"], |name| format!("-l {name} ")),
];

#[test]
fn every_shell_knows_every_command_and_option() {
    let directory = TempDir::with_prefix("podfs-test-").expect("a directory");
    for (shell, check, spelling) in SHELLS {
        let script = podfs(&["completions", shell]);
        let path = directory.path().join(shell);
        fs::write(&path, &script).expect("written");
        let checked = Command::new(shell).args(check).arg(&path).output().expect(shell);
        assert!(
            checked.status.success() && checked.stderr.is_empty(),
            "{shell}: {}",
            String::from_utf8_lossy(&checked.stderr)
        );
        for command in commands() {
            assert!(script.contains(&command), "{shell} does not know {command}");
            for inner in inner(&command) {
                assert!(script.contains(&inner), "{shell} does not know {command} {inner}");
            }
            for option in all_options(&command) {
                assert!(
                    script.contains(&spelling(&option.name)),
                    "{shell} does not know --{} of {command}",
                    option.name
                );
            }
        }
    }
}

#[test]
fn bash_completes_commands_options_and_words() {
    let complete = |words: &str, last: &str| {
        let script = podfs(&["completions", "bash"])
            + &format!("COMP_WORDS=({words} {last}); COMP_CWORD=$((${{#COMP_WORDS[@]}} - 1))\n")
            + &format!("_podfs podfs '{last}' \"${{COMP_WORDS[COMP_CWORD - 1]}}\"; echo \"${{COMPREPLY[*]}}\"\n");
        let output = Command::new("bash").arg("-c").arg(script).output().expect("bash");
        String::from_utf8(output.stdout).expect("text").trim().to_owned()
    };
    assert_eq!(complete("podfs", "stat"), "status");
    assert_eq!(complete("podfs run", "--server"), "--server-memory-max");
    assert_eq!(complete("podfs run --log-format", "j"), "json");
    assert_eq!(complete("podfs node", "rel"), "release");
    assert_eq!(complete("podfs node wait", "--unm"), "--unmounted");
}
