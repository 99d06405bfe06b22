//! The allocatable resources of a node.

/// The resources that a node offers to pods. The downward API shows them as the limits of a container that has none.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Allocatable {
    /// Thousandths of a core.
    pub cpu_milli: u64,
    /// Bytes of memory.
    pub memory_bytes: u64,
    /// Bytes of local storage.
    pub ephemeral_storage_bytes: u64,
}
