//! A request that a task answers: its number, its caller, and its calls that must not take effect twice.
//!
//! Records of such calls stay until the answer is written: a successor that gets the same request again finds all of them. Once
//! the kernel has the answer, a successor needs none of them.

use std::cell::RefCell;
use std::rc::Rc;
use std::time::Duration;

use podfs_nfs::error::Error;
use podfs_nfs::export::CallOptions;
use podfs_nfs::rpc::Credential;
use rustix::fs::Timespec;
use rustix::io::Errno;
use tokio::time::sleep;

use super::stale_handles::is_stale;
use crate::nfs::client_state::calls::{Calls, RecordedCall};
use crate::nfs::client_state::open_files::NfsOpenFile;
use crate::session::Caller;

/// The most repetitions of a call that the server may be executing twice at the same time.
const MOST_REPETITIONS: usize = 3;
/// The pause before each repetition.
pub const PAUSE: Duration = Duration::from_millis(100);

/// A request of the kernel that a task answers.
pub struct NfsRequest {
    /// The kernel's number of the request, without the bit that marks a resent one.
    pub unique: u64,
    /// The calling process.
    pub caller: Caller,
    /// A server process that has died had read the request before.
    pub resent: bool,
    calls: RefCell<Vec<RecordedCall>>,
    /// The file that the request opened.
    opened: RefCell<Option<Rc<NfsOpenFile>>>,
}

/// The outcome of a call that must not take effect twice.
pub struct NonIdempotentOutcome<T> {
    /// The server's answer.
    pub outcome: Result<T, Error>,
    /// The call may have been made before, and the server may have forgotten its answer: an error may be the effect of the
    /// call itself.
    pub doubtful: bool,
    /// The time at which the call was first made.
    pub at: Timespec,
}

impl NfsRequest {
    /// A request for which this process has made no call yet.
    pub fn new(unique: u64, caller: Caller, resent: bool) -> Self {
        Self { unique, caller, resent, calls: RefCell::default(), opened: RefCell::default() }
    }

    /// Records the file that the request has opened.
    pub fn set_opened(&self, open: &Rc<NfsOpenFile>) {
        *self.opened.borrow_mut() = Some(Rc::clone(open));
    }

    /// Records that the answer is written.
    pub fn mark_answered(&self) {
        if let Some(open) = self.opened.take() {
            open.mark_known();
        }
    }

    /// Makes call number `step` of this request. If a dead server has recorded the call, it is made with the same xid and
    /// credential.
    ///
    /// # Errors
    /// When there is no memory to record it.
    pub async fn once<T>(
        &self,
        calls: &Calls,
        step: u32,
        credential: &Credential,
        make: impl AsyncFn(CallOptions<'_>) -> Result<T, Error>,
    ) -> Result<NonIdempotentOutcome<T>, Errno> {
        let call = calls.begin(self.unique, step, credential)?;
        let (credential, earlier_xid, at) = (call.credential(), call.xid(), call.at());
        let index = {
            let mut all = self.calls.borrow_mut();
            all.push(call);
            all.len() - 1
        };
        let announce = |xid| self.calls.borrow()[index].announce(xid);
        let mut options = CallOptions { credential: &credential, policy: None, announce: Some(&announce), earlier_xid };
        let mut doubtful = earlier_xid.is_some();
        let mut outcome = make(options).await;
        for _ in 0..MOST_REPETITIONS {
            doubtful |= outcome.as_ref().is_err_and(Error::is_retransmitted);
            if !doubtful || !outcome.as_ref().is_err_and(is_stale) {
                break;
            }
            // The server may be executing the call twice at the same time, for two connections. After that, its answer differs.
            sleep(PAUSE).await;
            options.earlier_xid = None;
            outcome = make(options).await;
        }
        Ok(NonIdempotentOutcome { outcome, doubtful, at })
    }
}
