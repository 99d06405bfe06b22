//! The client: requests to the API server, over one HTTP/2 connection, with credentials that are up to date.
//!
//! - The client reads the settings again when the server answers 401 or accepts no connection, before the credentials
//!   of a program expire, and otherwise at a request, at most once a minute, because files change. It keeps the
//!   connection unless the certificates have changed. Requests do not wait for the reading while their credentials are good
//!   (`renewal`).
//! - Requests have deadlines and answers have limits. A watch has no deadline: the follower that reads it ends it. While a watch
//!   is quiet, only pings show that the server is gone.
//! - The client follows no redirects: an API server sends none, and no other server may get its credentials.

mod connection;
mod connection_pool;
mod exchange;
mod renewal;
mod watch;

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex as StdMutex, MutexGuard};
use std::time::{Duration, Instant};

use reqwest::{Method, Url};
use serde::Deserialize;
use serde_json::{Value, json};
use tokio::sync::{Mutex, Notify};
use tokio::time::sleep;

use super::address::{Collection, ObjectPart, Resource, WatchStart, path};
use super::error::{ApiError, ErrorClass};
use super::outage::Outage;
use super::settings::{SettingsError, SettingsSource};
use connection::ApiConnection;
use exchange::AnswerDuration;
use renewal::CurrentConnection;

pub(crate) use watch::{Watch, WatchChange};

/// Most bytes of an answer about one object. Its values are 1 MiB at most, and a third more in base64.
const MAX_OBJECT: usize = 4 << 20;
/// Most bytes of a list.
const MAX_LIST: usize = 32 << 20;
/// For how long after a connection was made a 410 means that the server has restarted: then it answers other watches with
/// 410, too.
const RESTART_PERIOD: Duration = Duration::from_secs(30);
/// The kind of an object, and of a list, of which the server sends the metadata only.
pub(crate) const PARTIAL: &str = "PartialObjectMetadata";
const PARTIAL_LIST: &str = "PartialObjectMetadataList";
/// How long requests wait for the first one to make a connection, and for the one that tries an unreachable server.
/// When all pods of a node come back at once, that takes a while, and each further try would cost another handshake.
const QUEUE_TIMEOUT: Duration = Duration::from_secs(3);

/// A client of one API server. Cheap to clone.
#[derive(Clone)]
pub(crate) struct ApiClient(Arc<SharedClient>);

struct SharedClient {
    access: SettingsSource,
    /// Each task locks it for moments only.
    current: StdMutex<CurrentConnection>,
    /// Held by the task that opens the next connection.
    opening: Arc<Mutex<()>>,
    /// Held by the request that makes the connection, so that other requests use the same one.
    first: Mutex<()>,
    /// Held by the next request that tries an unreachable server.
    turn: Mutex<()>,
    reach: StdMutex<Reachability>,
    /// Notified when the server answers again.
    recovered: Notify,
    /// Notified when the server allows a request after it refused one.
    allowed: Notify,
    /// Whether the server has refused a request (403) and allowed none since.
    refused: AtomicBool,
    /// Whether the server may send all objects at the beginning of a watch (`sendInitialEvents`).
    initial_events: AtomicBool,
    /// Whether the server has answered a watch of this connection with 410.
    has_forgotten: AtomicBool,
}

/// Whether the server can be reached.
struct Reachability {
    outage: Outage,
    /// When the connection was made.
    since: Instant,
    /// When the client sent the last request that has to make a connection, and how many such requests are running.
    tried: Instant,
    trying: u32,
}

/// A request that has to make a connection, until it ends.
struct ConnectionAttempt<'a>(&'a ApiClient);

impl Drop for ConnectionAttempt<'_> {
    fn drop(&mut self) {
        self.0.reach().trying -= 1;
    }
}

/// The content of a list.
pub(crate) struct List {
    /// The version at which the watch after the list begins.
    pub(crate) version: String,
    pub(crate) items: Vec<Value>,
}

impl ApiClient {
    /// Reads the settings. Sends no request.
    ///
    /// # Errors
    /// When the settings cannot be used.
    pub(crate) async fn open(access: SettingsSource) -> Result<ApiClient, SettingsError> {
        let current = CurrentConnection::new(ApiConnection::open(&access, None).await?);
        Ok(ApiClient(Arc::new(SharedClient {
            access,
            current: StdMutex::new(current),
            opening: Arc::new(Mutex::new(())),
            first: Mutex::new(()),
            turn: Mutex::new(()),
            reach: StdMutex::new(Reachability {
                outage: Outage::default(),
                since: Instant::now(),
                tried: Instant::now(),
                trying: 0,
            }),
            recovered: Notify::new(),
            allowed: Notify::new(),
            refused: AtomicBool::new(false),
            initial_events: AtomicBool::new(true),
            has_forgotten: AtomicBool::new(false),
        })))
    }

