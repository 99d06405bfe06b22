//! Requests that the server has not answered yet, and when that becomes a problem.

use tokio::time::Instant;

use super::problem_log::SETTLE_DELAY;
use crate::kube::error::ApiError;

/// A request about an object that is not known yet.
pub(crate) struct ObjectRequest {
    made_at: Instant,
    /// The error of the last attempt.
    pub(crate) trouble: Option<ApiError>,
}

impl ObjectRequest {
    pub(crate) fn new() -> ObjectRequest {
        ObjectRequest { made_at: Instant::now(), trouble: None }
    }

    /// Until when a missing answer is no problem: the server may just have started, or be busy.
    pub(crate) fn settles(&self) -> Option<Instant> {
        self.trouble.as_ref().is_none_or(ApiError::may_pass).then(|| self.made_at + SETTLE_DELAY)
    }

    /// Why there is no answer about the object with this title.
    pub(crate) fn why(&self, title: &str) -> String {
        match &self.trouble {
            Some(trouble) => trouble.sentence.clone(),
            None => format!("{title}: the API server has not answered yet"),
        }
    }
}
