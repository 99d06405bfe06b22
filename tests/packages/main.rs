//! The packages: what is in them, and what they do on a machine where they are installed.

mod built;
#[path = "../common/mod.rs"]
mod common;
mod installed;
