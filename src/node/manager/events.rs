//! Events of the pods of an API server: problems with their volumes, in the kubelet's words (ME-02).

use std::collections::HashMap;

use tokio::task::JoinHandle;
use tracing::Instrument;

use crate::host::fs_group::OwnershipNotice;
use crate::kube::client::ApiClient;
use crate::manifest::pod::{PodIdentity, PodUid};
use crate::node::spans;
use crate::source::{Condition, Conditions, grown, post_events};
use crate::supervisor::status::{ExpansionStatus, VolumeState, VolumeStatus};

/// The posters of events, one for each pod.
pub(super) struct Events {
    client: Option<ApiClient>,
    node: Option<String>,
    posters: HashMap<PodUid, PodEvents>,
}

struct PodEvents {
    conditions: Conditions,
    /// The last report about the group of each volume's files.
    ownership: HashMap<String, OwnershipNotice>,
    task: JoinHandle<()>,
}

impl Events {
    /// Posts to the API server of this client. Without a client, posts nothing.
    pub(super) fn new(client: Option<ApiClient>, node: Option<String>) -> Events {
        Events { client, node, posters: HashMap::new() }
    }

    /// Sets the condition of a volume of a pod. Never waits.
    pub(super) fn report(&mut self, pod: &PodIdentity, volume: &VolumeStatus) {
        let Some(client) = self.client.clone() else { return };
        let condition = match (volume.state, &volume.reason) {
            (VolumeState::Live, _) => Condition::Mounted,
            (VolumeState::Waiting | VolumeState::Behind, Some(reason)) => Condition::Failing(reason.clone()),
            _ => return,
        };
        self.post(client, pod, &volume.name, condition);
    }

    /// Reports that a container has the kubelet's volume, although podfs serves the pod. Never waits.
    pub(super) fn report_kept(&mut self, pod: &PodIdentity, container: &str, path: &str, reason: &str) {
        let Some(client) = self.client.clone() else { return };
        let sentence = format!("Container {container:?} has the kubelet's volume at {path:?} : {reason}");
        // The colon distinguishes this subject from the names of volumes, which have none.
        self.post(client, pod, &format!("{container}:{path}"), Condition::Kept(sentence));
    }

    /// Reports the outcome of a volume's growth. Never waits.
    pub(super) fn report_growth(&mut self, pod: &PodIdentity, volume: &str, expansion: &ExpansionStatus) {
        let Some(client) = self.client.clone() else { return };
        let condition = match &expansion.error {
            None => Condition::Resized(grown(volume)),
            Some(error) => Condition::NotResized(format!(
                "NodeExpandVolume.NodeExpandVolume failed for volume {volume:?} : {error}"
            )),
        };
        // The colon distinguishes this subject from the names of volumes, which have none.
        self.post(client, pod, &format!("growth:{volume}"), condition);
    }

    /// Reports what is new about the group of a volume's files. Never waits.
    pub(super) fn report_ownership(&mut self, pod: &PodIdentity, volume: &VolumeStatus) {
        let (Some(client), Some(notice)) = (self.client.clone(), &volume.ownership) else { return };
        let poster = self.poster(client, pod);
        if poster.ownership.insert(volume.name.clone(), notice.clone()).as_ref() == Some(notice) {
            return;
        }
        let condition = match notice.clone() {
            OwnershipNotice::AlreadyMountedVolume(sentence) => Condition::Shared(sentence),
            OwnershipNotice::VolumePermissionChangeInProgress(sentence) => Condition::ChangesGroup(sentence),
        };
        // The colon distinguishes this subject from the names of volumes, which have none.
        poster.conditions.set(&format!("group:{}", volume.name), condition);
    }

    fn post(&mut self, client: ApiClient, pod: &PodIdentity, subject: &str, condition: Condition) {
        self.poster(client, pod).conditions.set(subject, condition);
    }

    fn poster(&mut self, client: ApiClient, pod: &PodIdentity) -> &mut PodEvents {
        self.posters.entry(pod.uid.clone()).or_insert_with(|| {
            let (conditions, posting) = post_events(client, pod.clone(), self.node.clone());
            let task = tokio::spawn(posting.instrument(spans::of_pod(pod)));
            PodEvents { conditions, ownership: HashMap::new(), task }
        })
    }

    /// Stops the poster of a pod that is gone.
    pub(super) fn stop(&mut self, pod: &PodUid) {
        if let Some(poster) = self.posters.remove(pod) {
            poster.task.abort();
        }
    }
}
