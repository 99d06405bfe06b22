//! What each thread of a session is doing, so that a successor knows it.
//!
//! A thread has a *seat*. It names the request that the thread answers, from before the service is asked until after
//! the answer is written. What is not idempotent is marked *begun* before its system call.
//!
//! A successor moves what the seats of its predecessor say to a list of *carried* requests, where it stays until they
//! are asked for again. It is complete there before its seat is free, so a kill between leaves it in both, and the
//! next successor finds that it is the same request.

use std::sync::atomic::Ordering::{Acquire, Relaxed, Release};
use std::sync::atomic::{AtomicU32, AtomicU64};

use rustix::time::{ClockId, Timespec, clock_gettime};

use super::shared::shared;

/// Most threads of a session.
pub const SEATS: usize = 16;
/// Most requests that are remembered for a successor. Each takeover adds one for each thread at most.
const CARRIED: usize = 64;

/// A request that may have been executed: it was begun, and its answer is not known to have been given.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Begun {
    /// Not later than what the execution leaves on a file system of this host as a time.
    pub at: Timespec,
    /// What the service noted before.
    pub note: u64,
}

shared! {
    /// The place of one thread. Only that thread writes it.
    #[repr(align(64))]
    pub(crate) struct Seat {
        /// The request it answers, without the mark of a resent one; 0 when there is none.
        unique: AtomicU64,
        /// The last request it answered, or answers.
        last: AtomicU64,
        begun: BegunRecord,
        /// The thread that has the place, or had it last.
        thread: AtomicU32,
    }
    /// Whether a request was begun, and when.
    pub(crate) struct BegunRecord {
        seconds: AtomicU64,
        note: AtomicU64,
        nanoseconds: AtomicU32,
        /// 1 if it was; written last.
        is: AtomicU32,
    }
    /// What a seat said when its thread died.
    pub(crate) struct Carried {
        /// The request; 0 for a free place. Written last.
        unique: AtomicU64,
        /// Larger in those that were carried later.
        order: AtomicU64,
        begun: BegunRecord,
    }
    /// All of it.
    pub(crate) struct Seats {
        seats: [Seat; SEATS],
        carried: [Carried; CARRIED],
        /// The last `order` that was given.
        order: AtomicU64,
    }
}

impl Seat {
    /// The calling thread has this place from now on.
    pub(crate) fn sit_down(&self) {
        self.thread.store(rustix::thread::gettid().as_raw_nonzero().get().cast_unsigned(), Release);
    }

    /// The thread answers `unique` from here on.
    pub(crate) fn take(&self, unique: u64) {
        // Nothing of the request before may be taken for this one's.
        self.begun.is.store(0, Relaxed);
        self.last.store(unique, Relaxed);
        self.unique.store(unique, Release);
    }

    /// The answer is written.
    pub(crate) fn clear(&self) {
        self.unique.store(0, Release);
    }

    /// What comes now may not be done twice. `at` is when it was begun first.
    pub(crate) fn begin(&self, at: Option<Timespec>, note: u64) {
        let at = at.unwrap_or_else(|| clock_gettime(ClockId::RealtimeCoarse));
        self.begun.set(Some(Begun { at, note }));
    }
}

impl BegunRecord {
    fn get(&self) -> Option<Begun> {
        (self.is.load(Acquire) == 1).then(|| Begun {
            at: Timespec {
                tv_sec: self.seconds.load(Relaxed).cast_signed(),
                tv_nsec: i64::from(self.nanoseconds.load(Relaxed).min(999_999_999)),
            },
            note: self.note.load(Relaxed),
        })
    }

    fn set(&self, begun: Option<Begun>) {
        self.is.store(0, Release);
        if let Some(Begun { at, note }) = begun {
            self.seconds.store(at.tv_sec.cast_unsigned(), Release);
            self.nanoseconds.store(at.tv_nsec as u32, Release);
            self.note.store(note, Release);
            // A system call follows, before which the compiler may not keep this back.
            self.is.store(1, Release);
        }
    }
}

impl Seats {
    /// The seat of that number.
    pub(crate) fn seat(&self, index: usize) -> &Seat {
        &self.seats[index]
    }

    /// The threads that answer a request at this moment, each with the request's number.
    pub(crate) fn busy(&self) -> impl Iterator<Item = (i32, u64)> {
        let busy = |seat: &Seat| (seat.thread.load(Relaxed).cast_signed(), seat.unique.load(Acquire));
        self.seats.iter().map(busy).filter(|(_, unique)| *unique != 0)
    }

    /// Carries what the seats say, and frees them. Their threads must be dead.
    pub(crate) fn carry(&self) {
        for seat in &self.seats {
            let unique = seat.unique.load(Acquire);
            if unique != 0 {
                self.keep(unique, seat.begun.get());
                seat.clear();
            }
        }
    }

    /// What is carried of the request `unique`: whether it was begun.
    pub(crate) fn earlier(&self, unique: u64) -> Option<Begun> {
        self.carried(unique)?.begun.get()
    }

