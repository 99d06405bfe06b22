//! Paths of the node. One that leads to a disk is the pod's only as long as it is the same disk.

use std::path::Path;

use podfs_fuse::mount::private::Access;
use tracing::warn;

use super::passthrough::{MountPlan, PassthroughVolume};
use super::{Setting, Trouble};
use crate::host::device::BlockDevice;
use crate::host::disks::PodDisks;
use crate::host::{FileKind, Source, host_path};
use crate::supervisor::run_dir::claim::DISKS;
use crate::volume::{HostPath, Volume};

impl PassthroughVolume {
    /// A hostPath volume of the pod.
    pub(super) fn host_path(&mut self, spec: &Volume, source: &HostPath) -> Result<MountPlan, Trouble> {
        let path = self.setting().site.volume(HostPath::DIRECTORY, spec.name.as_str());
        self.set_path(path.clone());
        let source = self.open_host_path(spec, source, &path)?;
        self.mount_plan(spec, path, source, Access::ReadWrite)
    }

    /// Opens a path of the node that is shown at `path`. If it leads to a disk, no other disk may take its place.
    pub(super) fn open_host_path(&mut self, spec: &Volume, source: &HostPath, path: &Path) -> Result<Source, Trouble> {
        let source = host_path::open(source)?;
        if source.kind() != FileKind::BlockDevice {
            return Ok(source);
        }
        // One without a medium can be shown and not opened.
        let Ok(device) = BlockDevice::open(&source) else { return Ok(source) };
        if let Some(Err(error)) = disks(self.setting()).map(|disks| disks.pin(spec.name.as_str(), &device)) {
            // What a supervisor before this one has mounted leads to the other disk by now.
            if let Ok(Some((_, visible))) = self.setting().mount_points().keep(path) {
                visible.unmount().unwrap_or_else(|error| warn!("{error}"));
            }
            return Err(error.into());
        }
        self.hold(device);
        Ok(source)
    }
}

/// The volume has gone from the pod: another one of its name may be another disk.
pub(super) fn forget_disk(setting: &Setting, volume: &str) {
    if let Some(Err(error)) = disks(setting).map(|disks| disks.forget(volume)) {
        warn!("volume {volume:?}: {error}");
    }
}

/// The disks of the pod; none without a pod.
fn disks(setting: &Setting) -> Option<PodDisks> {
    setting.mount_points().run_directory().map(|directory| PodDisks::of(directory.join(DISKS)))
}
