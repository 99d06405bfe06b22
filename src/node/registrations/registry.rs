//! A thread that watches the directory in which drivers register.

use std::collections::BTreeMap;
use std::fs::{self, DirBuilder};
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::{DirBuilderExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::thread;
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::inotify::{CreateFlags, WatchFlags, add_watch, init};
use tracing::warn;

use crate::driver::csi::sockets_in;

/// The longest wait for a change, in case podfs missed one.
const LONGEST: Timespec = Timespec { tv_sec: 30, tv_nsec: 0 };
/// The pause between two scans: a driver that starts makes and removes several files.
const PAUSE: Duration = Duration::from_millis(100);

/// Distinguishes a socket from a later one at the same path.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct SocketId {
    inode: u64,
    made: (i64, i64),
}

/// Starts the thread. It passes all sockets to `report`, at once and after each change, and ends when `report` returns
/// false.
///
/// # Errors
/// When the directory cannot be made or watched, or the thread cannot be started.
pub(super) fn watch(
    registry: PathBuf,
    report: impl Fn(BTreeMap<PathBuf, SocketId>) -> bool + Send + 'static,
) -> io::Result<()> {
    let changes = init(CreateFlags::CLOEXEC | CreateFlags::NONBLOCK)?;
    follow(&changes, &registry)?;
    let scans = move || {
        loop {
            match sockets(&registry) {
                Ok(sockets) => {
                    if !report(sockets) {
                        return;
                    }
                }
                // The drivers stay registered.
                Err(error) => warn!("podfs cannot read {}: {error}; it tries again", registry.display()),
            }
            thread::sleep(PAUSE);
            let mut source = [PollFd::from_borrowed_fd(changes.as_fd(), PollFlags::IN)];
            // An interrupted wait only leads to one more scan.
            let _ = poll(&mut source, Some(&LONGEST));
            let mut events = [0; 4096];
            while rustix::io::read(&changes, &mut events).is_ok_and(|count| count > 0) {}
            // Another process may have removed the directory. If podfs cannot watch it now, the next scan tries again.
            let _ = follow(&changes, &registry);
        }
    };
    thread::Builder::new().name("podfs-registry".to_owned()).spawn(scans)?;
    Ok(())
}

fn follow(changes: &OwnedFd, registry: &Path) -> io::Result<()> {
    DirBuilder::new().recursive(true).mode(0o750).create(registry)?;
    let of_entries = WatchFlags::CREATE | WatchFlags::DELETE | WatchFlags::MOVE | WatchFlags::DELETE_SELF;
    add_watch(changes, registry, of_entries | WatchFlags::MOVE_SELF | WatchFlags::ONLYDIR)?;
    Ok(())
}

fn sockets(registry: &Path) -> io::Result<BTreeMap<PathBuf, SocketId>> {
    let identified = |path: PathBuf| {
        let found = fs::metadata(&path).ok()?;
        Some((path, SocketId { inode: found.ino(), made: (found.ctime(), found.ctime_nsec()) }))
    };
    Ok(sockets_in(registry)?.into_iter().filter_map(identified).collect())
}
