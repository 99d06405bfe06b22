//! A volume whose files podfs assembles and commits, generation by generation.

use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::time::Instant;

use podfs_fuse::audit::AuditSubject;
use podfs_fuse::client::{Commit, CommitError, LivePartError, ProjectionMount, VolumeObserver};
use podfs_fuse::mount::MountError;
use podfs_fuse::mount::point::MountPoint;
use podfs_fuse::mount::private::{ContainerAccess, MountOptions, MountPointType};
use podfs_fuse::mount::visible::VisibleMount;
use podfs_fuse::projection::image::DirectoryAttributes;
use podfs_fuse::projection::old::OldUsage;
use podfs_fuse::projection::tree::Root;
use podfs_fuse::projection::{FileEntry, ImageError, ImageLayout};
use podfs_fuse::protocol::Reporting;
use serde_json::json;
use tracing::warn;

use super::label::label;
use super::mounter::Mounter;
use super::{PodEnd, RefreshFailure, ShownContent, VolumeContext};
use crate::manifest::PodView;
use crate::manifest::pod::PodIdentity;
use crate::payload::{AssembledPayload, Ownership, Payload, PayloadError};
use crate::supervisor::volume::adopted::KeptVolume;
use crate::volume::{self, Volume};

/// A projection, which is mounted once its first payload is complete.
pub(super) struct ProjectedVolume {
    source: volume::Projection,
    setting: VolumeContext,
    path: PathBuf,
    /// The mount point, once podfs has made it.
    point: Option<MountPoint>,
    mounted: Option<MountedProjection>,
    /// The warnings about the last payload.
    warned: Vec<String>,
    /// The SELinux label of the volume's mounts.
    label: Option<String>,
}

/// Fields are dropped in this order, so that the projection is no longer visible when it ends.
struct MountedProjection {
    visible: VisibleMount,
    projection: ProjectionMount,
}

