//! The trait for mounting a volume of the pod.

use std::os::fd::OwnedFd;
use std::path::Path;
use std::time::{Duration, Instant};

use podfs_fuse::client::{LivePartError, VolumeObserver};
use podfs_fuse::mount::MountError;
use podfs_fuse::mount::visible::VisibleMount;
use podfs_fuse::projection::old::OldUsage;

use super::growth::Expansion;
use super::{PodEnd, RefreshFailure, ShownContent, VolumeContext};
use crate::manifest::PodView;
use crate::supervisor::volume::adopted::KeptVolume;
use crate::volume::Volume;

/// Mounts one volume, and owns the mount.
pub(super) trait Mounter: Send {
    /// The data and settings that all volumes of the pod share.
    fn setting(&self) -> &VolumeContext;

    /// The path at which the volume is, or will be, mounted; unknown until its PersistentVolume is known.
    fn path(&self) -> Option<&Path>;

    /// A group that containers need to use the volume.
    fn group(&self) -> Option<u32> {
        None
    }

    /// Whether containers can only read the volume.
    fn is_read_only(&self) -> bool;

    /// The shown content, if the volume is mounted.
    fn shown(&self) -> Option<ShownContent>;

    /// The observer of the volume's requests, once a server serves it.
    fn watch(&self) -> Option<VolumeObserver> {
        None
    }

    /// The visible mount, once the volume is mounted.
    fn visible(&mut self) -> Option<&mut VisibleMount> {
        None
    }

    /// Adopts the mount of an earlier supervisor. Drops a mount of a volume of another kind.
    fn adopt(&mut self, kept: KeptVolume);

    /// Makes the volume show what `pod` describes, because of a change that podfs saw at `noticed_at`. Mounts it if
    /// needed.
    fn show(
        &mut self,
        spec: &Volume,
        pod: &PodView,
        noticed_at: Option<Instant>,
    ) -> Result<ShownContent, RefreshFailure>;

    /// Mounts the volume again, after another process has unmounted it. Processes that still use the old mount, and
    /// processes that use the new one, share one file system and its server.
    fn show_again(&mut self) -> Result<(), RefreshFailure> {
        Ok(())
    }

    /// Makes the volume show what its path on the node leads to now, because the container with this name is about to start. Containers
    /// that run keep what they have. Returns whether the volume has another mount now.
    fn follow_path(&mut self, _spec: &Volume, _pod: &PodView, _container: &str) -> Result<bool, RefreshFailure> {
        Ok(false)
    }

    /// Notes that a container may use any mount that the volume has had so far.
    fn keep_earlier_mounts(&mut self) {}

    /// Ends earlier mounts that only this container may still use, or all of them if all containers have ended (`None`).
    fn release_container(&mut self, _container: Option<&str>) {}

    /// The outcome of the volume's last growth on the node, if its claim does not report it.
    fn expansion(&self) -> Option<&Expansion> {
        None
    }

    /// How long until the next call of the volume's driver, if that has `requiresRepublish`.
    fn republish_in(&self) -> Option<Duration> {
        None
    }

    /// When the next old generation is due for removal.
    fn next_removal(&self) -> Option<Instant> {
        None
    }

    /// Removes the old generations whose time is over. `name` is that of the volume.
    fn remove_old(&mut self, _name: &str) {}

    /// The number of old generations, and their memory.
    fn old_usage(&self) -> OldUsage {
        OldUsage::default()
    }

    /// A mount of one path of a payload, which changes in place with each commit. `None` for a volume without payload,
    /// and for a volume that is not mounted.
    fn live_part(&mut self, _path: &str) -> Option<Result<OwnedFd, LivePartError>> {
        None
    }

    /// Unmounts the volume, and deletes its content if that ends with the pod.
    fn take_down(self: Box<Self>, volume: &str, end: PodEnd) -> Result<(), MountError>;
}
