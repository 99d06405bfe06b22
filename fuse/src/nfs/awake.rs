//! Staying awake while calls follow one another closely.
//!
//! A program that makes one call after the other waits twice for this thread to wake up: when it makes the call, and when the
//! server has answered. On an idle CPU each takes longer than the call's work. So the thread goes to sleep only when it has had
//! no event for a moment; until then it polls its descriptors. If another thread wants the CPU, it sleeps at once for a while:
//! otherwise the other thread would wait for it.

use std::cell::Cell;
use std::rc::Rc;
use std::time::{Duration, Instant};

use nix::sys::resource::{UsageWho, getrusage};
use tokio::sync::Notify;
use tokio::task::yield_now;
use tokio::time::sleep;

/// The time for which the thread stays awake after an event.
const LINGERS: Duration = Duration::from_micros(100);
/// The time for which the thread does not stay awake, after another thread wanted its CPU.
const RESTS: Duration = Duration::from_millis(10);

/// Whether the thread stays awake.
#[derive(Debug)]
pub(super) struct Awake {
    /// When something happened last.
    last: Cell<Instant>,
    stirred: Notify,
}

impl Awake {
    pub(super) fn new() -> Rc<Self> {
        Rc::new(Self { last: Cell::new(Instant::now()), stirred: Notify::new() })
    }

    /// Something has happened, and something else may follow.
    pub(super) fn stir(&self) {
        self.last.set(Instant::now());
        self.stirred.notify_one();
    }

    /// Keeps the thread awake for as long as it runs.
    pub(super) async fn run(self: Rc<Self>) {
        loop {
            self.stirred.notified().await;
            let before = preemptions();
            let mut now = before;
            loop {
                match next(self.last.get().elapsed(), now > before) {
                    // Between two turns the runtime looks at all descriptors.
                    AwakeStep::Look => yield_now().await,
                    AwakeStep::Sleep => break,
                    AwakeStep::Rest => {
                        sleep(RESTS).await;
                        break;
                    }
                }
                now = preemptions();
            }
        }
    }
}

/// The next step of the thread when no event is pending.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum AwakeStep {
    /// It looks whether there is something to read.
    Look,
    /// It goes to sleep until something happens.
    Sleep,
    /// It sleeps for a while, even if events arrive.
    Rest,
}

/// Something happened last so long `ago`; `is_wanted` if another thread has wanted the CPU since this one stays awake.
fn next(ago: Duration, is_wanted: bool) -> AwakeStep {
    match is_wanted {
        true => AwakeStep::Rest,
        false if ago < LINGERS => AwakeStep::Look,
        false => AwakeStep::Sleep,
    }
}

/// The number of times that the kernel took the CPU from the calling thread.
fn preemptions() -> i64 {
    // It is always known.
    getrusage(UsageWho::RUSAGE_THREAD).map_or(0, |usage| usage.involuntary_context_switches())
}

#[cfg(test)]
mod tests {
    use rustix::time::{ClockId, clock_gettime};
    use tokio::runtime::Builder;
    use tokio::task::{LocalSet, spawn_local};

    use super::*;

    #[test]
    fn the_thread_stays_awake_after_an_event_and_then_sleeps() {
        assert_eq!(next(Duration::ZERO, false), AwakeStep::Look);
        assert_eq!(next(LINGERS - Duration::from_nanos(1), false), AwakeStep::Look);
        assert_eq!(next(LINGERS, false), AwakeStep::Sleep);
        assert_eq!(next(Duration::from_secs(1), false), AwakeStep::Sleep);
    }

    #[test]
    fn the_thread_rests_when_another_thread_wants_its_cpu() {
        for ago in [Duration::ZERO, LINGERS, Duration::from_secs(1)] {
            assert_eq!(next(ago, true), AwakeStep::Rest);
        }
    }

    /// The time for which the calling thread has had a CPU.
    fn worked() -> Duration {
        clock_gettime(ClockId::ThreadCPUTime).try_into().expect("a time that has passed")
    }

    #[test]
    fn the_thread_works_no_more_when_nothing_happens() {
        const WATCHED: Duration = Duration::from_millis(200);
        const TIMEOUT: Duration = Duration::from_secs(20);
        let runtime = Builder::new_current_thread().enable_all().build().expect("a runtime");
        LocalSet::new().block_on(&runtime, async {
            let awake = Awake::new();
            let keeps = spawn_local(Rc::clone(&awake).run());
            for _ in 0..3 {
                awake.stir();
                let deadline = Instant::now() + TIMEOUT;
                loop {
                    let before = worked();
                    sleep(WATCHED).await;
                    // A thread that does not sleep uses nearly all of the elapsed time.
                    if worked() - before < WATCHED / 10 {
                        break;
                    }
                    assert!(Instant::now() < deadline, "the thread does not go to sleep");
                }
            }
            assert!(!keeps.is_finished());
        });
    }
}
