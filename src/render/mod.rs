//! The future content of a pod's volumes, without mounting them: for people, for programs, as files and as an archive.
//!
//! | module | owns |
//! |---|---|
//! | [`model`] | the entries of each volume, as `podfs run` shows them |
//! | [`tree`] | text for people |
//! | [`json`] | one JSON document |
//! | [`directory`] | files below a directory |
//! | [`tar`] | a tar archive |
//! | [`diff`] | the differences between two renderings |
//! | `lines` | which lines of two texts differ |
//!
//! Nothing here needs Linux: a rendering depends on the manifests alone, and not on the machine.

pub mod diff;
pub mod directory;
pub mod json;
mod lines;
pub mod model;
pub mod tar;
pub mod tree;
