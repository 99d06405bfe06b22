//! The allocatable resources of a node.

/// The resources that a node offers to pods: the limit of containers that have none.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Allocatable {
    /// Thousandths of a core.
    pub cpu_milli: u64,
    /// Bytes of memory.
    pub memory_bytes: u64,
    /// Bytes of local storage.
    pub ephemeral_storage_bytes: u64,
}
