//! Having the kernel drop what it holds of files' content.
//!
//! The kernel waits for pages that are being read, and no signal ends that wait (`invalidate_inode_pages2_range`). A thread
//! that waits there keeps its process from ending when that is killed. What it waits for would be answered by the next
//! server, which does not begin before the last one has ended. So the wait is a process of its own: a child that shares the
//! server's descriptors, as the keeper does, and outlives it if it has to.

use std::io;
use std::os::fd::AsRawFd;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread;

use super::answer::Notifier;

/// A file of a mount, as the kernel numbers it.
type Node = (Notifier, u64);

/// Has the kernel drop content, one lot after another. Nobody waits for it.
pub struct Dropper(Sender<Node>);

impl Dropper {
    /// Starts it, with a thread of this name, which ends with it.
    ///
    /// # Errors
    /// When there are no threads left.
    pub fn start(name: &str) -> io::Result<Self> {
        let (sender, nodes) = channel();
        thread::Builder::new().name(name.to_owned()).spawn(move || run(&nodes))?;
        Ok(Self(sender))
    }

    /// Lets the kernel drop what it holds of a node's content, unless it has forgotten the node by then.
    pub fn drop_content(&self, notifier: &Notifier, node: u64) {
        // The thread lives as long as this.
        let _ = self.0.send((notifier.clone(), node));
    }
}

fn run(nodes: &Receiver<Node>) {
    while let Ok(first) = nodes.recv() {
        let lot: Vec<Node> = std::iter::once(first).chain(nodes.try_iter()).collect();
        let messages: Vec<_> =
            lot.iter().map(|(notifier, node)| (notifier.device.as_raw_fd(), Notifier::content(*node))).collect();
        // SAFETY: the child has memory of its own and makes system calls only, so it does not matter what other threads
        // held when they were left behind. Until it has ended, `lot` keeps the descriptors open here.
        match unsafe { libc::syscall(libc::SYS_clone, libc::CLONE_FILES | libc::SIGCHLD, 0, 0, 0, 0) } {
            0 => child(&messages),
            child if child > 0 => wait_for(child as libc::pid_t),
            // There are no processes left. A server that is killed now may have to wait for its end.
            _ => tell(&messages),
        }
    }
}

/// The life of the child.
fn child(messages: &[(i32, [u8; Notifier::LENGTH])]) -> ! {
    // SAFETY: these calls take numbers, and memory that outlives them; nothing is to be cleaned up.
    unsafe {
        let mut all = std::mem::zeroed();
        libc::sigfillset(&raw mut all);
        libc::sigprocmask(libc::SIG_SETMASK, &raw const all, std::ptr::null_mut());
        tell(messages);
        libc::_exit(0)
    }
}

/// Makes system calls only.
fn tell(messages: &[(i32, [u8; Notifier::LENGTH])]) {
    for (device, message) in messages {
        // The kernel may not know the node any more, or the file system may be unmounted.
        // SAFETY: the message has as many bytes as the call is told.
        let _ = unsafe { libc::write(*device, message.as_ptr().cast(), message.len()) };
    }
}

fn wait_for(child: libc::pid_t) {
    // It is gone when there is no such child, too: a server's children are forgotten at once.
    // SAFETY: nobody wants to know how it ended.
    while unsafe { libc::waitpid(child, std::ptr::null_mut(), 0) } < 0
        && io::Error::last_os_error().kind() == io::ErrorKind::Interrupted
    {}
}
