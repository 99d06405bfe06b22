//! From a request to its answer: the server identifies the user, parses the request, checks the permission, and then
//! answers, or carries out a planned fault.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Duration, Instant, SystemTime};

use axum::body::{Bytes, to_bytes};
use axum::extract::Request;
use axum::http::StatusCode;
use axum::http::header::RETRY_AFTER;
use axum::response::{IntoResponse, Response};
use k8s_openapi::ByteString;
use serde_json::{Value, json};
use tokio::time::sleep;

use super::authorizer::Rules;
use super::faults::{Answer, Faults};
use super::identity::{MASTERS, User, Users};
use super::listener::Connection;
use super::request::ApiRequest;
use super::resources::Resource;
use super::selector::Selection;
use super::status::{Failure, json_response};
use super::store::{Key, Store};
use super::tokens::rfc3339;
use super::{tokens, watch};

/// Most bytes of a request.
const LIMIT: usize = 4 << 20;

/// The kinds that clients create.
const CREATED: [&str; 4] = ["Event", "PersistentVolume", "PodCertificateRequest", "CSINode"];

/// The state from which the server answers requests.
pub struct Cluster {
    pub users: Users,
    pub faults: Faults,
    state: Mutex<State>,
}

#[derive(Default)]
pub struct State {
    pub store: Store,
    pub rules: Rules,
    pub initial_events: InitialEvents,
    pub overload: Overload,
    /// Whether `/readyz` says that it is not ready.
    pub starting: bool,
    /// Every request, in the order in which they came.
    pub requests: Vec<ApiRequest>,
    /// The number of tokens that the server issued.
    tokens: u64,
}

/// The treatment of a watch with `sendInitialEvents`, which begins with the existing objects.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum InitialEvents {
    /// The watch begins with the existing objects.
    #[default]
    Sent,
    /// The server refuses the watch, as one with the feature switched off.
    Refused,
    /// The watch begins with the existing objects, and no bookmark marks their end.
    Ignored,
}

/// The overload protection: a client that asks too often gets a 429 with `Retry-After`.
#[derive(Default)]
pub struct Overload {
    /// The most requests that the server admits within a duration.
    pub limit: Option<(usize, Duration)>,
    recent: VecDeque<Instant>,
    /// The number of requests over the limit.
    pub refused: usize,
}

impl Overload {
    fn admits(&mut self) -> bool {
        let Some((most, within)) = self.limit else { return true };
        let now = Instant::now();
        while self.recent.front().is_some_and(|at| now.duration_since(*at) > within) {
            self.recent.pop_front();
        }
        if self.recent.len() >= most {
            self.refused += 1;
            return false;
        }
        self.recent.push_back(now);
        true
    }
}

impl Cluster {
    pub fn new(users: Users) -> Self {
        Self { users, faults: Faults::default(), state: Mutex::default() }
    }

