//! Undoes stores through a writable mapping.
//!
//! A privileged container can remount its bind mount read-write and map a file of it shared and
//! writable. The kernel sends no request before a store: it changes the page in the page cache, which all readers share,
//! and sends WRITE only when it writes the page back. The server refuses that WRITE, and makes the kernel drop the page, so
//! that the next reader gets the real bytes again.
//!
//! To drop pages waits for their locks, so another process does it, not a thread that answers requests.

use std::sync::LazyLock;

use crate::session::{NodeId, Notifier, PageInvalidator};

/// The process that undoes stores in all volumes. It starts at the first store. Without it, a store stays until the kernel
/// drops the page.
static INVALIDATOR: LazyLock<Option<PageInvalidator>> = LazyLock::new(|| PageInvalidator::start("undo").ok());

/// Undoes stores to the files of one volume.
pub struct Undo(Notifier);

impl Undo {
    /// Uses `notifier` to notify the kernel.
    pub fn new(notifier: Notifier) -> Self {
        Self(notifier)
    }

    /// Makes the kernel drop the cached pages of a file.
    pub(crate) fn file(&self, node: NodeId) {
        if let Some(invalidator) = &*INVALIDATOR {
            invalidator.drop_content(&self.0, node);
        }
    }
}
