//! Erasing the data of a user. Runs on a thread of its own: a disk may take hours.

use std::fs::File;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use podfs_fuse::mount::table::mounts;
use rustix::fs::syncfs;
use tracing::info;

use super::error::ErasureError;
use super::identity::DiskIdentity;
use super::inspection::{open_exclusive, open_mount};
use super::record::{ErasureRecord, write};
use crate::host::delete;
use crate::host::device::erase;

/// After how many bytes podfs records the progress.
const STEP: u64 = 1 << 30;
/// The end of the directory, in a pod's directory of a kubelet or of podfs, in which the volume's name follows.
const IN_POD: &str = "volumes/kubernetes.io~local-volume";
/// The directories below the root directory of a kubelet or of podfs in which a volume in use has an entry with its
/// name.
const GLOBAL: [&str; 3] = [
    "plugins/kubernetes.io/local-volume/mounts",
    "plugins/kubernetes.io/local-volume/volumeDevices",
    "plugins/kubernetes.io~local-volume/volumeDevices",
];

/// The progress of an erasure, and whether it has to stop.
#[derive(Debug, Default)]
pub(super) struct ErasureProgress {
    /// Erased bytes of a device.
    pub(super) erased: AtomicU64,
    /// Bytes of a device; 0 for a file system.
    pub(super) total: AtomicU64,
    stopped: AtomicBool,
}

impl ErasureProgress {
    /// Makes the erasure end soon.
    pub(super) fn stop(&self) {
        self.stopped.store(true, Ordering::Relaxed);
    }

    fn may_continue(&self) -> bool {
        !self.stopped.load(Ordering::Relaxed)
    }
}

/// An erasure.
pub(super) struct Erasure {
    pub(super) record: ErasureRecord,
    /// The file of the record.
    pub(super) file: PathBuf,
    /// The root directories of podfs and of the kubelet.
    pub(super) roots: [PathBuf; 2],
    pub(super) progress: Arc<ErasureProgress>,
}

/// The outcome of an erasure.
pub(super) struct ErasureOutcome {
    /// The last record that this erasure has written to the disk, if it has written one.
    pub(super) record: Option<ErasureRecord>,
    /// Why the erasure did not finish, if it did not.
    pub(super) result: Result<(), ErasureError>,
}

impl Erasure {
    /// Erases all data of the entry, unless the entry is in use, or is another disk or file system by now.
    pub(super) fn run(self) -> ErasureOutcome {
        let mut written = None;
        let result = self.erase(&mut written);
        ErasureOutcome { record: written, result }
    }

    fn erase(&self, written: &mut Option<ErasureRecord>) -> Result<(), ErasureError> {
        let mut record = self.record.clone();
        self.check_unused()?;
        if record.is_device {
            let (device, size, identity) = open_exclusive(&record.path)?;
            self.check(&identity)?;
            self.write_record(&record, written)?;
            self.erase_device(&device, size, &mut record, written)?;
        } else {
            let (directory, identity) = open_mount(&record.path)?;
            self.check(&identity)?;
            self.write_record(&record, written)?;
            let root = directory.try_clone().map_err(ErasureError::Failed)?;
            let left = delete::empty(root, &|| self.progress.may_continue()).map_err(|cause| self.failed(cause))?;
            if !left.is_empty() {
                return Err(ErasureError::Left(left.to_string()));
            }
            syncfs(&directory).map_err(|errno| self.failed(errno.into()))?;
        }
        record.is_done = true;
        self.write_record(&record, written)
    }

    fn erase_device(
        &self,
        device: &File,
        size: u64,
        record: &mut ErasureRecord,
        written: &mut Option<ErasureRecord>,
    ) -> Result<(), ErasureError> {
        self.progress.total.store(size, Ordering::Relaxed);
        let (mut recorded, mut last_tenth) = (Ok(()), 0);
        let begin = record.erased;
        let mut progress = |erased: u64| {
            self.progress.erased.store(erased, Ordering::Relaxed);
            let tenth = erased.saturating_mul(10) / size.max(1);
            if tenth > last_tenth && erased < size {
                last_tenth = tenth;
                info!("{} is erased to {} %", self.record.path.display(), tenth * 10);
            }
            if erased - record.erased >= STEP {
                record.erased = erased;
                recorded = self.write_record(record, written);
            }
            recorded.is_ok() && self.progress.may_continue()
        };
        let erased = erase(device, begin, size, &mut progress).map_err(|cause| self.failed(cause));
        recorded.and(erased)
    }

    fn failed(&self, cause: io::Error) -> ErasureError {
        match self.progress.may_continue() {
            true => ErasureError::Failed(cause),
            false => ErasureError::Stopped,
        }
    }

    fn write_record(&self, record: &ErasureRecord, written: &mut Option<ErasureRecord>) -> Result<(), ErasureError> {
        write(&self.file, record).map_err(|cause| ErasureError::Record { file: self.file.clone(), cause })?;
        *written = Some(record.clone());
        Ok(())
    }

    fn check(&self, found: &DiskIdentity) -> Result<(), ErasureError> {
        if found.is(&self.record.identity) {
            return Ok(());
        }
        Err(ErasureError::OtherEntry(self.record.volume.clone()))
    }

    /// Checks that no pod still has the volume.
    fn check_unused(&self) -> Result<(), ErasureError> {
        let name = &self.record.volume;
        let table = mounts().map_err(ErasureError::NoMountTable)?;
        let in_pod = Path::new(IN_POD).join(name);
        if let Some(mounted) = table.iter().find(|mounted| mounted.at.ends_with(&in_pod)) {
            return Err(ErasureError::InPod(mounted.at.clone()));
        }
        let mut places = self.roots.iter().flat_map(|root| GLOBAL.map(|place| root.join(place).join(name)));
        match places.find(|place| place.symlink_metadata().is_ok()) {
            Some(place) => Err(ErasureError::OnNode(place)),
            None => Ok(()),
        }
    }
}
