//! Steps of a supervisor that make it wait for a disk. A file system that is frozen, or whose disk fails, blocks each system call
//! that writes to it, also at the start and at the end of a supervisor, and a signal does not end such a call. So the log says
//! what the supervisor waits for.

use std::sync::mpsc::{RecvTimeoutError, channel};
use std::thread::{Builder, scope};
use std::time::Duration;

use tracing::{info, warn};

/// How long a step takes before podfs reports it.
pub(in crate::supervisor) const LONG: Duration = Duration::from_secs(2);

/// Enough for one line of the log.
const STACK: usize = 256 << 10;

/// What the log says about a disk that may be the reason.
const HINT: &str = "a disk that is slow, frozen or failing may be the reason";

/// Does a step on this thread. If it takes long, another thread reports that, and this one reports its end. `step` names what
/// podfs does, and where.
pub(in crate::supervisor) fn report_if_long<T>(step: &str, work: impl FnOnce() -> T) -> T {
    let (ended, waiting) = channel::<()>();
    scope(|scope| {
        let watch = move || {
            let is_long = waiting.recv_timeout(LONG) == Err(RecvTimeoutError::Timeout);
            if is_long {
                report_long(step);
            }
            is_long
        };
        // Without a thread, there is no report.
        let watch = Builder::new().name("long step".to_owned()).stack_size(STACK).spawn_scoped(scope, watch);
        let outcome = work();
        drop(ended);
        if watch.is_ok_and(|watch| watch.join().unwrap_or_default()) {
            report_end(step);
        }
        outcome
    })
}

/// Reports a step that takes long.
pub(in crate::supervisor) fn report_long(step: &str) {
    warn!("podfs still waits to {step}; {HINT}");
}

/// Reports the end of such a step.
pub(in crate::supervisor) fn report_end(step: &str) {
    info!("podfs no longer waits to {step}");
}
