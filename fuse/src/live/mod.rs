//! Live parts of a projection: single paths of its payload, shown as plain files and directories that change in place.
//!
//! A container that mounts one path of a projection (`subPath`) has one generation for ever, because a bind mount belongs
//! to an inode. A *live* mount follows the payload instead. For live mounts, the supervisor mounts a second, small file system
//! beside the projection, and attaches it nowhere:
//!
//! ```text
//! 0              slot of the path app.yaml: a file
//! 1/             slot of the path conf.d: a directory
//! 1/log.yaml     conf.d/log.yaml of the payload
//! ```
//!
//! A container's target is a read-only bind mount of a *slot*. A slot keeps its inode for as long as the volume is mounted,
//! also if its path vanishes. `docs/design/live-sub-paths.md` has the reasons and the proofs.
//!
//! | module | owns |
//! |---|---|
//! | [`tree`] | the tree of the server, its replica in the supervisor, and how both change: by announced steps |
//! | [`step`] | one of these steps |
//! | [`plan`](mod@plan) | the steps from one payload to another |
//! | [`filesystem`] | the FUSE side, and the swap, at which files get other bytes |

pub mod filesystem;
pub mod plan;
pub mod step;
pub mod tree;
