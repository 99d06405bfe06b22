//! A limit on the space of a volume, counted by the server.
//!
//! With a limit, every write goes through the server (no kernel passthrough), which refuses a write that does not fit with `ENOSPC`
//! before it executes it. The server counts what `du(1)` counts: the blocks of each file, once, however many names it has. It
//! charges files when they grow and discharges them when their last name or last open file goes. Each read of a file's attributes
//! corrects the charge for changes by the source itself, such as blocks that it allocates only when it writes them.
//!
//! Each request that can make a file, a directory or an attribute grow checks for room first. Directories grow with their names,
//! and file systems such as ext4 do not shrink them again: a directory that held many names keeps its blocks until it is removed.
//! The root cannot be removed, so it has rules of its own:
//!
//! 1. Its first block is free, and what it grows beyond that is charged like any other growth.
//! 2. When a request finds no room, and most names of the root are gone, the blocks that the root kept are free from
//!    then on: new names go there.
//! 3. So that these blocks do not add up, the root may grow by no more than the limit. The volume takes twice its limit
//!    at most.
//!
//! The kernel does not wait for the answer to RELEASE. So a process may close a file, remove it and write again before the server has
//! closed the file. A request that finds no room, while a removed file is open, waits for a moment for the RELEASE of such a file.
//!
//! The region has the *account*, which is the sum of all charges, and the charge of each node. A new charge changes both: the
//! server first records the whole change in the region, and a successor that finds this record makes the change once more. The
//! server sets a charge, and never adds to it, so a request that the kernel sends again changes nothing.

use std::collections::HashSet;
use std::ffi::{OsStr, OsString};
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering::{Relaxed, Release};
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::time::Instant;

use rustix::fs::{AtFlags, FileType, Mode, OFlags, Statx, StatxFlags, openat, statx};
use rustix::io::Errno;

use super::attributes::{attributes_of, bytes_taken, kind};
use super::devices::device_of;
use super::extents;
use super::listing::SourceListing;
use super::node::Node;
use crate::region::Region;
use crate::region::header::PassthroughCounters;
use crate::session::NodeId;
use crate::session::abi::Kstatfs;

/// The unit by which files grow.
const BLOCK: u64 = 4096;

/// The limit and the usage, in bytes.
pub struct QuotaUsage {
    /// The limit that the volume was mounted with. The supervisor may have set another one in the region.
    first_limit: u64,
    region: Arc<Region>,
    /// The lock on the account.
    account: Mutex<()>,
    /// Notifies that the last open file of a removed file is closed, and its space is free.
    closed: Condvar,
    /// Whether a request has removed names since the last scan of the root.
    names_removed: AtomicBool,
}

/// The lock on the account. A thread holds it from the check for room until it has charged the space, and from the look at a
/// file's attributes until it has charged the file.
pub struct QuotaLock<'a> {
    usage: &'a QuotaUsage,
    counters: &'a PassthroughCounters,
    /// `None` only while the thread waits.
    guard: Option<MutexGuard<'a, ()>>,
}

impl QuotaUsage {
    /// Counts the space that the files in `source` take already. The first block of the directory itself is free.
    ///
    /// # Errors
    /// When the source cannot be read.
    pub fn measure(source: BorrowedFd<'_>, limit: u64, region: Arc<Region>) -> Result<QuotaUsage, Errno> {
        region.header().counters.used.store(taken_below(source)?.saturating_add(growth_of(source)?), Release);
        Ok(Self::inherit(limit, region))
    }

    /// The account that a dead server left in `region`.
    pub fn inherit(limit: u64, region: Arc<Region>) -> QuotaUsage {
        QuotaUsage {
            first_limit: limit,
            region,
            account: Mutex::new(()),
            closed: Condvar::new(),
            names_removed: AtomicBool::new(true),
        }
    }

    /// Most bytes that the volume may take now.
    fn limit(&self) -> u64 {
        match self.region.header().limit.load(Relaxed) {
            0 => self.first_limit,
            limit => limit,
        }
    }

    /// Bytes of the root directory that are free of charge.
    fn root_free(&self) -> u64 {
        self.region.header().root_free.load(Relaxed).max(BLOCK)
    }

