//! A limit on what a volume takes, counted by the server.
//!
//! Every write goes through the server then (no kernel passthrough), which refuses what does not fit with `ENOSPC`
//! before it is done. What is counted is what `du(1)` counts: the blocks of each file, once, however many names it
//! has. Files are charged when they grow and discharged when their last name or last open file goes; each look at a
//! file puts right what the source did on its own, such as blocks that it only decided on when it wrote them.
//!
//! The account and what each node is charged with stand in the region. A charge changes both: it is written down as a
//! whole before, and a successor that finds it so makes it once more. What a node is charged with is always set, never
//! added to, so what is done again for a request that is asked for again changes nothing.

use std::collections::HashSet;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::atomic::Ordering::{Relaxed, Release};
use std::sync::{Arc, Mutex, MutexGuard};

use rustix::fs::{FileType, Mode, OFlags, openat};
use rustix::io::Errno;

use super::attributes::{attributes_of, bytes_taken, kind};
use super::extents;
use super::listing::Listing;
use super::node::{Node, ROOT};
use crate::region::Region;
use crate::region::header::Counters;
use crate::session::abi::Kstatfs;

/// What files grow by.
const BLOCK: u64 = 4096;

/// The limit and what is taken of it, in bytes.
pub struct Usage {
    limit: u64,
    region: Arc<Region>,
    right: Mutex<()>,
}

/// The sole right to change what is taken: held from looking for room until it is taken, and from looking at a file
/// until it is charged with what it takes.
pub struct Account<'a> {
    limit: u64,
    counters: &'a Counters,
    _right: MutexGuard<'a, ()>,
}

impl Usage {
    /// Counts what is in `source` already; the directory itself is free.
    ///
    /// # Errors
    /// When the source cannot be read.
    pub fn measure(source: BorrowedFd<'_>, limit: u64, region: Arc<Region>) -> Result<Usage, Errno> {
        region.header().counters.used.store(taken_below(source)?, Release);
        Ok(Self::inherit(limit, region))
    }

    /// As a dead server left it.
    pub fn inherit(limit: u64, region: Arc<Region>) -> Usage {
        Usage { limit, region, right: Mutex::new(()) }
    }

    /// Keeps everybody else from the account until it is dropped.
    pub fn lock(&self) -> Account<'_> {
        let right = self.right.lock().expect("a thread that panics ends the process");
        Account { limit: self.limit, counters: &self.region.header().counters, _right: right }
    }

    /// The file system as a whole, as far as the limit lets it be used.
    pub fn narrow(&self, whole: Kstatfs) -> Kstatfs {
        let unit = u64::from(whole.frsize.max(1));
        let room = self.lock().room() / unit;
        Kstatfs {
            blocks: (self.limit / unit).min(whole.blocks),
            bfree: room.min(whole.bfree),
            bavail: room.min(whole.bavail),
            ..whole
        }
    }
}

impl Account<'_> {
    /// How many of the `length` bytes at `offset` of `file` can be written.
    ///
    /// # Errors
    /// `ENOSPC` when none can.
    pub fn room_for(&self, file: BorrowedFd<'_>, offset: u64, length: u64) -> Result<u64, Errno> {
        let mut room = self.room();
        if length.saturating_add(2 * BLOCK) <= room || length == 0 {
            return Ok(length);
        }
        let end = offset.saturating_add(length).next_multiple_of(BLOCK);
        let mut position = offset - offset % BLOCK;
        while position < end {
            // Blocks that are there already cost nothing, a hole costs its own.
            let there = extents::first_in(file, position..end)?.unwrap_or(end..end);
            let hole = there.start - position;
            if hole > room {
                let fits = position + (room - room % BLOCK);
                return if fits > offset { Ok(fits - offset) } else { Err(Errno::NOSPC) };
            }
            room -= hole;
            position = there.end.next_multiple_of(BLOCK);
        }
        Ok(length)
    }

    /// # Errors
    /// `ENOSPC` when a directory or a link does not fit any more.
    pub fn check_room_for_node(&self) -> Result<(), Errno> {
        if self.room() >= BLOCK { Ok(()) } else { Err(Errno::NOSPC) }
    }

    /// Charges `node`, open as `file`, with what it takes now.
    pub fn settle(&mut self, node: &Node, file: BorrowedFd<'_>) {
        // The root is free, and what cannot be looked at stays as it was.
        if let (false, Ok(found)) = (node.id == ROOT, attributes_of(file)) {
            self.charge(node, bytes_taken(&found));
        }
    }

    /// `node` takes nothing any more.
    pub fn discharge(&mut self, node: &Node) {
        self.charge(node, 0);
    }

    /// A file that the kernel does not know, and that took `bytes`, is gone.
    pub fn give_back(&mut self, bytes: u64) {
        self.counters.used.store(self.used().saturating_sub(bytes), Release);
    }

    /// `node` takes `bytes` now.
    pub fn charge(&mut self, node: &Node, bytes: u64) {
        let before = node.record.charged.load(Relaxed);
        if before == bytes {
            return;
        }
        let used = self.used().saturating_add(bytes).saturating_sub(before);
        let redo = &self.counters.redo;
        redo.charged.store(bytes, Release);
        redo.used.store(used, Release);
        redo.cell.store(node.record.id().to_word(), Release);
        node.record.charged.store(bytes, Release);
        self.counters.used.store(used, Release);
        redo.cell.store(0, Release);
    }

    fn used(&self) -> u64 {
        self.counters.used.load(Relaxed)
    }

    fn room(&self) -> u64 {
        self.limit.saturating_sub(self.used())
    }
}

/// What is taken by what is below a directory. Other mounts are not counted, links are not followed.
fn taken_below(source: BorrowedFd<'_>) -> Result<u64, Errno> {
    let device = |found: &rustix::fs::Statx| (found.stx_dev_major, found.stx_dev_minor);
    let home = device(&attributes_of(source)?);
    let mut counted = HashSet::new();
    let mut total = 0;
    let directory = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let mut pending = vec![openat(source, c".", directory, Mode::empty())?];
    while let Some(next) = pending.pop() {
        Listing::new(next).read(0, |at, entry| {
            if entry.name == "." || entry.name == ".." {
                return Ok(true);
            }
            let flags = OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC;
            let file = openat(at, entry.name, flags, Mode::empty())?;
            let found = attributes_of(file.as_fd())?;
            if device(&found) != home || !counted.insert(found.stx_ino) {
                return Ok(true);
            }
            total += bytes_taken(&found);
            if kind(&found) == FileType::Directory {
                pending.push(openat(&file, c".", directory, Mode::empty())?);
            }
            Ok(true)
        })?;
    }
    Ok(total)
}
