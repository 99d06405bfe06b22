//! Making the kernel drop pages of files.
//!
//! The kernel waits for pages that are being read, and no signal ends that wait (`invalidate_inode_pages2_range`). A killed
//! process does not end while a thread waits there. Only the next server could answer the reads that hold the pages, but it does
//! not begin before the killed server has ended. So a child process waits. It shares the server's descriptors, as the keeper does,
//! and may outlive the server.

use std::io;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread;

use rustix::io::retry_on_intr;
use rustix::process::{WaitOptions, waitpid};

use super::answer::Notifier;
use super::ids::NodeId;
use crate::child;

/// A node, with the notifier of its volume.
type NodeOfVolume = (Notifier, NodeId);

/// Makes the kernel drop the content of nodes, one after another, on a thread of its own.
pub struct PageInvalidator(Sender<NodeOfVolume>);

impl PageInvalidator {
    /// Starts the thread, with this name. The thread ends when the result is dropped.
    ///
    /// # Errors
    /// When there are no threads left.
    pub fn start(name: &str) -> io::Result<Self> {
        let (sender, nodes) = channel();
        thread::Builder::new().name(name.to_owned()).spawn(move || run(&nodes))?;
        Ok(Self(sender))
    }

    /// Lets the kernel drop its cached pages and attributes of a node, unless it has forgotten the node by then.
    pub fn drop_content(&self, notifier: &Notifier, node: NodeId) {
        // The thread lives as long as this sender.
        let _ = self.0.send((notifier.clone(), node));
    }
}

fn run(nodes: &Receiver<NodeOfVolume>) {
    while let Ok(first) = nodes.recv() {
        let batch: Vec<NodeOfVolume> = std::iter::once(first).chain(nodes.try_iter()).collect();
        // SAFETY: the child makes system calls only. Until it has ended, `batch` keeps the descriptors open here.
        match unsafe { child::start(|| drop_all(&batch)) } {
            // An error means that the child has ended: the kernel reaps a server's children at once.
            Ok(child) => drop(retry_on_intr(|| waitpid(Some(child), WaitOptions::empty()))),
            // No process could be started. If the server is killed now, its end may have to wait.
            Err(_) => drop_all(&batch),
        }
    }
}

/// Lets the kernel drop its cached attributes and pages of these nodes, and waits until it has done so. Only for a thread that
/// answers no requests. The thread can be killed meanwhile.
pub fn drop_content_of(notifier: &Notifier, nodes: &[NodeId]) {
    let drop_all = || nodes.iter().for_each(|node| drop(notifier.drop_content(*node)));
    // SAFETY: the child makes system calls only. Until it has ended, `notifier` keeps the descriptor open here.
    match unsafe { child::start(drop_all) } {
        // An error means that the child has ended.
        Ok(child) => drop(retry_on_intr(|| waitpid(Some(child), WaitOptions::empty()))),
        Err(_) => drop_all(),
    }
}

/// Makes system calls only.
fn drop_all(batch: &[NodeOfVolume]) {
    for (notifier, node) in batch {
        // The kernel may not know the node any more, or the file system may be unmounted.
        let _ = notifier.drop_content(*node);
    }
}
