//! Mount points: what stands on the host around a pod's volumes, and goes with them. Directories and mount points are
//! written down before they are used, so that the next podfs finds them if this one is killed.

use std::io;
use std::path::{Path, PathBuf};

use nix::unistd::mkdtemp;
use podfs_fuse::mount::MountError;
use podfs_fuse::mount::directories::Directories;
use podfs_fuse::mount::private::Shape;
use podfs_fuse::mount::visible::{Leftovers, MountPoint, VisibleMount, take_away};
use tracing::warn;

use super::claim::{Claim, Inheritance};

/// Why something could not be set up.
#[derive(Debug, thiserror::Error)]
pub enum MountPointsError {
    /// A mount point is taken or cannot be made.
    #[error(transparent)]
    Mount(#[from] MountError),
    /// What was made could not be written down.
    #[error("cannot write the run directory: {0}")]
    Record(#[source] io::Error),
    /// There is no place for the content of an emptyDir.
    #[error("cannot make a directory in {}: {cause}", parent.display())]
    Home {
        /// Where it should be.
        parent: PathBuf,
        /// What the kernel said.
        cause: io::Error,
    },
}

/// What was made on the host for the volumes of one supervisor.
#[derive(Debug)]
pub struct MountPoints {
    // Taken back before the claim is given up.
    directories: Directories,
    /// What an earlier podfs had mounted.
    left: Vec<PathBuf>,
    mounts: Vec<PathBuf>,
    homes: Vec<PathBuf>,
    claim: Option<Claim>,
}

impl MountPoints {
    /// Begins with what a podfs that was killed has left.
    pub fn new(claim: Option<Claim>, inheritance: Inheritance) -> MountPoints {
        let Inheritance { directories, mounts } = inheritance;
        MountPoints { directories, left: mounts, mounts: Vec::new(), homes: Vec::new(), claim }
    }

    /// The mount of an earlier podfs at `path`, if there is one and it lives. It is this one's from now on.
    ///
    /// # Errors
    /// When the mount table cannot be read.
    pub fn keep(&mut self, path: &Path) -> Result<Option<(MountPoint, VisibleMount)>, MountError> {
        // Where there is no directory, nothing is mounted.
        let Ok(point) = MountPoint::of_mount(path) else { return Ok(None) };
        if !self.left.iter().any(|left| left == point.path()) {
            return Ok(None);
        }
        let Some(visible) = point.find()? else { return Ok(None) };
        self.mark(&point);
        Ok(Some((point, visible)))
    }

    /// The place that an earlier podfs recorded for the file system with this device number, and its mount there. Another
    /// process may have unmounted it meanwhile.
    ///
    /// # Errors
    /// When the mount table cannot be read.
    pub fn keep_served(&mut self, path: &Path, device: &str) -> Result<Option<(MountPoint, VisibleMount)>, MountError> {
        let point = MountPoint::recorded(path);
        if !self.left.iter().any(|left| left == path) {
            return Ok(None);
        }
        let visible = point.find_of(device)?;
        self.mark(&point);
        Ok(Some((point, visible)))
    }

    /// Makes a mount point ready. It is to be written down before anything is mounted on it.
    ///
    /// # Errors
    /// When it is taken, or cannot be made.
    pub fn prepare(&mut self, path: &Path, shape: Shape) -> Result<MountPoint, MountError> {
        // Whoever has claimed the pod may take away what others mounted for it.
        let leftovers = if self.claim.is_some() { Leftovers::Cover } else { Leftovers::RemoveDead };
        let point = MountPoint::prepare_shape(path, shape, leftovers, &mut self.directories)?;
        self.mark(&point);
        Ok(point)
    }

    /// The mount at `point` is this podfs' from now on.
    fn mark(&mut self, point: &MountPoint) {
        self.left.retain(|left| left != point.path());
        if !self.mounts.iter().any(|mount| mount == point.path()) {
            self.mounts.push(point.path().to_owned());
        }
    }

    /// Makes the directory an emptyDir keeps its content in: this one, or one that nobody else knows.
    ///
    /// # Errors
    /// When it cannot be made or written down.
    pub fn make_home(&mut self, path: Option<PathBuf>) -> Result<PathBuf, MountPointsError> {
        let path = match path {
            Some(path) => {
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
        self.homes.push(path.clone());
        self.record()?;
        Ok(path)
    }

    /// Writes down what was made so far.
    ///
    /// # Errors
    /// When the run directory cannot be written.
    pub fn record(&mut self) -> Result<(), MountPointsError> {
        let MountPoints { directories, left, mounts, claim, .. } = self;
        let mounts = [&left[..], mounts].concat();
        claim.as_mut().map_or(Ok(()), |claim| claim.record(directories, &mounts)).map_err(MountPointsError::Record)
    }

    /// Takes back what was made. What was written down stays if there is content left to be found by the next podfs.
    pub fn take_back(self) {
        let MountPoints { directories, left, homes, claim, .. } = self;
        for path in left {
            if let Err(error) = take_away(&path) {
                warn!("a mount of an earlier podfs stays: {error}");
            }
        }
        drop(directories);
        if let Some(claim) = claim
            && homes.iter().any(|home| home.exists())
        {
            claim.leave_record();
        }
    }
}
