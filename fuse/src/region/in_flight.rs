//! The request that each thread of a session is executing, for the successor.
//!
//! Each thread has a *slot*. The slot names the request that the thread answers, from before the service gets the request until
//! after the answer is written. A request that is not idempotent is marked *begun* before its system call.
//!
//! A successor moves the requests in the slots of its predecessor to a list of requests *to replay*, where each stays until the
//! kernel sends it again. The successor completes the entry of the list before it frees the slot. A kill in between leaves the
//! request in both, and the next successor recognises it as the same request.

use std::sync::atomic::Ordering::{Acquire, Relaxed, Release};
use std::sync::atomic::{AtomicU32, AtomicU64};

use rustix::time::{ClockId, Timespec, clock_gettime};

use super::shared::shared;

/// Most threads of a session, those for slow requests included.
pub const SLOTS: usize = 16;
/// Most requests that are remembered for a successor. Each takeover adds one for each thread at most.
const REPLAYS: usize = 64;

/// A request that a server began, and may have executed. Whether the kernel got the answer is unknown.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BegunRequest {
    /// A time that is not later than any timestamp that the execution sets on a file system of this host.
    pub at: Timespec,
    /// The note that the service made before its system call.
    pub note: u64,
    /// The file that the request removes or renames, if the service has marked it. `at` has no meaning then.
    pub file: Option<FileMark>,
}

/// What tells a file from another one that gets its name later.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FileMark {
    ino: u64,
    /// 31 bits made of the time at which the file was made; 0 if the file system does not know that time.
    birth: u32,
}

impl FileMark {
    /// The mark of a file with this inode number, made `birth` nanoseconds after the epoch.
    pub fn new(ino: u64, birth: Option<i128>) -> Self {
        // A prime number, so that times of whole ticks differ.
        const BIRTHS: i128 = 0x7fff_ffff;
        Self { ino, birth: birth.map_or(0, |birth| (birth.rem_euclid(BIRTHS) as u32).max(1)) }
    }

    /// Whether both marks are those of one file. File systems use an inode number again, ext4 at once.
    pub fn is_same(self, other: Self) -> bool {
        self.ino == other.ino && (self.birth == other.birth || self.birth == 0 || other.birth == 0)
    }
}

/// The bit of `nanoseconds` which says that a record has a [`FileMark`] instead of a time.
const HAS_FILE: u32 = 1 << 31;

shared! {
    /// The slot of one thread. Only that thread writes it.
    #[repr(align(64))]
    pub(crate) struct InFlightSlot {
        /// The request that the thread answers, without the kernel's mark of a resent request; 0 for none.
        unique: AtomicU64,
        /// The last request that a thread of this slot began to answer.
        last: AtomicU64,
        begun: BegunRecord,
        /// The thread that has the slot, or had it last.
        thread: AtomicU32,
    }
    /// Whether a request was begun, and when, or with which file. An earlier version of podfs does not use the time of a request that
    /// removes or renames a file, so it reads a record with a file as one without.
    pub(crate) struct BegunRecord {
        /// The seconds of the time, or the inode number of the file.
        seconds: AtomicU64,
        note: AtomicU64,
        /// The nanoseconds of the time, or the birth of the file with [`HAS_FILE`].
        nanoseconds: AtomicU32,
        /// 1 if the request was begun. Written last.
        is_begun: AtomicU32,
    }
    /// The state of a slot when its thread died.
    pub(crate) struct Replay {
        /// The request; 0 for a free place. Written last.
        unique: AtomicU64,
        /// Larger for a request that was kept later.
        order: AtomicU64,
        begun: BegunRecord,
    }
    /// All slots of a region, and the requests to replay.
    pub(crate) struct InFlightSlots {
        slots: [InFlightSlot; SLOTS],
        to_replay: [Replay; REPLAYS],
        /// The largest `order` so far.
        order: AtomicU64,
    }
}

