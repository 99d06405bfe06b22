//! The files of a pod that a cleanup removes: its run directory, the homes of drivers, and the content of emptyDirs; and its
//! links to block devices.

use std::path::{Path, PathBuf};

use super::{Cleanup, CleanupStep, holds_only};
use crate::admin::leftovers::HOMES;
use crate::driver::{self, DriverHome};
use crate::host::{HostError, block, empty_dir, local};
use crate::supervisor::run_dir::claim::PodLock;
use crate::supervisor::run_dir::file_names::{CONTROL, COUNTS, DISKS, LOCK, NEXT_COUNTS, NEXT_SERVER, SERVER};
use crate::supervisor::run_dir::record::PodLockRecord;

impl Cleanup<'_> {
    /// Removes the links to the block devices of the pod with this run directory.
    pub(super) fn block_devices(&mut self, directory: &Path) {
        let uid = directory.file_name().and_then(|uid| uid.to_str()).filter(|_| !self.dry_run);
        let left = uid.map(|uid| block::unmap_all(&self.root, uid)).unwrap_or_default();
        self.report_devices(left);
    }

    /// Unmounts the file systems of devices that only this pod used. Returns whether none of them stays.
    pub(super) fn devices(&mut self, uid: &str) -> bool {
        self.dry_run || self.report_devices(local::leave_all_at_once(&self.root, uid))
    }

    pub(super) fn report_devices(&mut self, left: Vec<(PathBuf, HostError)>) -> bool {
        left.iter().for_each(|(place, error)| self.report_left(place, &error.to_string()));
        left.is_empty()
    }

    /// Removes the lock file, the sockets beside it, and the directories that podfs made for them.
    pub(super) fn run_files(&mut self, directory: &Path, claim: PodLock, record: &PodLockRecord) {
        let mut run: Vec<_> = record.run.iter().filter(|made| made.exists()).cloned().collect();
        if !run.iter().any(|made| made == directory) {
            run.push(directory.to_owned());
        }
        let mut gone: Vec<_> = [LOCK, CONTROL, COUNTS, NEXT_COUNTS, DISKS, SERVER, NEXT_SERVER]
            .iter()
            .map(|name| directory.join(name))
            .collect();
        if self.dry_run {
            claim.leave_record();
        } else {
            drop(claim);
        }
        for made in run.iter().rev() {
            let is_removed = if self.dry_run { holds_only(made, &gone) } else { !made.exists() };
            if is_removed {
                gone.push(made.clone());
                (self.report)(&CleanupStep::Removed(made.clone()));
            } else if made == directory {
                self.report_left(made, "it holds files that are not podfs'");
            }
        }
    }

    /// Calls the FlexVolume and CSI drivers to unmount the pod's volumes. Returns whether all have done so.
    pub(super) fn drivers(&mut self, pod: &Path) -> bool {
        let mut all = true;
        for (home, _) in DriverHome::all(pod) {
            match if self.dry_run { Ok(()) } else { driver::undo(&home) } {
                Ok(()) => (self.report)(&CleanupStep::Removed(home.path().to_owned())),
                Err(error) => {
                    self.report_left(home.path(), &error.to_string());
                    all = false;
                }
            }
        }
        all
    }

    /// Deletes the content of the pod's emptyDirs, after they are unmounted. Returns whether nothing is left.
    pub(super) fn contents(&mut self, pod: &Path) -> bool {
        let mut all = true;
        let homes = pod.join(HOMES).read_dir().into_iter().flatten().flatten().map(|entry| entry.path());
        for home in homes.filter(|home| home.is_dir() && !home.is_symlink()) {
            if self.dry_run {
                (self.report)(&CleanupStep::Removed(home.clone()));
                self.deleted.push(home);
                continue;
            }
            match empty_dir::remove(&home) {
                Ok(left) if left.is_empty() => (self.report)(&CleanupStep::Removed(home)),
                Ok(left) => {
                    self.report_left(&home, &left.to_string());
                    all = false;
                }
                Err(error) => {
                    self.report_left(&home, &error.to_string());
                    all = false;
                }
            }
        }
        all
    }
}
