//! Opening a node by its place, because it has neither a lasting handle nor a descriptor.

use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;

use rustix::fs::{Mode, OFlags, openat};
use rustix::io::Errno;

use super::attributes::attributes_of;
use super::node::Node;
use super::nodes::SharedNodes;
use super::places::PlaceInDirectory;

impl SharedNodes {
    /// Opens a node without a handle by its place, with `O_PATH`. `levels` limits the number of directories above it.
    ///
    /// # Errors
    /// `ESTALE` when the place has another file or none, and those of `open(2)`.
    pub fn open_by_place(self: &Arc<Self>, node: &Node, levels: usize) -> Result<OwnedFd, Errno> {
        let levels = levels.checked_sub(1).ok_or(Errno::STALE)?;
        let PlaceInDirectory { parent, name } = node.place().ok_or(Errno::STALE)?;
        let parent = self.get(parent).ok_or(Errno::STALE)?;
        let directory = match parent.held() {
            Some(held) => held,
            None if parent.handle().is_some() => Arc::new(parent.reopen(OFlags::PATH)?),
            None => Arc::new(self.open_by_place(&parent, levels)?),
        };
        let flags = OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let opened = openat(&*directory, &*name, flags, Mode::empty());
        let file = opened.map_err(|errno| if errno == Errno::NOENT { Errno::STALE } else { errno })?;
        if node.is_of(&attributes_of(file.as_fd())?) { Ok(file) } else { Err(Errno::STALE) }
    }
}
