//! A follower: the objects of a collection, and every change of them, also across outages of the server.
//!
//! Why the follower misses no change and never goes back:
//!
//! 1. A list has all objects and a version; the watch after it begins at this version. A server that supports `sendInitialEvents`
//!    sends both as one answer: a watch that begins with all objects, up to a bookmark with the version. When a watch ends, the
//!    next one begins at the version of the last change, or of the last bookmark.
//! 2. If the server no longer has the changes since a version (410), or refuses to watch from there, the follower asks for
//!    another list. It does so at once after the first 410: a server that has restarted answers nearly every watch with one. The
//!    node's other single objects then skip that request: for half a minute, their watches begin with all objects.
//! 3. The follower ignores a list that is older than the version it knows, because that server is behind, and asks again later.
//!    It drops a change that is not newer. So content never goes back (MG-05), and the follower reports an object only once if the
//!    server sends it twice. Before the bookmark, the follower reports only an object that it has never listed.
//! 4. A watch of many objects lasts for some minutes, one of a single object for half an hour and more, as a kubelet's; each for
//!    a different time. The server ends it then. The follower ends a watch that lasts longer; the client ends one whose
//!    connection answers no pings.
//! 5. After a failure, the follower makes a pause, see `retry`.
//! 6. If the server forbids the list of a single object, the follower gets the object itself (`get`). The watch begins before
//!    that request, so it misses no change after the answer. The watch begins with all objects and not at the object's version,
//!    which is too old for most servers when the object has not changed for long.
//! 7. If the server forbids the list of a signer's ClusterTrustBundles, a watch that begins with all objects replaces the list.
//!    The server does not mark the last one, so the list is complete as soon as the watch is quiet. A bundle that comes later is
//!    a change.

use std::collections::BTreeMap;
use std::time::Duration;

use serde_json::Value;
use tokio::time::{Instant, timeout_at};

use super::address::{Collection, ObjectPart, WatchStart};
use super::client::{ApiClient, List, Watch, WatchChange};
use super::error::{ApiError, ErrorClass};
use super::retry::{Pause, Retry};
use super::version::is_not_newer;

/// The shortest and the longest time, in seconds, for which the follower requests a watch: of many objects, and of a
/// single one. A node has hundreds of the latter, and a cluster thousands of nodes.
const WATCH: std::ops::Range<u64> = 300..600;
const WATCH_OF_ONE: std::ops::Range<u64> = 1800..3600;
/// How much later than requested a watch may end.
const SLACK: Duration = Duration::from_secs(30);
/// How long a watch may take to send all objects. A server that takes longer does not support the request. A server that is slow
/// to begin its answer is busy: then the watch may take [`INITIAL_OF_BUSY`] times as long as the server took to begin.
const INITIAL_LIST_TIMEOUT: Duration = Duration::from_secs(3);
const INITIAL_OF_BUSY: u32 = 5;
/// If a server that sends no bookmark is quiet for this time, it has sent all objects.
const QUIET_TIMEOUT: Duration = Duration::from_millis(300);
/// A watch that ends sooner, and without a change, counts as a failure: the next one does not begin at once.
const SHORT: Duration = Duration::from_secs(1);
/// The annotation of the bookmark after all objects.
const INITIAL_END: &str = "/metadata/annotations/k8s.io~1initial-events-end";

/// Follows a collection.
pub(crate) struct Follower {
    client: ApiClient,
    collection: Collection,
    /// How much of each object the next list or watch requests.
    part: ObjectPart,
    state: FollowerState,
    retry: Retry,
    /// The version of the last change, once there was a list.
    version: Option<String>,
    /// Whether a 410 led to the last list, and no watch has succeeded since.
    relisted: bool,
    /// Whether the server has forbidden the list.
    is_list_forbidden: bool,
}

