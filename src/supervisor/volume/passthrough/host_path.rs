//! Files and directories of the node, as a hostPath volume of the pod names them.

use podfs_fuse::mount::private::Access;

use super::{Common, MountPlan, PassthroughSource, Trouble};
use crate::host::device::BlockDevice;
use crate::host::{FileKind, host_path};
use crate::manifest::PodView;
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
        let source = host_path::open(&self.source)?;
        if source.kind() == FileKind::BlockDevice {
            // One without a medium can be shown and not opened.
            self.device = BlockDevice::open(&source).ok();
        }
        MountPlan::of_host(spec, path, source, Access::ReadWrite)
    }
}
