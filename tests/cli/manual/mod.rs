//! What podfs says of itself is the same everywhere: `--help`, manual pages, completions, settings and the README. And what its
//! test scripts say of a run.

mod completions;
mod help;
mod inventory;
mod layers;
mod pages;
mod readme;
mod retry;
mod source;
