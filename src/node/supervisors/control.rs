//! Talking to the supervisor of a pod.

use std::path::{Path, PathBuf};
use std::time::Duration;

use serde_json::Value;
use tokio::time::{Instant, sleep_until};

use super::pod::blocking;
use crate::source::{Push, Taken};
use crate::supervisor::control::{self, Answer, AskError, Question};
use crate::supervisor::status::PodStatus;

/// How often a supervisor is asked.
const POLL: Duration = Duration::from_millis(20);

/// Follows the status of a pod.
#[derive(Debug)]
pub(super) struct StatusWatch {
    directory: PathBuf,
    next: Instant,
    last: Option<Box<PodStatus>>,
}

impl StatusWatch {
    /// Begins with the status at this moment.
    ///
    /// # Errors
    /// When no supervisor answers.
    pub(super) async fn begin(directory: &Path) -> Result<StatusWatch, AskError> {
        ask(directory, Question::Status).await?;
        Ok(StatusWatch { directory: directory.to_owned(), next: Instant::now(), last: None })
    }

    /// The status, when it is another one than before; nothing when the supervisor has ended. Cancel-safe.
    ///
    /// # Errors
    /// When the supervisor does not answer any more.
    pub(super) async fn next(&mut self) -> Result<Option<PodStatus>, AskError> {
        loop {
            sleep_until(self.next).await;
            let answer = ask(&self.directory, Question::Status).await;
            self.next = Instant::now() + POLL;
            match answer {
                Ok(Answer::Status(status)) if self.last.as_ref() != Some(&status) => {
                    self.last = Some(status.clone());
                    return Ok(Some(*status));
                }
                Ok(_) => {}
                Err(AskError::NobodyListens(_)) => return Ok(None),
                Err(error) => return Err(error),
            }
        }
    }
}

/// Gives objects to the supervisor of the pod with this run directory.
///
/// # Errors
/// When it does not answer, or does not take them.
pub(super) async fn push(directory: &Path, push: Push) -> Result<Taken, String> {
    match ask(directory, Question::Push(push)).await {
        Ok(Answer::Pushed(taken)) => Ok(taken),
        Ok(answer) => Err(refusal(answer)),
        Err(error) => Err(error.to_string()),
    }
}

fn refusal(answer: Answer) -> String {
    match answer {
        Answer::Refused(reason) | Answer::Busy(reason) => reason,
        _ => "the supervisor answers another question".to_owned(),
    }
}

async fn ask(directory: &Path, question: Question) -> Result<Answer, AskError> {
    let directory = directory.to_owned();
    blocking(move || control::ask(&directory, &question, None)).await
}

/// Tells the supervisor which volumes are wanted, besides those that it serves.
///
/// # Errors
/// When it does not answer, or does not take them.
pub(super) async fn publish(_directory: &Path, _manifest: Value) -> Result<(), String> {
    Err("the supervisor does not take further volumes yet".to_owned())
}

/// Has the supervisor unmount volumes.
///
/// # Errors
/// When it does not answer, or something of them stays.
pub(super) async fn unpublish(_directory: &Path, _volumes: Vec<String>) -> Result<(), String> {
    Err("the supervisor does not unmount single volumes yet".to_owned())
}

/// Has the supervisor refresh volumes.
///
/// # Errors
/// When it does not answer, or does not have them.
pub(super) async fn remount(_directory: &Path, _volumes: Vec<String>) -> Result<(), String> {
    Err("the supervisor does not refresh volumes when asked to yet".to_owned())
}
