//! Locks.
//!
//! A caller that has got a lock sees what the last holder wrote, also if that holder is a process of the host or uses another volume. So
//! the kernel drops its cached attributes of the file after the lock is granted and before the caller has the answer. It drops
//! cached content, too, if it does not read the source by itself: that may wait for a request (`PageInvalidator`), so a thread of
//! its own does it, and answers. Before such a file is unlocked, the kernel writes what callers stored through mappings.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use rustix::fs::OFlags;
use rustix::io::Errno;

use super::super::locks::{Holder, LockRequest, LockStep, check_lock_limit, conflict, for_locking};
use super::super::node::Node;
use super::super::open_node::OpenNode;
use super::PassthroughFilesystem;
use crate::region::waits::WAITS;
use crate::session::abi::{FlushIn, LkIn, fopen};
use crate::session::{Answer, Exchange, drop_content_of};

/// What the kernel may have cached of a file, and must not use after its lock changes hands.
#[derive(Clone, Copy, PartialEq, Eq)]
enum CachedState {
    Nothing,
    Attributes,
    /// Attributes and pages. Callers may have stored something through a mapping if `mapped`.
    Content {
        mapped: bool,
    },
}

impl PassthroughFilesystem {
    /// A process has closed a descriptor of the file: it has no `fcntl` locks there any more.
    pub(super) fn flush(&self, node: &Arc<Node>, arguments: &FlushIn) -> Result<Answer, Errno> {
        let given_up = node.open().as_mut().map_or(Ok(()), |open| open.locks.give_up(arguments.lock_owner));
        if self.options.remote.is_some() {
            // The next open of the file, on any machine, must find the written data, and the close must return write errors.
            // Closing another descriptor of the same open file does both.
            let same = rustix::io::dup(&*self.files.get(arguments.fh)?.file()?)?;
            nix::unistd::close(same).map_err(|errno| Errno::from_raw_os_error(errno as i32))?;
        }
        given_up.map(|()| Answer::Done)
    }

    pub(super) fn find_lock(&self, node: &Arc<Node>, arguments: &LkIn) -> Result<Answer, Errno> {
        let owner = arguments.owner;
        let (description, file) = {
            let mut open = node.open();
            let open = open.as_mut().ok_or(Errno::BADF)?;
            self.restore_locks(open);
            (open.locks.existing(owner)?, open.file()?)
        };
        let mut found = match description {
            Some(description) => conflict(&description, arguments.lk)?,
            None => conflict(&for_locking(&file)?, arguments.lk)?,
        };
        // The lock of another caller is that of an open file description, for which the kernel names no process.
        if found.typ.cast_signed() != libc::F_UNLCK && found.pid == 0 {
            found.pid = node.open().as_ref().and_then(|open| open.locks.holder(owner)).unwrap_or(0);
        }
        Ok(Answer::Lock(found))
    }

    pub(super) fn set_lock(
        &self,
        node: &Arc<Node>,
        arguments: &LkIn,
        wait: bool,
        exchange: &Exchange<'_>,
    ) -> Result<Answer, Errno> {
        let lock_request = LockRequest::parse(arguments)?;
        if !lock_request.is_unlock() {
            check_lock_limit(&self.region)?;
        }
        let (region, locked, owner) = (Arc::clone(&self.region), Arc::clone(node), arguments.owner);
        let record = move |lock_request| {
            let holder = Holder { region: &region, node: locked.id, owner };
            locked.open().as_mut().map_or(Ok(()), |open| open.locks.record(holder, lock_request))
        };
        let (description, cached) = {
            let mut open = node.open();
            let open = open.as_mut().ok_or(Errno::BADF)?;
            self.restore_locks(open);
            let cached = self.cached_state(node, open);
            let OpenNode { locks, files, .. } = &mut **open;
            if lock_request.is_unlock() {
                match locks.existing(owner)? {
                    Some(description) => (description, cached),
                    None => return Ok(Answer::Done),
                }
            } else {
                let file = files.first().ok_or(Errno::BADF)?.file()?;
                let open = || Ok((for_locking(&file)?, self.descriptor_permit(exchange).map_err(|_| Errno::NOLCK)?));
                (locks.description(&self.region, node.id, arguments, open)?, cached)
            }
        };
        let start = |step| {
            let (notifier, id) = (self.notifier.clone(), node.id);
            let drop_cached = move || match cached {
                CachedState::Nothing => {}
                // The kernel has forgotten the node if this fails.
                CachedState::Attributes => drop(notifier.drop_attributes(id)),
                CachedState::Content { .. } => drop_content_of(&notifier, &[id]),
            };
            let description = Arc::clone(&description);
            let started = self.waits.start(step, lock_request, description, &record, drop_cached, exchange.defer());
            started.map(|()| Answer::Later).inspect_err(|_| self.warn_of_lock_waits())
        };
        if lock_request.is_unlock() {
            if cached == (CachedState::Content { mapped: true })
                && let Ok(later) = start(LockStep::Unlock)
            {
                return Ok(later);
            }
            record(lock_request)?;
            return lock_request.try_on(&description).map(|()| Answer::Done);
        }
        match lock_request.try_on(&description).and_then(|()| record(lock_request)) {
            Ok(()) if matches!(cached, CachedState::Content { .. }) => start(LockStep::Granted).inspect_err(|_| {
                let _recorded = record(lock_request.undone());
                lock_request.undo_on(&description);
            }),
            Ok(()) => {
                if cached == CachedState::Attributes {
                    let _forgotten = self.notifier.drop_attributes(node.id);
                }
                Ok(Answer::Done)
            }
            Err(Errno::AGAIN | Errno::ACCESS) if wait => start(LockStep::Wait),
            Err(errno) => Err(errno),
        }
    }

    /// What the kernel may have cached of the file `node`, whose open files are `open`.
    fn cached_state(&self, node: &Node, open: &OpenNode) -> CachedState {
        if open.backing.is_none() && self.cached_or_direct() & fopen::DIRECT_IO == 0 {
            return CachedState::Content { mapped: open.files.iter().any(|file| file.access() == OFlags::RDWR) };
        }
        if self.validity.keeps_attributes_of(node) { CachedState::Attributes } else { CachedState::Nothing }
    }

    fn warn_of_lock_waits(&self) {
        if !self.are_waits_reported.swap(true, Ordering::Relaxed) {
            let volume = self.options.name.as_str();
            tracing::warn!(
                volume,
                "volume {volume:?}: {WAITS} callers wait for locks; more get ENOLCK until some have theirs"
            );
        }
    }
}
