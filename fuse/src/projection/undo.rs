//! Undoing what was stored through a writable mapping.
//!
//! A privileged container can remount its bind mount read-write and map a file of it shared and
//! writable. The kernel does not ask before a store: it changes the page that every other reader sees,
//! and only tells the server when the page is written back. The server refuses that WRITE, and lets the
//! kernel drop the page, so that the next reader gets the real bytes again.
//!
//! Dropping pages waits for their locks, so it happens on a thread that answers no requests.

use std::sync::LazyLock;
use std::sync::mpsc::{Sender, channel};
use std::thread;

use super::tree::NodeId;
use crate::session::Notifier;

/// The files to undo, of all volumes. The thread is started with the first.
static QUEUE: LazyLock<Sender<(Notifier, NodeId)>> = LazyLock::new(|| {
    let (sender, files) = channel::<(Notifier, NodeId)>();
    thread::spawn(move || {
        for (notifier, node) in files {
            // The mount may be gone by now, and with it the page.
            let _ = notifier.drop_content(node.0);
        }
    });
    sender
});

/// Undoes stores to the files of one volume.
pub struct Undo(Notifier);

impl Undo {
    /// Tells the kernel by `notifier`.
    pub fn new(notifier: Notifier) -> Self {
        Self(notifier)
    }

    /// Lets the kernel drop what it holds of a file's content.
    pub(super) fn file(&self, node: NodeId) {
        // Fails only when the thread has ended, and it never does.
        let _ = QUEUE.send((self.0.clone(), node));
    }
}