    /// Locks the account until the returned guard is dropped.
    pub fn lock(&self) -> QuotaLock<'_> {
        let guard = self.account.lock().expect("a thread that panics ends the process");
        QuotaLock { usage: self, counters: &self.region.header().counters, guard: Some(guard) }
    }

    /// Frees the space of a removed file whose last open file is closed.
    pub fn discharge_closed(&self, node: &Node) {
        self.lock().discharge(node);
        self.closed.notify_all();
    }

    /// A name was removed somewhere.
    pub fn name_removed(&self) {
        self.names_removed.store(true, Release);
    }

    /// The figures of the source's file system, reduced to what the limit allows.
    pub fn narrow(&self, whole: Kstatfs) -> Kstatfs {
        let unit = u64::from(whole.frsize.max(1));
        let free = self.lock().free_space() / unit;
        Kstatfs {
            blocks: (self.limit() / unit).min(whole.blocks),
            bfree: free.min(whole.bfree),
            bavail: free.min(whole.bavail),
            ..whole
        }
    }
}

impl QuotaLock<'_> {
    /// Lets go of the lock until a removed file is closed for the last time, at most until this time. Returns `false` at that time.
    pub fn wait_for_close(&mut self, until: Instant) -> bool {
        let left = until.saturating_duration_since(Instant::now());
        let Some(guard) = self.guard.take().filter(|_| !left.is_zero()) else { return false };
        let (guard, _) = self.usage.closed.wait_timeout(guard, left).expect("a thread that panics ends the process");
        self.guard = Some(guard);
        true
    }

    /// Returns how many of the `length` bytes at `offset` of `file` fit into the volume.
    ///
    /// # Errors
    /// `ENOSPC` when none can.
    pub fn free_space_for(&self, file: BorrowedFd<'_>, offset: u64, length: u64) -> Result<u64, Errno> {
        let mut free = self.free_space();
        if length.saturating_add(2 * BLOCK) <= free || length == 0 {
            return Ok(length);
        }
        let end = offset.saturating_add(length).next_multiple_of(BLOCK);
        let mut position = offset - offset % BLOCK;
        while position < end {
            // Blocks that the file has already cost nothing. A hole costs its whole length.
            let there = extents::first_in(file, position..end)?.unwrap_or(end..end);
            let hole = there.start - position;
            if hole > free {
                let fits = position + (free - free % BLOCK);
                return if fits > offset { Ok(fits - offset) } else { Err(Errno::NOSPC) };
            }
            free -= hole;
            position = there.end.next_multiple_of(BLOCK);
        }
        Ok(length)
    }

    /// Checks for free space for one more name in `parent`, open as `directory`, and for a file of `blocks` blocks.
    ///
    /// # Errors
    /// `ENOSPC` when there is none.
    pub fn check_space_for_name(&self, parent: &Node, directory: BorrowedFd<'_>, blocks: u64) -> Result<(), Errno> {
        let root_is_full = || {
            let grown = attributes_of(directory).map_or(0, |found| bytes_taken(&found).saturating_sub(BLOCK));
            parent.id == NodeId::ROOT && grown >= self.usage.limit() && grown >= self.usage.root_free()
        };
        if self.free_space() >= (1 + blocks) * BLOCK && !root_is_full() { Ok(()) } else { Err(Errno::NOSPC) }
    }

    /// Checks for free space for an extended attribute of `length` bytes.
    ///
    /// # Errors
    /// `ENOSPC` when there is none.
    pub fn check_space_for_attribute(&self, length: usize) -> Result<(), Errno> {
        if self.free_space() >= (length.max(1) as u64).next_multiple_of(BLOCK) { Ok(()) } else { Err(Errno::NOSPC) }
    }

    /// Checks whether a name may move to another directory, which may grow by a block. It may in a full volume, because
    /// programs that make room move files. It may not in a volume that takes more than its limit.
    ///
    /// # Errors
    /// `ENOSPC` when the volume takes more than its limit.
    pub fn check_not_exceeded(&self) -> Result<(), Errno> {
        if self.used() <= self.usage.limit() { Ok(()) } else { Err(Errno::NOSPC) }
    }

    /// Makes the blocks free of charge that the root, open as `directory`, keeps although their names are gone. Returns whether
    /// there were such blocks.
    pub fn free_blocks_of_root(&mut self, root: &Node, directory: BorrowedFd<'_>) -> bool {
        if root.kind != FileType::Directory || !self.usage.names_removed.swap(false, Relaxed) {
            return false;
        }
        let Ok(size) = attributes_of(directory).map(|found| bytes_taken(&found)) else { return false };
        if size <= self.usage.root_free() || !names_take_at_most(directory, size / 4).unwrap_or(false) {
            return false;
        }
        let free = size.min(self.usage.limit().saturating_add(8 * BLOCK));
        // In this order: a successor that finds the old number charges the root anew, and then finds these blocks again.
        self.charge(root, size.saturating_sub(free));
        self.usage.region.header().root_free.store(free, Release);
        true
    }

    /// Charges `node`, open as `file`, with the bytes that it takes now.
    pub fn settle(&mut self, node: &Node, file: BorrowedFd<'_>) {
        // Without the file's attributes the charge stays as it was.
        if let Ok(found) = attributes_of(file) {
            let free = if node.id == NodeId::ROOT { self.free_of(node) } else { 0 };
            self.charge(node, bytes_taken(&found).saturating_sub(free));
        }
    }

    /// Bytes of the root that are not charged. A root that is a file is charged with all its bytes.
    fn free_of(&self, root: &Node) -> u64 {
        if root.kind == FileType::Directory { self.usage.root_free() } else { 0 }
    }

    /// Removes the charge of `node`, which takes no space any more.
    pub fn discharge(&mut self, node: &Node) {
        self.charge(node, 0);
    }

    /// A file that the kernel does not know, and that took `bytes`, is gone.
    pub fn give_back(&mut self, bytes: u64) {
        self.counters.used.store(self.used().saturating_sub(bytes), Release);
    }

    /// Sets the charge of `node`, which takes `bytes` now.
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

    fn free_space(&self) -> u64 {
        self.usage.limit().saturating_sub(self.used())
    }
}

