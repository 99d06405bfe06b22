//! A watch: an answer that lasts, with one line of JSON for each change.

use reqwest::Response;
use serde::Deserialize;
use serde_json::Value;

use super::connection_pool::WatchSlot;
use super::exchange::too_large;
use super::parse;
use crate::kube::error::{ApiError, ErrorClass, Status};

/// Changes of a collection, as the server sends them.
pub(crate) struct Watch {
    action: String,
    answer: Response,
    _slot: Option<WatchSlot>,
    /// The received bytes of lines that [`Watch::next`] has not returned yet.
    unread: Vec<u8>,
    /// How many bytes of `unread` have no end of line.
    searched: usize,
    limit: usize,
}

/// One change.
#[derive(Debug, PartialEq)]
pub(crate) enum WatchChange {
    /// An object is new, or different.
    Put(Value),
    /// An object was deleted.
    Deleted(Value),
    /// Nothing changed up to this version.
    Bookmark(Value),
}

#[derive(Deserialize)]
struct WatchLine {
    #[serde(rename = "type")]
    kind: String,
    object: Value,
}

impl Watch {
    pub(super) fn new(action: String, answer: Response, slot: Option<WatchSlot>, limit: usize) -> Self {
        Self { action, answer, _slot: slot, unread: Vec::new(), searched: 0, limit }
    }

    /// Waits for the next change; `None` when the server has ended the watch.
    ///
    /// # Errors
    /// When the server sends an error, the connection breaks, or the answer is not one to a watch.
    pub(crate) async fn next(&mut self) -> Result<Option<WatchChange>, ApiError> {
        loop {
            if let Some(line) = self.line() {
                match line.trim_ascii() {
                    [] => continue,
                    line => return change(&self.action, line).map(Some),
                }
            }
            if self.unread.len() > self.limit {
                return Err(too_large(&self.action, self.limit));
            }
            match self.answer.chunk().await.map_err(|error| ApiError::transport(&self.action, &error))? {
                Some(chunk) => self.unread.extend_from_slice(&chunk),
                None if self.unread.trim_ascii().is_empty() => return Ok(None),
                // Not every server ends the last line. A line of a connection that broke does not parse.
                None => {
                    let line = std::mem::take(&mut self.unread);
                    self.searched = 0;
                    return change(&self.action, line.trim_ascii()).map(Some);
                }
            }
        }
    }

    fn line(&mut self) -> Option<Vec<u8>> {
        let Some(end) = self.unread[self.searched..].iter().position(|byte| *byte == b'\n') else {
            self.searched = self.unread.len();
            return None;
        };
        let after = self.unread.split_off(self.searched + end + 1);
        self.searched = 0;
        Some(std::mem::replace(&mut self.unread, after))
    }
}

fn change(action: &str, line: &[u8]) -> Result<WatchChange, ApiError> {
    let WatchLine { kind, object } = parse(action, line)?;
    match kind.as_str() {
        "ADDED" | "MODIFIED" => Ok(WatchChange::Put(object)),
        "DELETED" => Ok(WatchChange::Deleted(object)),
        "BOOKMARK" => Ok(WatchChange::Bookmark(object)),
        "ERROR" => {
            let status: Status = serde_json::from_value(object).unwrap_or_default();
            Err(ApiError::of_status(action, status))
        }
        _ => {
            Err(ApiError::new(ErrorClass::InvalidAnswer, format!("cannot {action}: the answer is not one to a watch")))
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    const ACTION: &str = "watch configmap default/app";

    #[test]
    fn each_line_is_a_change() {
        let line = br#"{"type":"MODIFIED","object":{"kind":"ConfigMap"}}"#;
        assert_eq!(change(ACTION, line), Ok(WatchChange::Put(json!({ "kind": "ConfigMap" }))));
        let line = br#"{"type":"DELETED","object":{}}"#;
        assert_eq!(change(ACTION, line), Ok(WatchChange::Deleted(json!({}))));
    }

    #[test]
    fn an_error_in_the_middle_says_what_to_do() {
        let line =
            br#"{"type":"ERROR","object":{"kind":"Status","code":410,"message":"too old resource version: 1 (5)"}}"#;
        assert_eq!(change(ACTION, line).expect_err("an error").class, ErrorClass::Gone);
    }

    #[test]
    fn a_line_that_was_cut_is_a_broken_connection() {
        let error = change(ACTION, br#"{"type":"MODIFIED","object":{"da"#).expect_err("an error");
        assert_eq!(error.class, ErrorClass::Unreachable);
        assert!(error.sentence.ends_with("the answer ends in the middle"), "{error}");
    }

    #[test]
    fn invalid_bytes_are_reported_without_quoting_them() {
        let error = change(ACTION, b"{\"type\":\"ADDED\",\"object\":\"\xff\"}").expect_err("an error");
        assert_eq!(error.sentence, "cannot watch configmap default/app: the answer is not UTF-8");
    }
}
