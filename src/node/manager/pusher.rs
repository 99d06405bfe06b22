//! Pushes objects to supervisors: one task for each pod pushes the objects of its volumes, and later each change.
//!
//! A supervisor that was started again has no objects, so it gets all of them. After a push that failed, the task pushes all objects
//! again, after pauses, until the manager stops it; the published state of the pod has the reason. Before each push, the task
//! reports the PersistentVolumes behind the pod's claims to the manager, so the manager reports a volume as in use before the
//! supervisor can mount it. The task also announces growth in claims of the API server before the supervisor can grow their volumes.

use std::collections::{BTreeMap, HashMap};
use std::time::Duration;

use podfs_fuse::{Backoff, DoublingPause};
use tokio::sync::{mpsc, watch};
use tokio::task::JoinHandle;
use tokio::time::{Instant, sleep_until};
use tracing::{Instrument, debug, info, warn};

use super::Manager;
use super::growing::Announcer;
use crate::kube::client::ApiClient;
use crate::manifest::pod::PodUid;
use crate::node::backing::Backing;
use crate::node::feed::PodObjects;
use crate::node::pod::{NodePod, PodOrigin};
use crate::node::spans;
use crate::node::supervisors::{PushFailure, PushPath, Supervisors};
use crate::node::world::VolumeId;

/// The pauses after pushes that failed.
const PAUSE: DoublingPause = DoublingPause::new(Duration::from_millis(200), Duration::from_secs(10));

/// The tasks that push.
pub(super) struct Pushers {
    objects: PodObjects,
    supervisors: Supervisors,
    client: Option<ApiClient>,
    reports: mpsc::UnboundedSender<PusherReport>,
    pushers: HashMap<PodUid, Pusher>,
}

/// What a task tells the manager about its pod.
pub(super) enum PusherReport {
    /// These are the backings of its volumes, by the names of the volumes.
    Backings(PodUid, BTreeMap<String, Backing>),
    /// [`Pushers::failure`] has changed.
    Failure(PodUid),
}

struct Pusher {
    task: JoinHandle<()>,
    described: watch::Sender<NodePod>,
    /// Why its supervisor does not take objects, if that is so.
    failure: watch::Receiver<Option<String>>,
}

impl Pushers {
    /// Without any pod. Also returns the receiver of the tasks' reports.
    pub(super) fn new(
        objects: PodObjects,
        supervisors: Supervisors,
        client: Option<ApiClient>,
    ) -> (Pushers, mpsc::UnboundedReceiver<PusherReport>) {
        let (reports, receiver) = mpsc::unbounded_channel();
        (Pushers { objects, supervisors, client, reports, pushers: HashMap::new() }, receiver)
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
        let (reported, failure) = watch::channel(None);
        let failures =
            PushFailures { uid: uid.clone(), backoff: PAUSE.backoff(), reported, reports: self.reports.clone() };
        let (objects, supervisor) = (self.objects.clone(), self.supervisors.push_path(&uid));
        let client = self.client.clone().filter(|_| pod.origin == PodOrigin::Api);
        let announcer = client.map(|client| Announcer::new(client, &pod.pod));
        let push = push(objects, supervisor, failures, announcer, descriptions);
        let task = tokio::spawn(push.instrument(spans::of_pod(&pod.pod.identity)));
        self.pushers.insert(uid, Pusher { task, described, failure });
    }

    /// Ends the pushes to a pod.
    pub(super) fn stop(&mut self, pod: &PodUid) {
        if let Some(pusher) = self.pushers.remove(pod) {
            pusher.task.abort();
        }
    }

    /// A sentence that says why the pod's supervisor does not take objects, if that is so.
    pub(super) fn failure(&self, pod: &PodUid) -> Option<String> {
        let reason = self.pushers.get(pod)?.failure.borrow().clone()?;
        Some(format!("its volumes do not follow their objects: {reason}; podfs tries again"))
    }
}

impl Manager {
    pub(super) fn take_pusher_report(&mut self, report: PusherReport) {
        match report {
            // A volume whose claim is gone keeps its last backing, because it is still mounted.
            PusherReport::Backings(uid, backings) => {
                self.touch(&uid);
                let id = |volume| VolumeId { pod: uid.clone(), volume };
                self.backings.extend(backings.into_iter().map(|(volume, backing)| (id(volume), backing)));
            }
            PusherReport::Failure(uid) => self.touch(&uid),
        }
    }
}

/// The pushes of a pod that have failed in a row.
struct PushFailures {
    uid: PodUid,
    backoff: Backoff,
    reported: watch::Sender<Option<String>>,
    reports: mpsc::UnboundedSender<PusherReport>,
}

impl PushFailures {
    /// Records a push that failed. Returns the pause before the next one.
    fn fail(&mut self, failure: PushFailure) -> Duration {
        let (uid, PushFailure { reason, is_replaced }) = (&self.uid, failure);
        debug!("pod {uid}: its supervisor does not take objects: {reason}");
        if is_replaced {
            return Duration::ZERO;
        }
        let pause = self.backoff.fail();
        // A supervisor that has just been replaced may miss one push.
        if self.backoff.failures() > 1 && self.reported.borrow().as_ref() != Some(&reason) {
            warn!("pod {uid}: its volumes do not follow their objects: {reason}; podfs tries again");
            self.report(Some(reason));
        }
        pause
    }

    /// Records a push that the supervisor has taken.
    fn succeed(&mut self) {
        self.backoff.reset();
        if self.reported.borrow().is_some() {
            info!("pod {}: its supervisor takes objects again", self.uid);
            self.report(None);
        }
    }

    fn report(&self, reason: Option<String>) {
        self.reported.send_replace(reason);
        // Fails only while the daemon ends.
        let _ = self.reports.send(PusherReport::Failure(self.uid.clone()));
    }
}

async fn push(
    objects: PodObjects,
    mut supervisor: PushPath,
    mut failures: PushFailures,
    mut announcer: Option<Announcer>,
    mut descriptions: watch::Receiver<NodePod>,
) {
    let mut objects = objects.follow(&descriptions.borrow_and_update().clone());
    let mut reported = BTreeMap::new();
    let mut pause_ends = Instant::now();
    loop {
        let next_push = async {
            sleep_until(pause_ends).await;
            objects.next().await
        };
        tokio::select! {
            push = next_push => {
                let (current, growing) = objects.backings_and_growing();
                if current != reported {
                    reported.clone_from(&current);
                    // Fails only while the daemon ends.
                    let _ = failures.reports.send(PusherReport::Backings(failures.uid.clone(), current));
                }
                if let Some(announcer) = &mut announcer {
                    announcer.announce(growing).await;
                }
                match supervisor.push(push).await {
                    Ok(_) => failures.succeed(),
                    Err(failure) => {
                        pause_ends = Instant::now() + failures.fail(failure);
                        objects.restart();
                    }
                }
            }
            Ok(()) = descriptions.changed() => {
                let pod = descriptions.borrow_and_update().clone();
                objects.update(&pod);
                pause_ends = Instant::now();
            }
        }
    }
}
