//! Pushes objects to supervisors: one task for each pod pushes the objects of its volumes, and later each change.
//!
//! A supervisor that was started again has no objects, so it gets all of them. After a push that failed, the task
//! pushes all objects again, until the manager stops it. Before each push, the task reports the PersistentVolumes
//! behind the pod's claims to the manager, so the manager reports a volume as in use before the supervisor can mount
//! it. The task also announces growth in claims of the API server before the supervisor can grow their volumes.

use std::collections::{BTreeMap, HashMap};
use std::time::Duration;

use tokio::sync::{mpsc, watch};
use tokio::task::JoinHandle;
use tracing::{Instrument, debug};

use super::growing::Announcer;
use crate::kube::client::ApiClient;
use crate::manifest::pod::PodUid;
use crate::node::backing::Backing;
use crate::node::feed::PodObjects;
use crate::node::pod::{NodePod, PodOrigin};
use crate::node::spans;
use crate::node::supervisors::{PushFailure, PushPath, Supervisors};

/// The pause after a push that failed.
const PAUSE: Duration = Duration::from_millis(200);

/// The tasks that push.
pub(super) struct Pushers {
    objects: PodObjects,
    supervisors: Supervisors,
    client: Option<ApiClient>,
    backings: mpsc::UnboundedSender<Backings>,
    pushers: HashMap<PodUid, Pusher>,
}

/// A pod, and the backings of its volumes by name.
pub(super) type Backings = (PodUid, BTreeMap<String, Backing>);

struct Pusher {
    task: JoinHandle<()>,
    described: watch::Sender<NodePod>,
}

impl Pushers {
    /// Without any pod. Also returns the receiver of [`Backings`].
    pub(super) fn new(
        objects: PodObjects,
        supervisors: Supervisors,
        client: Option<ApiClient>,
    ) -> (Pushers, mpsc::UnboundedReceiver<Backings>) {
        let (backings, receiver) = mpsc::unbounded_channel();
        (Pushers { objects, supervisors, client, backings, pushers: HashMap::new() }, receiver)
    }

    /// Takes a changed pod, whose labels or references may differ.
    pub(super) fn describe(&self, pod: &NodePod) {
        if let Some(pusher) = self.pushers.get(&pod.pod.identity.uid) {
            pusher.described.send_replace(pod.clone());
        }
    }

    /// Starts to push to the pod's new supervisor: everything first, then each change.
    pub(super) fn start(&mut self, pod: &NodePod) {
        let uid = pod.pod.identity.uid.clone();
        self.stop(&uid);
        let (described, descriptions) = watch::channel(pod.clone());
        let (objects, supervisor, backings) =
            (self.objects.clone(), self.supervisors.push_path(&uid), self.backings.clone());
        let client = self.client.clone().filter(|_| pod.origin == PodOrigin::Api);
        let announcer = client.map(|client| Announcer::new(client, &pod.pod));
        let push = push(uid.clone(), objects, supervisor, backings, announcer, descriptions);
        let task = tokio::spawn(push.instrument(spans::of_pod(&pod.pod.identity)));
        self.pushers.insert(uid, Pusher { task, described });
    }

    /// Ends the pushes to a pod.
    pub(super) fn stop(&mut self, pod: &PodUid) {
        if let Some(pusher) = self.pushers.remove(pod) {
            pusher.task.abort();
        }
    }
}

async fn push(
    uid: PodUid,
    objects: PodObjects,
    mut supervisor: PushPath,
    backings: mpsc::UnboundedSender<Backings>,
    mut announcer: Option<Announcer>,
    mut descriptions: watch::Receiver<NodePod>,
) {
    let mut objects = objects.follow(&descriptions.borrow_and_update().clone());
    let mut reported = BTreeMap::new();
    loop {
        tokio::select! {
            push = objects.next() => {
                let (current, growing) = objects.backings_and_growing();
                if current != reported {
                    reported.clone_from(&current);
                    // Fails only while the daemon ends.
                    let _ = backings.send((uid.clone(), current));
                }
                if let Some(announcer) = &mut announcer {
                    announcer.announce(growing).await;
                }
                if let Err(PushFailure { reason, is_replaced }) = supervisor.push(push).await {
                    debug!("pod {uid}: its supervisor does not take objects: {reason}");
                    objects.restart();
                    if !is_replaced {
                        tokio::time::sleep(PAUSE).await;
                    }
                }
            }
            Ok(()) = descriptions.changed() => {
                let pod = descriptions.borrow_and_update().clone();
                objects.update(&pod);
            }
        }
    }
}