#[derive(Debug, thiserror::Error)]
enum RefreshError {
    #[error(transparent)]
    Payload(#[from] PayloadError),
    #[error(transparent)]
    Layout(#[from] ImageError),
    #[error(transparent)]
    Mount(#[from] MountError),
    #[error(transparent)]
    Commit(#[from] CommitError),
}

impl From<RefreshError> for RefreshFailure {
    fn from(error: RefreshError) -> RefreshFailure {
        match error {
            RefreshError::Payload(error) => RefreshFailure::manifests(error),
            RefreshError::Layout(error) => RefreshFailure::manifests(error),
            RefreshError::Mount(error) => RefreshFailure::of_mount(error),
            RefreshError::Commit(error) => RefreshFailure::temporary(error),
        }
    }
}

impl Mounter for ProjectedVolume {
    fn setting(&self) -> &VolumeContext {
        &self.setting
    }

    fn path(&self) -> Option<&Path> {
        Some(&self.path)
    }

    fn is_read_only(&self) -> bool {
        true
    }

    fn shown(&self) -> Option<ShownContent> {
        let mounted = self.mounted.as_ref().filter(|mounted| !mounted.projection.is_given_up())?;
        mounted.shown()
    }

    fn watch(&self) -> Option<VolumeObserver> {
        self.mounted.as_ref().map(|mounted| mounted.projection.watch())
    }

    fn visible(&mut self) -> Option<&mut VisibleMount> {
        self.mounted.as_mut().map(|mounted| &mut mounted.visible)
    }

    fn adopt(&mut self, kept: KeptVolume) {
        let KeptVolume { served, point, visible, .. } = kept;
        self.path = point.path().to_owned();
        self.point = Some(point);
        let Ok(mut projection) = served.into_projection() else { return };
        projection.keep_old_for(self.setting.keep_old_generations);
        self.mounted = Some(MountedProjection { visible, projection });
    }

    /// Assembles the files from the pod's objects, and commits them.
    fn show(
        &mut self,
        spec: &Volume,
        pod: &PodView,
        noticed_at: Option<Instant>,
    ) -> Result<ShownContent, RefreshFailure> {
        if self.point.is_none() {
            self.point = Some(self.setting.prepare(&self.path, MountPointType::Directory)?);
        }
        Ok(self.show_payload(spec, pod, noticed_at)?)
    }

    fn show_again(&mut self) -> Result<(), RefreshFailure> {
        let Some(mounted) = &mut self.mounted else { return Ok(()) };
        let point = self.point.insert(self.setting.prepare(&self.path, MountPointType::Directory)?);
        if !mounted.projection.is_given_up() {
            mounted.visible.replace(mounted.projection.show(point).map_err(RefreshFailure::of_mount)?);
        }
        Ok(())
    }

    fn next_removal(&self) -> Option<Instant> {
        self.mounted.as_ref()?.projection.next_removal()
    }

    fn remove_old(&mut self, name: &str) {
        if let Some(mounted) = &mut self.mounted {
            mounted.projection.remove_old();
            warn_of_left(name, &mut mounted.projection);
        }
    }

    fn old_usage(&self) -> OldUsage {
        self.mounted.as_ref().map(|mounted| mounted.projection.old_usage()).unwrap_or_default()
    }

    fn live_part(&mut self, path: &str) -> Option<Result<OwnedFd, LivePartError>> {
        let options = MountOptions { selinux_context: self.label.clone(), shape: MountPointType::Directory };
        self.mounted.as_mut().map(|mounted| mounted.projection.live_part(path, &options))
    }

    fn take_down(self: Box<Self>, _: &str, _: PodEnd) -> Result<(), MountError> {
        self.mounted.map_or(Ok(()), |mounted| mounted.visible.unmount())
    }
}

impl ProjectedVolume {
    pub(super) fn new(
        source: volume::Projection,
        spec: &Volume,
        point: Option<MountPoint>,
        setting: VolumeContext,
    ) -> Self {
        let path = match &point {
            Some(point) => point.path().to_owned(),
            None => setting.site.volume(spec.kind.directory.unwrap_or_default(), spec.name.as_str()),
        };
        Self { source, setting, path, point, mounted: None, warned: Vec::new(), label: None }
    }

    /// Assembles the payload, and commits it to the mounted projection. Mounts a new projection if none is mounted, or
    /// if a takeover has given up the mounted one.
    fn show_payload(
        &mut self,
        spec: &Volume,
        pod: &PodView,
        noticed_at: Option<Instant>,
    ) -> Result<ShownContent, RefreshError> {
        let assembled = Payload::assemble(&self.source, pod)?;
        warn_once(&mut self.warned, spec.name.as_str(), &assembled);
        self.label = label(pod, &self.setting.site);
        let payload = &assembled.payload;
        let directories = DirectoryAttributes { mode: payload.directory_mode, gid: payload.gid };
        let layout = ImageLayout::new(entries(payload), directories)?;
        let mounted = match &mut self.mounted {
            Some(mounted) if !mounted.projection.is_given_up() => {
                let began = Instant::now();
                let commit = mounted.projection.commit(&layout, directories)?;
                if let (Some(noticed_at), Commit::Switched { staged_in, switched_in, .. }) = (noticed_at, commit) {
                    let before = began.saturating_duration_since(noticed_at);
                    mounted.projection.note_propagation(before + staged_in + switched_in);
                }
                warn_of_left(spec.name.as_str(), &mut mounted.projection);
                mounted
            }
            _ => {
                let mode = Ownership::of(&pod.facts).root_mode(self.source.medium);
                let mut mounted = self.mount_projection(spec, &layout, directories, pod, mode)?;
                if let Some(given_up) = self.mounted.take() {
                    mounted.visible.cover(given_up.visible);
                }
                if let Some(noticed_at) = noticed_at {
                    mounted.projection.note_propagation(noticed_at.elapsed());
                }
                self.mounted.insert(mounted)
            }
        };
        Ok(mounted.shown().expect("a projection has a generation after its first commit"))
    }

    /// Mounts the projection. Its first generation is complete before it is visible (FU-09).
    fn mount_projection(
        &self,
        spec: &Volume,
        layout: &ImageLayout<'_>,
        directories: DirectoryAttributes,
        pod: &PodView,
        mode: u16,
    ) -> Result<MountedProjection, RefreshError> {
        let nested = spec.nested.iter().map(|path| path.as_str().to_owned()).collect();
        let root = Root { mode, gid: directories.gid, directories: nested };
        let options = MountOptions { selinux_context: self.label.clone(), shape: MountPointType::Directory };
        let VolumeContext { server, trace, .. } = &self.setting;
        let identity = VolumeContext::identity(spec, &pod.identity, &self.path, None, ContainerAccess::ReadOnly);
        let audit = spec.preferences.audit.then(|| subject(&pod.identity));
        let reporting = Reporting { trace: *trace, audit };
        let mut projection = ProjectionMount::start(server, &root, &options, &identity, &reporting)?;
        projection.keep_old_for(self.setting.keep_old_generations);
        projection.commit(layout, directories)?;
        let point = self.point.as_ref().expect("`show` makes it before it assembles the first payload");
        let visible = projection.show(point)?;
        Ok(MountedProjection { visible, projection })
    }
}

impl MountedProjection {
    /// The shown content. A later change of the annotation `podfs.io/audit.VOLUME` does not switch the access log on or
    /// off.
    fn shown(&self) -> Option<ShownContent> {
        let shown = if self.projection.is_audited() { ShownContent::Audited } else { ShownContent::Generation };
        self.projection.generation().cloned().map(shown)
    }
}

/// The pod, for each line of the access log. The line names the volume, too.
fn subject(pod: &PodIdentity) -> AuditSubject {
    let PodIdentity { namespace, name, uid } = pod;
    let pod = json!({"namespace": namespace, "name": name, "uid": uid.as_str()});
    AuditSubject([("pod".to_owned(), pod)].into_iter().collect())
}

/// Logs why podfs could not remove an old generation, or has to give up live parts. Logs each reason once.
fn warn_of_left(volume: &str, projection: &mut ProjectionMount) {
    if let Some(reason) = projection.take_left() {
        warn!("volume {volume:?}: {reason}");
    }
}

/// Logs the warnings about a payload, except those that podfs has logged about the payload before.
fn warn_once(warned: &mut Vec<String>, volume: &str, assembled: &AssembledPayload<'_>) {
    let warnings: Vec<_> = assembled.warnings.iter().map(ToString::to_string).collect();
    for warning in warnings.iter().filter(|warning| !warned.contains(warning)) {
        warn!("volume {volume:?}: {warning}");
    }
    *warned = warnings;
}

/// The files of a payload, for an image.
fn entries<'a>(payload: &'a Payload<'_>) -> impl Iterator<Item = FileEntry<'a>> {
    payload.files.iter().map(|(path, file)| FileEntry {
        path: path.as_str(),
        content: &file.content,
        mode: file.mode,
        uid: file.uid,
        gid: payload.gid,
    })
}
