//! One volume of the pod: its state, its mount, its next refresh.
//!
//! | module | owns |
//! |---|---|
//! | `mounter` | the trait for mounting a volume |
//! | `registry` | the registry of volume kinds |
//! | `mount_plan` | the planned mount of a source as it is |
//! | `projected` | volumes whose files podfs assembles |
//! | `passthrough` | volumes that show a source as it is, in one file for each kind |
//! | `device` | volumes that containers get as block devices |
//! | `failure` | why a refresh failed |
//! | `growth` | volumes whose PersistentVolume has grown |
//! | `adopted` | a volume that an earlier supervisor has mounted |
//! | `driver` | volumes that a driver of another vendor mounts |
//! | `label` | the SELinux label of a volume that podfs shows through FUSE |
//! | `hidden` | volumes that another process has unmounted, or over which it has mounted something |
//! | `removal_error` | errors about parts of a volume that podfs could not remove |
//! | `state` | the states of a volume |
//! | `local` | local PersistentVolumes: directories, and file systems of block devices |
//! | `nfs` | finding an export and its server |
//! | `sub_path` | parts of the volume that are mounted for containers |
//! | [`search`] | searching for an NFS server that has moved to another address |

pub(in crate::supervisor) mod adopted;
mod device;
pub(in crate::supervisor) mod driver;
mod failure;
mod growth;
mod hidden;
mod label;
mod local;
mod mount_plan;
mod mounter;
mod nfs;
mod passthrough;
mod projected;
mod registry;
pub(in crate::supervisor) mod removal_error;
pub mod search;
mod state;
pub(in crate::supervisor) mod sub_path;

use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Duration, Instant};

use podfs_fuse::client::{ServerClient, VolumeIdentity, VolumeObserver};
use podfs_fuse::mount::MountError;
use podfs_fuse::mount::point::MountPoint;
use podfs_fuse::mount::private::{ContainerAccess, MountPointType};
use podfs_fuse::projection::old::OldUsage;
use podfs_fuse::{Backoff, DoublingPause};
use tracing::span::EnteredSpan;
use tracing::{error_span, field, info, warn};

use self::adopted::{KeptVolume, VolumeRecord};
use super::run_dir::mount_points::MountPoints;
use super::run_dir::site::Site;
use crate::driver::CallObserver;
use crate::host::empty_dir;
use crate::host::fs_group::OwnershipObserver;
use crate::manifest::PodView;
use crate::manifest::pod::PodIdentity;
use crate::source::Condition;
use crate::volume::{EmptyDir, SubPathMode, Volume, VolumeSource};
use failure::RefreshFailure;
pub use growth::{Expansion, ExpansionFailure};
use hidden::{HiddenReason, UnmountSeries};
use mounter::Mounter;
use registry::mounter;
use removal_error::{RemovalCause, RemovalError};
pub use state::{ShownContent, VolumeLife};

/// The pauses before podfs retries a refresh that failed; each is twice as long as the pause before.
const RETRY: DoublingPause = DoublingPause::new(Duration::from_millis(100), Duration::from_secs(30));

/// How long a container that starts waits for the file systems on a path of the node, and for a volume that is busy.
pub(in crate::supervisor) const PATH_TIMEOUT: Duration = Duration::from_secs(1);

/// The data and settings that all volumes of a supervisor have in common. Cheap to clone.
#[derive(Clone)]
pub struct VolumeContext {
    /// The connection to the server, which answers the volumes' requests.
    pub server: Arc<ServerClient>,
    /// Where the volumes appear.
    pub site: Site,
    /// The mount points. A thread locks them for single calls that make or remove a directory or a file.
    pub mount_points: Arc<Mutex<MountPoints>>,
    /// The directory of FlexVolume drivers.
    pub flex_volumes: PathBuf,
    /// Learns of the calls that make drivers mount volumes.
    pub driver_calls: CallObserver,
    /// Learns of the reports about the group of the volumes' files.
    pub ownership: OwnershipObserver,
    /// Whether the server reports every FUSE request on standard output.
    pub trace: bool,
    /// How long a projection keeps a generation after the switch to the next one.
    pub keep_old_generations: Duration,
    /// What containers with a subPath of a projection see after a change, unless the volume has a mode of its own.
    pub sub_path: SubPathMode,
    /// Whether requests for directories of the node go over io_uring, where that is possible.
    pub io_uring: bool,
    /// Whether the content of emptyDirs stays when a signal ends the supervisor, for an agent to delete.
    pub keep_empty_dirs: bool,
}

