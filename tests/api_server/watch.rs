//! Watches: a streamed answer with a line for each change.
//!
//! Each watch has a task, which writes lines into a short queue; the queue is the body of the answer. The task ends when the
//! time of the watch is over, when a planned fault ends the watch, or when the client has closed the connection.

use std::io;
use std::time::Duration;

use axum::body::{Body, Bytes};
use axum::http::HeaderValue;
use axum::http::header::CONTENT_TYPE;
use axum::response::Response;
use futures_util::stream::poll_fn;
use serde_json::{Value, json};
use tokio::sync::mpsc::{Receiver, Sender, channel};
use tokio::sync::watch;
use tokio::time::{Instant, sleep_until};

use super::answers::InitialEvents;
use super::faults::{Behaviour, Cut, End, broken};
use super::request::ApiRequest;
use super::resources::Resource;
use super::selector::Selection;
use super::status::Failure;
use super::store::{Change, Registered, Store, WatchMessage};

/// The duration of a watch without `timeoutSeconds`.
const DEFAULT_DURATION: Duration = Duration::from_secs(40 * 60);

type Line = Result<Bytes, io::Error>;

/// The answer to a watch.
pub fn answer(
    store: &mut Store,
    request: &ApiRequest,
    selection: Selection,
    behaviour: watch::Receiver<Behaviour>,
    initial: InitialEvents,
) -> Result<Response, Failure> {
    let wants_bookmarks = request.is_set("allowWatchBookmarks");
    let version = match request.parameter("resourceVersion").unwrap_or_default() {
        "" | "0" => None,
        version => Some(version.parse().map_err(|_| Failure::bad_request(format!("Invalid value: {version:?}")))?),
    };
    let sends_initial = match request.parameter("sendInitialEvents") {
        Some(_) if request.parameter("resourceVersionMatch") != Some("NotOlderThan") => {
            let why =
                "sendInitialEvents: Forbidden: sendInitialEvents requires setting resourceVersionMatch to NotOlderThan";
            return Err(Failure::invalid("ListOptions.meta.k8s.io", "", why));
        }
        Some(_) if initial == InitialEvents::Refused => {
            let why = "sendInitialEvents: Forbidden: sendInitialEvents is forbidden for watch unless the WatchList feature \
                       gate is enabled";
            return Err(Failure::invalid("ListOptions.meta.k8s.io", "", why));
        }
        Some(value) => matches!(value, "true" | "1"),
        None => false,
    };
    let time = match request.parameter("timeoutSeconds").map(str::parse) {
        Some(Ok(seconds)) if seconds > 0 => Duration::from_secs(seconds),
        Some(Err(_)) => return Err(Failure::bad_request("timeoutSeconds is not a number")),
        _ => DEFAULT_DURATION,
    };
    // Without a version, or with initial events, a watch begins with the existing objects.
    let (mut first, metadata_only) = (Vec::new(), request.wants_metadata());
    let resource = selection.resource();
    let begin = match version {
        Some(version) if !sends_initial => version,
        _ => {
            let current = store.version();
            let objects = store.select(&selection, current)?;
            first.extend(objects.iter().map(|(_, object)| line("ADDED", &resource.render(object, metadata_only))));
            if sends_initial && wants_bookmarks && initial == InitialEvents::Sent {
                first.push(bookmark(resource, current, metadata_only, true));
            }
            current
        }
    };
    let (sender, lines) = channel(16);
    match store.watch(selection.clone(), begin) {
        Ok(registered) => {
            let until = Instant::now() + time;
            let begun = Instant::now();
            let watch =
                Watch { sender, selection, wants_bookmarks, metadata_only, begun, until, behaviour, changes: 0 };
            tokio::spawn(watch.run(first, registered));
        }
        // As the cache of a real server, report the error in the stream of the watch and not by the HTTP status.
        Err(failure) => {
            let error = line("ERROR", &failure.status());
            tokio::spawn(async move { sender.send(Ok(error)).await });
        }
    }
    Ok(streaming(lines))
}

fn streaming(mut lines: Receiver<Line>) -> Response {
    let mut response = Response::new(Body::from_stream(poll_fn(move |context| lines.poll_recv(context))));
    response.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static("application/json"));
    response
}

