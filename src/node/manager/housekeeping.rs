//! The passes over directories of deleted pods: every two seconds, on a blocking thread, one at a time.

use std::collections::BTreeSet;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::task::spawn_blocking;
use tracing::{info, warn};

use crate::manifest::pod::PodUid;
use crate::node::orphans::{Orphans, PodPresence};
use crate::node::spans;

/// The interval of passes (the kubelet's housekeeping, 5.8).
pub(super) const HOUSEKEEPING_INTERVAL: Duration = Duration::from_secs(2);

/// The passes.
pub(super) struct Housekeeping {
    /// Locked while a pass runs.
    orphans: Arc<Mutex<Orphans>>,
    /// The pods that the node has. A pass asks again before it changes the directory of a pod.
    known: Arc<Mutex<BTreeSet<PodUid>>>,
}

impl Housekeeping {
    pub(super) fn new(orphans: Orphans) -> Housekeeping {
        Housekeeping { orphans: Arc::new(Mutex::new(orphans)), known: Arc::default() }
    }

    /// Notes that the node has a pod, for the pass that runs.
    pub(super) fn note_known(&self, uid: &PodUid) {
        lock(&self.known).insert(uid.clone());
    }

    /// Starts a pass over the directories of all pods except the known ones, unless the last pass is still running. `presence` says
    /// whether another pod is gone for certain.
    pub(super) fn start_pass(
        &self,
        known: BTreeSet<PodUid>,
        presence: impl Fn(&PodUid) -> PodPresence + Send + 'static,
    ) {
        *lock(&self.known) = known;
        let (orphans, known) = (Arc::clone(&self.orphans), Arc::clone(&self.known));
        spawn_blocking(move || {
            let Ok(mut orphans) = orphans.try_lock() else { return };
            match orphans.pass(|uid| if lock(&known).contains(uid) { PodPresence::Known } else { presence(uid) }) {
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

/// Locks the known pods. No code panics while it holds the lock.
fn lock(known: &Mutex<BTreeSet<PodUid>>) -> MutexGuard<'_, BTreeSet<PodUid>> {
    known.lock().unwrap_or_else(PoisonError::into_inner)
}
