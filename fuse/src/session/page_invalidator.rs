//! Making the kernel drop pages of files.
//!
//! The kernel waits for pages that are being read, and no signal ends that wait (`invalidate_inode_pages2_range`). A killed
//! process does not end while a thread waits there. Only the next server could answer the reads that hold the pages, but it does
//! not begin before the last one has ended. So a child process waits, which shares the server's descriptors, as the keeper does,
//! and may outlive the server.

use std::io;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread;

use rustix::io::retry_on_intr;
use rustix::process::{WaitOptions, waitpid};

use super::answer::Notifier;
use super::ids::NodeId;
use crate::child;

/// A file of a mount, as the kernel numbers it.
type NodeOfVolume = (Notifier, NodeId);

/// Makes the kernel drop the content of nodes, one after another, on a thread of its own.
pub struct PageInvalidator(Sender<NodeOfVolume>);

impl PageInvalidator {
    /// Starts it, with a thread of this name, which ends with it.
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
        // The thread lives as long as this.
        let _ = self.0.send((notifier.clone(), node));
    }
}

fn run(nodes: &Receiver<NodeOfVolume>) {
    while let Ok(first) = nodes.recv() {
        let lot: Vec<NodeOfVolume> = std::iter::once(first).chain(nodes.try_iter()).collect();
        // SAFETY: it makes system calls only. Until it has ended, `lot` keeps the descriptors open here.
        match unsafe { child::start(|| tell(&lot)) } {
            // An error means that the child has ended: the kernel reaps a server's children at once.
            Ok(child) => drop(retry_on_intr(|| waitpid(Some(child), WaitOptions::empty()))),
            // No process could be started. If the server is killed now, its end may have to wait.
            Err(_) => tell(&lot),
        }
    }
}

/// Lets the kernel drop its cached attributes and pages of these nodes, and waits until it has. Only for a thread that
/// answers no requests. The thread can be killed meanwhile.
pub fn drop_content_of(notifier: &Notifier, nodes: &[NodeId]) {
    let tell = || nodes.iter().for_each(|node| drop(notifier.drop_content(*node)));
    // SAFETY: it makes system calls only. Until it has ended, `notifier` keeps the descriptor open here.
    match unsafe { child::start(tell) } {
        // An error means that the child has ended.
        Ok(child) => drop(retry_on_intr(|| waitpid(Some(child), WaitOptions::empty()))),
        Err(_) => tell(),
    }
}

/// Makes system calls only.
fn tell(lot: &[NodeOfVolume]) {
    for (notifier, node) in lot {
        // The kernel may not know the node any more, or the file system may be unmounted.
        let _ = notifier.drop_content(*node);
    }
}