    /// The object of a collection with at most one; `None` if it does not exist.
    pub(crate) async fn get(&self, collection: &Collection) -> Result<Option<Value>, ApiError> {
        self.get_part(collection, ObjectPart::Whole).await
    }

    /// A part of the object of a collection with at most one.
    pub(crate) async fn get_part(&self, collection: &Collection, part: ObjectPart) -> Result<Option<Value>, ApiError> {
        let action = format!("get {}", collection.title());
        let request = |server: &Url| (Method::GET, collection.object(server), None);
        match self.ask(&action, MAX_OBJECT, part.accept(), request).await {
            Ok(body) => parse(&action, &body).map(Some),
            Err(error) if error.class == ErrorClass::NotFound => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// The objects of a collection at this moment.
    pub(crate) async fn list(&self, collection: &Collection, part: ObjectPart) -> Result<List, ApiError> {
        let action = format!("list {}", collection.title());
        let limit = if collection.is_single() { MAX_OBJECT } else { MAX_LIST };
        let request = |server: &Url| (Method::GET, collection.list(server), None);
        let body = self.ask(&action, limit, part.accept_list(), request).await?;
        let list: ListBody = parse(&action, &body)?;
        let Some(version) = list.metadata.resource_version.filter(|version| !version.is_empty()) else {
            return Err(ApiError::new(ErrorClass::InvalidAnswer, format!("cannot {action}: the answer is no list")));
        };
        // Items of a list have no kind.
        let (kind, api_version) = match list.kind.as_deref() {
            Some(PARTIAL_LIST) => (PARTIAL, "meta.k8s.io/v1"),
            _ => (collection.resource.kind, collection.resource.api_version),
        };
        let items = list.items.unwrap_or_default().into_iter().map(|mut item| {
            if let Some(item) = item.as_object_mut() {
                item.insert("kind".to_owned(), kind.into());
                item.insert("apiVersion".to_owned(), api_version.into());
            }
            item
        });
        Ok(List { version, items: items.collect() })
    }

    /// The changes of a collection, for about `seconds`.
    pub(crate) async fn watch(
        &self,
        collection: &Collection,
        part: ObjectPart,
        since: WatchStart<'_>,
        seconds: u64,
    ) -> Result<Watch, ApiError> {
        let action = format!("watch {}", collection.title());
        let request = |server: &Url| (Method::GET, collection.watch(server, since, seconds), None);
        let (answer, slot) = self.answer(&action, AnswerDuration::Long, part.accept(), &request).await?;
        Ok(Watch::new(action, answer, slot, MAX_OBJECT))
    }

    /// Creates an object, or a subresource of one (`below` is `[NAME, "token"]` then). Returns the answer.
    pub(crate) async fn create(
        &self,
        resource: Resource,
        namespace: Option<&str>,
        below: &[&str],
        object: &Value,
    ) -> Result<Value, ApiError> {
        let place = std::iter::once(resource.plural).chain(below.iter().copied()).collect::<Vec<_>>().join("/");
        let action = in_namespace(&format!("create {place}"), namespace);
        let request = |server: &Url| (Method::POST, path(server, resource, namespace, below), Some(object));
        let body = self.ask(&action, MAX_OBJECT, ObjectPart::Whole.accept(), request).await?;
        parse(&action, &body)
    }

    /// Changes an object, or a subresource of one (`below` is `[NAME, "status"]` then), by a JSON merge patch. Returns
    /// the changed object.
    pub(crate) async fn patch(
        &self,
        resource: Resource,
        namespace: Option<&str>,
        below: &[&str],
        change: &Value,
    ) -> Result<Value, ApiError> {
        let action = in_namespace(&format!("patch {}/{}", resource.plural, below.join("/")), namespace);
        let request = |server: &Url| (Method::PATCH, path(server, resource, namespace, below), Some(change));
        let body = self.ask(&action, MAX_OBJECT, ObjectPart::Whole.accept(), request).await?;
        parse(&action, &body)
    }

    /// Deletes the one object of a collection, if it has this uid and, if one is given, this version. A missing object
    /// is no error.
    pub(crate) async fn delete(
        &self,
        collection: &Collection,
        uid: &str,
        version: Option<&str>,
    ) -> Result<(), ApiError> {
        let action = format!("delete {}", collection.title());
        let mut preconditions = json!({"uid": uid});
        if let Some(version) = version {
            preconditions["resourceVersion"] = version.into();
        }
        let options = json!({"apiVersion": "v1", "kind": "DeleteOptions", "preconditions": preconditions});
        let request = |server: &Url| (Method::DELETE, collection.object(server), Some(&options));
        match self.ask(&action, MAX_OBJECT, ObjectPart::Whole.accept(), request).await {
            Err(error) if error.class == ErrorClass::NotFound => Ok(()),
            answer => answer.map(drop),
        }
    }

    /// Waits until the server answers again.
    pub(crate) async fn recovered(&self) {
        self.0.recovered.notified().await;
    }

    /// Waits until the server allows a request after it refused one.
    pub(crate) async fn allowed(&self) {
        self.0.allowed.notified().await;
    }

    /// Waits until this request may try a server that cannot be reached. Cancel-safe.
    pub(crate) async fn turn_to_try(&self) {
        let _turn = self.0.turn.lock().await;
        loop {
            let pause = self.reach().outage.pause(tokio::time::Instant::now());
            sleep(pause).await;
            let reach = self.reach();
            if reach.trying == 0 || reach.tried.elapsed() >= QUEUE_TIMEOUT {
                return;
            }
        }
    }

    fn try_to_reach(&self) -> ConnectionAttempt<'_> {
        let mut reach = self.reach();
        reach.tried = Instant::now();
        reach.trying += 1;
        ConnectionAttempt(self)
    }

    /// For how long the server has been reachable.
    pub(crate) fn connected_for(&self) -> Duration {
        self.reach().since.elapsed()
    }

    /// Whether to request all objects at the beginning of a watch, which saves the request for a list.
    pub(crate) fn may_send_initial_events(&self) -> bool {
        self.0.initial_events.load(Ordering::Relaxed)
    }

    /// Notes that the server does not send all objects at the beginning of a watch. The client requests them again on its next
    /// connection.
    pub(crate) fn sends_no_initial_events(&self) {
        self.0.initial_events.store(false, Ordering::Relaxed);
    }

    /// Notes that the server no longer has the changes since the version of a watch.
    pub(crate) fn note_forgotten_changes(&self) {
        self.0.has_forgotten.store(true, Ordering::Relaxed);
    }

    /// Whether the client has reached the server only recently, and the server no longer has earlier changes.
    pub(crate) fn has_forgotten(&self) -> bool {
        self.0.has_forgotten.load(Ordering::Relaxed) && self.connected_for() < RESTART_PERIOD
    }

    fn reach(&self) -> MutexGuard<'_, Reachability> {
        self.0.reach.lock().expect("no code panics while it is locked")
    }