    /// The request was asked for again, and answered.
    pub(crate) fn drop_carried(&self, unique: u64) {
        if let Some(carried) = self.carried(unique) {
            carried.unique.store(0, Release);
        }
    }

    /// Nothing is carried any more.
    pub(crate) fn drop_all_carried(&self) {
        self.carried.iter().for_each(|carried| carried.unique.store(0, Release));
    }

    /// Whatever may be asked for again: what is carried, and what will be once the seats are.
    pub(crate) fn unanswered(&self) -> impl Iterator<Item = u64> {
        let seated = self.seats.iter().map(|seat| seat.unique.load(Acquire)).filter(|unique| *unique != 0);
        seated.chain(self.all_carried())
    }

    /// The requests that are carried.
    pub(crate) fn all_carried(&self) -> impl Iterator<Item = u64> {
        self.carried.iter().map(|carried| carried.unique.load(Acquire)).filter(|unique| *unique != 0)
    }

    /// The last request of each thread that there was.
    pub(crate) fn last(&self) -> impl Iterator<Item = u64> {
        self.seats.iter().map(|seat| seat.last.load(Relaxed)).filter(|unique| *unique != 0)
    }

    fn carried(&self, unique: u64) -> Option<&Carried> {
        self.carried.iter().find(|carried| carried.unique.load(Acquire) == unique)
    }

    fn keep(&self, unique: u64, begun: Option<Begun>) {
        let place = match self.carried(unique) {
            // A successor that died before it began anew knew no more than this.
            Some(_) if begun.is_none() => return,
            Some(known) => known,
            None => {
                let place = self.oldest();
                place.unique.store(0, Release);
                place
            }
        };
        // Until it is whole, the seat says the same.
        place.begun.set(begun);
        let order = self.order.load(Relaxed).wrapping_add(1);
        self.order.store(order, Relaxed);
        place.order.store(order, Relaxed);
        place.unique.store(unique, Release);
    }

    /// A free place, or else the one taken first.
    fn oldest(&self) -> &Carried {
        let age = |carried: &&Carried| match carried.unique.load(Relaxed) {
            0 => (false, 0),
            _ => (true, carried.order.load(Relaxed)),
        };
        self.carried.iter().min_by_key(age).expect("there are places")
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::region::{Kind, Region};

    fn region() -> Region {
        Region::create(Kind::Passthrough).expect("a region")
    }

    /// What the next server knows of `unique` when the threads die now.
    fn known(seats: &Seats, unique: u64) -> (bool, Option<u64>) {
        seats.carry();
        (seats.all_carried().any(|carried| carried == unique), seats.earlier(unique).map(|begun| begun.note))
    }

    #[test]
    fn what_a_dead_thread_had_begun_is_known_until_it_is_answered() {
        let region = region();
        let seats = region.seats();
        seats.seat(0).take(10);
        seats.seat(0).begin(None, 7);
        seats.seat(3).take(12);
        assert_eq!(known(seats, 10), (true, Some(7)));
        assert_eq!(known(seats, 12), (true, None), "it was read, and not begun");
        // The successor dies too, at each point of answering it.
        seats.seat(1).take(10);
        assert_eq!(known(seats, 10), (true, Some(7)));
        seats.seat(1).take(10);
        seats.seat(1).begin(None, 8);
        assert_eq!(known(seats, 10), (true, Some(8)), "what was noted last is what was tried last");
        seats.drop_carried(10);
        assert_eq!(known(seats, 10), (false, None));
    }

    #[test]
    fn a_thread_that_has_answered_leaves_nothing() {
        let region = region();
        let seat = region.seats().seat(5);
        seat.take(10);
        seat.begin(None, 1);
        seat.clear();
        seat.take(12);
        assert_eq!(known(region.seats(), 10), (false, None));
        assert_eq!(known(region.seats(), 12), (true, None));
    }

    #[test]
    fn what_was_carried_first_gives_way_when_there_is_no_room() {
        let region = region();
        let seats = region.seats();
        for unique in 1..=CARRIED as u64 + 1 {
            seats.seat(0).take(unique * 2);
            seats.carry();
        }
        let mut carried: Vec<_> = seats.all_carried().collect();
        carried.sort_unstable();
        assert_eq!(carried, (2..=CARRIED as u64 + 1).map(|n| n * 2).collect::<Vec<_>>());
    }

    #[test]
    fn a_request_is_begun_no_later_than_what_it_leaves_behind() {
        let region = region();
        let directory = tempfile::tempdir().expect("a directory");
        region.seats().seat(0).take(2);
        region.seats().seat(0).begin(None, 0);
        let path = directory.path().join("made");
        std::fs::create_dir(&path).expect("a directory");
        region.seats().carry();
        let at = region.seats().earlier(2).expect("begun").at;
        let found = rustix::fs::stat(&path).expect("attributes");
        assert!((at.tv_sec, at.tv_nsec) <= (found.st_ctime, found.st_ctime_nsec as i64));
    }
}
