//! Paths of the node, as a hostPath volume names them. One that leads to a disk is the pod's only as long as it is the same disk.

use std::path::Path;

use podfs_fuse::mount::private::Access;
use tracing::warn;

use super::{Common, MountPlan, PassthroughSource, PodEnd, Setting, Trouble};
use crate::host::device::BlockDevice;
use crate::host::disks::PodDisks;
use crate::host::{FileKind, HostSource, host_path};
use crate::manifest::PodView;
use crate::supervisor::run_dir::claim::DISKS;
use crate::volume::{HostPath, Volume};

/// A hostPath volume.
pub(in crate::supervisor::volume) struct HostPathSource {
    source: HostPath,
    /// The device that the volume shows, if it shows one. While it is open, the kernel gives its number to no other device.
    device: Option<BlockDevice>,
}

impl HostPathSource {
    pub(in crate::supervisor::volume) fn new(source: HostPath) -> Self {
        Self { source, device: None }
    }
}

impl PassthroughSource for HostPathSource {
    fn find(&mut self, volume: &mut Common, spec: &Volume, _: &PodView) -> Result<MountPlan, Trouble> {
        let path = volume.place(HostPath::DIRECTORY, spec.name.as_str());
        let Opened { source, device } = open(&volume.setting, spec, &self.source, &path)?;
        self.device = device;
        MountPlan::of_host(spec, path, source, Access::ReadWrite)
    }

    fn take_down(self: Box<Self>, volume: &Common, name: &str, end: PodEnd) {
        if self.device.is_some() && end == PodEnd::Clean {
            forget_disk(&volume.setting, name);
        }
    }
}

/// A path of the node that is open, and so is the disk that it names.
pub(super) struct Opened {
    pub(super) source: HostSource,
    pub(super) device: Option<BlockDevice>,
}

/// Opens a path of the node that is to be shown at `path`. If it is a disk, no other disk may take its place.
pub(super) fn open(setting: &Setting, spec: &Volume, source: &HostPath, path: &Path) -> Result<Opened, Trouble> {
    let source = host_path::open(source)?;
    if source.kind() != FileKind::BlockDevice {
        return Ok(Opened { source, device: None });
    }
    // One without a medium can be shown and not opened.
    let Ok(device) = BlockDevice::open(&source) else { return Ok(Opened { source, device: None }) };
    if let Some(Err(error)) = disks(setting).map(|disks| disks.pin(spec.name.as_str(), &device)) {
        // What a supervisor before this one has mounted leads to the other disk by now.
        if let Ok(Some((_, visible))) = setting.mount_points().keep(path) {
            visible.unmount().unwrap_or_else(|error| warn!("{error}"));
        }
        return Err(error.into());
    }
    Ok(Opened { source, device: Some(device) })
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