/// What a follower does next.
enum FollowerState {
    /// Asks for a list: at the start, and when the follower may have missed changes. A list leads to `Listed`; a watch that
    /// begins with all objects leads to `Beginning`.
    Unlisted,
    /// Receives all objects from a watch. The bookmark after them leads to `Watching`; if the server sends none, the follower
    /// asks for a list.
    Beginning(Box<InitialList>),
    /// Everything up to the version is known. Asks for a watch, which leads to `Watching`.
    Listed,
    /// Receives changes. The end of the watch leads to `Listed`, as does a connection that breaks; a server that no longer
    /// has the version leads to `Unlisted`.
    Watching(Box<Watching>),
    /// A request failed: waits, and continues in the state `then`.
    Waiting { pause: Pause, then: Box<FollowerState> },
}

struct Watching {
    watch: Watch,
    began: Instant,
    ends: Instant,
    has_change: bool,
}

struct InitialList {
    watching: Watching,
    /// When the bookmark is overdue, or the server has been quiet for long enough.
    until: Instant,
    end: ListEnd,
    /// The objects received, by namespace and name.
    objects: BTreeMap<(String, String), Value>,
    /// The version of the one object, if it was reported already.
    reported: Option<String>,
}

/// What ends the part of a watch with all objects.
#[derive(Clone, Copy, PartialEq, Eq)]
enum ListEnd {
    Bookmark,
    Quiet,
}

/// What a follower reports.
#[derive(Debug)]
pub(crate) enum FollowerEvent {
    /// These are all objects.
    Listed(Vec<Value>),
    /// An object is new, or different.
    Put(Value),
    /// An object was deleted.
    Deleted(Value),
    /// The server has nothing new.
    Alive,
    /// Following fails at present, for this reason.
    Failure(ApiError),
}

impl Follower {
    pub(crate) fn new(client: ApiClient, collection: Collection) -> Self {
        let retry = Retry::new(client.clone());
        let (part, state) = (ObjectPart::Whole, FollowerState::Unlisted);
        Self { client, collection, part, state, retry, version: None, relisted: false, is_list_forbidden: false }
    }

    /// The version up to which all changes are known.
    pub(crate) fn version(&self) -> Option<&str> {
        self.version.as_deref()
    }