impl VolumeContext {
    /// Locks the mount points. Hold the lock for single calls that make or remove a directory or a file.
    pub(super) fn mount_points(&self) -> MutexGuard<'_, MountPoints> {
        self.mount_points.lock().expect("no thread panics while the mount points are locked")
    }

    /// Makes and records the mount point of a volume.
    fn prepare(&self, path: &Path, shape: MountPointType) -> Result<MountPoint, RefreshFailure> {
        let mut mount_points = self.mount_points();
        mount_points.expect(path, shape).map_err(RefreshFailure::temporary)?;
        let point = mount_points.prepare(path, shape).map_err(RefreshFailure::of_mount)?;
        mount_points.record().map_err(RefreshFailure::temporary)?;
        Ok(point)
    }

    /// The name of a volume, and the record for the supervisor that adopts it.
    fn identity(
        volume: &Volume,
        pod: &PodIdentity,
        path: &Path,
        group: Option<u32>,
        access: ContainerAccess,
    ) -> VolumeIdentity {
        let (read_only, claim) = (Some(access == ContainerAccess::ReadOnly), volume.claim_name(&pod.name));
        let record = VolumeRecord { path: path.to_owned(), group, read_only, claim };
        // JSON cannot hold a path that is not UTF-8. Such a volume has no record, so the next supervisor does not adopt
        // it.
        VolumeIdentity::new(volume.name.as_str(), serde_json::to_value(record).unwrap_or_default())
    }
}

/// The outcome of a refresh.
pub enum RefreshOutcome {
    /// The volume needs no refresh until the pod or its objects change.
    Settled,
    /// The volume needs another refresh after this time: the last one failed, or a CSI driver has to be called again.
    RetryIn(Duration),
    /// This process can never mount the volume.
    Permanent(MountError),
}

/// How a supervisor ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PodEnd {
    /// A signal asked the supervisor to end: the pod has ended.
    Stopped,
    /// The supervisor ends with an error: the next podfs of the pod continues with the volumes' content.
    Failed,
}

/// A volume of the pod.
pub struct PodVolume {
    spec: Volume,
    mounter: Box<dyn Mounter>,
    /// Whether the volume was published after this process had started.
    is_published: bool,
    state: VolumeLife,
    /// Why the path of the volume does not show it, if it does not.
    hidden: Option<HiddenReason>,
    unmounts: UnmountSeries,
    /// Whether the volume waits for an object that podfs requested only seconds ago, which is no problem yet.
    is_settling: bool,
    backoff: Backoff,
    last_error: Option<String>,
    /// When podfs saw the oldest change that the volume does not show yet.
    noticed_at: Option<Instant>,
}

impl PodVolume {
    /// A volume that is not mounted yet. `point` is its mount point, if podfs has made that already.
    pub fn new(spec: Volume, point: Option<MountPoint>, setting: VolumeContext) -> Self {
        let (state, mounter) = (VolumeLife::before_first_refresh(&spec), mounter(&spec, point, setting));
        Self {
            spec,
            mounter,
            is_published: false,
            state,
            hidden: None,
            unmounts: UnmountSeries::default(),
            is_settling: false,
            backoff: RETRY.backoff(),
            last_error: None,
            noticed_at: None,
        }
    }

    /// A volume that was published after this process had started. It is not mounted yet, and has no mount point.
    pub fn published(spec: Volume, setting: VolumeContext) -> Self {
        Self { is_published: true, ..Self::new(spec, None, setting) }
    }

    /// A volume that another supervisor has mounted.
    pub(super) fn adopted(spec: Volume, kept: KeptVolume, setting: VolumeContext) -> Self {
        let mut volume = Self::new(spec, None, setting);
        volume.mounter.adopt(kept);
        volume.expect_to_be_mounted();
        if let Some(shown) = volume.mounter.shown().filter(|_| volume.hidden.is_none()) {
            volume.state = VolumeLife::Live(shown);
        }
        volume
    }

    /// Enters a span with the volume and the generation that it shows now. Until the result is dropped, each event on
    /// this thread has these as fields.
    fn enter_span(&self) -> EnteredSpan {
        let (volume, generation) = (self.spec.name.as_str(), self.state.generation().map(field::display));
        // The span has the level of an error, so that events have its fields whatever filter --log sets.
        error_span!("volume", volume, generation).entered()
    }

    /// The volume, as the manifest describes it.
    pub fn spec(&self) -> &Volume {
        &self.spec
    }

    /// Changes the definition of an emptyDir, such as its size limit.
    pub fn describe(&mut self, source: EmptyDir) {
        self.spec.source = VolumeSource::EmptyDir(source);
    }

    /// The path at which the volume is, or will be, mounted; unknown until its PersistentVolume is known.
    pub fn path(&self) -> Option<&Path> {
        self.mounter.path()
    }

    /// A group that containers need to use the volume.
    pub fn group(&self) -> Option<u32> {
        self.mounter.group()
    }

    /// Whether containers can only read the volume.
    pub fn is_read_only(&self) -> bool {
        self.mounter.is_read_only()
    }

