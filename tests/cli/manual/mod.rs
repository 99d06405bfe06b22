//! Checks that `--help`, manual pages, completions, settings and the documentation agree, and the reports of the test scripts.

mod completions;
mod golden;
mod guide;
mod help;
mod imports;
mod inventory;
mod layers;
mod links;
mod names;
mod pages;
mod retry;
pub mod source;