    /// The follower's state, in a word for `podfs status`.
    pub(crate) fn state_name(&self) -> &'static str {
        match self.state {
            FollowerState::Unlisted | FollowerState::Beginning(_) => "listing",
            FollowerState::Listed => "connecting",
            FollowerState::Watching(_) => "watching",
            FollowerState::Waiting { .. } => "waiting",
        }
    }

    /// Asks for metadata only, from the next request on. A running watch has whole objects until it ends.
    pub(crate) fn follow_metadata(&mut self) {
        self.part = ObjectPart::Metadata;
    }

    /// Asks for whole objects again. The server sends whole objects for changes after the version.
    pub(crate) fn follow_whole(&mut self) {
        if self.part == ObjectPart::Metadata {
            self.part = ObjectPart::Whole;
            self.state = if self.version.is_some() { FollowerState::Listed } else { FollowerState::Unlisted };
        }
    }

    /// Asks for whole objects again, and for another list of them.
    pub(crate) fn list_whole(&mut self) {
        self.part = ObjectPart::Whole;
        self.state = FollowerState::Unlisted;
    }

    /// Waits for the next event. Not cancel-safe: received changes would be lost.
    pub(crate) async fn next(&mut self) -> FollowerEvent {
        loop {
            let event = match std::mem::replace(&mut self.state, FollowerState::Unlisted) {
                FollowerState::Unlisted if self.client.may_send_initial_events() => self.begin().await,
                FollowerState::Unlisted if self.is_list_forbidden => self.watch_without_list().await,
                FollowerState::Unlisted => self.list().await,
                FollowerState::Beginning(beginning) => self.receive_initial_list(beginning).await,
                FollowerState::Listed => self.begin_watch().await,
                FollowerState::Watching(watching) => self.receive(watching).await,
                FollowerState::Waiting { pause, then } => {
                    self.retry.wait(&pause).await;
                    self.state = *then;
                    None
                }
            };
            if let Some(event) = event {
                return event;
            }
        }
    }

    async fn list(&mut self) -> Option<FollowerEvent> {
        match self.client.list(&self.collection, self.part).await {
            Ok(List { version, items }) => match self.check_version(&version) {
                Ok(()) => {
                    self.version = Some(version);
                    self.state = FollowerState::Listed;
                    Some(FollowerEvent::Listed(items))
                }
                Err(error) => Some(self.fail(error, FollowerState::Unlisted)),
            },
            Err(error) if error.class == ErrorClass::Forbidden && self.collection.needs_no_list() => {
                self.is_list_forbidden = true;
                None
            }
            Err(error) => Some(self.fail_to_list(error)),
        }
    }

    /// Begins a watch. Then gets the object of a collection with one object; of any other collection, the watch has all objects.
    async fn watch_without_list(&mut self) -> Option<FollowerEvent> {
        // If the watch fails, the follower tries the list again, which the server may allow by then.
        self.is_list_forbidden = false;
        let watching = match self.watch(WatchStart::Now).await {
            Ok(watching) => watching,
            Err(error) => return Some(self.fail_to_list(error)),
        };
        if !self.collection.is_single() {
            self.is_list_forbidden = true;
            self.begin_initial_list(watching, QUIET_TIMEOUT, ListEnd::Quiet);
            return None;
        }
        let object = match self.client.get_part(&self.collection, self.part).await {
            Ok(object) => object,
            Err(error) => return Some(self.fail_to_list(error)),
        };
        if let Some(version) = object.as_ref().and_then(version_of)
            && self.version.as_deref().is_none_or(|known| !is_not_newer(&version, known))
        {
            self.version = Some(version);
        }
        self.is_list_forbidden = true;
        self.state = FollowerState::Watching(Box::new(watching));
        Some(FollowerEvent::Listed(object.into_iter().collect()))
    }

    fn begin_initial_list(&mut self, watching: Watching, within: Duration, end: ListEnd) {
        let (until, objects) = (Instant::now() + within, BTreeMap::new());
        self.state = FollowerState::Beginning(Box::new(InitialList { watching, until, end, objects, reported: None }));
    }

    /// Requests all objects and their changes at once.
    async fn begin(&mut self) -> Option<FollowerEvent> {
        let sent_at = Instant::now();
        match self.watch(WatchStart::Beginning).await {
            Ok(watching) => {
                self.begin_initial_list(
                    watching,
                    INITIAL_LIST_TIMEOUT.max(sent_at.elapsed() * INITIAL_OF_BUSY),
                    ListEnd::Bookmark,
                );
                None
            }
            // A server that does not support `sendInitialEvents` refuses it. If it refuses the watch for another reason, it also
            // refuses the list.
            Err(error) if error.class == ErrorClass::Refused => {
                self.client.sends_no_initial_events();
                None
            }
            Err(error) => Some(self.fail_to_list(error)),
        }
    }

    async fn receive_initial_list(&mut self, mut beginning: Box<InitialList>) -> Option<FollowerEvent> {
        let Ok(next) = timeout_at(beginning.until, beginning.watching.watch.next()).await else {
            if beginning.end == ListEnd::Quiet {
                return Some(self.finish_quiet_list(*beginning));
            }
            self.client.sends_no_initial_events();
            return None;
        };
        if beginning.end == ListEnd::Quiet {
            beginning.until = Instant::now() + QUIET_TIMEOUT;
        }
        let change = match next {
            Ok(Some(change)) => change,
            Ok(None) => {
                self.state =
                    FollowerState::Waiting { pause: self.retry.next_pause(), then: Box::new(FollowerState::Unlisted) };
                return None;
            }
            Err(error) => return self.handle_broken_watch(error).await,
        };
        let (WatchChange::Put(object) | WatchChange::Deleted(object) | WatchChange::Bookmark(object)) = &change;
        let Some(version) = version_of(object) else { return Some(self.fail_without_version()) };
        match change {
            WatchChange::Bookmark(bookmark) if bookmark.pointer(INITIAL_END).is_some() => {
                return Some(self.finish_initial_list(*beginning, version));
            }
            WatchChange::Bookmark(_) => {}
            // An object that was never listed cannot go back.
            WatchChange::Put(object) if self.version.is_none() && self.collection.is_single() => {
                let event = match &beginning.reported {
                    None => Some(FollowerEvent::Listed(vec![object])),
                    Some(reported) if is_not_newer(&version, reported) => None,
                    Some(_) => Some(FollowerEvent::Put(object)),
                };
                if event.is_some() {
                    beginning.reported = Some(version);
                }
                self.state = FollowerState::Beginning(beginning);
                return event;
            }
            WatchChange::Put(object) => drop(beginning.objects.insert(name_of(&object), object)),
            WatchChange::Deleted(object) if beginning.reported.is_some() => {
                beginning.reported = Some(version);
                self.state = FollowerState::Beginning(beginning);
                return Some(FollowerEvent::Deleted(object));
            }
            WatchChange::Deleted(object) => drop(beginning.objects.remove(&name_of(&object))),
        }
        self.state = FollowerState::Beginning(beginning);
        None
    }

    /// Takes the bookmark after all objects.
    fn finish_initial_list(&mut self, beginning: InitialList, version: String) -> FollowerEvent {
        if let Err(error) = self.check_version(&version) {
            return self.fail(error, FollowerState::Unlisted);
        }
        let InitialList { mut watching, objects, reported, .. } = beginning;
        watching.has_change = true;
        self.retry.reset();
        self.version = Some(version);
        self.state = FollowerState::Watching(Box::new(watching));
        match reported {
            Some(_) => FollowerEvent::Alive,
            None => FollowerEvent::Listed(objects.into_values().collect()),
        }
    }

    /// Ends the list: the server is quiet, so it has sent all objects.
    fn finish_quiet_list(&mut self, beginning: InitialList) -> FollowerEvent {
        let InitialList { mut watching, objects, .. } = beginning;
        let versions = objects.values().filter_map(version_of);
        let newest = versions.reduce(|one, other| if is_not_newer(&other, &one) { one } else { other });
        self.version = newest.or(self.version.take());
        watching.has_change = true;
        self.retry.reset();
        self.state = FollowerState::Watching(Box::new(watching));
        FollowerEvent::Listed(objects.into_values().collect())
    }

    /// Checks that a list of this version is not older than the known version.
    fn check_version(&self, version: &str) -> Result<(), ApiError> {
        match self.version.as_deref() {
            Some(known) if version != known && is_not_newer(version, known) => {
                let title = self.collection.title();
                let sentence =
                    format!("{title}: the server is at version {version} and behind {known}, which is known here");
                Err(ApiError::new(ErrorClass::Busy, sentence))
            }
            _ => Ok(()),
        }
    }

    async fn watch(&self, since: WatchStart<'_>) -> Result<Watching, ApiError> {
        let seconds = fastrand::u64(if self.collection.is_single() { WATCH_OF_ONE } else { WATCH });
        let watch = self.client.watch(&self.collection, self.part, since, seconds).await?;
        let began = Instant::now();
        Ok(Watching { watch, began, ends: began + Duration::from_secs(seconds) + SLACK, has_change: false })
    }

    async fn begin_watch(&mut self) -> Option<FollowerEvent> {
        // Without a version, the follower needs a list.
        let version = self.version.clone()?;
        if self.collection.is_single() && self.client.has_forgotten() && self.client.may_send_initial_events() {
            return None;
        }
        match self.watch(WatchStart::Version(&version)).await {
            Ok(watching) => {
                self.state = FollowerState::Watching(Box::new(watching));
                Some(FollowerEvent::Alive)
            }
            Err(error) => self.lose(error),
        }
    }

    async fn receive(&mut self, mut watching: Box<Watching>) -> Option<FollowerEvent> {
        let Ok(next) = timeout_at(watching.ends, watching.watch.next()).await else {
            self.state = FollowerState::Listed;
            return None;
        };
        let change = match next {
            Ok(Some(change)) => change,
            Ok(None) => {
                self.state = match self.has_gone_on(&watching) {
                    true => FollowerState::Listed,
                    false => {
                        FollowerState::Waiting { pause: self.retry.next_pause(), then: Box::new(FollowerState::Listed) }
                    }
                };
                return None;
            }
            Err(error) => {
                self.has_gone_on(&watching);
                return self.handle_broken_watch(error).await;
            }
        };
        watching.has_change = true;
        self.has_gone_on(&watching);
        let (WatchChange::Put(object) | WatchChange::Deleted(object) | WatchChange::Bookmark(object)) = &change;
        let Some(version) = version_of(object) else { return Some(self.fail_without_version()) };
        self.state = FollowerState::Watching(watching);
        if self.version.as_deref().is_some_and(|known| is_not_newer(&version, known)) {
            return Some(FollowerEvent::Alive);
        }
        self.version = Some(version);
        Some(match change {
            WatchChange::Put(object) => FollowerEvent::Put(object),
            WatchChange::Deleted(object) => FollowerEvent::Deleted(object),
            WatchChange::Bookmark(_) => FollowerEvent::Alive,
        })
    }

    /// Whether a watch had a change, or lasted for a while. If so, resets the failures before it.
    fn has_gone_on(&mut self, watching: &Watching) -> bool {
        let has = watching.has_change || watching.began.elapsed() >= SHORT;
        if has {
            self.retry.reset();
            self.relisted = false;
        }
        has
    }

    /// Handles an answer to a watch that ended before its time, or has an error.
    async fn handle_broken_watch(&mut self, error: ApiError) -> Option<FollowerEvent> {
        if error.class == ErrorClass::Unreachable {
            self.client.note_broken_connection();
        }
        self.lose(error.in_answer())
    }

    /// Handles a watch that cannot begin or continue.
    fn lose(&mut self, error: ApiError) -> Option<FollowerEvent> {
        let then = match error.class {
            // The follower lists again at once, unless the watch after the last 410 failed, too.
            ErrorClass::Gone if !self.relisted => {
                self.relisted = true;
                self.client.note_forgotten_changes();
                return None;
            }
            ErrorClass::Gone | ErrorClass::NotFound | ErrorClass::Refused | ErrorClass::InvalidAnswer => {
                FollowerState::Unlisted
            }
            _ => FollowerState::Listed,
        };
        Some(self.fail(error, then))
    }

    fn fail_to_list(&mut self, error: ApiError) -> FollowerEvent {
        // The server may have the resource in another version.
        if error.class == ErrorClass::NotFound
            && let Some(other) = self.collection.resource.other_version()
        {
            self.collection.resource = other;
        }
        self.fail(error, FollowerState::Unlisted)
    }

    fn fail_without_version(&mut self) -> FollowerEvent {
        let sentence = format!("cannot watch {}: a change has no resourceVersion", self.collection.title());
        self.fail(ApiError::new(ErrorClass::InvalidAnswer, sentence), FollowerState::Unlisted)
    }

    fn fail(&mut self, error: ApiError, then: FollowerState) -> FollowerEvent {
        let pause = self.retry.failed(&error);
        // After an outage, a 410 is the first one again.
        self.relisted &= pause != Pause::Outage;
        self.state = FollowerState::Waiting { pause, then: Box::new(then) };
        FollowerEvent::Failure(error)
    }
}

fn name_of(object: &Value) -> (String, String) {
    let field = |pointer: &str| object.pointer(pointer).and_then(Value::as_str).unwrap_or_default().to_owned();
    (field("/metadata/namespace"), field("/metadata/name"))
}

/// The version of an object.
pub(crate) fn version_of(object: &Value) -> Option<String> {
    object.pointer("/metadata/resourceVersion")?.as_str().filter(|version| !version.is_empty()).map(str::to_owned)
}