    /// Notes that the server has answered the first request of a connection.
    fn reached(&self) {
        let mut reach = self.reach();
        reach.outage.end();
        reach.since = Instant::now();
        drop(reach);
        self.0.initial_events.store(true, Ordering::Relaxed);
        self.0.has_forgotten.store(false, Ordering::Relaxed);
        self.0.recovered.notify_waiters();
    }
}

#[derive(Deserialize)]
struct ListBody {
    kind: Option<String>,
    metadata: ListMetadata,
    items: Option<Vec<Value>>,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct ListMetadata {
    resource_version: Option<String>,
}

/// Parses an answer. The error does not have the parser's text, which may quote a value.
fn parse<T: for<'de> Deserialize<'de>>(action: &str, body: &[u8]) -> Result<T, ApiError> {
    serde_json::from_slice(body).map_err(|error| {
        let fault = match std::str::from_utf8(body) {
            Err(_) => "is not UTF-8",
            Ok(text) if text.trim_start().starts_with('<') => "is HTML and not JSON: that is no API server",
            Ok(_) if error.is_eof() => "ends in the middle",
            Ok(_) => "is not the JSON of an API server",
        };
        let class = if error.is_eof() { ErrorClass::Unreachable } else { ErrorClass::InvalidAnswer };
        ApiError::new(class, format!("cannot {action}: the answer {fault}")).in_answer()
    })
}

fn in_namespace(action: &str, namespace: Option<&str>) -> String {
    namespace.map_or_else(|| action.to_owned(), |namespace| format!("{action} in namespace {namespace}"))
}
