//! Projections: payloads shown as a directory that switches from one generation to the next.
//!
//! A container sees the layout of the kubelet's `AtomicWriter`:
//!
//! ```text
//! ..2026_11_20_17_46_18.1234567890/   the generation: every file of the payload, immutable
//! ..data -> ..2026_11_20_17_46_18.1234567890
//! app.yaml -> ..data/app.yaml         one link per top-level name
//! ```
//!
//! | module | owns |
//! |---|---|
//! | [`image`] | a payload in a memory file, which both processes share |
//! | [`steps`] | the system calls of a commit, in the `AtomicWriter`'s order |
//! | [`tree`] | the tree of the server: generations, links, node ids; it changes only by announced steps |
//! | [`filesystem`] | the answers to FUSE requests from a [`tree`] |
//! | [`undo`] | undoing stores through a writable mapping |
//! | [`old`] | old generations, until their removal |

pub mod filesystem;
pub mod image;
pub mod old;
pub mod steps;
pub mod tree;
pub mod undo;

mod generation;
mod memory;

pub use generation::GenerationName;
pub use image::{FileEntry, Image, ImageError, ImageLayout};
