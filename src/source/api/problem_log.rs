//! Problems with objects, in the log: one line for each cause, not for each object or each answer. podfs repeats a cause that lasts
//! every ten minutes, and logs its end, both with counts.
//!
//! podfs logs a refusal (403) and a busy server only when they last: after a start of the API server they pass within
//! seconds, for every object. A 410 is no problem. podfs logs an outage once for all objects.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use tokio::time::Instant;
use tracing::{debug, info, warn};

use super::single::ObjectUpdate;
use crate::kube::error::{ApiError, ErrorClass};
use crate::manifest::tokens::Token;

/// How long a problem that may pass by itself has to last.
pub(crate) const SETTLE_DELAY: Duration = Duration::from_secs(10);
/// How often podfs repeats a problem that lasts.
const REPEAT_INTERVAL: Duration = Duration::from_secs(600);

/// The problems of objects, as podfs has logged them.
#[derive(Default)]
pub(crate) struct ProblemLog {
    problems: ObjectProblems,
    /// Whether podfs has logged an outage, and not yet its end.
    logged_outage: bool,
}

impl ProblemLog {
    /// Logs the problem of an object; an outage once, and not for each object.
    pub(crate) fn note<T>(&mut self, title: &str, update: &ObjectUpdate<T>) {
        match update {
            ObjectUpdate::Failure(error) => self.problems.trouble(title, error, Instant::now()),
            ObjectUpdate::Is(_) | ObjectUpdate::Absent | ObjectUpdate::Alive => {
                self.problems.note_end(title, Instant::now())
            }
        }
        match update {
            ObjectUpdate::Failure(ApiError { class: ErrorClass::Unreachable, sentence, .. }) if !self.logged_outage => {
                warn!("the API server is unreachable, and volumes stay as they are: {sentence}");
                self.logged_outage = true;
            }
            ObjectUpdate::Is(_) | ObjectUpdate::Absent | ObjectUpdate::Alive if self.logged_outage => {
                info!("the API server answers again");
                self.logged_outage = false;
            }
            _ => {}
        }
    }

    /// Logs the problem of a token. An expired token does not end a problem.
    pub(crate) fn note_token(&mut self, title: &str, update: &ObjectUpdate<Token>) {
        if !matches!(update, ObjectUpdate::Absent) {
            self.note(title, update);
        }
    }

    /// Forgets an object to which nothing refers any more.
    pub(crate) fn forget(&mut self, title: &str) {
        self.problems.note_end(title, Instant::now());
    }

    /// When the next line is due.
    pub(crate) fn due(&self) -> Option<Instant> {
        self.problems.due()
    }

    /// Logs the lines that are due.
    pub(crate) fn log(&mut self, now: Instant) {
        self.problems.log(now);
    }
}

/// The present problems, by cause.
#[derive(Default)]
struct ObjectProblems(BTreeMap<ProblemCause, ObjectProblem>);

/// The cause of a line: the class, and the sentence if it is about one object.
#[derive(Debug, PartialEq, Eq, PartialOrd, Ord)]
struct ProblemCause(ErrorClass, Option<String>);

struct ObjectProblem {
    since: Instant,
    /// When the next line is due.
    due: Instant,
    is_logged: bool,
    /// The last sentence.
    sentence: String,
    /// The objects that still have the problem.
    objects: BTreeSet<String>,
    /// The number of answers, and the most objects at a time.
    answers: u64,
    most: usize,
}

impl ProblemCause {
    fn of(error: &ApiError) -> Option<ProblemCause> {
        match error.class {
            ErrorClass::Gone => None,
            ErrorClass::Unreachable => None,
            class @ (ErrorClass::Refused | ErrorClass::NotFound) => {
                Some(ProblemCause(class, Some(error.sentence.clone())))
            }
            class => Some(ProblemCause(class, None)),
        }
    }

    /// How long it has to last before podfs logs it.
    fn settle(&self) -> Duration {
        match self.0 {
            ErrorClass::Forbidden | ErrorClass::Busy => SETTLE_DELAY,
            _ => Duration::ZERO,
        }
    }
}

impl ObjectProblems {
    /// Notes the problem of an object.
    fn trouble(&mut self, object: &str, error: &ApiError, now: Instant) {
        debug!("{object}: {error}");
        let Some(cause) = ProblemCause::of(error) else { return };
        self.end(object, Some(&cause), now);
        let due = now + cause.settle();
        let problem = self.0.entry(cause).or_insert_with(|| ObjectProblem {
            since: now,
            due,
            is_logged: false,
            sentence: String::new(),
            objects: BTreeSet::new(),
            answers: 0,
            most: 0,
        });
        problem.sentence.clone_from(&error.sentence);
        problem.objects.insert(object.to_owned());
        problem.answers += 1;
        problem.most = problem.most.max(problem.objects.len());
        self.log(now);
    }