/// Bytes that a directory takes beyond its first block.
///
/// # Errors
/// When its attributes cannot be read.
pub fn growth_of(directory: BorrowedFd<'_>) -> Result<u64, Errno> {
    attributes_of(directory).map(|found| bytes_taken(&found).saturating_sub(BLOCK))
}

/// Whether the names in a directory take at most `most` bytes in ext4's format.
fn names_take_at_most(directory: BorrowedFd<'_>, most: u64) -> Result<bool, Errno> {
    const HEAD: u64 = 8;
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let mut taken: u64 = 0;
    SourceListing::new(openat(directory, c".", flags, Mode::empty())?).read(0, |_, entry| {
        taken += (HEAD + entry.name.len() as u64).next_multiple_of(4);
        Ok(taken <= most)
    })?;
    Ok(taken <= most)
}

/// The space of the files below a directory, without other mounts, and without following links. One directory is open at a time,
/// so any number of them can be measured.
fn taken_below(source: BorrowedFd<'_>) -> Result<u64, Errno> {
    fn open(at: BorrowedFd<'_>, name: &OsStr) -> Result<SourceListing, Errno> {
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        openat(at, name, flags, Mode::empty()).map(SourceListing::new)
    }
    let mut measured = MeasuredTree { mount: numbers_of(&look_at(source)?).mount, counted: HashSet::new(), total: 0 };
    let mut current = open(source, OsStr::new("."))?;
    let mut levels = vec![measured.read(&mut current)?];
    while let Some(level) = levels.last_mut() {
        if let Some(name) = level.directories.pop() {
            current = open(current.directory(), &name)?;
            levels.push(measured.read(&mut current)?);
            continue;
        }
        levels.pop();
        let Some(above) = levels.last() else { break };
        current = open(current.directory(), OsStr::new(".."))?;
        if numbers_of(&look_at(current.directory())?) != above.numbers {
            // Another process has moved a directory.
            return Err(Errno::STALE);
        }
    }
    Ok(measured.total)
}

