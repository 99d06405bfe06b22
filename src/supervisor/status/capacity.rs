//! How much room there is in the volumes that show something of the host. statfs(2) on a source that does not answer blocks, so
//! each call has a thread of its own, which is left behind when it hangs; until it returns, podfs makes no other call for that
//! volume.

use std::collections::HashMap;
use std::io;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::channel;
use std::thread;
use std::time::{Duration, Instant};

use podfs_fuse::client::Watch;
use podfs_fuse::passthrough::Room;
use rustix::fs::{CWD, Mode, OFlags, openat};

/// How long all looks together may take. A client that asks for metrics waits two seconds.
const TIMEOUT: Duration = Duration::from_secs(1);

/// A volume to look at.
pub(in crate::supervisor) struct Look {
    /// Its place in the manifest.
    pub(in crate::supervisor) place: usize,
    /// Where to look.
    pub(in crate::supervisor) at: At,
    pub(in crate::supervisor) hanging: Hanging,
}

/// Where to look.
pub(in crate::supervisor) enum At {
    /// At its source.
    Source(Watch),
    /// At where it is mounted: it is a bind mount.
    Mount(PathBuf),
}

/// Whether a look at a volume has not come back yet. Cheap to clone.
#[derive(Clone, Default)]
pub(in crate::supervisor) struct Hanging(Arc<AtomicBool>);

/// Looks at all of these. What does not answer in time is left out.
pub(in crate::supervisor) fn look(looks: Vec<Look>) -> HashMap<usize, Room> {
    let (found, findings) = channel();
    for Look { place, at, hanging: Hanging(hanging) } in looks {
        if hanging.swap(true, Ordering::AcqRel) {
            continue;
        }
        let (found, back) = (found.clone(), Arc::clone(&hanging));
        let look = move || {
            let room = at.room();
            back.store(false, Ordering::Release);
            // The reader may have given up by then.
            let _ = found.send((place, room));
        };
        if thread::Builder::new().name("room".to_owned()).spawn(look).is_err() {
            hanging.store(false, Ordering::Release);
        }
    }
    drop(found);
    let until = Instant::now() + TIMEOUT;
    let mut rooms = HashMap::new();
    while let Ok((place, room)) = findings.recv_timeout(until.saturating_duration_since(Instant::now())) {
        if let Ok(Some(room)) = room {
            rooms.insert(place, room);
        }
    }
    rooms
}

impl At {
    fn room(self) -> io::Result<Option<Room>> {
        match self {
            At::Source(watch) => watch.room(),
            At::Mount(path) => {
                let file = openat(CWD, path, OFlags::PATH | OFlags::CLOEXEC, Mode::empty())?;
                Room::at(file).map(Some)
            }
        }
    }
}
