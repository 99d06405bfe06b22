//! The actual state of the world: the volumes that are mounted, or may be.
//!
//! Invariants:
//! 1. A volume that may need an unmount is in this world, as mounted or uncertain, until an unmount has succeeded.
//! 2. Only a mounted volume can have a remount required.
//! 3. A volume that an earlier daemon left is uncertain until its supervisor has reported its state, or until it was mounted again.

use std::collections::BTreeMap;
use std::path::PathBuf;

use super::VolumeId;
use crate::manifest::pod::PodUid;
use crate::node::state::MountState;

/// The volumes that are mounted, or may be.
#[derive(Clone, Debug, Default)]
pub struct ActualWorld {
    volumes: BTreeMap<VolumeId, ActualVolume>,
}

/// A volume that is mounted, that may be mounted, or that podfs has tried to mount.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ActualVolume {
    /// Its mount.
    pub mount: MountState,
    /// Whether its supervisor has to set it up again.
    pub remount_required: bool,
    /// Whether an earlier daemon left it, and no operation on it has succeeded since.
    pub reconstructed: bool,
    /// Whether it was mounted since its last unmount, or may have been: containers may use it.
    pub was_mounted: bool,
    /// The last report of its supervisor.
    pub observed: ObservedVolume,
    /// Why it is not mounted, or not current, according to its supervisor.
    reported_reason: Option<String>,
    /// Why the last operation on it failed, unless its supervisor has reported since.
    failure: Option<String>,
}

/// A supervisor's report of a volume.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ObservedVolume {
    /// Where it is mounted, or is going to be.
    pub path: Option<PathBuf>,
    /// The plugin that serves it, according to its path.
    pub plugin: Option<String>,
    /// A supplemental group that containers need.
    pub group: Option<u32>,
    /// Whether containers can only read it.
    pub read_only: bool,
}

/// The outcome of an operation: the kubelet's classes of errors.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OperationOutcome {
    /// It succeeded.
    Done,
    /// It failed, and nothing of the volume is mounted.
    Final,
    /// It failed, and something of the volume may be mounted.
    Uncertain,
    /// It was not tried, or not completed; the volume is as it was before.
    Transient,
}

impl Default for ActualVolume {
    fn default() -> Self {
        ActualVolume {
            mount: MountState::NotMounted,
            remount_required: false,
            reconstructed: false,
            was_mounted: false,
            observed: ObservedVolume::default(),
            reported_reason: None,
            failure: None,
        }
    }
}

impl ActualVolume {
    /// Why it is not mounted, or not current.
    pub fn reason(&self) -> Option<&str> {
        self.failure.as_deref().or(self.reported_reason.as_deref())
    }
}

impl ActualWorld {
    /// The volume, if it is known.
    pub fn volume(&self, id: &VolumeId) -> Option<&ActualVolume> {
        self.volumes.get(id)
    }

    /// All known volumes.
    pub fn volumes(&self) -> impl Iterator<Item = (&VolumeId, &ActualVolume)> {
        self.volumes.iter()
    }

    /// The volumes of a pod.
    pub fn of_pod(&self, pod: &PodUid) -> impl Iterator<Item = (&VolumeId, &ActualVolume)> {
        let first = VolumeId { pod: pod.clone(), volume: String::new() };
        self.volumes.range(first..).take_while(move |(id, _)| id.pod == *pod)
    }

    /// Whether any volume of the pod may be mounted.
    pub fn has_mounts(&self, pod: &PodUid) -> bool {
        self.of_pod(pod).any(|(_, volume)| volume.mount != MountState::NotMounted)
    }

    /// Adds a volume that an earlier daemon left, unless it is known.
    pub fn reconstruct(&mut self, id: VolumeId) {
        let found = ActualVolume {
            mount: MountState::Uncertain,
            reconstructed: true,
            was_mounted: true,
            ..ActualVolume::default()
        };
        self.volumes.entry(id).or_insert(found);
    }

    /// Takes the end of a mount or a remount. On errors see the table of 5.4 (VM-04). The supervisor may have reported during the
    /// operation; its report stays.
    pub fn mounted(&mut self, id: &VolumeId, outcome: OperationOutcome, failure: Option<String>) {
        let volume = self.volumes.entry(id.clone()).or_default();
        volume.failure = failure;
        match (outcome, volume.mount) {
            (OperationOutcome::Done, _) => {
                volume.mount = MountState::Mounted;
                volume.was_mounted = true;
                volume.remount_required = false;
                volume.reconstructed = false;
                volume.failure = None;
            }
            // A refresh that fails leaves the volume as it is; the reconciler tries again (VM-08).
            (_, MountState::Mounted) | (OperationOutcome::Transient, _) => {}
            (OperationOutcome::Uncertain, _) => volume.mount = MountState::Uncertain,
            // The leftovers of an earlier daemon still have to be undone (RC-04).
            (OperationOutcome::Final, _) if volume.reconstructed => volume.mount = MountState::Uncertain,
            (OperationOutcome::Final, _) => volume.mount = MountState::NotMounted,
        }
    }

    /// Takes the end of an unmount.
    pub fn unmounted(&mut self, id: &VolumeId, outcome: OperationOutcome, failure: Option<String>) {
        match (outcome, self.volumes.get_mut(id)) {
            (OperationOutcome::Done, _) => drop(self.volumes.remove(id)),
            (OperationOutcome::Transient, Some(volume)) => volume.failure = failure,
            (_, Some(volume)) => {
                volume.mount = MountState::Uncertain;
                volume.remount_required = false;
                volume.failure = failure;
            }
            (_, None) => {}
        }
    }

    /// Takes a supervisor's report of a volume.
    pub fn report(&mut self, id: &VolumeId, is_mounted: bool, observed: ObservedVolume, reason: Option<String>) {
        let volume = self.volumes.entry(id.clone()).or_default();
        volume.observed = observed;
        volume.reported_reason = reason;
        volume.failure = None;
        match (is_mounted, volume.mount) {
            (true, _) => {
                volume.mount = MountState::Mounted;
                volume.was_mounted = true;
                volume.reconstructed = false;
            }
            // Its supervisor no longer has a mount of it.
            (false, MountState::Mounted) => {
                volume.mount = MountState::NotMounted;
                volume.remount_required = false;
            }
            // It may be partly mounted, and its supervisor continues to mount it: it is no leftover of an earlier daemon.
            (false, _) => volume.reconstructed = false,
        }
    }

    /// Makes the mounted volumes of the pod require a remount.
    pub fn require_remount(&mut self, pod: &PodUid) {
        for (id, volume) in &mut self.volumes {
            if id.pod == *pod && volume.mount == MountState::Mounted {
                volume.remount_required = true;
            }
        }
    }

    /// Makes the volume require a remount, if it is mounted.
    pub fn require_remount_of(&mut self, id: &VolumeId) {
        if let Some(volume) = self.volumes.get_mut(id).filter(|volume| volume.mount == MountState::Mounted) {
            volume.remount_required = true;
        }
    }

    /// Forgets volumes that are not mounted and that `is_wanted` does not name. Returns them.
    pub fn forget_unmounted(&mut self, is_wanted: impl Fn(&VolumeId) -> bool) -> Vec<VolumeId> {
        let unmounted = self.volumes.iter().filter(|(_, volume)| volume.mount == MountState::NotMounted);
        let forgotten: Vec<_> = unmounted.map(|(id, _)| id).filter(|id| !is_wanted(id)).cloned().collect();
        forgotten.iter().for_each(|id| drop(self.volumes.remove(id)));
        forgotten
    }
}

#[cfg(test)]
mod tests;