struct Watch {
    sender: Sender<Line>,
    selection: Selection,
    wants_bookmarks: bool,
    metadata_only: bool,
    begun: Instant,
    until: Instant,
    behaviour: watch::Receiver<Behaviour>,
    /// The number of changes that the watch has sent.
    changes: usize,
}

/// The watch has ended.
struct Over;

impl Watch {
    async fn run(mut self, first: Vec<Bytes>, registered: Registered) {
        let _ = self.send_all(first, registered).await;
    }

    async fn send_all(&mut self, first: Vec<Bytes>, registered: Registered) -> Result<(), Over> {
        for line in first {
            self.send(line).await?;
        }
        let Registered { missed, mut messages } = registered;
        for change in missed {
            self.change(&change).await?;
        }
        loop {
            let cut = self.behaviour.borrow_and_update().cut;
            let cut_at = cut.and_then(|cut| cut.time).map(|time| self.begun + time);
            let end = cut_at.map_or(self.until, |at| at.min(self.until));
            tokio::select! {
                message = messages.recv() => match message {
                    Some(WatchMessage::Change(change)) => self.change(&change).await?,
                    Some(WatchMessage::Bookmark(version)) if self.wants_bookmarks => {
                        self.send(bookmark(self.selection.resource(), version, self.metadata_only, false)).await?;
                    }
                    Some(WatchMessage::Bookmark(_)) => {}
                    None => return Err(Over),
                },
                // The test has changed the behaviour of the server: the next turn reads it.
                changed = self.behaviour.changed() => changed.map_err(|_| Over)?,
                () = sleep_until(end) => match cut {
                    Some(Cut { end, .. }) if cut_at.is_some_and(|at| at < self.until) => return self.end(end).await,
                    _ => return Err(Over),
                },
                () = self.sender.closed() => return Err(Over),
            }
        }
    }

    /// Sends a change as this watch sees it: an object that the watch newly selects is added, an object that the watch no
    /// longer selects is deleted.
    async fn change(&mut self, change: &Change) -> Result<(), Over> {
        let Behaviour { cut, disturbance, .. } = self.behaviour.borrow().clone();
        if let Some(Cut { events: Some(events), end, .. }) = cut
            && self.changes >= events
        {
            return self.end(end).await;
        }
        let selects = |object: &Value| self.selection.selects(&change.key, object);
        let before = change.before.as_deref().filter(|before| selects(before));
        let is_there = !change.deleted && selects(&change.object);
        let kind = match (before, is_there) {
            (None, true) => "ADDED",
            (Some(_), true) => "MODIFIED",
            (Some(_), false) => "DELETED",
            (None, false) => return Ok(()),
        };
        let show = |object: &Value| self.selection.resource().render(object, self.metadata_only);
        let changed = line(kind, &show(&change.object));
        let outdated = before.filter(|_| disturbance.outdated).map(|before| line("MODIFIED", &show(before)));
        self.changes += 1;
        if disturbance.duplicate {
            self.send(changed.clone()).await?;
        }
        self.send(changed).await?;
        match outdated {
            Some(outdated) => self.send(outdated).await,
            None => Ok(()),
        }
    }

    async fn end(&self, end: End) -> Result<(), Over> {
        match end {
            End::Clean => {}
            End::Broken => drop(self.sender.send(Err(broken())).await),
            End::MidLine => self.send(Bytes::from_static(br#"{"type":"MODIFIED","object":{"kind":"Conf"#)).await?,
        }
        Err(Over)
    }

    async fn send(&self, line: Bytes) -> Result<(), Over> {
        self.sender.send(Ok(line)).await.map_err(|_| Over)
    }
}

fn line(kind: &str, object: &Value) -> Bytes {
    let mut line = json!({"type": kind, "object": object}).to_string();
    line.push('\n');
    Bytes::from(line)
}

/// A bookmark with the server's version. `ends_initial` marks the end of the initial events.
fn bookmark(resource: &Resource, version: u64, metadata_only: bool, ends_initial: bool) -> Bytes {
    let mut metadata = json!({"resourceVersion": version.to_string(), "creationTimestamp": null});
    if ends_initial {
        metadata["annotations"] = json!({"k8s.io/initial-events-end": "true"});
    }
    line("BOOKMARK", &resource.render(&json!({"metadata": metadata}), metadata_only))
}