    #[track_caller]
    pub fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().expect("no panic before")
    }

    /// Answers a request as a real server does, or with the fault that a test planned for it.
    pub async fn answer(self: Arc<Self>, connection: Arc<Connection>, request: Request) -> Response {
        let (parts, body) = request.into_parts();
        let mut request = ApiRequest::parse(&parts, connection.number);
        if request.path == "/readyz" {
            return self.state().readiness();
        }
        let Ok(body) = to_bytes(body, LIMIT).await else { return StatusCode::BAD_REQUEST.into_response() };
        request.body = serde_json::from_slice(&body).unwrap_or(Value::Null);
        let user = self.users.identify(&connection.certificates, &parts.headers);
        if let Ok(user) = &user {
            request.user.clone_from(&user.name);
        }
        self.state().requests.push(request.clone());
        let is_limited = user.as_ref().is_ok_and(|user| !user.is_in(MASTERS));
        if is_limited && !self.state().overload.admits() {
            return too_many();
        }
        let (due, delay) = (self.faults.due(&request), self.faults.behaviour().delay);
        if !delay.is_zero() {
            sleep(delay).await;
        }
        match due {
            None | Some(Answer::Right) => {
                user.and_then(|user| self.serve(&user, &request)).unwrap_or_else(|failure| failure.response())
            }
            Some(Answer::Never) => std::future::pending().await,
            Some(answer) if answer.spoils() => {
                // A watch has no end, so it has no middle either: the server spoils the first line of the watch.
                let right = match request.verb.as_str() {
                    "watch" => {
                        json_response(StatusCode::OK, &json!({"type": "ADDED", "object": {"kind": "ConfigMap"}}))
                    }
                    _ => user.and_then(|user| self.serve(&user, &request)).unwrap_or_else(|failure| failure.response()),
                };
                let (parts, body) = right.into_parts();
                let right: Bytes = to_bytes(body, usize::MAX).await.expect("it is in memory");
                let mut spoilt = answer.spoil(right).into_response();
                *spoilt.status_mut() = parts.status;
                spoilt
            }
            Some(answer) => answer.response(),
        }
    }

    fn serve(&self, user: &User, request: &ApiRequest) -> Result<Response, Failure> {
        let mut state = self.state();
        // As in a real server, the permission is checked before the existence of the object: a user without the
        // permission gets 403 for a missing object, too.
        state.rules.check(&state.store, user, request)?;
        let unserved = self.faults.behaviour().unserved;
        let resource = request.resource.filter(|resource| unserved != Some(resource.api_version().as_str()));
        let resource = resource.ok_or_else(Failure::no_resource)?;
        if request.namespace.is_some() && !resource.namespaced {
            return Err(Failure::no_resource());
        }
        match (request.verb.as_str(), request.subresource.as_deref()) {
            ("get", None) => get(&state.store, resource, request),
            ("list", None) => list(&state.store, &selection(resource, request)?, request),
            ("watch", None) => {
                let initial = state.initial_events;
                let selection = selection(resource, request)?;
                watch::answer(&mut state.store, request, selection, self.faults.watch_behaviour(), initial)
            }
            ("create", None) if CREATED.contains(&resource.kind) => create(&mut state.store, resource, request),
            ("delete", None) if resource.kind == "PersistentVolume" => delete(&mut state.store, resource, request),
            ("patch", None) if ["Event", "CSINode"].contains(&resource.kind) => {
                patch(&mut state.store, resource, request)
            }
            ("patch", Some("status")) if ["Node", "PersistentVolumeClaim"].contains(&resource.kind) => {
                patch(&mut state.store, resource, request)
            }
            ("create", Some("token")) if resource.kind == "ServiceAccount" => {
                state.tokens += 1;
                let answer = tokens::issue(&state.store, user, request, &self.faults.behaviour(), state.tokens)?;
                Ok(json_response(StatusCode::CREATED, &answer))
            }
            (_, None) => Err(Failure::no_method()),
            (_, Some(_)) => Err(Failure::no_resource()),
        }
    }
}

impl State {
    fn readiness(&self) -> Response {
        let (code, text) = match self.starting {
            true => {
                (StatusCode::INTERNAL_SERVER_ERROR, "[-]informer-sync failed: reason withheld\nreadyz check failed\n")
            }
            false => (StatusCode::OK, "ok"),
        };
        (code, text).into_response()
    }
}

/// The text of a real server's overload protection. It is no `Status` object: the protection answers before the request
/// reaches the code that makes `Status` objects.
fn too_many() -> Response {
    let text = "Too many requests, please try again later.\n";
    (StatusCode::TOO_MANY_REQUESTS, [(RETRY_AFTER, "1")], text).into_response()
}

fn get(store: &Store, resource: &'static Resource, request: &ApiRequest) -> Result<Response, Failure> {
    let (namespace, name) =
        (request.namespace.as_deref().unwrap_or_default(), request.name.as_deref().unwrap_or_default());
    let object = store.get(&Key::new(resource.plural, namespace, name)).ok_or_else(|| Failure::not_found(request))?;
    Ok(json_response(StatusCode::OK, &resource.render(object, false)))
}

