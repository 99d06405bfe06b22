//! `podfs version`.

use clap::Args;

use super::exit::Failure;

/// Print the version.
#[derive(Args)]
pub(super) struct Version {}

impl Version {
    pub(super) fn execute(self) -> Result<(), Failure> {
        println!("podfs {}", env!("CARGO_PKG_VERSION"));
        Ok(())
    }
}
