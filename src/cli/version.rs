//! `podfs version`.

use clap::Args;

use super::exit::Failure;

/// Print the version.
#[derive(Args)]
#[command(after_help = "\
EXIT STATUS:
  0  it is printed
  2  bad arguments

EXAMPLES:
  podfs version")]
pub(super) struct Version {}

impl Version {
    pub(super) fn execute(self) -> Result<(), Failure> {
        println!("podfs {}", env!("CARGO_PKG_VERSION"));
        Ok(())
    }
}
