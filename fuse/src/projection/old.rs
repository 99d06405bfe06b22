//! Old generations, to which `..data` pointed before. A reader that resolved the link just before a switch still opens files in the
//! directory. So each stays for a time with all its files.
//!
//! A volume that changes very often keeps only its newest old generations: at most [`MOST`], with at most [`MOST_BYTES`] together,
//! but always the previous generation.

use std::sync::Arc;
use std::time::{Duration, Instant};

use super::generation::GenerationName;
use super::image::Image;
use crate::Backoff;
use crate::DoublingPause;

/// Most old generations of a volume.
pub const MOST: usize = 64;
/// Most bytes of memory for the old generations of a volume.
pub const MOST_BYTES: u64 = 16 << 20;

/// The delay after a failed removal. It doubles with each further failure.
const RETRY: DoublingPause = DoublingPause::new(Duration::from_secs(1), Duration::from_secs(30));

/// An old generation.
#[derive(Clone)]
pub(crate) struct OldGeneration {
    pub(crate) name: GenerationName,
    pub(crate) image: Arc<Image>,
    /// The time of its removal.
    until: Instant,
    /// The delays after failed removals.
    backoff: Backoff,
}

/// The number of old generations of a volume, and their memory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct OldUsage {
    /// Their number.
    pub generations: usize,
    /// Bytes of memory.
    pub bytes: u64,
}

/// The old generations of a volume, oldest first.
#[derive(Default)]
pub(crate) struct OldGenerations {
    keep_for: Duration,
    all: Vec<OldGeneration>,
}

impl OldGenerations {
    /// Keeps each old generation for `time`. For existing ones, the time begins now.
    pub(crate) fn keep_for(&mut self, time: Duration) {
        self.keep_for = time;
        let until = Instant::now() + time;
        self.all.iter_mut().for_each(|old| old.until = until);
    }

    pub(crate) fn push(&mut self, name: GenerationName, image: Arc<Image>) {
        self.all.push(OldGeneration { name, image, until: Instant::now() + self.keep_for, backoff: RETRY.backoff() });
    }

    pub(crate) fn contains(&self, name: &str) -> bool {
        self.all.iter().any(|old| old.name.as_str() == name)
    }

    pub(crate) fn usage(&self) -> OldUsage {
        let bytes = self.all.iter().map(|old| old.image.memory()).sum();
        OldUsage { generations: self.all.len(), bytes }
    }

    /// The time of the next removal.
    pub(crate) fn next_removal(&self) -> Option<Instant> {
        self.all.iter().map(|old| old.until).min()
    }

    /// The generations to remove now: their time is over, or newer ones exceed the limits.
    pub(crate) fn due(&self, now: Instant) -> Vec<OldGeneration> {
        let (mut generations, mut bytes) = (MOST, MOST_BYTES);
        let newest_first = self.all.iter().rev().enumerate();
        let due = newest_first.filter(|(age, old)| {
            let fits = generations > 0 && old.image.memory() <= bytes;
            (generations, bytes) = if fits { (generations - 1, bytes - old.image.memory()) } else { (0, 0) };
            old.until <= now || (!fits && *age > 0 && old.backoff.failures() == 0)
        });
        let mut due: Vec<_> = due.map(|(_, old)| old.clone()).collect();
        due.reverse();
        due
    }

    /// Makes all generations due whose removal has failed.
    pub(crate) fn retry_now(&mut self) {
        let now = Instant::now();
        self.all.iter_mut().filter(|old| old.backoff.failures() > 0).for_each(|old| old.until = now);
    }

    pub(crate) fn removed(&mut self, name: &GenerationName) {
        self.all.retain(|old| old.name != *name);
    }

    /// Notes that a removal failed, so it is due again later. Returns whether this is its first failure.
    pub(crate) fn failed(&mut self, name: &GenerationName) -> bool {
        let Some(old) = self.all.iter_mut().find(|old| old.name == *name) else { return false };
        old.until = Instant::now() + old.backoff.fail();
        old.backoff.failures() == 1
    }
}

#[cfg(test)]
mod tests {
    use std::time::SystemTime;

    use super::super::image::{DirectoryAttributes, FileEntry, ImageLayout};
    use super::*;

    fn image(size: usize) -> Arc<Image> {
        let content = vec![b'x'; size];
        let entry = FileEntry { path: "a", content: &content, mode: 0o644, uid: 0, gid: 0 };
        let directories = DirectoryAttributes { mode: 0o755, gid: 0 };
        Arc::new(ImageLayout::new([entry], directories).expect("a tree").image().expect("an image"))
    }

    fn kept_for_an_hour(sizes: &[usize]) -> (OldGenerations, Vec<GenerationName>) {
        let mut old = OldGenerations::default();
        old.keep_for(Duration::from_secs(3600));
        let names: Vec<_> = sizes.iter().map(|_| GenerationName::new(SystemTime::now())).collect();
        sizes.iter().zip(&names).for_each(|(size, name)| old.push(name.clone(), image(*size)));
        (old, names)
    }

    fn due(old: &OldGenerations, at: Instant) -> Vec<GenerationName> {
        old.due(at).into_iter().map(|old| old.name).collect()
    }

    #[test]
    fn a_generation_is_due_when_its_time_is_over() {
        let (old, names) = kept_for_an_hour(&[1, 1]);
        assert_eq!(due(&old, Instant::now()), []);
        assert_eq!(due(&old, Instant::now() + Duration::from_secs(3601)), names);
        assert_eq!(old.usage().generations, 2);
    }

    #[test]
    fn the_newest_are_kept_within_the_limits_and_the_previous_one_always() {
        let (old, names) = kept_for_an_hour(&[1; MOST + 2]);
        assert_eq!(due(&old, Instant::now()), names[..2]);
        let half = usize::try_from(MOST_BYTES / 2).expect("a size");
        let (old, names) = kept_for_an_hour(&[1, half, half, 1]);
        assert_eq!(due(&old, Instant::now()), names[..2], "the oldest goes, too, though it would fit");
        let (old, names) = kept_for_an_hour(&[1, 3 * half]);
        assert_eq!(due(&old, Instant::now()), names[..1]);
    }

    #[test]
    fn a_failed_removal_is_due_again_later_and_at_the_next_commit() {
        let (mut old, names) = kept_for_an_hour(&[1]);
        old.keep_for(Duration::ZERO);
        assert_eq!(due(&old, Instant::now()), names);
        assert!(old.failed(&names[0]), "it is the first time");
        assert_eq!(due(&old, Instant::now()), []);
        assert!(old.next_removal().is_some());
        old.retry_now();
        assert_eq!(due(&old, Instant::now()), names);
        assert!(!old.failed(&names[0]));
        old.removed(&names[0]);
        assert_eq!((old.next_removal(), old.usage()), (None, OldUsage::default()));
    }
}