    /// The outcome of the volume's last growth on the node, if its claim does not report it.
    pub fn expansion(&self) -> Option<&Expansion> {
        self.mounter.expansion()
    }

    /// The observer of the volume's requests, once a server serves it.
    pub fn watch(&self) -> Option<VolumeObserver> {
        self.mounter.watch()
    }

    /// The volume's state.
    pub fn state(&self) -> &VolumeLife {
        &self.state
    }

    /// Whether the volume waits for an object that podfs requested only seconds ago.
    pub fn is_settling(&self) -> bool {
        self.is_settling
    }

    /// The volume's problem, if it has one.
    pub fn problem(&self) -> Option<&str> {
        self.state.reason().filter(|_| !self.is_settling)
    }

    /// Whether the volume is mounted and current; unknown while it waits for an object that podfs requested only
    /// seconds ago.
    pub fn condition(&self) -> Option<Condition> {
        let failing = |reason: &str| Condition::Failing(reason.to_owned());
        (!self.is_settling).then(|| self.state.reason().map_or(Condition::Mounted, failing))
    }

    /// The last error, even if the volume has recovered since.
    pub fn last_error(&self) -> Option<&str> {
        self.last_error.as_deref()
    }

    /// The kubelet's name of the volume's plugin, such as `kubernetes.io/secret`; `unknown` for a claim that is not
    /// bound yet.
    pub fn plugin(&self) -> String {
        let is_of_plugin = |path: &&Path| path.parent().is_some_and(|above| above.ends_with("volumes"));
        let of_claim = || self.path()?.ancestors().find(is_of_plugin)?.file_name()?.to_str();
        self.spec.kind.directory.or_else(of_claim).unwrap_or("unknown").replace('~', "/")
    }

    /// Refreshes the volume: makes it show what `pod` describes. `noticed_at` is when podfs saw the change that caused
    /// the refresh, if a change did. If another process has unmounted the volume, mounts it again first. If the refresh
    /// fails, the volume continues to show what it showed before.
    pub fn refresh(&mut self, pod: &PodView, noticed_at: Option<Instant>) -> RefreshOutcome {
        let _span = self.enter_span();
        self.noticed_at = self.noticed_at.or(noticed_at);
        self.show_again();
        match self.mounter.show(&self.spec, pod, self.noticed_at) {
            Ok(shown) => {
                self.noticed_at = None;
                match self.hidden.clone() {
                    None => {
                        self.backoff.reset();
                        self.enter(VolumeLife::Live(shown));
                        self.mounter.republish_in().map_or(RefreshOutcome::Settled, RefreshOutcome::RetryIn)
                    }
                    Some(hidden) => {
                        self.last_error = Some(hidden.reason());
                        self.enter(VolumeLife::Hidden(shown, hidden.reason()));
                        // The supervisor watches the mount table, and refreshes a covered volume when its path shows it
                        // again.
                        if self.is_unmounted() { self.retry() } else { RefreshOutcome::Settled }
                    }
                }
            }
            // A permanent failure ends the supervisor. But the pod's other volumes are in use when this one is
            // published.
            Err(RefreshFailure::Permanent(error)) if self.is_published => {
                self.fail(error.to_string());
                self.retry()
            }
            Err(RefreshFailure::Permanent(error)) => RefreshOutcome::Permanent(error),
            Err(RefreshFailure::Manifests(cause)) => {
                let reason = cause.to_string();
                // podfs cannot show this change; only another change helps.
                self.noticed_at = None;
                match (pod.known.is_settling, &self.state) {
                    // The volume has the same problem as before, which is reported already.
                    (true, VolumeLife::Waiting(known)) if *known == reason && !self.is_settling => {}
                    (true, VolumeLife::Waiting(_)) => self.settle(reason),
                    (true, VolumeLife::Live(_)) => {}
                    (true, VolumeLife::Behind(..) | VolumeLife::Hidden(..)) | (false, _) => self.fail(reason),
                }
                if self.is_unmounted() { self.retry() } else { RefreshOutcome::Settled }
            }
            Err(RefreshFailure::Temporary(cause)) => {
                self.fail(cause.to_string());
                self.retry()
            }
        }
    }

    /// Makes the volume show what its path on the node leads to now, because a container is about to start. Containers that run keep
    /// what they have.
    ///
    /// # Errors
    /// A sentence for the pod's user, in the kubelet's words.
    pub(in crate::supervisor) fn follow_path(&mut self, pod: &PodView, container: &str) -> Result<(), String> {
        let _span = self.enter_span();
        match self.mounter.follow_path(&self.spec, pod, container) {
            Ok(true) => {
                if let Some(shown) = self.mounter.shown().filter(|_| self.hidden.is_none()) {
                    self.enter(VolumeLife::Live(shown));
                }
                Ok(())
            }
            Ok(false) => Ok(()),
            Err(failure) => {
                let name = self.spec.name.as_str();
                warn!("container {container:?} cannot start: MountVolume.SetUp failed for volume {name:?} : {failure}");
                Err(format!("MountVolume.SetUp failed for volume {name:?} : {failure}"))
            }
        }
    }

