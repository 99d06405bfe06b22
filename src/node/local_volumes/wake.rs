//! A thread that scans the directories: at once, after each change of them (inotify) and of the mount table
//! (`proc_pid_mountinfo(5)`), and every 30 s.

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::thread;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::inotify::{CreateFlags, WatchFlags, add_watch, init};
use tracing::warn;

use super::ClassDirectory;
use super::entries::{DirectoryScan, scan};

/// The longest time between two scans: disks become free, and sizes change, without an event.
const LONGEST: Timespec = Timespec { tv_sec: 30, tv_nsec: 0 };
/// The shortest time between two scans. A node that starts pods changes its mount table all the time.
const PAUSE: Duration = Duration::from_secs(1);

/// Starts the thread. It passes each scan to `report`, and ends when `report` returns false.
///
/// # Errors
/// When changes cannot be watched, or the thread cannot be started.
pub(super) fn start(
    directories: Vec<ClassDirectory>,
    report: impl Fn(DirectoryScan) -> bool + Send + 'static,
) -> io::Result<()> {
    let changes = init(CreateFlags::CLOEXEC | CreateFlags::NONBLOCK)?;
    let table = File::open("/proc/self/mountinfo")?;
    let watch = move || watch(&directories, &changes, &table, &report);
    thread::Builder::new().name("podfs-discover".to_owned()).spawn(watch)?;
    Ok(())
}

fn watch(directories: &[ClassDirectory], changes: &OwnedFd, table: &File, report: &dyn Fn(DirectoryScan) -> bool) {
    loop {
        let began = Instant::now();
        for ClassDirectory { directory, .. } in directories {
            // The scan reports a missing directory; podfs watches it as soon as it exists.
            let _ = add_watch(changes, directory, of_entries());
        }
        match scan(directories) {
            Ok(scan) => {
                if !report(scan) {
                    return;
                }
            }
            Err(error) => warn!("cannot scan for local volumes: {error}; podfs tries again"),
        }
        thread::sleep(PAUSE.saturating_sub(began.elapsed()));
        let (changes, table) = (changes.as_fd(), table.as_fd());
        let mut sources =
            [PollFd::from_borrowed_fd(changes, PollFlags::IN), PollFd::from_borrowed_fd(table, PollFlags::PRI)];
        // An interrupted wait only leads to one more scan.
        let _ = poll(&mut sources, Some(&LONGEST));
        let mut events = [0; 4096];
        while rustix::io::read(changes, &mut events).is_ok_and(|count| count > 0) {}
    }
}

fn of_entries() -> WatchFlags {
    WatchFlags::CREATE
        | WatchFlags::DELETE
        | WatchFlags::MOVE
        | WatchFlags::DELETE_SELF
        | WatchFlags::MOVE_SELF
        | WatchFlags::ONLYDIR
}
