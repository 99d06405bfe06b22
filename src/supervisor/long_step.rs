//! Steps of a supervisor that wait for a disk. A file system that is frozen, or whose disk fails, blocks each system call that
//! writes to it, also at the start and at the end of a supervisor, and no signal ends such a call. So the log says which step
//! the supervisor waits for.

use std::sync::mpsc::{RecvTimeoutError, channel};
use std::thread::{Builder, scope};
use std::time::Duration;

use tracing::{info, warn};

/// How long a step may take before podfs reports it.
pub(in crate::supervisor) const REPORT_DELAY: Duration = Duration::from_secs(2);

/// Enough for one line of the log.
const STACK: usize = 256 << 10;

/// The end of the log line: the probable reason.
const HINT: &str = "a disk that is slow, frozen or failing may be the reason";

/// Runs `work`, a step, on this thread. If the step takes longer than [`REPORT_DELAY`], another thread reports that, and
/// this thread reports the end of the step. `step` is the verb and the object of the step, for the log.
pub(in crate::supervisor) fn report_if_long<T>(step: &str, work: impl FnOnce() -> T) -> T {
    let (ended, waiting) = channel::<()>();
    scope(|scope| {
        let watch = move || {
            let is_long = waiting.recv_timeout(REPORT_DELAY) == Err(RecvTimeoutError::Timeout);
            if is_long {
                report_long(step);
            }
            is_long
        };
        // If the kernel starts no thread, the step is not reported.
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

/// Reports the end of a step that took long.
pub(in crate::supervisor) fn report_end(step: &str) {
    info!("podfs no longer waits to {step}");
}
