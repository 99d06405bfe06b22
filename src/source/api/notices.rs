//! Which events are due: failures of each volume of the pod, and a later success.
//!
//! 1. A failure is due when it has lasted for a second, and again every ten minutes for as long as it lasts.
//! 2. A success is due only after a failure that was posted.
//! 3. The limit on events is the kubelet's: a burst, and then one every few minutes. The repetitions of 1. do not count
//!    towards it: in ten minutes, each volume has at most one.

use std::collections::BTreeMap;
use std::time::Duration;

use tokio::time::Instant;

/// How long a condition has to last before it is posted.
const SETTLE_DELAY: Duration = Duration::from_secs(1);
/// How often a failure that lasts is posted again.
const REPEAT_INTERVAL: Duration = Duration::from_secs(600);
/// How many events podfs may post at once, and how long it takes until it may post one more.
const BURST: u32 = 25;
const REFILL_INTERVAL: Duration = Duration::from_secs(300);

/// The condition of a volume.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Condition {
    /// It is mounted, and current.
    Mounted,
    /// It could not be mounted or refreshed, for this reason.
    Failing(String),
    /// A container has the kubelet's volume in its place. podfs posts the event with this sentence once.
    Kept(String),
    /// The volume has grown. podfs posts the event with this sentence once.
    Resized(String),
    /// The volume could not grow. podfs posts the event with this sentence once.
    NotResized(String),
    /// Other pods use the volume, whose files have another group. podfs posts the event with this sentence once.
    Shared(String),
    /// podfs gives many files to the pod's group. podfs posts the event with this sentence once.
    ChangesGroup(String),
}

/// The conditions of the pod's volumes, and the events posted about them.
pub(super) struct Notices {
    volumes: BTreeMap<String, Notice>,
    budget: Budget,
}

/// An event to post about a volume.
#[derive(Default)]
struct Notice {
    /// The condition, and when it is due.
    due: Option<(Condition, Instant)>,
    /// Whether this condition was posted before.
    is_repetition: bool,
    /// Whether a failure was posted, and no success since.
    has_failed: bool,
}

impl Notices {
    pub(super) fn new(now: Instant) -> Notices {
        Notices { volumes: BTreeMap::new(), budget: Budget { remaining: BURST, refilled: now } }
    }

    /// Sets the condition of a volume.
    pub(super) fn set(&mut self, volume: String, condition: Condition, now: Instant) {
        let notice = self.volumes.entry(volume).or_default();
        let before = notice.due.take();
        if before.as_ref().is_some_and(|(before, _)| *before == condition) {
            notice.due = before;
            return;
        }
        if condition == Condition::Mounted && !notice.has_failed {
            return;
        }
        // A failure with another reason, before the first was posted, keeps the time of the first.
        let due = match (&condition, before) {
            (Condition::Failing(_), Some((Condition::Failing(_), due))) if !notice.is_repetition => due,
            _ => now + SETTLE_DELAY,
        };
        notice.due = Some((condition, due));
        notice.is_repetition = false;
    }

    /// A condition to post now, with its volume.
    pub(super) fn due(&mut self, now: Instant) -> Option<(String, Condition)> {
        let is_affordable = self.budget.remaining_at(now) > 0;
        let is_due = |(volume, notice): (&String, &Notice)| match &notice.due {
            Some((condition, due)) if *due <= now && (is_affordable || notice.is_repetition) => {
                Some((volume.clone(), condition.clone()))
            }
            _ => None,
        };
        self.volumes.iter().find_map(is_due)
    }

    /// When the next condition is due.
    pub(super) fn next_due(&self, now: Instant) -> Option<Instant> {
        let affordable = if self.budget.remaining > 0 { now } else { self.budget.refilled + REFILL_INTERVAL };
        let due = |notice: &Notice| {
            let (_, due) = notice.due.as_ref()?;
            Some(if notice.is_repetition { *due } else { (*due).max(affordable) })
        };
        self.volumes.values().filter_map(due).min()
    }

    /// Notes that the due event of a volume was posted, or will not be.
    pub(super) fn note_posted(&mut self, volume: &str, was_posted: bool, now: Instant) {
        let Some(notice) = self.volumes.get_mut(volume) else { return };
        match notice.due.take() {
            Some((condition @ Condition::Failing(_), _)) => {
                if was_posted && !notice.is_repetition {
                    self.budget.remaining = self.budget.remaining.saturating_sub(1);
                }
                notice.has_failed |= was_posted;
                notice.due = Some((condition, now + REPEAT_INTERVAL));
                notice.is_repetition = true;
            }
            Some((
                Condition::Mounted
                | Condition::Kept(_)
                | Condition::Resized(_)
                | Condition::NotResized(_)
                | Condition::Shared(_)
                | Condition::ChangesGroup(_),
                _,
            )) => {
                if was_posted {
                    self.budget.remaining = self.budget.remaining.saturating_sub(1);
                }
                *notice = Notice::default();
            }
            None => {}
        }
    }
}

