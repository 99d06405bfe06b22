//! A volume's share of the descriptors that its server may have.
//!
//! One process serves all volumes of a pod, and the kernel limits its descriptors (`RLIMIT_NOFILE`). Each volume gets the same
//! share of them, so no volume can use up the descriptors of another one. Only descriptors whose number callers can raise count:
//! open files and directories, a descriptor for each owner of locks, and files that stay open because they cannot be opened
//! again. The process sets aside the descriptors that a volume always has, mostly those of the directories used last.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use rustix::io::Errno;
use rustix::process::{Resource, getrlimit};

/// Descriptors of a volume that are not counted; more than it ever has.
const SET_ASIDE: usize = 600;
/// The least share of a volume, however small the limit of the process is.
const LEAST: usize = 256;

/// The number of volumes that this process serves.
static VOLUMES: AtomicUsize = AtomicUsize::new(0);

/// The share of one volume.
#[derive(Debug)]
pub struct Share {
    taken: Arc<AtomicUsize>,
    /// The limit of the process.
    limit: usize,
    /// The volume's name.
    volume: String,
    /// Whether podfs has logged that the share is used up.
    is_reported: AtomicBool,
}

/// The permission to have one descriptor of a share open. Dropping this gives it back.
#[derive(Debug)]
pub struct DescriptorPermit(Arc<AtomicUsize>);

impl Share {
    /// The share of a new volume, which makes the shares of the other volumes smaller.
    pub fn new(volume: &str) -> Self {
        VOLUMES.fetch_add(1, Ordering::Relaxed);
        let limit = getrlimit(Resource::Nofile).current.and_then(|limit| usize::try_from(limit).ok());
        Self {
            taken: Arc::default(),
            limit: limit.unwrap_or(usize::MAX),
            volume: volume.to_owned(),
            is_reported: AtomicBool::new(false),
        }
    }

    /// The permission also if the share is used up, for a descriptor of a dead server, which stays open.
    pub fn take_anyway(&self) -> DescriptorPermit {
        self.taken.fetch_add(1, Ordering::Relaxed);
        DescriptorPermit(Arc::clone(&self.taken))
    }

    /// The permission for one more descriptor.
    ///
    /// # Errors
    /// `ENFILE` when there is none.
    pub fn take(&self) -> Result<DescriptorPermit, Errno> {
        let most = share_of_volume(self.limit, VOLUMES.load(Ordering::Relaxed));
        let taken = self.taken.fetch_add(1, Ordering::Relaxed);
        let permit = DescriptorPermit(Arc::clone(&self.taken));
        if taken < most {
            return Ok(permit);
        }
        if !self.is_reported.swap(true, Ordering::Relaxed) {
            tracing::warn!(
                volume = self.volume,
                "volume {:?}: its {most} descriptors are all in use, so no more files are opened until some are closed; \
                 raise the limit of open files (LimitNOFILE= of podfs' unit) if that is too few",
                self.volume
            );
        }
        Err(Errno::NFILE)
    }
}

impl Drop for Share {
    fn drop(&mut self) {
        VOLUMES.fetch_sub(1, Ordering::Relaxed);
    }
}

impl Drop for DescriptorPermit {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

/// The share of each volume, if a process with this limit serves so many volumes.
fn share_of_volume(limit: usize, volumes: usize) -> usize {
    (limit / volumes.max(1)).saturating_sub(SET_ASIDE).max(LEAST)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn volumes_get_the_same_part_and_never_less_than_the_least() {
        let rows = [(10_000, 1, 9_400), (10_000, 5, 1_400), (10_000, 10, 400), (1_000, 1, 400), (64, 3, LEAST)];
        for (limit, volumes, expected) in rows {
            assert_eq!(share_of_volume(limit, volumes), expected, "{limit} descriptors, {volumes} volumes");
        }
    }

    #[test]
    fn a_returned_descriptor_can_be_taken_again() {
        let mut share = Share::new("test");
        share.limit = 0;
        let all: Vec<_> = (0..LEAST).map(|_| share.take().expect("a permit")).collect();
        assert_eq!(share.take().err(), Some(Errno::NFILE));
        assert_eq!(share.take().err(), Some(Errno::NFILE), "being refused takes nothing");
        let more = share.take_anyway();
        drop(all);
        assert!(share.take().is_ok());
        let filled: Vec<_> = (1..LEAST).map(|_| share.take().expect("a permit")).collect();
        assert_eq!(share.take().err(), Some(Errno::NFILE), "what was taken anyway counts");
        drop((more, filled));
    }
}
