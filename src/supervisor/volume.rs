//! One volume of the pod: what it waits for, what it shows, and its next refresh.

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use podfs_fuse::mount::MountError;
use podfs_fuse::mount::private::MountOptions;
use podfs_fuse::mount::visible::{MountPoint, VisibleMount};
use podfs_fuse::projection::commit::CommitError;
use podfs_fuse::projection::image::DirectoryAttributes;
use podfs_fuse::projection::tree::Root;
use podfs_fuse::projection::{Entry, GenerationName, ImageError, Layout, Projection};
use podfs_fuse::server::Server;
use tracing::{info, warn};

use crate::manifest::objects::Objects;
use crate::manifest::pod::{PodFacts, PodIdentity};
use crate::payload::{Allocatable, Assembled, Inputs, Ownership, Payload, PayloadError};
use crate::volume::{Volume, VolumeSource};

/// The first wait before a failed system call is tried again; each further wait is twice as long.
const FIRST_RETRY: Duration = Duration::from_millis(100);
const LONGEST_RETRY: Duration = Duration::from_secs(30);

/// Where SELinux shows that it is in use.
const SELINUX: &str = "/sys/fs/selinux/enforce";

/// Everything a refresh is made from.
pub struct Refresh {
    /// The pod's name and namespace.
    pub identity: PodIdentity,
    /// What the pod manifest says at this moment.
    pub facts: PodFacts,
    /// The objects at this moment.
    pub objects: Objects,
    /// What this machine offers to pods.
    pub allocatable: Allocatable,
}

/// The life of a volume.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum State {
    /// Nothing is mounted yet: the first payload is not complete, for this reason. The first commit
    /// leads to [`State::Live`].
    Waiting(String),
    /// Mounted, and current. Every commit leads back here.
    Live(GenerationName),
    /// Mounted, and showing the last good generation, because the last refresh failed for this reason
    /// (VM-08, VM-09). A later refresh that succeeds leads to [`State::Live`].
    Behind(GenerationName, String),
}

/// What became of a refresh.
pub enum Attempt {
    /// There is nothing to do until something changes.
    Settled,
    /// The kernel or the server refused; another try may succeed.
    RetryIn(Duration),
    /// The volume can never be mounted by this process.
    Hopeless(MountError),
}

/// A volume of the pod.
pub struct PodVolume {
    spec: Volume,
    point: MountPoint,
    trace: bool,
    server: Arc<Server>,
    shown: Option<Shown>,
    state: State,
    warned: Vec<String>,
    failures: u32,
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

impl PodVolume {
    /// A volume that is going to be shown at `point`. Nothing is mounted before the first payload is
    /// complete.
    pub fn new(spec: Volume, point: MountPoint, trace: bool, server: Arc<Server>) -> Self {
        let state = State::Waiting("its first payload".to_owned());
        Self { spec, point, trace, server, shown: None, state, warned: Vec::new(), failures: 0 }
    }

    /// The volume, as the manifest describes it.
    pub fn spec(&self) -> &Volume {
        &self.spec
    }

    /// Where it is, or will be, seen.
    pub fn path(&self) -> &Path {
        self.point.path()
    }

    /// Where it is in its life.
    pub fn state(&self) -> &State {
        &self.state
    }

    /// Shows what `refresh` says. When that fails, what is shown stays as it is.
    pub fn refresh(&mut self, refresh: &Refresh) -> Attempt {
        let outcome = self.show_payload(refresh);
        match outcome {
            Ok(generation) => {
                self.failures = 0;
                self.enter(State::Live(generation));
                Attempt::Settled
            }
            Err(RefreshError::Mount(error @ (MountError::Privilege { .. } | MountError::Unsupported { .. }))) => {
                Attempt::Hopeless(error)
            }
            Err(error) => {
                let waits_for_manifests = matches!(error, RefreshError::Payload(_) | RefreshError::Layout(_));
                self.fail(error.to_string());
                if waits_for_manifests { Attempt::Settled } else { self.retry() }
            }
        }
    }

    /// Unmounts the volume.
    ///
    /// # Errors
    /// When the kernel does not unmount it.
    pub fn take_down(self) -> Result<(), MountError> {
        self.shown.map_or(Ok(()), |shown| shown.visible.unmount())
    }

    fn show_payload(&mut self, refresh: &Refresh) -> Result<GenerationName, RefreshError> {
        let VolumeSource::Projection(source) = &self.spec.source;
        let inputs = Inputs {
            identity: &refresh.identity,
            facts: &refresh.facts,
            objects: &refresh.objects,
            machine: refresh.allocatable,
        };
        let assembled = Payload::assemble(source, inputs)?;
        warn_once(&mut self.warned, self.spec.name.as_str(), &assembled);
        let payload = &assembled.payload;
        let directories = DirectoryAttributes { mode: payload.directory_mode, gid: payload.gid };
        let layout = Layout::new(entries(payload), directories)?;
        let generation = match &mut self.shown {
            Some(shown) => {
                shown.projection.commit(&layout, directories)?;
                current(&shown.projection)
            }
            None => {
                let mode = Ownership::of(&refresh.facts).root_mode(source.medium);
                let shown = self.bring_up(&layout, directories, refresh, mode)?;
                current(&self.shown.insert(shown).projection)
            }
        };
        Ok(generation)
    }

    /// The first generation is complete before anybody can see the volume (FU-09).
    fn bring_up(
        &self,
        layout: &Layout<'_>,
        directories: DirectoryAttributes,
        refresh: &Refresh,
        mode: u16,
    ) -> Result<Shown, RefreshError> {
        let nested = self.spec.nested.iter().map(|path| path.as_str().to_owned()).collect();
        let root = Root { mode, gid: directories.gid, directories: nested };
        let selinux_context = refresh.facts.selinux_label.clone().filter(|_| Path::new(SELINUX).exists());
        let options = MountOptions { selinux_context };
        let mut projection = Projection::start(Arc::clone(&self.server), &root, &options, self.trace)?;
        projection.commit(layout, directories)?;
        let visible = projection.show(&self.point)?;
        Ok(Shown { visible, projection })
    }

    fn fail(&mut self, reason: String) {
        let state = match &self.shown {
            None => State::Waiting(reason),
            Some(shown) => State::Behind(current(&shown.projection), reason),
        };
        self.enter(state);
    }

    fn retry(&mut self) -> Attempt {
        let delay = FIRST_RETRY.saturating_mul(2_u32.saturating_pow(self.failures));
        self.failures = self.failures.saturating_add(1);
        Attempt::RetryIn(delay.min(LONGEST_RETRY))
    }

    /// Logs every change of state once, in the kubelet's words where it has some (ME-02).
    fn enter(&mut self, state: State) {
        if state == self.state {
            return;
        }
        let name = self.spec.name.as_str();
        match &state {
            State::Waiting(reason) | State::Behind(_, reason) => {
                warn!("MountVolume.SetUp failed for volume {name:?} : {reason}");
            }
            State::Live(generation) => info!(volume = name, %generation, "volume is current"),
        }
        self.state = state;
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
