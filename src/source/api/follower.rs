//! A follower: what a collection holds, and every change of it, whatever happens to the server.
//!
//! Why nothing is missed and nothing goes back:
//!
//! 1. A list says what there is and its version; the watch after it begins at this version. When a watch ends, the next one
//!    begins at the version of the last change, or of the last bookmark.
//! 2. A server that no longer knows what happened since (410), or that refuses to watch from there, is asked for another
//!    list.
//! 3. A list that is older than what is known is no news: its server is behind. It is asked again later. A change that is
//!    not newer is left out. So content never goes back (MG-05), and what is sent twice is told once.
//! 4. A watch lasts for some minutes, a different time each, and ends by itself. One that does not end when it should is given
//!    up, and so is one on a connection that answers no pings.
//! 5. After a failure comes a wait, longer each time. A server that answers somebody ends the waits of all who wait because it
//!    could not be reached.

use std::future::pending;
use std::time::Duration;

use serde_json::Value;
use tokio::time::{Instant, sleep, timeout_at};

use super::address::Collection;
use super::backoff::Backoff;
use super::client::{Change, Client, List, Watch};
use super::error::{ApiError, Class};
use super::version::is_not_newer;

/// The shortest and the longest time a watch is asked for, in seconds.
const WATCH: std::ops::Range<u64> = 300..600;
/// How much later than asked for a watch may end.
const SLACK: Duration = Duration::from_secs(30);
/// The longest that a server can ask podfs to stay away.
pub(super) const LONGEST_ASKED: Duration = Duration::from_secs(60);
/// A watch that ends sooner, and without a word, is as good as a failure: the next one is not asked for at once.
const SHORT: Duration = Duration::from_secs(1);

/// Follows a collection.
pub(super) struct Follower {
    client: Client,
    collection: Collection,
    state: State,
    backoff: Backoff,
    /// The version of the last change, once there was a list.
    version: Option<String>,
}

/// What a follower does next.
enum State {
    /// Asks for a list: at the start, and when changes may have been missed. A list leads to `Listed`.
    Unlisted,
    /// Everything up to the version is known. Asks for a watch, which leads to `Watching`.
    Listed,
    /// Hears of changes. The end of the watch leads to `Listed`, as does a connection that breaks; a server that does not
    /// know the version any more leads to `Unlisted`.
    Watching(Box<Watching>),
    /// Something failed: waits, and goes on as the other state says. Ends sooner when the server is back, if it was away.
    Waiting { until: Instant, away: bool, then: Box<State> },
}

struct Watching {
    watch: Watch,
    began: Instant,
    ends: Instant,
    heard: bool,
}

/// What a follower tells.
#[derive(Debug)]
pub(super) enum News {
    /// This is all there is.
    Listed(Vec<Value>),
    /// An object is new, or different.
    Put(Value),
    /// An object is gone.
    Deleted(Value),
    /// There is nothing new, as of now.
    Alive,
    /// It does not go on for now, for this reason.
    Trouble(ApiError),
}

impl Follower {
    pub(super) fn new(client: Client, collection: Collection) -> Self {
        Self { client, collection, state: State::Unlisted, backoff: Backoff::default(), version: None }
    }

    /// Up to which version everything is known.
    pub(super) fn version(&self) -> Option<&str> {
        self.version.as_deref()
    }