/// How many events may be posted.
struct Budget {
    remaining: u32,
    refilled: Instant,
}

impl Budget {
    fn remaining_at(&mut self, now: Instant) -> u32 {
        while self.remaining < BURST && now.duration_since(self.refilled) >= REFILL_INTERVAL {
            self.remaining += 1;
            self.refilled += REFILL_INTERVAL;
        }
        if self.remaining == BURST {
            self.refilled = now;
        }
        self.remaining
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn failing(reason: &str) -> Condition {
        Condition::Failing(reason.to_owned())
    }

    /// Posts all that is due.
    fn post(notices: &mut Notices, now: Instant) -> Vec<Condition> {
        let mut posted = Vec::new();
        while let Some((volume, condition)) = notices.due(now) {
            notices.note_posted(&volume, true, now);
            posted.push(condition);
        }
        posted
    }

    #[test]
    fn a_failure_that_lasts_is_posted_after_a_second_and_every_ten_minutes() {
        let start = Instant::now();
        let mut notices = Notices::new(start);
        notices.set("v".to_owned(), failing("a"), start);
        assert_eq!((notices.due(start), notices.next_due(start)), (None, Some(start + SETTLE_DELAY)));
        notices.set("v".to_owned(), failing("b"), start + SETTLE_DELAY / 2);
        let mut now = start + SETTLE_DELAY;
        for _ in 0..100 {
            assert_eq!(post(&mut notices, now), [failing("b")], "the time of the first reason counts");
            notices.set("v".to_owned(), failing("b"), now + REPEAT_INTERVAL / 2);
            assert_eq!(post(&mut notices, now + REPEAT_INTERVAL / 2), []);
            assert_eq!(notices.next_due(now), Some(now + REPEAT_INTERVAL));
            now += REPEAT_INTERVAL;
        }
    }

    #[test]
    fn a_success_is_posted_after_a_failure_that_was_posted_and_only_then() {
        let start = Instant::now();
        let mut notices = Notices::new(start);
        notices.set("v".to_owned(), Condition::Mounted, start);
        assert_eq!(notices.next_due(start), None);
        notices.set("v".to_owned(), failing("a"), start);
        notices.set("v".to_owned(), Condition::Mounted, start);
        assert_eq!(notices.next_due(start), None, "it passed within the second");
        notices.set("v".to_owned(), failing("a"), start);
        assert_eq!(post(&mut notices, start + SETTLE_DELAY), [failing("a")]);
        let now = start + REPEAT_INTERVAL / 2;
        notices.set("v".to_owned(), Condition::Mounted, now);
        notices.set("v".to_owned(), Condition::Mounted, now + SETTLE_DELAY / 2);
        assert_eq!(post(&mut notices, now + SETTLE_DELAY), [Condition::Mounted]);
        assert_eq!(notices.next_due(now), None);
    }

    #[test]
    fn an_event_that_cannot_be_posted_stays_due_or_waits() {
        let start = Instant::now();
        let mut notices = Notices::new(start);
        notices.set("v".to_owned(), failing("a"), start);
        let now = start + SETTLE_DELAY;
        assert_eq!(notices.due(now), notices.due(now), "it is due until it is posted");
        notices.note_posted("v", false, now);
        assert_eq!((notices.due(now), notices.next_due(now)), (None, Some(now + REPEAT_INTERVAL)));
        notices.set("v".to_owned(), Condition::Mounted, now);
        assert_eq!(notices.next_due(now), None, "no failure was posted");
    }

    #[test]
    fn after_a_burst_there_is_an_event_every_five_minutes_and_repetitions_are_free() {
        let start = Instant::now();
        let mut notices = Notices::new(start);
        (0..100).for_each(|volume| notices.set(format!("v{volume}"), failing("a"), start));
        let now = start + SETTLE_DELAY;
        assert_eq!(post(&mut notices, now).len(), 25);
        assert_eq!(notices.next_due(now), Some(notices.budget.refilled + REFILL_INTERVAL));
        assert_eq!(post(&mut notices, now + REFILL_INTERVAL).len(), 1);
        // Those 26 are repeated, and one more is new.
        assert_eq!(post(&mut notices, now + REPEAT_INTERVAL).len(), 26);
    }
}
