//! A volume that podfs assembles: committed generation by generation.

use std::sync::Arc;

use podfs_fuse::mount::MountError;
use podfs_fuse::mount::private::{MountOptions, Shape};
use podfs_fuse::mount::visible::{MountPoint, VisibleMount};
use podfs_fuse::projection::commit::CommitError;
use podfs_fuse::projection::image::DirectoryAttributes;
use podfs_fuse::projection::tree::Root;
use podfs_fuse::projection::{Entry, GenerationName, ImageError, Layout, Projection};
use podfs_fuse::server::Watch;
use tracing::warn;

use super::{Refresh, Setting, Trouble};
use crate::payload::{Assembled, Inputs, Ownership, Payload, PayloadError};
use crate::volume::{self, Volume};

/// The mount of a projection, once its first payload was complete.
pub(super) struct ProjectedVolume {
    setting: Setting,
    point: MountPoint,
    shown: Option<Shown>,
    warned: Vec<String>,
}

/// Fields are dropped in this order: nobody sees the projection any more when it ends.
struct Shown {
    visible: VisibleMount,
    projection: Projection,
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

impl From<RefreshError> for Trouble {
    fn from(error: RefreshError) -> Trouble {
        match error {
            RefreshError::Payload(_) | RefreshError::Layout(_) => Trouble::Manifests(error.to_string()),
            RefreshError::Mount(error) => Trouble::of_mount(error),
            RefreshError::Commit(_) => Trouble::Passing(error.to_string()),
        }
    }
}

impl ProjectedVolume {
    pub(super) fn new(setting: Setting, point: MountPoint) -> Self {
        Self { setting, point, shown: None, warned: Vec::new() }
    }

    pub(super) fn adopted(setting: Setting, point: MountPoint, visible: VisibleMount, projection: Projection) -> Self {
        Self { shown: Some(Shown { visible, projection }), ..Self::new(setting, point) }
    }

    pub(super) fn point(&self) -> &MountPoint {
        &self.point
    }

    /// The generation that is shown.
    pub(super) fn generation(&self) -> Option<GenerationName> {
        self.shown.as_ref().and_then(|shown| shown.projection.generation().cloned())
    }

    /// A way to look at it, once it is mounted.
    pub(super) fn watch(&self) -> Option<Watch> {
        self.shown.as_ref().map(|shown| shown.projection.watch())
    }

    /// Shows the files that `refresh` comes to.
    pub(super) fn show(
        &mut self,
        spec: &Volume,
        source: &volume::Projection,
        refresh: &Refresh,
    ) -> Result<GenerationName, Trouble> {
        Ok(self.show_payload(spec, source, refresh)?)
    }

    pub(super) fn take_down(self) -> Result<(), MountError> {
        self.shown.map_or(Ok(()), |shown| shown.visible.unmount())
    }

    fn show_payload(
        &mut self,
        spec: &Volume,
        source: &volume::Projection,
        refresh: &Refresh,
    ) -> Result<GenerationName, RefreshError> {
        let inputs = Inputs {
            identity: &refresh.identity,
            facts: &refresh.facts,
            objects: &refresh.objects,
            tokens: &refresh.tokens,
            machine: refresh.allocatable,
        };
        let assembled = Payload::assemble(source, inputs)?;
        warn_once(&mut self.warned, spec.name.as_str(), &assembled);
        let payload = &assembled.payload;
        let directories = DirectoryAttributes { mode: payload.directory_mode, gid: payload.gid };
        let layout = Layout::new(entries(payload), directories)?;
        if self.shown.as_ref().is_some_and(|shown| shown.projection.is_given_up()) {
            self.shown = None;
        }
        let generation = match &mut self.shown {
            Some(shown) => {
                shown.projection.commit(&layout, directories)?;
                current(&shown.projection)
            }
            None => {
                let mode = Ownership::of(&refresh.facts).root_mode(source.medium);
                let shown = self.bring_up(spec, &layout, directories, refresh, mode)?;
                current(&self.shown.insert(shown).projection)
            }
        };
        Ok(generation)
    }

    /// The first generation is complete before anybody can see the volume (FU-09).
    fn bring_up(
        &self,
        spec: &Volume,
        layout: &Layout<'_>,
        directories: DirectoryAttributes,
        refresh: &Refresh,
        mode: u16,
    ) -> Result<Shown, RefreshError> {
        let nested = spec.nested.iter().map(|path| path.as_str().to_owned()).collect();
        let root = Root { mode, gid: directories.gid, directories: nested };
        let options = MountOptions { selinux_context: refresh.selinux_context(), shape: Shape::Directory };
        let Setting { server, trace, .. } = &self.setting;
        let about = Setting::about(spec, self.point.path(), None);
        let mut projection = Projection::start(Arc::clone(server), &root, &options, about, *trace)?;
        projection.commit(layout, directories)?;
        let visible = projection.show(&self.point)?;
        Ok(Shown { visible, projection })
    }
}

/// Logs what is odd about a payload, unless the one before was odd in the same way.
fn warn_once(warned: &mut Vec<String>, volume: &str, assembled: &Assembled<'_>) {
    let warnings: Vec<_> = assembled.warnings.iter().map(ToString::to_string).collect();
    for warning in warnings.iter().filter(|warning| !warned.contains(warning)) {
        warn!("volume {volume:?}: {warning}");
    }
    *warned = warnings;
}

fn entries<'a>(payload: &'a Payload<'_>) -> impl Iterator<Item = Entry<'a>> {
    payload.files.iter().map(|(path, file)| Entry {
        path: path.as_str(),
        content: &file.content,
        mode: file.mode,
        uid: file.uid,
        gid: payload.gid,
    })
}

fn current(projection: &Projection) -> GenerationName {
    projection.generation().expect("a projection has a generation after its first commit").clone()
}
