//! A poller: gets one object that a node's credentials may get and not watch: a claim, a PersistentVolume, a
//! VolumeAttachment or a PodCertificateRequest. It repeats the request, less often the longer the object stays the
//! same.

use std::time::Duration;

use serde_json::Value;
use tokio::time::Instant;

use super::address::Collection;
use super::backoff::JitteredBackoff;
use super::client::ApiClient;
use super::follower::{FollowerEvent, version_of};
use super::retry::{Pause, Retry};
use super::version::is_not_newer;

/// The longest pause between two requests, and so the longest delay of a change.
const LONGEST_PAUSE: Duration = Duration::from_secs(5);

/// Gets an object again and again.
pub(crate) struct Poller {
    client: ApiClient,
    object: Collection,
    pace: JitteredBackoff,
    retry: Retry,
    /// The pause before the next request.
    pause: Pause,
    /// The last known version of the object, if it has existed.
    version: Option<String>,
    last: LastOutcome,
}

/// The outcome of the last request.
#[derive(Clone, Copy, PartialEq, Eq)]
enum LastOutcome {
    /// There was no request.
    None,
    /// The object existed.
    Is,
    /// The object did not exist.
    Absent,
    /// The request failed.
    Failed,
}

impl Poller {
    /// A poller of the one object of this collection.
    pub(crate) fn new(client: ApiClient, object: Collection) -> Self {
        let (retry, pause) = (Retry::new(client.clone()), Pause::Until(Instant::now()));
        Self { client, object, pace: JitteredBackoff::default(), retry, pause, version: None, last: LastOutcome::None }
    }

    /// The version of the object.
    pub(crate) fn version(&self) -> Option<&str> {
        self.version.as_deref()
    }

    /// Waits for the next event.
    pub(crate) async fn next(&mut self) -> FollowerEvent {
        self.retry.wait(&self.pause).await;
        match self.client.get(&self.object).await {
            Ok(object) => {
                self.retry.reset();
                let event = self.take(object);
                self.pause = Pause::Until(Instant::now() + self.pace.fail_within(LONGEST_PAUSE));
                event
            }
            Err(error) => {
                self.last = LastOutcome::Failed;
                self.pause = self.retry.failed(&error);
                FollowerEvent::Failure(error)
            }
        }
    }

    fn take(&mut self, object: Option<Value>) -> FollowerEvent {
        let now = if object.is_some() { LastOutcome::Is } else { LastOutcome::Absent };
        let before = std::mem::replace(&mut self.last, now);
        let Some(object) = object else {
            return if before == LastOutcome::Absent {
                FollowerEvent::Alive
            } else {
                FollowerEvent::Listed(Vec::new())
            };
        };
        let version = version_of(&object).unwrap_or_default();
        let is_known = self.version.as_deref().is_some_and(|known| is_not_newer(&version, known));
        if is_known && before != LastOutcome::Absent {
            return FollowerEvent::Alive;
        }
        self.pace.reset();
        self.version = Some(version);
        FollowerEvent::Put(object)
    }
}
