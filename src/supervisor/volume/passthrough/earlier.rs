//! Earlier mounts of a volume whose path on the node leads elsewhere now, and the containers that may use them.
//!
//! A container keeps the mount with which it has started, so the server goes on with an earlier mount until the containers that were
//! prepared before the change have ended. If podfs does not know all containers that may use a mount, it keeps the mount until all
//! containers, or the pod, have ended: after an adoption, and if an agent has prepared none.

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
#[derive(Default)]
enum ContainerSet {
    /// No container was prepared with it. An agent that prepares none may have started some.
    #[default]
    NoneYet,
    /// Those with these names.
    Known(BTreeSet<String>),
    /// Any container of the pod.
    Unknown,
}

impl ContainerSet {
    fn remove(&mut self, container: &str) {
        if let ContainerSet::Known(names) = self {
            names.remove(container);
        }
    }

    fn add(&mut self, container: &str) {
        match self {
            ContainerSet::NoneYet => *self = ContainerSet::Known(BTreeSet::from([container.to_owned()])),
            ContainerSet::Known(names) => drop(names.insert(container.to_owned())),
            ContainerSet::Unknown => {}
        }
    }

    /// Whether no container uses the mount.
    fn is_over(&self) -> bool {
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
        self.users.add(container);
    }

    /// Notes that a container may use any of the mounts.
    pub(super) fn keep(&mut self) {
        self.users = ContainerSet::Unknown;
        self.mounts.iter_mut().for_each(|mount| mount.users = ContainerSet::Unknown);
    }

    /// Notes that the container, or each container (`None`), has ended.
    pub(super) fn release(&mut self, container: Option<&str>) {
        let Some(container) = container else {
            *self = EarlierMounts::default();
            return;
        };
        self.users.remove(container);
        self.mounts.iter_mut().for_each(|mount| mount.users.remove(container));
        self.mounts.retain(|mount| !mount.users.is_over());
    }

    /// Notes that `served` is no longer the present mount. If all containers that were prepared with it have ended, it ends.
    pub(super) fn replace(&mut self, served: MountedVolume) {
        let users = std::mem::take(&mut self.users);
        if !users.is_over() {
            self.mounts.push(EarlierMount { _served: served, users });
        }
    }

    /// The number of earlier mounts.
    pub(super) fn len(&self) -> usize {
        self.mounts.len()
    }
}
