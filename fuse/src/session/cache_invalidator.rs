//! Making the kernel drop what it has cached: pages of files, and names.
//!
//! The kernel waits for pages that are being read, and for calls that change the directory of a name, and no signal ends that wait
//! (`invalidate_inode_pages2_range`, `inode_lock`). A killed process does not end while a thread waits there. Only the next server could
//! answer the requests that the kernel waits for, but it does not begin before the killed server has ended. So a child process waits. It
//! shares the server's descriptors, as the keeper does, and may outlive the server.

use std::ffi::CString;
use std::io;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread;

use rustix::io::retry_on_intr;
use rustix::process::{WaitOptions, waitpid};

use super::answer::Notifier;
use super::ids::NodeId;
use crate::child;

/// What the kernel drops, with the notifier of its volume.
type Drops = (Notifier, Cached);

/// Something that the kernel has cached.
enum Cached {
    /// The pages and attributes of a node.
    Content(NodeId),
    /// A name in a directory.
    Name(NodeId, CString),
}

/// Makes the kernel drop what it has cached, one thing after another, on a thread of its own.
pub struct CacheInvalidator(Sender<Drops>);

impl CacheInvalidator {
    /// Starts the thread, with this name. The thread ends when the result is dropped.
    ///
    /// # Errors
    /// When there are no threads left.
    pub fn start(name: &str) -> io::Result<Self> {
        let (sender, drops) = channel();
        thread::Builder::new().name(name.to_owned()).spawn(move || run(&drops))?;
        Ok(Self(sender))
    }

    /// Lets the kernel drop its cached pages and attributes of a node, unless it has forgotten the node by then.
    pub fn drop_content(&self, notifier: &Notifier, node: NodeId) {
        self.send(notifier, Cached::Content(node));
    }

    /// Lets the kernel look a name in a directory up when it needs the name next. What is mounted there stays. Only if the session has
    /// accepted [`init::HAS_EXPIRE_ONLY`](super::abi::init::HAS_EXPIRE_ONLY).
    pub fn expire_name(&self, notifier: &Notifier, directory: NodeId, name: &[u8]) {
        // No name of a file has a zero byte.
        if let Ok(name) = CString::new(name) {
            self.send(notifier, Cached::Name(directory, name));
        }
    }

    fn send(&self, notifier: &Notifier, cached: Cached) {
        // The thread lives as long as this sender.
        let _ = self.0.send((notifier.clone(), cached));
    }
}

fn run(drops: &Receiver<Drops>) {
    while let Ok(first) = drops.recv() {
        let batch: Vec<Drops> = std::iter::once(first).chain(drops.try_iter()).collect();
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
fn drop_all(batch: &[Drops]) {
    for (notifier, cached) in batch {
        // The kernel may not know the node any more, or the file system may be unmounted.
        let _ = match cached {
            Cached::Content(node) => notifier.drop_content(*node),
            Cached::Name(directory, name) => notifier.expire_name(*directory, name),
        };
    }
}