impl InFlightSlot {
    /// Gives the slot to the calling thread.
    pub(crate) fn register(&self) {
        self.thread.store(rustix::thread::gettid().as_raw_nonzero().get().cast_unsigned(), Release);
    }

    /// Gives the slot to the thread with this id.
    pub(crate) fn set_thread(&self, thread: i32) {
        self.thread.store(thread.cast_unsigned(), Relaxed);
    }

    /// Frees the slot if it still names `unique`. Another thread may have the slot already.
    pub(crate) fn clear_of(&self, unique: u64) {
        let _another = self.unique.compare_exchange(unique, 0, Release, Relaxed);
    }

    /// Names `unique` as the request that the thread answers from here on.
    pub(crate) fn take(&self, unique: u64) {
        // The record of the request before must not be read as one of this request.
        self.begun.is_begun.store(0, Relaxed);
        self.last.store(unique, Relaxed);
        self.unique.store(unique, Release);
    }

    /// Like [`take`](Self::take), for a request that the slot already has. Keeps the record whether the request was begun.
    pub(crate) fn take_again(&self, unique: u64) {
        self.last.store(unique, Relaxed);
        self.unique.store(unique, Release);
    }

    /// The record of the slot's request; `None` if it was not begun.
    pub(crate) fn begun(&self) -> Option<BegunRequest> {
        self.begun.get()
    }

    /// The thread that answers a request at this moment, with the request's number.
    pub(crate) fn busy(&self) -> Option<(i32, u64)> {
        let (thread, unique) = (self.thread.load(Relaxed).cast_signed(), self.unique.load(Acquire));
        (unique != 0).then_some((thread, unique))
    }

    /// Frees the slot after the thread has written its answer.
    pub(crate) fn clear(&self) {
        self.unique.store(0, Release);
    }

    /// Marks the slot's request as begun: it must not be executed twice from here on. `at` is the time at which an earlier server
    /// began it; `None` for the present time.
    pub(crate) fn begin(&self, at: Option<Timespec>, note: u64) {
        let at = at.unwrap_or_else(|| clock_gettime(ClockId::RealtimeCoarse));
        self.begun.set(Some(BegunRequest { at, note, file: None }));
    }

    /// As [`begin`](Self::begin), for a request that removes or renames `file`.
    pub(crate) fn begin_with(&self, note: u64, file: FileMark) {
        self.begun.set(Some(BegunRequest { at: Timespec::default(), note, file: Some(file) }));
    }
}

impl BegunRecord {
    fn get(&self) -> Option<BegunRequest> {
        (self.is_begun.load(Acquire) == 1).then(|| {
            let (seconds, nanoseconds) = (self.seconds.load(Relaxed), self.nanoseconds.load(Relaxed));
            let file =
                (nanoseconds & HAS_FILE != 0).then_some(FileMark { ino: seconds, birth: nanoseconds & !HAS_FILE });
            let time = Timespec { tv_sec: seconds.cast_signed(), tv_nsec: i64::from(nanoseconds.min(999_999_999)) };
            let at = if file.is_some() { Timespec::default() } else { time };
            BegunRequest { at, note: self.note.load(Relaxed), file }
        })
    }

    fn set(&self, begun: Option<BegunRequest>) {
        self.is_begun.store(0, Release);
        if let Some(BegunRequest { at, note, file }) = begun {
            let time = (at.tv_sec.cast_unsigned(), at.tv_nsec as u32);
            let (seconds, nanoseconds) = file.map_or(time, |file| (file.ino, file.birth | HAS_FILE));
            self.seconds.store(seconds, Release);
            self.nanoseconds.store(nanoseconds, Release);
            self.note.store(note, Release);
            // A system call follows; the compiler may not move this store behind it.
            self.is_begun.store(1, Release);
        }
    }
}

impl InFlightSlots {
    /// The slot with this index.
    pub(crate) fn slot(&self, index: usize) -> &InFlightSlot {
        &self.slots[index]
    }

