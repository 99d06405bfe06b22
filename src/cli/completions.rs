//! `podfs completions`: scripts with which shells complete command lines of podfs.

use clap::{Args, CommandFactory, ValueEnum};
use clap_complete::{Generator, generate};

use super::Cli;
use super::config::with_variables;
use super::exit::Failure;

/// Print a script with which a shell completes command lines of podfs.
#[derive(Args)]
#[command(after_help = "\
EXIT STATUS:
  0  it is printed
  1  standard output cannot be written
  2  bad arguments

EXAMPLES:
  podfs completions bash >/usr/share/bash-completion/completions/podfs
  podfs completions zsh >/usr/share/zsh/vendor-completions/_podfs
  podfs completions fish >/usr/share/fish/vendor_completions.d/podfs.fish")]
pub(super) struct Completions {
    /// The shell.
    #[arg(value_enum, value_name = "SHELL")]
    shell: Shell,
}

#[derive(Clone, Copy, ValueEnum)]
enum Shell {
    Bash,
    Zsh,
    Fish,
}

impl Completions {
    pub(super) fn execute(self) -> Result<(), Failure> {
        match self.shell {
            Shell::Bash => print(clap_complete::Shell::Bash),
            Shell::Zsh => print(clap_complete::Shell::Zsh),
            Shell::Fish => print(clap_complete::Shell::Fish),
        }
    }
}

fn print(shell: impl Generator) -> Result<(), Failure> {
    let mut text = Vec::new();
    generate(shell, &mut with_variables(Cli::command()), "podfs", &mut text);
    super::status::print_for_programs(&String::from_utf8_lossy(&text))
}
