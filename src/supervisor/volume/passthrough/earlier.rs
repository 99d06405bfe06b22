//! Earlier mounts of a volume whose path on the node leads elsewhere now, and the containers that may use them.
//!
//! A container keeps the mount with which it has started, so the server goes on with an earlier mount until the containers that were
//! prepared before the change have ended. A supervisor that adopts the volume does not know these containers; it keeps the mount until all
//! containers, or the pod, have ended.

use std::collections::BTreeSet;

use podfs_fuse::client::MountedVolume;

/// The mounts of a volume and their containers.
#[derive(Default)]
pub(super) struct EarlierMounts {
    mounts: Vec<EarlierMount>,
    /// The containers that were prepared with the present mount.
    users: ContainerSet,
}

/// A mount that is no longer visible. To drop it ends it.
struct EarlierMount {
    _served: MountedVolume,
    users: ContainerSet,
}

/// The containers that may use a mount.
enum ContainerSet {
    /// Those with these names.
    Known(BTreeSet<String>),
    /// Any container of the pod: an earlier supervisor has prepared some.
    Unknown,
}

impl Default for ContainerSet {
    fn default() -> Self {
        ContainerSet::Known(BTreeSet::new())
    }
}

impl ContainerSet {
    fn remove(&mut self, container: &str) {
        if let ContainerSet::Known(names) = self {
            names.remove(container);
        }
    }

    fn is_empty(&self) -> bool {
        matches!(self, ContainerSet::Known(names) if names.is_empty())
    }
}

impl EarlierMounts {
    /// The mounts that a supervisor has adopted.
    pub(super) fn adopted(mounts: impl Iterator<Item = MountedVolume>) -> EarlierMounts {
        let mounts = mounts.map(|served| EarlierMount { _served: served, users: ContainerSet::Unknown }).collect();
        EarlierMounts { mounts, users: ContainerSet::Unknown }
    }

    /// Notes that the container starts with the present mount. An earlier container of this name has ended.
    pub(super) fn prepare(&mut self, container: &str) {
        self.release(Some(container));
        if let ContainerSet::Known(names) = &mut self.users {
            names.insert(container.to_owned());
        }
    }

    /// Notes that the container, or each container (`None`), has ended.
    pub(super) fn release(&mut self, container: Option<&str>) {
        let Some(container) = container else {
            *self = EarlierMounts::default();
            return;
        };
        self.users.remove(container);
        self.mounts.iter_mut().for_each(|mount| mount.users.remove(container));
        self.mounts.retain(|mount| !mount.users.is_empty());
    }

    /// Notes that `served` is no longer the present mount. Without containers that may use it, it ends.
    pub(super) fn replace(&mut self, served: MountedVolume) {
        let users = std::mem::take(&mut self.users);
        if !users.is_empty() {
            self.mounts.push(EarlierMount { _served: served, users });
        }
    }

    /// The number of earlier mounts.
    pub(super) fn len(&self) -> usize {
        self.mounts.len()
    }
}
