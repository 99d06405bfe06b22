//! What podfs says of itself is the same everywhere: `--help`, manual pages, completions, settings and the documentation. And what its
//! test scripts say of a run.

mod completions;
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
