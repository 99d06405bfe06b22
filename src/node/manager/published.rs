//! Publishing the state of the node. After an event, the manager computes the state of the pods of that event again.

use std::sync::Arc;

use super::{Manager, pod_entry};
use crate::manifest::pod::PodUid;
use crate::node::reconciler::Action;
use crate::node::state::{MountState, NodeState};
use crate::node::world::VolumeId;

/// The note of a pod of an earlier daemon that this daemon cannot reconstruct.
const LOST: &str = "podfs cannot read what an earlier podfs node recorded of it, and no source describes it; podfs removes it once all \
                    sources can be read and the kubelet has no directory of it, or when it is released";

/// The note of a pod whose checkpoint only another version of podfs can use.
const OF_OTHER_VERSION: &str = "another version of podfs node wrote its checkpoint; podfs leaves it as it is until it is released: use that version, or \
                                release the pod when its containers have stopped";

impl Manager {
    /// Publishes the state if it has changed. Computes the state of a pod only after [`Manager::touch`]: an event of
    /// one pod does not compute the states of all others.
    pub(super) fn publish(&mut self) {
        let before = Arc::clone(&self.state.borrow());
        let mut pods = before.pods.clone();
        for uid in std::mem::take(&mut self.touched) {
            let is_lost = self.lost.contains_key(&uid);
            let exists = is_lost || self.pods.get(&uid).is_some() || self.actual.of_pod(&uid).next().is_some();
            if !exists {
                pods.remove(&uid);
                continue;
            }
            let (known, pid) = (self.pods.get(&uid), self.pids.get(&uid).copied());
            let is_unknown = known.is_some_and(|known| self.pods.is_unknown(known));
            let worlds = pod_entry::Worlds { desired: &self.desired, actual: &self.actual, backings: &self.backings };
            let mut entry = pod_entry::of_pod(&uid, known, is_unknown, worlds, pid, self.containers.of(&uid));
            self.complete(&uid, &mut entry);
            self.add_failed_retirement(&uid, &mut entry);
            entry.notes.extend(self.ending.get(&uid).cloned());
            entry.notes.extend(self.pushers.failure(&uid));
            if let (Some(lost), None) = (self.lost.get(&uid), known) {
                entry.notes.push(if lost.is_of_other_version { OF_OTHER_VERSION } else { LOST }.to_owned());
            }
            // While podfs unmounts a volume that a pod wants again, the volume is not ready for containers.
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
