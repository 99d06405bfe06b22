//! Mount points: the directories, files and mounts that podfs makes on the node for a pod's volumes, and removes with them. podfs
//! records directories and mount points before it uses them. So the next podfs finds them if this process is killed.

use std::io;
use std::path::{Path, PathBuf};

use nix::unistd::mkdtemp;
use podfs_fuse::mount::MountError;
use podfs_fuse::mount::directories::Directories;
use podfs_fuse::mount::point::{MountPoint, OldMountPolicy};
use podfs_fuse::mount::private::MountPointType;
use podfs_fuse::mount::visible::{VisibleMount, take_away, take_away_part};
use serde_json::Value;
use tracing::warn;

use super::claim::{PodLeftovers, PodLock, PodLockError};
use super::file_names::LOCK;
use super::site::SUB_PATHS;
use super::volumes_lock::VolumesTaken;

/// Why a mount point or directory cannot be prepared.
#[derive(Debug, thiserror::Error)]
pub enum MountPointsError {
    /// The mount point is in use, or cannot be made.
    #[error(transparent)]
    Mount(#[from] MountError),
    /// The supervisor ends.
    #[error("podfs ends")]
    Ended,
    /// The record cannot be written.
    #[error("cannot write the run directory: {0}")]
    Record(#[source] io::Error),
    /// Another podfs has the directory of the volumes.
    #[error(transparent)]
    Volumes(#[from] VolumesTaken),
    /// The directory for the content of an emptyDir cannot be made.
    #[error("cannot make a directory in {}: {cause}", parent.display())]
    Home {
        /// The directory in which it cannot be made.
        parent: PathBuf,
        /// The error of the system call.
        #[source]
        cause: io::Error,
    },
}

/// Why podfs cannot claim its pod again after the lock file was deleted.
#[derive(Debug, thiserror::Error)]
pub enum RestoreError {
    /// Another podfs has claimed the pod, or the file cannot be made.
    #[error(transparent)]
    Claim(#[from] PodLockError),
    /// The record cannot be written.
    #[error(transparent)]
    Record(#[from] MountPointsError),
}

/// The mount points that one supervisor has made on the node for its volumes. If this is dropped without
/// [`MountPoints::take_back`], the record of an earlier podfs stays.
#[derive(Debug)]
pub struct MountPoints {
    /// The directories and mount point files. Dropping this removes them, before the drop of `claim` gives up the claim.
    directories: Directories,
    /// The mount points of an earlier podfs that this podfs has not adopted.
    unadopted: Vec<PathBuf>,
    /// The mount points of this podfs's volumes.
    mounts: Vec<PathBuf>,
    /// The mount points of parts of volumes (subPath), made by this podfs or an earlier one.
    targets: Vec<PathBuf>,
    /// The files that this podfs or an earlier one has written for containers.
    written: Vec<PathBuf>,
    /// The directories for the content of emptyDirs, and those of drivers.
    homes: Vec<PathBuf>,
    claim: Option<PodLock>,
    /// Whether the supervisor has removed everything, because it ends.
    has_ended: bool,
}

impl MountPoints {
    /// Starts with the leftovers of a podfs that was killed.
    pub fn new(claim: Option<PodLock>, inheritance: PodLeftovers) -> MountPoints {
        let PodLeftovers { directories, mounts, written, definitions: _ } = inheritance;
        let (targets, unadopted) = mounts.into_iter().partition(|path| is_target(path));
        MountPoints {
            directories,
            unadopted,
            mounts: Vec::new(),
            targets,
            written,
            homes: Vec::new(),
            claim,
            has_ended: false,
        }
    }

    /// Adopts the mount of an earlier podfs at `path`, if there is one and its server lives.
    ///
    /// # Errors
    /// When the mount table cannot be read.
    pub fn adopt(&mut self, path: &Path) -> Result<Option<(MountPoint, VisibleMount)>, MountError> {
        // Where there is no directory, nothing is mounted.
        let Ok(point) = MountPoint::of_mount(path) else { return Ok(None) };
        if !self.unadopted.iter().any(|unadopted| unadopted == point.path()) {
            return Ok(None);
        }
        let Some(visible) = point.find()? else { return Ok(None) };
        self.mark(&point);
        Ok(Some((point, visible)))
    }

    /// Adopts the mount point that an earlier podfs recorded for the file system with this device number, and the mount
    /// there. Another process may have unmounted it meanwhile; then the mount is lost (`VisibleMount::is_lost`).
    ///
    /// # Errors
    /// When the mount table cannot be read.
    pub fn keep_served(&mut self, path: &Path, device: &str) -> Result<Option<(MountPoint, VisibleMount)>, MountError> {
        let point = MountPoint::recorded(path);
        if !self.unadopted.iter().any(|unadopted| unadopted == path) {
            return Ok(None);
        }
        let visible = point.find_of(device)?;
        self.mark(&point);
        Ok(Some((point, visible)))
    }

    /// Records that podfs is about to make a mount point at `path`. So if this process is killed, the next podfs removes even a
    /// directory of it.
    ///
    /// # Errors
    /// When the run directory cannot be written.
    pub fn expect(&mut self, path: &Path, shape: MountPointType) -> Result<(), MountPointsError> {
        self.directories.expect(path, shape == MountPointType::File);
        self.record()
    }

    /// Makes a mount point. The caller has to record it before it mounts anything on it.
    ///
    /// # Errors
    /// When it is in use, or cannot be made.
    pub fn prepare(&mut self, path: &Path, shape: MountPointType) -> Result<MountPoint, MountError> {
        // The holder of the pod's lock may remove mounts that an earlier podfs made for the pod.
        let leftovers = if self.claim.is_some() { OldMountPolicy::Cover } else { OldMountPolicy::RemoveDead };
        let point = MountPoint::prepare_shape(path, shape, leftovers, &mut self.directories)?;
        self.mark(&point);
        Ok(point)
    }

    /// Notes that the mount at `point` belongs to this podfs, and no longer to an earlier one.
    fn mark(&mut self, point: &MountPoint) {
        self.unadopted.retain(|unadopted| unadopted != point.path());
        if !self.mounts.iter().any(|mount| mount == point.path()) {
            self.mounts.push(point.path().to_owned());
        }
    }

    /// Makes the directory for the content of an emptyDir, or of a driver, at `path`. Without a path, makes a temporary directory
    /// with a new name.
    ///
    /// # Errors
    /// When it cannot be made or recorded.
    pub fn make_home(&mut self, path: Option<PathBuf>) -> Result<PathBuf, MountPointsError> {
        let path = match path {
            Some(path) => {
                self.directories.expect(&path, false);
                self.record()?;
                self.directories.make(&path)?;
                path
            }
            None => {
                let parent = std::env::temp_dir();
                let made = mkdtemp(&parent.join("podfs-XXXXXX"));
                let made = made.map_err(|errno| MountPointsError::Home { parent, cause: errno.into() })?;
                self.directories.adopt(made.clone());
                made
            }
        };
        if !self.homes.contains(&path) {
            self.homes.push(path.clone());
        }
        self.record()?;
        Ok(path)
    }

    /// Forgets a volume that was unmounted for good. Removes its mount point, its `home` if it has one, and the empty directories
    /// above them up to `top`.
    ///
    /// # Errors
    /// When the run directory cannot be written.
    pub fn forget(&mut self, path: &Path, home: Option<&Path>, top: &Path) -> Result<(), MountPointsError> {
        self.mounts.retain(|mount| mount != path);
        self.unadopted.retain(|mount| mount != path);
        self.directories.take_back(path, top);
        if let Some(home) = home {
            self.directories.take_back(home, top);
            self.homes.retain(|known| known != home || home.exists());
        }
        self.record()
    }

    /// The lock file of the pod; `None` without a pod.
    pub fn claim_file(&self) -> Option<PathBuf> {
        self.run_directory().map(|directory| directory.join(LOCK))
    }

    /// The mount points of an earlier podfs that this podfs has not adopted.
    pub fn unadopted(&self) -> &[PathBuf] {
        &self.unadopted
    }

    /// The directories in `parent` that this podfs or an earlier one made.
    pub fn made_in(&self, parent: &Path) -> Vec<PathBuf> {
        self.directories.made().iter().filter(|made| made.parent() == Some(parent)).cloned().collect()
    }

    /// Makes and records a mount point for a part of a volume (subPath). Unmounts an earlier mount there.
    ///
    /// # Errors
    /// When it is in use, cannot be made, or cannot be recorded.
    pub fn prepare_target(&mut self, path: &Path, shape: MountPointType) -> Result<MountPoint, MountPointsError> {
        refuse_if(self.has_ended)?;
        if !self.has_target(path) {
            self.targets.push(path.to_owned());
        }
        take_away_part(path)?;
        let point = MountPoint::prepare_shape(path, shape, OldMountPolicy::Cover, &mut self.directories)?;
        self.record()?;
        Ok(point)
    }

    /// Whether this podfs or an earlier one has recorded `path` as the mount point of a part of a volume.
    pub fn has_target(&self, path: &Path) -> bool {
        self.targets.iter().any(|target| target == path)
    }

    /// The recorded mount points of parts of volumes at or below `directory`.
    pub fn targets_below(&self, directory: &Path) -> Vec<PathBuf> {
        self.targets.iter().filter(|target| target.starts_with(directory)).cloned().collect()
    }

    /// Unmounts the parts of volumes at or below `directory`, and removes their mount points, up to `top`.
    ///
    /// # Errors
    /// When the kernel does not unmount a part, which stays recorded, or when the record cannot be written.
    pub fn remove_targets(&mut self, directory: &Path, top: &Path) -> Result<(), MountPointsError> {
        let targets = self.targets_below(directory);
        if targets.is_empty() {
            return Ok(());
        }
        let mut outcome = Ok(());
        for target in targets {
            match take_away_part(&target) {
                Ok(()) => self.targets.retain(|known| *known != target),
                Err(error) => outcome = Err(error.into()),
            }
        }
        self.directories.take_back(directory, top);
        self.record()?;
        outcome
    }

    /// Makes the directory for a file that podfs writes for containers, and records both. The file is removed with the
    /// pod, with any content.
    ///
    /// # Errors
    /// When the directory cannot be made, or the record cannot be written.
    pub fn prepare_written(&mut self, file: &Path) -> Result<(), MountPointsError> {
        refuse_if(self.has_ended)?;
        if let Some(parent) = file.parent() {
            self.directories.make(parent)?;
        }
        if !self.written.iter().any(|known| known == file) {
            self.written.push(file.to_owned());
        }
        self.record()
    }

    /// The recorded files for containers at or below `path`, the oldest first.
    pub fn written_below(&self, path: &Path) -> Vec<PathBuf> {
        self.written.iter().filter(|file| file.starts_with(path)).cloned().collect()
    }

    /// Removes these files for containers, and the directories that were made for them, up to `top`.
    ///
    /// # Errors
    /// When the record cannot be written.
    pub fn remove_written(&mut self, files: &[PathBuf], top: &Path) -> Result<(), MountPointsError> {
        for file in files {
            // A missing file is removed already. A directory belongs to another process, and stays.
            let _ = std::fs::remove_file(file);
            if let Some(parent) = file.parent().filter(|parent| parent.starts_with(top)) {
                self.directories.take_back(parent, top);
            }
        }
        self.written.retain(|known| !files.contains(known));
        if files.is_empty() { Ok(()) } else { self.record() }
    }

    /// Records the definitions of the volumes that podfs serves from now on.
    ///
    /// # Errors
    /// When the run directory cannot be written.
    pub fn define_volumes(&mut self, definitions: Vec<Value>) -> Result<(), MountPointsError> {
        let Some(claim) = &mut self.claim else { return Ok(()) };
        let before = claim.set_definitions(definitions);
        let recorded = self.record();
        if let (Err(_), Some(claim)) = (&recorded, &mut self.claim) {
            // A full disk may have no space for a longer record.
            claim.set_definitions(before);
        }
        recorded
    }

    /// Writes the record.
    ///
    /// # Errors
    /// When the run directory cannot be written.
    pub fn record(&mut self) -> Result<(), MountPointsError> {
        let MountPoints { directories, unadopted, mounts, targets, written, claim, has_ended, .. } = self;
        refuse_if(*has_ended)?;
        // The next podfs unmounts in reverse order: parts of a volume before the volume.
        let mounts = [&unadopted[..], mounts, targets].concat();
        let Some(claim) = claim else { return Ok(()) };
        claim.record(directories, &mounts, written).map_err(MountPointsError::Record)?;
        Ok(claim.wait_for_volumes()?)
    }

    /// The pod's run directory; `None` if the supervisor has not claimed a pod.
    pub fn run_directory(&self) -> Option<&Path> {
        self.claim.as_ref().map(PodLock::directory)
    }

    /// Claims the pod again and writes the record, if another process has deleted the pod's lock file. Returns whether the file
    /// was deleted.
    ///
    /// # Errors
    /// When another podfs has claimed the pod meanwhile, or the run directory cannot be made or written.
    pub fn restore_claim(&mut self) -> Result<bool, RestoreError> {
        let Some(claim) = self.claim.as_mut().filter(|claim| !claim.is_in_place()) else { return Ok(false) };
        claim.take_again()?;
        self.record()?;
        Ok(true)
    }

    /// Unmounts and removes what this podfs has made, and gives up the claim. Leaves the record for the next podfs if the content
    /// of an emptyDir, or a mount, stays. Afterwards, these mount points refuse to make anything, because a thread that still
    /// waits for a source may have a reference to them. `unmounted` says whether the volumes of this supervisor are all unmounted
    /// already.
    pub fn take_back(&mut self, unmounted: bool) {
        let ended = MountPoints { has_ended: true, ..MountPoints::new(None, PodLeftovers::default()) };
        let MountPoints { directories, unadopted, mounts, targets, written, homes, claim, .. } =
            std::mem::replace(self, ended);
        let parts = targets.iter().map(|target| take_away_part(target));
        let mounts: &[PathBuf] = if unmounted { &[] } else { &mounts };
        let volumes = unadopted.iter().chain(mounts).map(|path| take_away(path));
        let errors: Vec<_> = parts.chain(volumes).filter_map(Result::err).collect();
        errors.iter().for_each(|error| warn!("podfs cannot remove a mount: {error}"));
        written.iter().for_each(|file| drop(std::fs::remove_file(file)));
        drop(directories);
        let Some(claim) = claim else { return };
        if !errors.is_empty() || homes.iter().any(|home| home.exists()) {
            claim.leave_record();
        } else {
            claim.remove_record();
        }
    }
}

/// Refuses to make anything for a supervisor that has removed everything.
fn refuse_if(has_ended: bool) -> Result<(), MountPointsError> {
    if has_ended { Err(MountPointsError::Ended) } else { Ok(()) }
}

/// Whether a recorded mount is a part of a volume: `volume-subpaths/VOLUME/CONTAINER/INDEX`.
fn is_target(path: &Path) -> bool {
    path.ancestors().nth(3).and_then(Path::file_name).is_some_and(|name| name == SUB_PATHS)
}