fn list(store: &Store, selection: &Selection, request: &ApiRequest) -> Result<Response, Failure> {
    let resource = selection.resource();
    let page = request.parameter("continue").filter(|token| !token.is_empty()).map(Page::parse).transpose()?;
    let version = match &page {
        Some(page) => page.version,
        None => version_of_list(store, request)?,
    };
    let mut objects = store.select(selection, version)?;
    if let Some(Page { after, .. }) = &page {
        objects.retain(|(key, _)| (&key.namespace, &key.name) > (&after.0, &after.1));
    }
    let mut metadata = json!({"resourceVersion": version.to_string()});
    let limit = match request.parameter("limit").map(str::parse::<usize>) {
        None | Some(Ok(0)) => usize::MAX,
        Some(Ok(limit)) => limit,
        Some(Err(_)) => return Err(Failure::bad_request("limit is not a number")),
    };
    if objects.len() > limit {
        metadata["remainingItemCount"] = (objects.len() - limit).into();
        objects.truncate(limit);
        let (last, _) = objects.last().expect("a limit is not zero");
        metadata["continue"] = Page { version, after: (last.namespace.clone(), last.name.clone()) }.token().into();
    }
    // As in a real server, the items of a list have no kind: the list names it once.
    let items: Vec<Value> = objects
        .iter()
        .map(|(_, object)| {
            let mut item = match request.wants_metadata() {
                true => return resource.render(object, true),
                false => Value::clone(object),
            };
            let fields = item.as_object_mut().expect("an object");
            fields.remove("apiVersion");
            fields.remove("kind");
            item
        })
        .collect();
    let (kind, api_version) = match request.wants_metadata() {
        true => ("PartialObjectMetadataList".to_owned(), "meta.k8s.io/v1".to_owned()),
        false => (format!("{}List", resource.kind), resource.api_version()),
    };
    let list = json!({"kind": kind, "apiVersion": api_version, "metadata": metadata, "items": items});
    Ok(json_response(StatusCode::OK, &list))
}

/// The version that a list request asks for.
fn version_of_list(store: &Store, request: &ApiRequest) -> Result<u64, Failure> {
    let current = store.version();
    let wanted = match request.parameter("resourceVersion").unwrap_or_default() {
        "" => None,
        version => {
            let invalid = || Failure::bad_request(format!("Invalid value: {version:?}"));
            Some(version.parse::<u64>().map_err(|_| invalid())?)
        }
    };
    match (wanted, request.parameter("resourceVersionMatch")) {
        (None, None) => Ok(current),
        (None, Some(_)) => {
            let why =
                "resourceVersionMatch: Forbidden: resourceVersionMatch is forbidden unless resourceVersion is provided";
            Err(Failure::invalid("ListOptions.meta.k8s.io", "", why))
        }
        (Some(wanted), _) if wanted > current => Err(Failure::too_new(wanted, current)),
        (Some(wanted), Some("Exact")) => Ok(wanted),
        (Some(_), _) => Ok(current),
    }
}

fn selection(resource: &'static Resource, request: &ApiRequest) -> Result<Selection, Failure> {
    let (fields, labels) = (request.parameter("fieldSelector"), request.parameter("labelSelector"));
    Selection::new(resource, request.namespace.as_deref(), fields, labels)
}

fn create(store: &mut Store, resource: &'static Resource, request: &ApiRequest) -> Result<Response, Failure> {
    let mut object = request.body.clone();
    if Resource::of(&object) != Some(resource) {
        return Err(Failure::bad_request(format!("the object provided is not a {}", resource.kind)));
    }
    let namespace = request.namespace.as_deref().unwrap_or_default();
    let metadata = &mut object["metadata"];
    if metadata["namespace"].as_str().is_some_and(|in_body| in_body != namespace) {
        let message = "the namespace of the provided object does not match the namespace sent on the request";
        return Err(Failure::bad_request(message));
    }
    if resource.namespaced {
        metadata["namespace"] = namespace.into();
    }
    let name = match (metadata["name"].as_str(), metadata["generateName"].as_str()) {
        (Some(name), _) => name.to_owned(),
        (None, Some(prefix)) => format!("{prefix}{:05x}", store.version()),
        (None, None) => {
            let why = "metadata.name: Required value: name or generateName is required";
            return Err(Failure::invalid(resource.kind, "", why));
        }
    };
    metadata["name"] = name.as_str().into();
    let key = Key::new(resource.plural, namespace, &name);
    if store.get(&key).is_some() {
        return Err(Failure::exists(request, &name));
    }
    store.put(object);
    let created = store.get(&key).expect("it was just put");
    Ok(json_response(StatusCode::CREATED, &resource.render(created, false)))
}

