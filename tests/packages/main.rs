//! The packages: their contents, and their behaviour on a machine on which they are installed.

mod built;
#[path = "../common/mod.rs"]
mod common;
mod installed;
