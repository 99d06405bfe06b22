//! A poller: one object that a node's credentials may get and not watch, which are claims and PersistentVolumes. It is
//! asked for again and again, less often the longer nothing happens, until it is as its pod needs it.

use std::time::Duration;

use serde_json::Value;
use tokio::time::sleep;

use super::address::Collection;
use super::backoff::Backoff;
use super::client::Client;
use super::follower::{LONGEST_ASKED, News, version_of};
use super::version::is_not_newer;

/// How long a change may stay unheard.
const LONGEST: Duration = Duration::from_secs(5);

/// Asks for an object again and again.
pub(super) struct Poller {
    client: Client,
    object: Collection,
    pace: Backoff,
    delay: Duration,
    /// The version of the object, once it was there.
    version: Option<String>,
    last: Last,
}

/// What came of the last time.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Last {
    /// There was none.
    None,
    /// The object was there.
    Is,
    /// There was no such object.
    Absent,
    /// It failed.
    Failed,
}

impl Poller {
    /// `object` is one object.
    pub(super) fn new(client: Client, object: Collection) -> Self {
        Self { client, object, pace: Backoff::default(), delay: Duration::ZERO, version: None, last: Last::None }
    }

    /// The version of the object.
    pub(super) fn version(&self) -> Option<&str> {
        self.version.as_deref()
    }

    /// The next news.
    pub(super) async fn next(&mut self) -> News {
        if self.last != Last::None {
            sleep(self.delay).await;
        }
        self.delay = self.pace.fail().min(LONGEST);
        let object = match self.client.get(&self.object).await {
            Ok(object) => object,
            Err(error) => {
                self.last = Last::Failed;
                self.delay = self.delay.max(error.retry_after.unwrap_or_default().min(LONGEST_ASKED));
                return News::Trouble(error);
            }
        };
        self.take(object)
    }

    fn take(&mut self, object: Option<Value>) -> News {
        let now = if object.is_some() { Last::Is } else { Last::Absent };
        let before = std::mem::replace(&mut self.last, now);
        let Some(object) = object else {
            return if before == Last::Absent { News::Alive } else { News::Listed(Vec::new()) };
        };
        let version = version_of(&object).unwrap_or_default();
        let is_known = self.version.as_deref().is_some_and(|known| is_not_newer(&version, known));
        if is_known && before != Last::Absent {
            return News::Alive;
        }
        self.pace.reset();
        self.version = Some(version);
        News::Put(object)
    }
}
