//! The passes over directories of deleted pods: every two seconds, on a blocking thread, one at a time.

use std::collections::BTreeSet;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use tokio::task::spawn_blocking;
use tracing::{info, warn};

use crate::manifest::pod::PodUid;
use crate::node::orphans::Orphans;
use crate::node::spans;

/// The interval of passes (the kubelet's housekeeping, 5.8).
pub(super) const HOUSEKEEPING: Duration = Duration::from_secs(2);

/// The passes. A pass holds the lock while it runs.
pub(super) struct Housekeeping(Arc<Mutex<Orphans>>);

impl Housekeeping {
    pub(super) fn new(orphans: Orphans) -> Housekeeping {
        Housekeeping(Arc::new(Mutex::new(orphans)))
    }

    /// Starts a pass over the directories of all pods except the known ones, unless the last pass is still running.
    pub(super) fn start_pass(&self, known: BTreeSet<PodUid>) {
        let orphans = Arc::clone(&self.0);
        spawn_blocking(move || {
            let Ok(mut orphans) = orphans.try_lock() else { return };
            match orphans.pass(|uid| known.contains(uid)) {
                Ok(pass) => {
                    pass.removed.iter().for_each(|uid| {
                        let _span = spans::of_uid(uid, None).entered();
                        info!("pod {uid}: its directories are removed");
                    });
                    if let Some(report) = pass.report {
                        warn!("{report}");
                    }
                }
                Err(error) => warn!("cannot look for directories of deleted pods: {error}"),
            }
        });
    }
}
