//! Undoing stores through a writable mapping.
//!
//! A privileged container can remount its bind mount read-write and map a file of it shared and
//! writable. The kernel does not ask before a store: it changes the page that every other reader sees,
//! and sends a request only when the page is written back. The server refuses that WRITE, and lets the kernel drop the page, so
//! that the next reader gets the real bytes again.
//!
//! Dropping pages waits for their locks, so no thread that answers requests does it.

use std::sync::LazyLock;

use crate::session::{NodeId, Notifier, PageInvalidator};

/// The process that undoes stores in all volumes; it starts at the first store. Without it they are undone when the kernel drops
/// the page.
static INVALIDATOR: LazyLock<Option<PageInvalidator>> = LazyLock::new(|| PageInvalidator::start("undo").ok());

/// Undoes stores to the files of one volume.
pub struct Undo(Notifier);

impl Undo {
    /// Notifies the kernel with `notifier`.
    pub fn new(notifier: Notifier) -> Self {
        Self(notifier)
    }

    /// Lets the kernel drop what it holds of a file's content.
    pub(crate) fn file(&self, node: NodeId) {
        if let Some(invalidator) = &*INVALIDATOR {
            invalidator.drop_content(&self.0, node);
        }
    }
}