    /// Notes that an object has no problem, or that no volume refers to it any more.
    fn note_end(&mut self, object: &str, now: Instant) {
        if !self.0.is_empty() {
            self.end(object, None, now);
        }
    }

    /// When the next line is due.
    fn due(&self) -> Option<Instant> {
        self.0.values().map(|problem| problem.due).min()
    }

    /// Logs the lines that are due.
    fn log(&mut self, now: Instant) {
        for problem in self.0.values_mut().filter(|problem| problem.due <= now) {
            warn!("{}", problem.line(now));
            problem.is_logged = true;
            problem.due = now + REPEAT_INTERVAL;
        }
    }

    /// Notes that an object no longer has problems, except for one of this cause.
    fn end(&mut self, object: &str, except: Option<&ProblemCause>, now: Instant) {
        self.0.retain(|cause, problem| {
            if except != Some(cause) {
                problem.objects.remove(object);
            }
            let is_over = problem.objects.is_empty();
            if is_over && problem.is_logged {
                info!("this problem is over after {}: {}", problem.extent(now), problem.sentence);
            }
            !is_over
        });
    }
}

impl ObjectProblem {
    fn line(&self, now: Instant) -> String {
        let ObjectProblem { sentence, is_logged, most, .. } = self;
        match (is_logged, most) {
            (false, 1) => format!("{sentence}; podfs asks again, and volumes stay as they are"),
            (false, objects) => {
                let others = objects - 1;
                format!("{sentence}; so it is with {others} more objects; podfs asks again")
            }
            (true, _) => format!("still so after {}: {sentence}", self.extent(now)),
        }
    }

    fn extent(&self, now: Instant) -> String {
        let seconds = now.saturating_duration_since(self.since).as_secs();
        format!("{seconds} s ({} answers, {} objects)", self.answers, self.most)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn error(class: ErrorClass, sentence: &str) -> ApiError {
        ApiError::new(class, sentence)
    }

    fn lines(problems: &mut ObjectProblems, now: Instant) -> Vec<String> {
        let due: Vec<_> = problems.0.values().filter(|one| one.due <= now).map(|one| one.line(now)).collect();
        problems.log(now);
        due
    }

    #[test]
    fn a_refusal_of_many_objects_is_one_line_and_only_when_it_lasts() {
        let (mut problems, begun) = (ObjectProblems::default(), Instant::now());
        for (number, second) in (0..120).zip([0, 1].into_iter().cycle()) {
            let now = begun + Duration::from_secs(second);
            problems.trouble(&format!("ConfigMap default/{number}"), &error(ErrorClass::Forbidden, "forbidden"), now);
            problems.trouble(&format!("ConfigMap default/{number}"), &error(ErrorClass::Gone, "too old"), now);
        }
        assert_eq!(problems.0.len(), 1);
        assert_eq!(problems.due(), Some(begun + SETTLE_DELAY));
        assert!(lines(&mut problems, begun + SETTLE_DELAY / 2).is_empty());
        let expected = "forbidden; so it is with 119 more objects; podfs asks again";
        assert_eq!(lines(&mut problems, begun + SETTLE_DELAY), [expected]);
        assert!(lines(&mut problems, begun + SETTLE_DELAY * 2).is_empty());
        let expected = "still so after 610 s (120 answers, 120 objects): forbidden";
        assert_eq!(lines(&mut problems, begun + SETTLE_DELAY + REPEAT_INTERVAL), [expected]);
        (0..120).for_each(|number| problems.note_end(&format!("ConfigMap default/{number}"), begun));
        assert_eq!(problems.due(), None);
    }

    #[test]
    fn a_fault_of_one_object_is_logged_at_once_on_its_own_line() {
        let (mut problems, now) = (ObjectProblems::default(), Instant::now());
        for object in ["a", "b"] {
            problems.trouble(object, &error(ErrorClass::Refused, &format!("{object} is too large")), now);
        }
        assert!(problems.0.values().all(|problem| problem.is_logged));
        // Another cause takes the place of the first.
        problems.trouble("a", &error(ErrorClass::Busy, "busy"), now);
        assert_eq!(problems.0.len(), 2);
    }
}
