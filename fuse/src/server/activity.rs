//! What a volume's session has done so far.

use std::sync::atomic::{AtomicI32, AtomicU64, Ordering};

/// Counts requests.
#[derive(Default)]
pub struct Activity {
    requests: AtomicU64,
    thread: AtomicI32,
}

impl Activity {
    /// Number of requests.
    pub fn requests(&self) -> u64 {
        self.requests.load(Ordering::Relaxed)
    }

    /// The thread that served the first one, once there was one.
    pub fn thread(&self) -> Option<i32> {
        Some(self.thread.load(Ordering::Relaxed)).filter(|thread| *thread != 0)
    }

    /// One more request.
    pub fn count(&self) {
        if self.requests.fetch_add(1, Ordering::Relaxed) == 0 {
            self.thread.store(rustix::thread::gettid().as_raw_nonzero().get(), Ordering::Relaxed);
        }
    }
}
