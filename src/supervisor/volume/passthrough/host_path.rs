//! Files and directories of the node, as a hostPath volume of the pod names them.

use std::path::Path;

use podfs_fuse::mount::private::Access;
use tracing::warn;

use super::{Common, MountPlan, PassthroughSource, Setting, Trouble};
use crate::host::device::BlockDevice;
use crate::host::disks::PodDisks;
use crate::host::{FileKind, Source, host_path};
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
}

/// A path of the node that is open, and so is the disk that it names.
pub(super) struct Opened {
    pub(super) source: Source,
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
    let mut mount_points = setting.mount_points();
    let disks = mount_points.run_directory().map(|directory| PodDisks::of(directory.join(DISKS)));
    if let Some(Err(error)) = disks.map(|disks| disks.pin(spec.name.as_str(), &device)) {
        // What a supervisor before this one has mounted leads to the other disk by now.
        if let Ok(Some((_, visible))) = mount_points.keep(path) {
            visible.unmount().unwrap_or_else(|error| warn!("{error}"));
        }
        return Err(error.into());
    }
    drop(mount_points);
    Ok(Opened { source, device: Some(device) })
}
