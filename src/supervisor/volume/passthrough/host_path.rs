//! hostPath volumes: paths of the node. If the path leads to a disk, the pod gets this disk only, and no other disk that later has
//! the same path.

use std::path::Path;
use std::sync::mpsc::{self, Receiver, TryRecvError};
use std::thread;

use podfs_fuse::mount::private::ContainerAccess;
use tracing::warn;

use super::{MountPlan, PassthroughParts, PassthroughSource, PodEnd, RefreshFailure, VolumeContext};
use crate::host::device::BlockDevice;
use crate::host::disks::PodDisks;
use crate::host::{FileKind, HostError, HostSource, host_path};
use crate::manifest::PodView;
use crate::supervisor::run_dir::file_names::DISKS;
use crate::supervisor::volume::PATH_TIMEOUT;
use crate::volume::{HostPath, Volume};

/// A hostPath volume.
pub(in crate::supervisor::volume) struct HostPathSource {
    source: HostPath,
    /// The block device that the volume shows, if it shows one. While it is open, the kernel gives its number to no other device.
    device: Option<BlockDevice>,
    follower: PathFollower,
}

impl HostPathSource {
    pub(in crate::supervisor::volume) fn new(source: HostPath) -> Self {
        Self { source, device: None, follower: PathFollower::default() }
    }
}

impl PassthroughSource for HostPathSource {
    fn find(&mut self, volume: &mut PassthroughParts, spec: &Volume, _: &PodView) -> Result<MountPlan, RefreshFailure> {
        let path = volume.place(HostPath::DIRECTORY, spec.name.as_str());
        let OpenedPath { source, device } = open(&volume.setting, spec, &self.source, &path)?;
        self.device = device;
        MountPlan::of_host(spec, path, source, ContainerAccess::ReadWrite, true)
    }

    fn follow_path(
        &mut self,
        _: &PassthroughParts,
        _: &Volume,
        _: &PodView,
    ) -> Result<Option<HostSource>, RefreshFailure> {
        match self.device {
            Some(_) => Ok(None),
            None => self.follower.follow(&self.source),
        }
    }

    fn take_down(self: Box<Self>, volume: &PassthroughParts, name: &str, end: PodEnd) {
        if self.device.is_some() && end == PodEnd::Stopped {
            forget_disk(&volume.setting, name);
        }
    }
}

/// Opens a path of the node again, without waiting for file systems that do not answer.
#[derive(Default)]
pub(super) struct PathFollower {
    /// The result of a thread that has not answered in time.
    late: Option<Receiver<Result<HostSource, HostError>>>,
}

impl PathFollower {
    /// The file or directory to which the path leads now; `None` if that is a disk, which the pod gets only at its start, and if a file
    /// system on the path does not answer: then a container gets what is mounted, as before.
    pub(super) fn follow(&mut self, source: &HostPath) -> Result<Option<HostSource>, RefreshFailure> {
        // No call can be interrupted while a file system does not answer, so podfs does not start a second thread meanwhile.
        let is_silent = |late: &Receiver<_>| matches!(late.try_recv(), Err(TryRecvError::Empty));
        let late = self.late.take().filter(is_silent);
        let opened = late.unwrap_or_else(|| opening(source));
        match opened.recv_timeout(PATH_TIMEOUT) {
            Ok(opened) => {
                let source = opened?;
                Ok((source.kind() != FileKind::BlockDevice).then_some(source))
            }
            Err(_) => {
                self.late = Some(opened);
                let path = source.path.display();
                warn!("hostPath {path} does not answer; the container gets what podfs has mounted before");
                Ok(None)
            }
        }
    }
}

/// Opens the path in another thread.
fn opening(source: &HostPath) -> Receiver<Result<HostSource, HostError>> {
    let (sender, opened) = mpsc::channel();
    let source = source.clone();
    let thread = thread::Builder::new().name("follow-path".into());
    // Without a thread, there is no sender, so the receiver gets no result.
    let _ = thread.spawn(move || drop(sender.send(host_path::open(&source))));
    opened
}

/// An open path of the node, and the disk to which it leads, if it leads to one.
pub(super) struct OpenedPath {
    pub(super) source: HostSource,
    pub(super) device: Option<BlockDevice>,
}

/// Opens a path of the node for a mount at `path`. If the path leads to another disk than before, refuses that disk.
pub(super) fn open(
    setting: &VolumeContext,
    spec: &Volume,
    source: &HostPath,
    path: &Path,
) -> Result<OpenedPath, RefreshFailure> {
    let source = host_path::open(source)?;
    if source.kind() != FileKind::BlockDevice {
        return Ok(OpenedPath { source, device: None });
    }
    // podfs cannot open a drive without a medium, but shows it all the same.
    let Ok(device) = BlockDevice::open(&source) else { return Ok(OpenedPath { source, device: None }) };
    if let Some(Err(error)) = disks(setting).map(|disks| disks.pin(spec.name.as_str(), &device)) {
        // The bind mount of an earlier supervisor leads to the refused disk, too.
        if let Ok(Some((_, visible))) = setting.mount_points().adopt(path) {
            visible.unmount().unwrap_or_else(|error| warn!("{error}"));
        }
        return Err(error.into());
    }
    Ok(OpenedPath { source, device: Some(device) })
}

/// Forgets the disk of a volume that the pod no longer has. A later volume of this name may have another disk.
pub(super) fn forget_disk(setting: &VolumeContext, volume: &str) {
    if let Some(Err(error)) = disks(setting).map(|disks| disks.forget(volume)) {
        warn!("volume {volume:?}: {error}");
    }
}

/// The record of the pod's disks; `None` without a pod.
fn disks(setting: &VolumeContext) -> Option<PodDisks> {
    setting.mount_points().run_directory().map(|directory| PodDisks::of(directory.join(DISKS)))
}
