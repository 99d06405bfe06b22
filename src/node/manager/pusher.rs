//! Pushes objects to supervisors: one task for each pod pushes what its volumes show, and later each change.
//!
//! A supervisor that was started again has no objects, so it gets all of them. After a push that failed, the task pushes all
//! objects again, until the pod needs none any more.

use std::collections::HashMap;
use std::time::Duration;

use tokio::sync::watch;
use tokio::task::JoinHandle;
use tracing::debug;

use crate::manifest::pod::PodUid;
use crate::node::feed::PodObjects;
use crate::node::pod::NodePod;
use crate::node::supervisors::Supervisors;

/// How long to wait after a supervisor did not take a push.
const PAUSE: Duration = Duration::from_millis(200);

/// The tasks that push.
pub(super) struct Pushers {
    objects: PodObjects,
    supervisors: Supervisors,
    pushers: HashMap<PodUid, Pusher>,
}

struct Pusher {
    task: JoinHandle<()>,
    described: watch::Sender<NodePod>,
}

impl Pushers {
    pub(super) fn new(objects: PodObjects, supervisors: Supervisors) -> Pushers {
        Pushers { objects, supervisors, pushers: HashMap::new() }
    }

    /// The pod is described anew: its labels or references may differ.
    pub(super) fn describe(&self, pod: &NodePod) {
        if let Some(pusher) = self.pushers.get(&pod.pod.identity.uid) {
            pusher.described.send_replace(pod.clone());
        }
    }

    /// Starts to push to the pod's supervisor, which is new: everything first, then each change.
    pub(super) fn start(&mut self, pod: &NodePod) {
        let uid = pod.pod.identity.uid.clone();
        self.stop(&uid);
        let (described, descriptions) = watch::channel(pod.clone());
        let task = tokio::spawn(push(uid.clone(), self.objects.clone(), self.supervisors.clone(), descriptions));
        self.pushers.insert(uid, Pusher { task, described });
    }

    /// Ends the pushes to a pod.
    pub(super) fn stop(&mut self, pod: &PodUid) {
        if let Some(pusher) = self.pushers.remove(pod) {
            pusher.task.abort();
        }
    }
}

async fn push(uid: PodUid, objects: PodObjects, supervisors: Supervisors, mut descriptions: watch::Receiver<NodePod>) {
    let mut objects = objects.follow(&descriptions.borrow_and_update().clone());
    loop {
        tokio::select! {
            push = objects.next() => {
                if let Err(reason) = supervisors.push(&uid, push).await {
                    debug!("pod {uid}: its supervisor does not take objects: {reason}");
                    objects.restart();
                    tokio::time::sleep(PAUSE).await;
                }
            }
            Ok(()) = descriptions.changed() => {
                let pod = descriptions.borrow_and_update().clone();
                objects.update(&pod);
            }
        }
    }
}