    /// What it does, in a word for `podfs status`.
    pub(super) fn doing(&self) -> &'static str {
        match self.state {
            State::Unlisted => "listing",
            State::Listed => "connecting",
            State::Watching(_) => "watching",
            State::Waiting { .. } => "waiting",
        }
    }

    /// The next news. Not to be cancelled: what was heard would be lost.
    pub(super) async fn next(&mut self) -> News {
        loop {
            match std::mem::replace(&mut self.state, State::Unlisted) {
                State::Unlisted => return self.list().await,
                State::Listed => {
                    if let Some(news) = self.begin_watch().await {
                        return news;
                    }
                }
                State::Watching(watching) => {
                    if let Some(news) = self.hear(watching).await {
                        return news;
                    }
                }
                State::Waiting { until, away, then } => {
                    self.wait(until, away).await;
                    self.state = *then;
                }
            }
        }
    }

    async fn list(&mut self) -> News {
        let List { version, items } = match self.client.list(&self.collection).await {
            Ok(list) => list,
            Err(error) => {
                // What this server does not have in one version, it may have in another.
                if error.class == Class::NotFound
                    && let Some(other) = self.collection.resource.other_version()
                {
                    self.collection.resource = other;
                }
                return self.fail(error, State::Unlisted);
            }
        };
        if let Some(known) = self.version.as_deref().filter(|known| is_older(&version, known)) {
            let title = self.collection.title();
            let sentence =
                format!("{title}: the server is at version {version} and behind {known}, which is known here");
            return self.fail(ApiError::new(Class::Busy, sentence), State::Unlisted);
        }
        self.version = Some(version);
        self.state = State::Listed;
        News::Listed(items)
    }

    async fn begin_watch(&mut self) -> Option<News> {
        let Some(version) = self.version.clone() else {
            self.state = State::Unlisted;
            return None;
        };
        let seconds = fastrand::u64(WATCH);
        match self.client.watch(&self.collection, &version, seconds).await {
            Ok(watch) => {
                let began = Instant::now();
                let ends = began + Duration::from_secs(seconds) + SLACK;
                self.state = State::Watching(Box::new(Watching { watch, began, ends, heard: false }));
                Some(News::Alive)
            }
            Err(error) => self.lose(error),
        }
    }

    async fn hear(&mut self, mut watching: Box<Watching>) -> Option<News> {
        let Ok(next) = timeout_at(watching.ends, watching.watch.next()).await else {
            self.state = State::Listed;
            return None;
        };
        let change = match next {
            Ok(Some(change)) => change,
            Ok(None) => {
                self.state = self.after(&watching);
                return None;
            }
            Err(error) => {
                if watching.began.elapsed() >= SHORT {
                    self.backoff.reset();
                }
                if error.class == Class::Unreachable {
                    self.client.broke().await;
                }
                return self.lose(error);
            }
        };
        self.backoff.reset();
        watching.heard = true;
        let (Change::Put(object) | Change::Deleted(object) | Change::Bookmark(object)) = &change;
        let Some(version) = version_of(object) else {
            let sentence = format!("cannot watch {}: a change has no resourceVersion", self.collection.title());
            return Some(self.fail(ApiError::new(Class::Nonsense, sentence), State::Unlisted));
        };
        self.state = State::Watching(watching);
        if self.version.as_deref().is_some_and(|known| is_not_newer(&version, known)) {
            return Some(News::Alive);
        }
        self.version = Some(version);
        Some(match change {
            Change::Put(object) => News::Put(object),
            Change::Deleted(object) => News::Deleted(object),
            Change::Bookmark(_) => News::Alive,
        })
    }

    /// What follows a watch that has ended as it should.
    fn after(&mut self, watching: &Watching) -> State {
        if watching.heard || watching.began.elapsed() >= SHORT {
            self.backoff.reset();
            return State::Listed;
        }
        let until = Instant::now() + self.backoff.fail();
        State::Waiting { until, away: false, then: Box::new(State::Listed) }
    }

    /// A watch cannot begin, or go on.
    fn lose(&mut self, error: ApiError) -> Option<News> {
        let then = match error.class {
            // At once, unless that was of no use just now.
            Class::Gone if self.backoff.is_fresh() => {
                self.backoff.fail();
                self.state = State::Unlisted;
                return None;
            }
            Class::Gone => State::Unlisted,
            Class::NotFound | Class::Refused | Class::Nonsense => State::Unlisted,
            _ => State::Listed,
        };
        Some(self.fail(error, then))
    }

    fn fail(&mut self, error: ApiError, then: State) -> News {
        let delay = self.backoff.fail().max(error.retry_after.unwrap_or_default().min(LONGEST_ASKED));
        let away = error.class == Class::Unreachable;
        self.state = State::Waiting { until: Instant::now() + delay, away, then: Box::new(then) };
        News::Trouble(error)
    }

    async fn wait(&self, until: Instant, away: bool) {
        /// So that not all come back in the same moment.
        const SPREAD: Duration = Duration::from_millis(50);
        let back = async {
            match away {
                true => self.client.recovered().await,
                false => pending().await,
            }
            sleep(SPREAD.mul_f64(fastrand::f64())).await;
        };
        tokio::select! {
            () = tokio::time::sleep_until(until) => {}
            () = back => {}
        }
    }
}

fn is_older(version: &str, known: &str) -> bool {
    version != known && is_not_newer(version, known)
}

/// The version of an object.
pub(super) fn version_of(object: &Value) -> Option<String> {
    object.pointer("/metadata/resourceVersion")?.as_str().filter(|version| !version.is_empty()).map(str::to_owned)
}
