//! One request: over the current connection, with up-to-date credentials, a deadline and a limit.

use std::sync::atomic::Ordering;
use std::time::Duration;

use reqwest::header::{ACCEPT, AUTHORIZATION, CONTENT_TYPE, HeaderValue, RETRY_AFTER};
use reqwest::{Method, Request, Response, StatusCode, Url};
use serde_json::Value;
use tokio::time::timeout;
use tracing::debug;

use super::connection::ApiConnection;
use super::connection_pool::WatchSlot;
use super::renewal::RereadReason;
use super::{ApiClient, QUEUE_TIMEOUT};
use crate::kube::error::{ApiError, ErrorClass};

/// How long an answer may take to begin, and then to end. The answer to a watch may take longer to end.
const DEADLINE: Duration = Duration::from_secs(15);

/// How long the answer to a request goes on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum AnswerDuration {
    Moment,
    Long,
}

impl ApiClient {
    /// Sends a request, and returns the body of the answer.
    pub(super) async fn ask<'a>(
        &self,
        action: &str,
        limit: usize,
        accept: &'static str,
        request: impl Fn(&Url) -> (Method, Url, Option<&'a Value>),
    ) -> Result<Vec<u8>, ApiError> {
        let (answer, _) = self.answer(action, AnswerDuration::Moment, accept, &request).await?;
        let body = timeout(DEADLINE, body(action, answer, limit)).await.unwrap_or_else(|_| Err(late(action)));
        if body.as_ref().is_err_and(|error| error.class == ErrorClass::Unreachable) {
            self.note_broken_connection();
        }
        body.map_err(ApiError::in_answer)
    }

    /// Sends a request, and returns a successful answer. After a 401, the client reads the credentials again and
    /// repeats the request.
    pub(super) async fn answer<'a>(
        &self,
        action: &str,
        lasts: AnswerDuration,
        accept: &'static str,
        request: &impl Fn(&Url) -> (Method, Url, Option<&'a Value>),
    ) -> Result<(Response, Option<WatchSlot>), ApiError> {
        let connection = self.connection().await;
        match self.answer_on(&connection, action, lasts, accept, request).await {
            Err(error) if error.class == ErrorClass::Unauthorized => {
                self.request_reread(&connection, RereadReason::Identity);
                let fresh = self.connection().await;
                if fresh.same_credentials(&connection) {
                    return Err(error);
                }
                self.answer_on(&fresh, action, lasts, accept, request).await
            }
            Err(error) => {
                if matches!(error.class, ErrorClass::Unreachable | ErrorClass::Untrusted) {
                    self.request_reread(&connection, RereadReason::Connection);
                }
                Err(error)
            }
            Ok(answer) => Ok(answer),
        }
    }

    async fn answer_on<'a>(
        &self,
        connection: &ApiConnection,
        action: &str,
        lasts: AnswerDuration,
        accept: &'static str,
        request: &impl Fn(&Url) -> (Method, Url, Option<&'a Value>),
    ) -> Result<(Response, Option<WatchSlot>), ApiError> {
        let (method, url, body) = request(&connection.server);
        let is_patch = method == Method::PATCH;
        let mut request = Request::new(method, url);
        let headers = request.headers_mut();
        headers.insert(ACCEPT, HeaderValue::from_static(accept));
        if let Some(authorization) = &connection.authorization {
            headers.insert(AUTHORIZATION, authorization.clone());
        }
        if let Some(body) = body {
            let content = if is_patch { "application/merge-patch+json" } else { "application/json" };
            headers.insert(CONTENT_TYPE, HeaderValue::from_static(content));
            *request.body_mut() = Some(body.to_string().into());
        }
        let turn = if connection.is_made() { None } else { timeout(QUEUE_TIMEOUT, self.0.first.lock()).await.ok() };
        // If another request has made the connection meanwhile, this one makes none, and later requests need not wait
        // for it.
        let turn = turn.filter(|_| !connection.is_made());
        let (http, slot) = match lasts {
            AnswerDuration::Moment => (connection.pool.first(), None),
            AnswerDuration::Long => {
                let (http, slot) = connection.pool.for_watch();
                (http, Some(slot))
            }
        };
        let trying = (!connection.is_made()).then(|| self.try_to_reach());
        let outcome = timeout(DEADLINE, http.execute(request)).await;
        drop(trying);
        let was_made = connection.note(matches!(outcome, Ok(Ok(_))));
        drop(turn);
        let answer = outcome.map_err(|_| late(action))?.map_err(|error| ApiError::transport(action, &error))?;
        if !was_made {
            self.reached();
        }
        let code = answer.status();
        debug!("{action}: {code}");
        if code.is_success() {
            if self.0.refused.swap(false, Ordering::Relaxed) {
                self.0.allowed.notify_waiters();
            }
            return Ok((answer, slot));
        }
        if code == StatusCode::FORBIDDEN {
            self.0.refused.store(true, Ordering::Relaxed);
        }
        let retry_after = answer.headers().get(RETRY_AFTER).and_then(|value| value.to_str().ok()).map(str::to_owned);
        let body = timeout(DEADLINE, body_of_error(answer, code)).await.unwrap_or_default();
        Err(ApiError::answered(action, code, retry_after.as_deref(), &body))
    }
}

fn late(action: &str) -> ApiError {
    ApiError::new(ErrorClass::Unreachable, format!("cannot {action}: the server does not answer in time"))
}

async fn body(action: &str, mut answer: Response, limit: usize) -> Result<Vec<u8>, ApiError> {
    let mut body = Vec::new();
    while let Some(chunk) = answer.chunk().await.map_err(|error| ApiError::transport(action, &error))? {
        if body.len() + chunk.len() > limit {
            return Err(too_large(action, limit));
        }
        body.extend_from_slice(&chunk);
    }
    Ok(body)
}

pub(super) fn too_large(action: &str, limit: usize) -> ApiError {
    let sentence = format!("cannot {action}: the answer is larger than {} MiB, which no object is", limit >> 20);
    ApiError::new(ErrorClass::InvalidAnswer, sentence)
}

/// Reads the body of an error, as far as possible.
async fn body_of_error(mut answer: Response, code: StatusCode) -> Vec<u8> {
    const LIMIT: usize = 64 << 10;
    let mut body = Vec::new();
    while let Ok(Some(chunk)) = answer.chunk().await {
        body.extend_from_slice(&chunk);
        if body.len() > LIMIT {
            debug!("the answer to {code} is cut");
            break;
        }
    }
    body
}
