//! Requests that the server has not answered yet, and when that becomes a problem.

use tokio::time::Instant;

use super::complaints::SETTLE;
use crate::kube::error::ApiError;

/// A request about an object that is not known yet.
pub(crate) struct ObjectRequest {
    asked: Instant,
    /// The error of the last attempt.
    pub(crate) trouble: Option<ApiError>,
}

impl ObjectRequest {
    pub(crate) fn new() -> ObjectRequest {
        ObjectRequest { asked: Instant::now(), trouble: None }
    }

    /// Until when a missing answer is no problem: the server may just have started, or be busy.
    pub(crate) fn settles(&self) -> Option<Instant> {
        self.trouble.as_ref().is_none_or(ApiError::may_pass).then(|| self.asked + SETTLE)
    }

    /// Why there is no answer.
    pub(crate) fn why(&self, what: &str) -> String {
        match &self.trouble {
            Some(trouble) => trouble.sentence.clone(),
            None => format!("{what}: the API server has not answered yet"),
        }
    }
}