    /// The threads that answer a request at this moment, each with the request's number.
    pub(crate) fn busy(&self) -> impl Iterator<Item = (i32, u64)> {
        self.slots.iter().filter_map(InFlightSlot::busy)
    }

    /// Moves the requests in the slots to the list of requests to replay. The threads of the slots must be dead.
    pub(crate) fn collect_replays(&self) {
        for slot in &self.slots {
            let unique = slot.unique.load(Acquire);
            if unique != 0 {
                self.keep_for_replay(unique, slot.begun.get());
                slot.clear();
            }
        }
    }

    /// The record of the request to replay `unique`; `None` if no earlier server began it.
    pub(crate) fn earlier(&self, unique: u64) -> Option<BegunRequest> {
        self.to_replay(unique)?.begun.get()
    }

    /// Forgets a request to replay: the kernel has sent it again, and the server has answered it.
    pub(crate) fn drop_replay(&self, unique: u64) {
        if let Some(to_replay) = self.to_replay(unique) {
            to_replay.unique.store(0, Release);
        }
    }

    /// Forgets all requests to replay.
    pub(crate) fn drop_all_replays(&self) {
        self.to_replay.iter().for_each(|to_replay| to_replay.unique.store(0, Release));
    }

    /// All requests that the kernel may send again: the requests to replay, and those in the slots.
    pub(crate) fn unanswered(&self) -> impl Iterator<Item = u64> {
        let in_slots = self.slots.iter().map(|slot| slot.unique.load(Acquire)).filter(|unique| *unique != 0);
        in_slots.chain(self.all_to_replay())
    }

    /// The requests to replay.
    pub(crate) fn all_to_replay(&self) -> impl Iterator<Item = u64> {
        self.to_replay.iter().map(|to_replay| to_replay.unique.load(Acquire)).filter(|unique| *unique != 0)
    }

    /// The last request of each slot that has had a request.
    pub(crate) fn last_requests(&self) -> impl Iterator<Item = u64> {
        self.slots.iter().map(|slot| slot.last.load(Relaxed)).filter(|unique| *unique != 0)
    }

    fn to_replay(&self, unique: u64) -> Option<&Replay> {
        self.to_replay.iter().find(|to_replay| to_replay.unique.load(Acquire) == unique)
    }

    fn keep_for_replay(&self, unique: u64, begun: Option<BegunRequest>) {
        let place = match self.to_replay(unique) {
            // The dead server had not begun the request. The kept record says whether an earlier server had.
            Some(_) if begun.is_none() => return,
            Some(known) => known,
            None => {
                let place = self.oldest();
                place.unique.store(0, Release);
                place
            }
        };
        // Until this record is complete, the slot still has the request.
        place.begun.set(begun);
        let order = self.order.load(Relaxed).wrapping_add(1);
        self.order.store(order, Relaxed);
        place.order.store(order, Relaxed);
        place.unique.store(unique, Release);
    }