    /// Notes that a container may use any mount that the volume has had so far.
    pub(in crate::supervisor) fn keep_earlier_mounts(&mut self) {
        self.mounter.keep_earlier_mounts();
    }

    /// Ends earlier mounts that only this container may still use, or all of them if all containers have ended (`None`).
    pub(in crate::supervisor) fn release_container(&mut self, container: Option<&str>) {
        self.mounter.release_container(container);
    }

    /// When the next old generation of the volume is due for removal.
    pub fn next_removal(&self) -> Option<Instant> {
        self.mounter.next_removal()
    }

    /// Removes the old generations whose time is over.
    pub fn remove_old_generations(&mut self) {
        let _span = self.enter_span();
        self.mounter.remove_old(self.spec.name.as_str());
    }

    /// The number of old generations, and their memory.
    pub fn old_generations(&self) -> OldUsage {
        self.mounter.old_usage()
    }

    /// Unmounts the volume, and deletes its content if that ends with the pod.
    ///
    /// # Errors
    /// When the kernel does not unmount it.
    pub fn take_down(self, end: PodEnd) -> Result<(), MountError> {
        let _span = self.enter_span();
        self.release_sub_paths(None).unwrap_or_else(|reason| warn!("{reason}"));
        self.mounter.take_down(self.spec.name.as_str(), end)
    }

    /// Removes the volume while the pod goes on: unmounts it, deletes the content of an emptyDir, and removes the
    /// directories that were made for it.
    ///
    /// # Errors
    /// When something of it is left.
    pub(in crate::supervisor) fn unpublish(self) -> Result<(), RemovalError> {
        let _span = self.enter_span();
        let setting = self.mounter.setting().clone();
        let (name, path) = (self.spec.name.clone(), self.path().map(Path::to_owned));
        let home = match self.spec.source {
            VolumeSource::EmptyDir(_) => setting.site.home(name.as_str()),
            _ => None,
        };
        let at = |cause: RemovalCause| RemovalError::Volume { volume: name.to_string(), cause };
        self.take_down(PodEnd::Stopped).map_err(|error| at(error.into()))?;
        driver::undo(&setting, name.as_str(), path.as_deref())?;
        if let Some(home) = home.as_deref().filter(|home| home.exists()) {
            let undeleted = empty_dir::remove(home).map_err(|error| at(error.into()))?;
            if !undeleted.is_empty() {
                return Err(at(RemovalCause::Content(format!("podfs leaves of its content {undeleted}"))));
            }
        }
        let Some(path) = path else { return Ok(()) };
        setting.mount_points().forget(&path, home.as_deref(), setting.site.path()).map_err(|error| at(error.into()))
    }

    /// Resets the pauses between tries, so that they begin short again.
    pub fn hurry(&mut self) {
        self.backoff.reset();
        self.unmounts = UnmountSeries::default();
    }

    /// Changes the state after a refresh that failed.
    fn fail(&mut self, reason: String) {
        self.last_error = Some(reason.clone());
        let state = match (self.mounter.shown(), &self.hidden) {
            (None, _) => VolumeLife::Waiting(reason),
            (Some(shown), None) => VolumeLife::Behind(shown, reason),
            (Some(shown), Some(hidden)) => VolumeLife::Hidden(shown, format!("{}; {reason}", hidden.reason())),
        };
        self.enter(state);
    }

    /// Notes that the volume waits for an object that podfs requested only seconds ago. Logs no warning.
    fn settle(&mut self, reason: String) {
        self.is_settling = true;
        self.state = VolumeLife::Waiting(reason);
    }

    /// A retry after the next pause.
    fn retry(&mut self) -> RefreshOutcome {
        RefreshOutcome::RetryIn(self.backoff.fail())
    }

    /// Changes the state. Logs every change once, in the kubelet's words where it has some (ME-02).
    fn enter(&mut self, state: VolumeLife) {
        if state == self.state && !self.is_settling {
            return;
        }
        self.is_settling = false;
        let name = self.spec.name.as_str();
        match &state {
            VolumeLife::Hidden(_, reason) => warn!("volume {name:?} is not at its path: {reason}"),
            VolumeLife::Waiting(reason) | VolumeLife::Behind(_, reason) => {
                warn!("MountVolume.SetUp failed for volume {name:?} : {reason}");
            }
            VolumeLife::Live(shown) => match shown.generation() {
                Some(generation) => info!(volume = name, mode = shown.mode(), %generation, "volume is current"),
                None => info!(volume = name, mode = shown.mode(), "volume is mounted"),
            },
        }
        self.state = state;
    }
}
