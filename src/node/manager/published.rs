//! The published state. After each event, it changes for the pods of the event.

use std::sync::Arc;

use super::{Manager, pod_entry};
use crate::manifest::pod::PodUid;
use crate::node::reconciler::Action;
use crate::node::state::{MountState, NodeState};
use crate::node::world::VolumeId;

impl Manager {
    /// Publishes what has changed. Computes the state of a pod only after [`Manager::touch`], so that an event of one
    /// pod costs the same however many pods there are.
    pub(super) fn publish(&mut self) {
        let before = Arc::clone(&self.state.borrow());
        let mut pods = before.pods.clone();
        for uid in std::mem::take(&mut self.touched) {
            let is_there = self.pods.get(&uid).is_some() || self.actual.of_pod(&uid).next().is_some();
            if !is_there {
                pods.remove(&uid);
                continue;
            }
            let (known, pid) = (self.pods.get(&uid), self.pids.get(&uid).copied());
            let worlds = pod_entry::Worlds { desired: &self.desired, actual: &self.actual, backings: &self.backings };
            let mut entry = pod_entry::of_pod(&uid, known, worlds, pid, self.containers.of(&uid));
            self.complete(&uid, &mut entry);
            // A wanted volume that is being unmounted is not ready for its next user.
            for volume in &mut entry.volumes {
                let id = VolumeId { pod: uid.clone(), volume: volume.name.clone() };
                if self.executor.runs(&id, Action::Unmount.name()) {
                    volume.mount = MountState::Uncertain;
                }
            }
            if pods.get(&uid).is_none_or(|published| **published != entry) {
                pods.insert(uid, Arc::new(entry));
            }
        }
        let states_synced = !self.actual.volumes().any(|(_, volume)| volume.reconstructed);
        let state = NodeState {
            sources_ready: self.pods.sources_ready(),
            states_synced: self.pods.sources_ready() && states_synced,
            trouble: self.trouble.values().flatten().cloned().collect(),
            pods,
        };
        if *before != state {
            self.state.send_replace(Arc::new(state));
        }
    }

    /// Notes that the published state of the pod may have changed.
    pub(super) fn touch(&mut self, uid: &PodUid) {
        if !self.touched.contains(uid) {
            self.touched.insert(uid.clone());
        }
    }
}