/// A tree that is being measured.
struct MeasuredTree {
    mount: u64,
    /// The files that are in `total`: a file may have several names.
    counted: HashSet<FileNumbers>,
    total: u64,
}

/// A directory on the way from the source to the directory that is read.
struct MeasuredDirectory {
    numbers: FileNumbers,
    /// The names of its directories that are not measured yet.
    directories: Vec<OsString>,
}

impl MeasuredTree {
    /// Counts the files in a directory.
    fn read(&mut self, directory: &mut SourceListing) -> Result<MeasuredDirectory, Errno> {
        let mut directories = Vec::new();
        directory.read(0, |at, entry| {
            if entry.name == "." || entry.name == ".." {
                return Ok(true);
            }
            let flags = OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC;
            let file = openat(at, entry.name, flags, Mode::empty())?;
            let found = look_at(file.as_fd())?;
            if numbers_of(&found).mount != self.mount || !self.counted.insert(numbers_of(&found)) {
                return Ok(true);
            }
            self.total += bytes_taken(&found);
            if kind(&found) == FileType::Directory {
                directories.push(entry.name.to_owned());
            }
            Ok(true)
        })?;
        Ok(MeasuredDirectory { numbers: numbers_of(&look_at(directory.directory())?), directories })
    }
}

/// What tells a file from all others while a tree is measured. Files of one mount may have several devices.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
struct FileNumbers {
    mount: u64,
    device: u64,
    ino: u64,
}

fn look_at(file: BorrowedFd<'_>) -> Result<Statx, Errno> {
    statx(file, c"", AtFlags::EMPTY_PATH, StatxFlags::BASIC_STATS | StatxFlags::MNT_ID)
}

fn numbers_of(found: &Statx) -> FileNumbers {
    FileNumbers { mount: found.stx_mnt_id, device: device_of(found), ino: found.stx_ino }
}

#[cfg(test)]
mod tests {
    use std::fs::{self, File};
    use std::os::unix::fs::MetadataExt;

    use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

    use super::*;

    /// Set in the process that may have few descriptors.
    const TREE: &str = "PODFS_TEST_MEASURED_TREE";

    #[test]
    fn a_tree_with_more_directories_than_descriptors_is_measured() {
        if let Some(tree) = std::env::var_os(TREE) {
            setrlimit(Resource::Nofile, Rlimit { current: Some(64), ..getrlimit(Resource::Nofile) }).expect("a limit");
            let source = File::open(tree).expect("a directory");
            println!("taken: {}.", taken_below(source.as_fd()).expect("measured"));
            return;
        }
        let base = tempfile::tempdir().expect("a directory");
        let mut deep = base.path().to_owned();
        let mut directories: Vec<_> = (0..100).map(|number| base.path().join(format!("beside{number}"))).collect();
        directories.extend((0..100).map(|_| {
            deep.push("below");
            deep.clone()
        }));
        let mut expected = 0;
        for directory in &directories {
            fs::create_dir(directory).expect("a directory");
            fs::write(directory.join("file"), "content").expect("written");
            fs::hard_link(directory.join("file"), directory.join("link")).expect("linked");
        }
        rustix::fs::syncfs(File::open(base.path()).expect("a directory")).expect("the blocks are there");
        for directory in &directories {
            expected += [directory.clone(), directory.join("file")]
                .map(|path| fs::symlink_metadata(path).expect("attributes").blocks() * 512)
                .iter()
                .sum::<u64>();
        }
        let own = std::env::current_exe().expect("this program");
        let name = "passthrough::usage::tests::a_tree_with_more_directories_than_descriptors_is_measured";
        let mut measuring = std::process::Command::new(own);
        let output = measuring.args([name, "--exact", "--nocapture"]).env(TREE, base.path()).output().expect("started");
        let text = String::from_utf8_lossy(&output.stdout).into_owned();
        assert!(text.contains(&format!("taken: {expected}.")), "{text}{}", String::from_utf8_lossy(&output.stderr));
    }
}
