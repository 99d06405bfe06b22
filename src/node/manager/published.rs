//! The published state: made anew after each event, of the pods that the event was about.

use std::sync::Arc;

use super::{Manager, picture};
use crate::manifest::pod::PodUid;
use crate::node::reconciler::Action;
use crate::node::state::{NodeState, VolumeMount};
use crate::node::world::VolumeId;

impl Manager {
    /// Publishes what has changed. What is published of a pod is made anew only if something of it was touched, so that an event of
    /// one pod costs the same however many pods there are.
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
            let worlds = picture::Worlds { desired: &self.desired, actual: &self.actual, backings: &self.backings };
            let mut entry = picture::of_pod(&uid, known, worlds, pid, self.containers.of(&uid));
            self.complete(&uid, &mut entry);
            // A volume that is wanted again while it is being unmounted is not there for its next user.
            for volume in &mut entry.volumes {
                let id = VolumeId { pod: uid.clone(), volume: volume.name.clone() };
                if self.executor.runs(&id, Action::Unmount.name()) {
                    volume.mount = VolumeMount::Uncertain;
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

    /// What is published of the pod may have changed.
    pub(super) fn touch(&mut self, uid: &PodUid) {
        if !self.touched.contains(uid) {
            self.touched.insert(uid.clone());
        }
    }
}
