//! Notices that another process unmounted the volume of `podfs mount`.
//!
//! The kernel marks an open mount table at each change (`proc_pid_mounts(5)`), and the supervisor reads the table then. It never
//! looks at the mount itself: a look may wait for the server that the supervisor has to replace. The supervisors of pods do not
//! watch the table: with many pods on a node, each mount of one would make all others read it.

use std::fs::File;
use std::io;

use tokio::io::Interest;
use tokio::io::unix::AsyncFd;
use tracing::warn;

use super::site::Site;

/// The mount table.
pub(super) struct UnmountWatch(AsyncFd<File>);

impl UnmountWatch {
    /// For a volume at a path of its own. A volume is served without a watch if there can be none.
    pub(super) fn of(site: &Site) -> Option<Self> {
        let open = || -> io::Result<AsyncFd<File>> {
            let table = File::open("/proc/self/mountinfo")?;
            // SAFETY: a file has the same descriptor for as long as it lives, and closes it only at its end.
            Ok(unsafe { AsyncFd::register_with_interest(table, Interest::PRIORITY) }?)
        };
        let is_exact = matches!(site, Site::Exactly(_));
        let table = is_exact.then(open)?;
        table.inspect_err(|error| warn!("podfs cannot notice an unmount from outside: {error}")).ok().map(Self)
    }
}

/// Waits until the mount table changes; for ever without a watch.
pub(super) async fn changed(watch: Option<&UnmountWatch>) {
    match watch {
        Some(UnmountWatch(table)) => match table.ready(Interest::PRIORITY).await {
            Ok(mut ready) => ready.clear_ready(),
            Err(_) => std::future::pending().await,
        },
        None => std::future::pending().await,
    }
}
