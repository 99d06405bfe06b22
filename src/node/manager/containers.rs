//! The containers of chosen pods, and whether they have podfs's volumes or the kubelet's. podfs posts an event of the
//! pod for a container with the kubelet's volumes.

use std::collections::BTreeMap;

use super::events::Events;
use crate::manifest::pod::{PodIdentity, PodUid};
use crate::node::state::ContainerEntry;

/// The containers of each pod that has any.
#[derive(Debug, Default)]
pub(super) struct PodContainers(BTreeMap<PodUid, Vec<ContainerEntry>>);

impl PodContainers {
    /// Replaces the containers of the pod.
    pub(super) fn take(&mut self, pod: &PodIdentity, containers: Vec<ContainerEntry>, events: &mut Events) {
        let before = self.of(&pod.uid);
        for new in containers.iter().filter(|one| before.iter().all(|known| known.id != one.id)) {
            for mount in &new.kept {
                if let Some(reason) = &mount.reason {
                    events.report_kept(pod, &new.name, &mount.path, reason);
                }
            }
        }
        match containers.is_empty() {
            true => drop(self.0.remove(&pod.uid)),
            false => drop(self.0.insert(pod.uid.clone(), containers)),
        }
    }

    /// The containers of a pod.
    pub(super) fn of(&self, pod: &PodUid) -> &[ContainerEntry] {
        self.0.get(pod).map(Vec::as_slice).unwrap_or_default()
    }
}