/// An object with finalizers is only marked with a `deletionTimestamp`: the controllers that set the finalizers remove
/// them later.
fn delete(store: &mut Store, resource: &'static Resource, request: &ApiRequest) -> Result<Response, Failure> {
    let (namespace, name) =
        (request.namespace.as_deref().unwrap_or_default(), request.name.as_deref().unwrap_or_default());
    let key = Key::new(resource.plural, namespace, name);
    let object = Value::clone(store.get(&key).ok_or_else(|| Failure::not_found(request))?);
    for field in ["uid", "resourceVersion"] {
        let (wanted, actual) = (&request.body["preconditions"][field], &object["metadata"][field]);
        if !wanted.is_null() && wanted != actual {
            let why =
                format!("the {field} in the precondition ({wanted}) does not match that of the object ({actual})");
            return Err(Failure::conflict(request, &why));
        }
    }
    let has_finalizers = object["metadata"]["finalizers"].as_array().is_some_and(|finalizers| !finalizers.is_empty());
    if has_finalizers {
        let mut marked = object;
        marked["metadata"]["deletionTimestamp"] = rfc3339(SystemTime::now());
        store.put(marked.clone());
        return Ok(json_response(StatusCode::OK, &resource.render(&marked, false)));
    }
    store.delete(&key);
    let details = json!({"name": name, "kind": resource.plural, "uid": object["metadata"]["uid"]});
    let status = json!({"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Success", "details": details});
    Ok(json_response(StatusCode::OK, &status))
}

/// A JSON merge patch (RFC 7386). A patch that names another version than the object's is a conflict.
fn patch(store: &mut Store, resource: &'static Resource, request: &ApiRequest) -> Result<Response, Failure> {
    let (namespace, name) =
        (request.namespace.as_deref().unwrap_or_default(), request.name.as_deref().unwrap_or_default());
    let key = Key::new(resource.plural, namespace, name);
    let before = Value::clone(store.get(&key).ok_or_else(|| Failure::not_found(request))?);
    let (wanted, actual) = (&request.body["metadata"]["resourceVersion"], &before["metadata"]["resourceVersion"]);
    if !wanted.is_null() && wanted != actual {
        return Err(Failure::conflict(
            request,
            "the object has been modified; please apply your changes to the latest version",
        ));
    }
    let mut object = before.clone();
    merge(&mut object, &request.body);
    if resource.kind == "CSINode" && changes_an_entry(&before, &object) {
        return Err(Failure::invalid(resource.kind, name, "spec.drivers: Invalid value: field is immutable"));
    }
    store.put(object);
    let patched = store.get(&key).expect("it was just put");
    Ok(json_response(StatusCode::OK, &resource.render(patched, false)))
}

/// Whether the entry of a driver differs from before. A real server lets a client add or remove entries, but not change
/// one.
fn changes_an_entry(before: &Value, now: &Value) -> bool {
    let drivers = |object: &Value| object["spec"]["drivers"].as_array().cloned().unwrap_or_default();
    let after = drivers(now);
    drivers(before).iter().any(|old| after.iter().any(|new| old["name"] == new["name"] && old != new))
}

fn merge(object: &mut Value, change: &Value) {
    let Value::Object(changes) = change else {
        *object = change.clone();
        return;
    };
    for (field, change) in changes {
        match change {
            Value::Null => drop(object.as_object_mut().and_then(|fields| fields.remove(field))),
            change => merge(&mut object[field.as_str()], change),
        }
    }
}

/// The position at which a list continues.
struct Page {
    version: u64,
    /// The namespace and the name of the last object of the page before.
    after: (String, String),
}

impl Page {
    fn token(&self) -> String {
        let Self { version, after: (namespace, name) } = self;
        let token = json!(ByteString(json!([version, namespace, name]).to_string().into_bytes()));
        token.as_str().expect("base64").to_owned()
    }

    fn parse(token: &str) -> Result<Self, Failure> {
        let invalid = || Failure::bad_request("continue key is not valid");
        let ByteString(bytes) = serde_json::from_value(token.into()).map_err(|_| invalid())?;
        let (version, namespace, name) = serde_json::from_slice(&bytes).map_err(|_| invalid())?;
        Ok(Self { version, after: (namespace, name) })
    }
}
