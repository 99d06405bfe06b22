//! The account of a volume with a limit: the checks for room, and the charges of what requests make and remove.

use std::ffi::OsStr;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

use rustix::fs::{Mode, OFlags, openat};
use rustix::io::Errno;

use super::super::attributes::{attributes_of, bytes_taken};
use super::super::node::Node;
use super::super::usage::QuotaLock;
use super::PassthroughFilesystem;
use crate::session::{Answer, Exchange, NodeId};

/// How long a request that finds no free space waits for a RELEASE that may be under way.
const RELEASE_TIMEOUT: Duration = Duration::from_millis(250);

impl PassthroughFilesystem {
    /// Charges a node of a limited volume with the space that it takes now.
    pub(super) fn settle(&self, node: &Arc<Node>, file: BorrowedFd<'_>) {
        if let Some(usage) = &self.usage {
            usage.lock().settle(node, file);
        }
    }

    /// Fails if there is no room for what the request makes. Does not check a request that a dead server may have executed
    /// already.
    pub(super) fn check_space(
        &self,
        exchange: &Exchange<'_>,
        check: impl Fn(&QuotaLock<'_>) -> Result<(), Errno>,
    ) -> Result<(), Errno> {
        match &self.usage {
            Some(usage) if exchange.earlier().is_none() => self.ask(&mut usage.lock(), check),
            _ => Ok(()),
        }
    }

    /// Calls `check` on the account. If there is no room, makes unused blocks of the root directory free, and checks again. Then waits
    /// for the end of RELEASEs that are under way.
    pub(super) fn ask<T>(
        &self,
        account: &mut QuotaLock<'_>,
        check: impl Fn(&QuotaLock<'_>) -> Result<T, Errno>,
    ) -> Result<T, Errno> {
        let checked = check(account);
        let root = if matches!(checked, Err(Errno::NOSPC)) { self.nodes.get(NodeId::ROOT) } else { None };
        let freed = root.is_some_and(|root| {
            root.held().is_some_and(|directory| account.free_blocks_of_root(&root, directory.as_fd()))
        });
        let mut checked = if freed { check(account) } else { checked };
        let until = Instant::now() + RELEASE_TIMEOUT;
        while matches!(checked, Err(Errno::NOSPC)) && self.files.has_nameless() && account.wait_for_close(until) {
            checked = check(account);
        }
        checked
    }

    /// Adapts the account of a limited volume after a name is gone. Returns the answer to the request.
    pub(super) fn removed(&self, removal: Option<LastNameRemoval>, exchange: &Exchange<'_>) -> Answer {
        self.discharge(removal, exchange);
        if let Some(usage) = &self.usage {
            usage.name_removed();
        }
        Answer::Done
    }

    /// The file that loses its last name when `name` is removed, in a volume with a limit.
    pub(super) fn last_name_removal(
        &self,
        directory: &OwnedFd,
        parent: &Arc<Node>,
        name: &OsStr,
    ) -> Option<LastNameRemoval> {
        self.usage.as_ref()?;
        let found = self.last_name_of(directory, name)?;
        let flags = OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let file = openat(directory, name, flags, Mode::empty()).ok()?;
        let (identity, _) = self.mounts.identify(file.as_fd(), Some(parent)).ok()?;
        Some(LastNameRemoval { node: self.nodes.find(&identity), bytes: bytes_taken(&found) })
    }

    /// Removes the charge of a file whose last name is gone. If a dead server has removed the name, there is no `removal`, but the
    /// note of that server names the node.
    fn discharge(&self, removal: Option<LastNameRemoval>, exchange: &Exchange<'_>) {
        let Some(usage) = &self.usage else { return };
        let earlier = || {
            let node = self.nodes.get(NodeId(exchange.earlier()?.note))?;
            // A file that has no name and is not open does not exist any more.
            let gone = match self.descriptor(&node).and_then(|file| attributes_of(file.as_fd())) {
                Ok(found) => found.stx_nlink == 0,
                Err(errno) => errno == Errno::STALE,
            };
            gone.then_some(LastNameRemoval { node: Some(node), bytes: 0 })
        };
        let Some(removal) = removal.or_else(earlier) else { return };
        let Some(node) = removal.node else { return usage.lock().give_back(removal.bytes) };
        match &*node.open() {
            // The bytes of the file stay until its last open file is closed.
            Some(_) => node.set_nameless(true),
            None => usage.lock().discharge(&node),
        }
    }
}

/// A file that loses its last name.
pub(super) struct LastNameRemoval {
    /// `None` if the kernel does not know the file.
    node: Option<Arc<Node>>,
    bytes: u64,
}

impl LastNameRemoval {
    /// The node's number.
    pub(super) fn note(&self) -> u64 {
        self.node.as_ref().map_or(0, |node| node.id.0)
    }
}