    /// A free place of the list, or else the place of the request that was kept first.
    fn oldest(&self) -> &Replay {
        let age = |to_replay: &&Replay| match to_replay.unique.load(Relaxed) {
            0 => (false, 0),
            _ => (true, to_replay.order.load(Relaxed)),
        };
        self.to_replay.iter().min_by_key(age).expect("there are places")
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::region::{Region, VolumeKind};

    fn region() -> Region {
        Region::create(VolumeKind::Passthrough).expect("a region")
    }

    /// The record of `unique` that the next server finds if the threads die now.
    fn known(slots: &InFlightSlots, unique: u64) -> (bool, Option<u64>) {
        slots.collect_replays();
        (slots.all_to_replay().any(|to_replay| to_replay == unique), slots.earlier(unique).map(|begun| begun.note))
    }

    #[test]
    fn a_begun_request_of_a_dead_thread_is_known_until_it_is_answered() {
        let region = region();
        let slots = region.in_flight();
        slots.slot(0).take(10);
        slots.slot(0).begin(None, 7);
        slots.slot(3).take(12);
        assert_eq!(known(slots, 10), (true, Some(7)));
        assert_eq!(known(slots, 12), (true, None), "it was read, and not begun");
        // The successor dies too, at each point of answering it.
        slots.slot(1).take(10);
        assert_eq!(known(slots, 10), (true, Some(7)));
        slots.slot(1).take(10);
        slots.slot(1).begin(None, 8);
        assert_eq!(known(slots, 10), (true, Some(8)), "what was noted last is what was tried last");
        slots.drop_replay(10);
        assert_eq!(known(slots, 10), (false, None));
    }

    #[test]
    fn the_file_of_a_begun_request_is_known_to_each_successor() {
        let region = region();
        let slots = region.in_flight();
        let file = FileMark::new(u64::MAX, Some(i128::from(i64::MIN)));
        slots.slot(0).take(10);
        slots.slot(0).begin_with(7, file);
        for _ in 0..2 {
            assert_eq!(known(slots, 10), (true, Some(7)));
            assert_eq!(slots.earlier(10).and_then(|begun| begun.file), Some(file));
            slots.slot(1).take(10);
        }
        // An earlier version of podfs records times only.
        slots.slot(0).take(12);
        slots.slot(0).begin(Some(Timespec { tv_sec: i64::MAX, tv_nsec: 999_999_999 }), 0);
        slots.collect_replays();
        assert_eq!(slots.earlier(12).map(|begun| begun.file), Some(None));
    }

    #[test]
    fn a_file_differs_from_a_later_one_with_its_number() {
        let (known, unknown) = (FileMark::new(5, Some(1_700_000_000_000_000_000)), FileMark::new(5, None));
        assert!(known.is_same(known) && known.is_same(unknown) && unknown.is_same(known));
        assert!(!known.is_same(FileMark::new(6, Some(1_700_000_000_000_000_000))));
        // The kernel's clock for times of files ticks every 1 to 10 milliseconds.
        let later = (1..1000).map(|tick| FileMark::new(5, Some(1_700_000_000_000_000_000 + tick * 4_000_000)));
        assert_eq!(later.filter(|later| known.is_same(*later)).count(), 0);
    }

    #[test]
    fn a_thread_that_has_answered_leaves_nothing() {
        let region = region();
        let slot = region.in_flight().slot(5);
        slot.take(10);
        slot.begin(None, 1);
        slot.clear();
        slot.take(12);
        assert_eq!(known(region.in_flight(), 10), (false, None));
        assert_eq!(known(region.in_flight(), 12), (true, None));
    }

    #[test]
    fn the_oldest_replay_is_dropped_when_there_is_no_room() {
        let region = region();
        let slots = region.in_flight();
        for unique in 1..=REPLAYS as u64 + 1 {
            slots.slot(0).take(unique * 2);
            slots.collect_replays();
        }
        let mut to_replay: Vec<_> = slots.all_to_replay().collect();
        to_replay.sort_unstable();
        assert_eq!(to_replay, (2..=REPLAYS as u64 + 1).map(|n| n * 2).collect::<Vec<_>>());
    }

    #[test]
    fn a_request_is_begun_no_later_than_what_it_leaves_behind() {
        let region = region();
        let directory = tempfile::tempdir().expect("a directory");
        region.in_flight().slot(0).take(2);
        region.in_flight().slot(0).begin(None, 0);
        let path = directory.path().join("made");
        std::fs::create_dir(&path).expect("a directory");
        region.in_flight().collect_replays();
        let at = region.in_flight().earlier(2).expect("begun").at;
        let found = rustix::fs::stat(&path).expect("attributes");
        assert!((at.tv_sec, at.tv_nsec) <= (found.st_ctime, found.st_ctime_nsec as i64));
    }
}
