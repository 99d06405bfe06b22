//! Staying awake while calls follow one another closely.
//!
//! A program that makes one call after the other waits twice for this thread to wake up: when it makes the call, and when the
//! NFS server has answered. On an idle CPU, each wake-up takes longer than the call's work. So the thread goes to sleep only
//! when it has had no event for a moment; until then it polls its descriptors. If another thread wants the CPU, this thread
//! sleeps at once for a while, so that the other thread does not have to wait.

use std::cell::Cell;
use std::rc::Rc;
use std::time::{Duration, Instant};

use nix::sys::resource::{UsageWho, getrusage};
use tokio::sync::Notify;
use tokio::task::yield_now;
use tokio::time::sleep;

/// The time for which the thread stays awake after an event.
const BUSY_POLL_TIME: Duration = Duration::from_micros(100);
/// The time for which the thread does not stay awake, after another thread wanted its CPU.
const REST_TIME: Duration = Duration::from_millis(10);

/// Whether the thread stays awake.
#[derive(Debug)]
pub(super) struct BusyPoll {
    /// The time of the last event.
    last: Cell<Instant>,
    event: Notify,
}

impl BusyPoll {
    pub(super) fn new() -> Rc<Self> {
        Rc::new(Self { last: Cell::new(Instant::now()), event: Notify::new() })
    }

    /// Records an event, which another event may follow soon.
    pub(super) fn note_event(&self) {
        self.last.set(Instant::now());
        self.event.notify_one();
    }

    /// Keeps the thread awake after events. Never ends.
    pub(super) async fn run(self: Rc<Self>) {
        loop {
            self.event.notified().await;
            let before = preemptions();
            let mut now = before;
            loop {
                match next(self.last.get().elapsed(), now > before) {
                    // Before the runtime continues this task, it polls all descriptors.
                    BusyPollStep::Poll => yield_now().await,
                    BusyPollStep::Sleep => break,
                    BusyPollStep::Rest => {
                        sleep(REST_TIME).await;
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
enum BusyPollStep {
    /// The thread polls its descriptors.
    Poll,
    /// The thread sleeps until the next event.
    Sleep,
    /// The thread sleeps for a while, even if events arrive.
    Rest,
}

/// The next step, at the time `elapsed` after the last event. `is_wanted`: another thread has wanted the CPU since this thread
/// stays awake.
fn next(elapsed: Duration, is_wanted: bool) -> BusyPollStep {
    match is_wanted {
        true => BusyPollStep::Rest,
        false if elapsed < BUSY_POLL_TIME => BusyPollStep::Poll,
        false => BusyPollStep::Sleep,
    }
}

/// The number of times that the kernel took the CPU from the calling thread.
fn preemptions() -> i64 {
    // The kernel always knows the number of the calling thread.
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
        assert_eq!(next(Duration::ZERO, false), BusyPollStep::Poll);
        assert_eq!(next(BUSY_POLL_TIME - Duration::from_nanos(1), false), BusyPollStep::Poll);
        assert_eq!(next(BUSY_POLL_TIME, false), BusyPollStep::Sleep);
        assert_eq!(next(Duration::from_secs(1), false), BusyPollStep::Sleep);
    }

    #[test]
    fn the_thread_rests_when_another_thread_wants_its_cpu() {
        for elapsed in [Duration::ZERO, BUSY_POLL_TIME, Duration::from_secs(1)] {
            assert_eq!(next(elapsed, true), BusyPollStep::Rest);
        }
    }

    /// The time for which the calling thread has had a CPU.
    fn cpu_time() -> Duration {
        clock_gettime(ClockId::ThreadCPUTime).try_into().expect("a time that has passed")
    }

    #[test]
    fn the_thread_works_no_more_when_nothing_happens() {
        const WATCHED: Duration = Duration::from_millis(200);
        const TIMEOUT: Duration = Duration::from_secs(20);
        let runtime = Builder::new_current_thread().enable_all().build().expect("a runtime");
        LocalSet::new().block_on(&runtime, async {
            let busy_poll = BusyPoll::new();
            let task = spawn_local(Rc::clone(&busy_poll).run());
            for _ in 0..3 {
                busy_poll.note_event();
                let deadline = Instant::now() + TIMEOUT;
                loop {
                    let before = cpu_time();
                    sleep(WATCHED).await;
                    // A thread that does not sleep uses nearly all of the elapsed time.
                    if cpu_time() - before < WATCHED / 10 {
                        break;
                    }
                    assert!(Instant::now() < deadline, "the thread does not go to sleep");
                }
            }
            assert!(!task.is_finished());
        });
    }
}
