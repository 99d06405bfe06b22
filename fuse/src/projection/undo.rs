//! Undoing what was stored through a writable mapping.
//!
//! A privileged container can remount its bind mount read-write and map a file of it shared and
//! writable. The kernel does not ask before a store: it changes the page that every other reader sees,
//! and only tells the server when the page is written back. The server refuses that WRITE, and lets the
//! kernel drop the page, so that the next reader gets the real bytes again.
//!
//! Dropping pages waits for their locks, so it happens on a thread that answers no requests.

use std::sync::mpsc::{Sender, channel};
use std::sync::{LazyLock, OnceLock};
use std::thread;

use fuser::{INodeNo, Notifier};

/// The files to undo, of all volumes. The thread is started with the first.
static QUEUE: LazyLock<Sender<(Notifier, INodeNo)>> = LazyLock::new(|| {
    let (sender, files) = channel::<(Notifier, INodeNo)>();
    thread::spawn(move || {
        for (notifier, node) in files {
            // The mount may be gone by now, and with it the page.
            let _ = notifier.inval_inode(node, 0, 0);
        }
    });
    sender
});

/// Undoes stores to the files of one volume.
#[derive(Default)]
pub struct Undo(OnceLock<Notifier>);

impl Undo {
    /// From now on the kernel can be told.
    pub fn enable(&self, notifier: Notifier) {
        // There is one session per volume, so this is the first and only notifier.
        let _ = self.0.set(notifier);
    }

    /// Lets the kernel drop what it holds of a file's content.
    pub(super) fn file(&self, node: INodeNo) {
        if let Some(notifier) = self.0.get() {
            // Fails only when the thread has ended, and it never does.
            let _ = QUEUE.send((notifier.clone(), node));
        }
    }
}
