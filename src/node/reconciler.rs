//! The reconciler: from the desired and the actual state of the world to the operations that bring the two together. A pure
//! function.
//!
//! Order of a pass, as in the kubelet (VM-01): unmounts first, so that a volume can move from one pod to another; then
//! mounts and remounts.

use std::collections::BTreeSet;

use super::state::MountState;
use super::world::VolumeId;
use super::world::actual::ActualWorld;
use super::world::desired::DesiredWorld;

/// An operation that one volume of one pod needs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Operation {
    /// The volume.
    pub id: VolumeId,
    /// What to do.
    pub action: Action,
}

/// The action of an operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Action {
    /// Mount it. A mount that failed may have left a part of it.
    Mount,
    /// Set it up again while it is mounted.
    Remount,
    /// Unmount it, and remove what podfs made for it.
    Unmount,
}

impl Action {
    /// The kubelet's name of the operation, in metrics and errors. Another name starts the back-off anew.
    pub fn name(self) -> &'static str {
        match self {
            Action::Mount | Action::Remount => "volume_mount",
            Action::Unmount => "volume_unmount",
        }
    }
}

/// The operations that are due. `pending` are the volumes with a running operation. Nothing is unmounted before
/// `ready_to_unmount`: every source has listed its pods, and podfs has found everything of an earlier daemon (VM-02).
pub fn reconcile(
    desired: &DesiredWorld,
    actual: &ActualWorld,
    pending: &BTreeSet<VolumeId>,
    ready_to_unmount: bool,
) -> Vec<Operation> {
    let is_idle = |id: &VolumeId| !pending.contains(id);
    let unmounts = actual.volumes().filter(|(id, volume)| {
        ready_to_unmount && volume.mount != MountState::NotMounted && desired.volume(id).is_none() && is_idle(id)
    });
    let unmounts = unmounts.map(|(id, _)| Operation { id: id.clone(), action: Action::Unmount });
    let mounts = desired.volumes().filter(|(id, _)| is_idle(id)).filter_map(|(id, _)| {
        let action = match actual.volume(&id) {
            Some(volume) if volume.mount == MountState::Mounted => volume.remount_required.then_some(Action::Remount),
            _ => Some(Action::Mount),
        };
        action.map(|action| Operation { id, action })
    });
    unmounts.chain(mounts).collect()
}

#[cfg(test)]
mod tests;
