//! The state of a volume: nodes, their names, open files, calls under way. All of it is in the volume's region too, for the
//! successor.
//!
//! | module | owns |
//! |---|---|
//! | `state` | its form in the region |
//! | `name` | the name by which a node was found |
//! | `node` | the files that the kernel knows |
//! | `freshness` | how long attributes of a node are valid |
//! | `open_files` | open files and directories |
//! | `listing` | how far a directory was read |
//! | `calls` | calls that must not take effect twice |
//! | `inherit` | reading the state that a dead server left |
//!
//! One thread uses the whole state. No cell stays borrowed across an `await`.

pub mod calls;
pub mod freshness;
pub mod inherit;
pub mod listing;
pub mod name;
pub mod node;
pub mod open_files;
pub mod state;
#[cfg(test)]
mod tests;

use std::rc::Rc;

use calls::Calls;
use node::NfsNodes;
use open_files::{NfsOpenFile, NfsOpenFiles};

use crate::session::{HandleId, NodeId};

/// The whole state of a volume.
pub struct ClientState {
    /// The files that the kernel knows.
    pub nodes: NfsNodes,
    /// Open files and directories.
    pub files: NfsOpenFiles,
    /// Calls that may not be made twice.
    pub calls: Calls,
}

impl ClientState {
    /// Closes an open file. It stays among the closed files while `has_data` holds for its node, because data is still to be written
    /// through it. Otherwise, its node is dropped, too, if the kernel has forgotten the node before and `is_dirty` does not hold for
    /// it.
    pub fn close(
        &self,
        handle: HandleId,
        has_data: impl Fn(NodeId) -> bool,
        is_dirty: impl Fn(NodeId) -> bool,
    ) -> Option<Rc<NfsOpenFile>> {
        let node = self.files.get(handle).ok()?.node.id;
        let open = self.files.remove(handle, has_data(node));
        self.nodes.drop_forgotten(is_dirty);
        open
    }
}
