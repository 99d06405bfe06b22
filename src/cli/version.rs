//! `podfs version`.

use clap::Args;

use super::exit::Failure;
use super::status::print;

/// Print the version.
#[derive(Args)]
#[command(after_help = "\
EXIT STATUS:
  0  it is printed
  1  it cannot be printed
  2  bad arguments

EXAMPLES:
  podfs version")]
pub(super) struct Version {}

impl Version {
    pub(super) fn execute(self) -> Result<(), Failure> {
        print(&format!("podfs {}\n", env!("CARGO_PKG_VERSION")))
    }
}
