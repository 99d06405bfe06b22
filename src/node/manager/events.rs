//! Events of the pods of an API server: what is wrong with their volumes, in the kubelet's words (5.11, ME-02).

use std::collections::HashMap;

use tokio::task::JoinHandle;

use crate::kube::client::Client;
use crate::manifest::pod::{PodIdentity, PodUid};
use crate::source::{Condition, Conditions, post_events};
use crate::supervisor::status::{VolumeState, VolumeStatus};

/// The posters of events, one for each pod.
pub(super) struct Events {
    client: Option<Client>,
    node: Option<String>,
    posters: HashMap<PodUid, Poster>,
}

struct Poster {
    conditions: Conditions,
    task: JoinHandle<()>,
}

impl Events {
    /// Posts to the server of this client. Without one, nothing is posted.
    pub(super) fn new(client: Option<Client>, node: Option<String>) -> Events {
        Events { client, node, posters: HashMap::new() }
    }

    /// Tells how a volume of a pod is. Never waits.
    pub(super) fn tell(&mut self, pod: &PodIdentity, volume: &VolumeStatus) {
        let Some(client) = &self.client else { return };
        let condition = match (volume.state, &volume.reason) {
            (VolumeState::Live, _) => Condition::Mounted,
            (VolumeState::Waiting | VolumeState::Behind, Some(reason)) => Condition::Failing(reason.clone()),
            _ => return,
        };
        let poster = self.posters.entry(pod.uid.clone()).or_insert_with(|| {
            let (conditions, posting) = post_events(client.clone(), pod.clone(), self.node.clone());
            Poster { conditions, task: tokio::spawn(posting) }
        });
        poster.conditions.tell(&volume.name, condition);
    }

    /// The pod is gone.
    pub(super) fn stop(&mut self, pod: &PodUid) {
        if let Some(poster) = self.posters.remove(pod) {
            poster.task.abort();
        }
    }
}
