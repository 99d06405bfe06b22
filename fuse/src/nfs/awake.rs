//! Staying awake while calls follow one another closely.
//!
//! A program that makes one call after the other waits twice for this thread to wake up: when it asks, and when the server
//! has answered. On an idle CPU each takes longer than the call's work. So the thread goes to sleep only when nothing has
//! happened for a moment; until then it looks again and again whether there is something to read. If somebody else wants
//! the CPU, it rests for a while: then it would not be the one that waits.

use std::cell::Cell;
use std::rc::Rc;
use std::time::{Duration, Instant};

use nix::sys::resource::{UsageWho, getrusage};
use tokio::sync::Notify;
use tokio::task::yield_now;
use tokio::time::sleep;

/// For so long after something has happened the thread stays awake.
const LINGERS: Duration = Duration::from_micros(100);
/// For so long it goes to sleep at once, after somebody else wanted its CPU.
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
            while self.last.get().elapsed() < LINGERS {
                // Between two turns the runtime looks at all descriptors.
                yield_now().await;
                if preemptions() > before {
                    sleep(RESTS).await;
                    break;
                }
            }
        }
    }
}

/// How often the calling thread had to give up its CPU.
fn preemptions() -> i64 {
    // It is always known.
    getrusage(UsageWho::RUSAGE_THREAD).map_or(0, |usage| usage.involuntary_context_switches())
}
