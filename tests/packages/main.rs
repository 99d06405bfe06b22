//! The packages: their contents, and their effect on a machine where they are installed.

mod built;
#[path = "../common/mod.rs"]
mod common;
mod installed;
