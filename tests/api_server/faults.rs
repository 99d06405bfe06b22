//! Faults of answers: a test plans them, and the server carries them out. (`listener` has the faults of connections.)

use std::sync::{Mutex, MutexGuard};
use std::time::Duration;

use axum::body::{Body, Bytes};
use axum::http::header::{CONTENT_TYPE, LOCATION};
use axum::http::{HeaderValue, StatusCode};
use axum::response::Response;
use tokio::sync::watch;

use super::request::ApiRequest;
use super::status::Failure;

/// A planned answer to a request: the right one, or a fault.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Answer {
    /// The right answer: it delays the next planned answer by one request.
    Right,
    /// 429, with the seconds after which the client may retry.
    TooMany(u64),
    /// An error of the server: 409, 500, 503, 504.
    Error(u16),
    /// 401, though the credentials are good.
    Unauthorized,
    /// 410 as the answer to the request itself. (A watch from a forgotten version says so in its stream.)
    Gone,
    /// 200 with an HTML page, as from a proxy that asks for a login.
    Html,
    /// 302 to this address.
    Redirect(String),
    /// The right answer, with bytes in it that are no UTF-8.
    InvalidUtf8,
    /// The first half of the right answer, with a regular end of the HTTP body.
    Truncated,
    /// The first half of the right answer; then the connection breaks.
    Broken,
    /// This number of spaces.
    Oversize(usize),
    /// The server never answers.
    Never,
}

/// The early end of watches.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Cut {
    /// The number of changes after which a watch ends.
    pub events: Option<usize>,
    /// The time after which a watch ends.
    pub time: Option<Duration>,
    pub end: End,
}

/// The end of an answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum End {
    /// The regular end.
    Clean,
    /// The stream breaks between two lines.
    Broken,
    /// The stream ends cleanly, in the middle of a line.
    MidLine,
}

/// Further faults of watches.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Disturbance {
    /// Watches send every change twice.
    pub duplicate: bool,
    /// After each change, watches send the state before it again, with its older version.
    pub outdated: bool,
}

/// The present behaviour of the server.
#[derive(Clone, Debug, Default)]
pub struct Behaviour {
    pub delay: Duration,
    pub cut: Option<Cut>,
    pub disturbance: Disturbance,
    /// The lifetime of tokens; it overrides the requested one.
    pub token_lifetime: Option<Duration>,
    /// The seconds by which the server's clock is ahead of the clients' clocks.
    pub clock_ahead: i64,
    /// A version of a group that is not served, such as `certificates.k8s.io/v1beta1`.
    pub unserved: Option<&'static str>,
}

#[derive(Clone, Debug)]
struct Planned {
    /// The verb and the resource of the concerned requests; `None` for all requests.
    only: Option<(String, String)>,
    /// The number of answers that still get the fault; `None` for all.
    times: Option<usize>,
    answer: Answer,
}

/// The planned faults. A running watch sees changes of the behaviour at once.
#[derive(Default)]
pub struct Faults {
    behaviour: watch::Sender<Behaviour>,
    planned: Mutex<Vec<Planned>>,
}

impl Faults {
    pub fn behaviour(&self) -> Behaviour {
        self.behaviour.borrow().clone()
    }

    pub fn watch_behaviour(&self) -> watch::Receiver<Behaviour> {
        self.behaviour.subscribe()
    }

    pub fn change_behaviour(&self, change: impl FnOnce(&mut Behaviour)) {
        self.behaviour.send_modify(change);
    }

    /// Plans an answer for the next `times` requests with this verb on this resource. `None` for `only` concerns every
    /// request; `None` for `times` has no end.
    pub fn plan(&self, only: Option<(&str, &str)>, times: Option<usize>, answer: Answer) {
        let only = only.map(|(verb, resource)| (verb.to_owned(), resource.to_owned()));
        self.planned().push(Planned { only, times, answer });
    }

    /// The planned answer to this request.
    pub fn due(&self, request: &ApiRequest) -> Option<Answer> {
        let mut planned = self.planned();
        let concerns =
            |plan: &&mut Planned| plan.only.as_ref().is_none_or(|(verb, resource)| request.is(verb, resource));
        let due = planned.iter_mut().find(concerns)?;
        due.times = due.times.map(|times| times - 1);
        let answer = due.answer.clone();
        planned.retain(|plan| plan.times != Some(0));
        Some(answer)
    }

    /// The number of planned faults that are still to come.
    pub fn pending(&self) -> usize {
        self.planned().len()
    }

    /// Forgets all planned faults.
    pub fn heal(&self) {
        self.planned().clear();
        self.behaviour.send_replace(Behaviour::default());
    }

    fn planned(&self) -> MutexGuard<'_, Vec<Planned>> {
        self.planned.lock().expect("no panic")
    }
}

impl Answer {
    /// Whether the server makes this answer from the right one.
    pub fn spoils(&self) -> bool {
        matches!(self, Self::InvalidUtf8 | Self::Truncated | Self::Broken)
    }

    /// The HTTP answer, for those that the server does not make from the right one.
    pub fn response(&self) -> Response {
        match self {
            Self::TooMany(seconds) => Failure::too_many(*seconds).response(),
            Self::Error(code) => Failure::server_error(*code).response(),
            Self::Unauthorized => Failure::unauthorized().response(),
            Self::Gone => Failure::too_old(1, 2).response(),
            Self::Html => typed("text/html", Body::from("<!DOCTYPE html>\n<html><body>Please log in</body></html>\n")),
            Self::Redirect(to) => {
                let mut response = Response::new(Body::empty());
                *response.status_mut() = StatusCode::FOUND;
                response.headers_mut().insert(LOCATION, HeaderValue::from_str(to).expect("an address"));
                response
            }
            Self::Oversize(bytes) => typed("application/json", Body::from(vec![b' '; *bytes])),
            Self::Right | Self::Never | Self::InvalidUtf8 | Self::Truncated | Self::Broken => {
                unreachable!("Cluster::answer treats {self:?} itself")
            }
        }
    }

    /// The right answer, spoilt.
    pub fn spoil(&self, right: Bytes) -> Body {
        let half = right.slice(..right.len() / 2);
        match self {
            Self::InvalidUtf8 => {
                let mut bytes = right.to_vec();
                // Inside of the last string.
                let quote = bytes.iter().rposition(|byte| *byte == b'"').expect("JSON has strings");
                bytes.splice(quote..quote, [0xff, 0xfe]);
                Body::from(bytes)
            }
            Self::Truncated => Body::from(half),
            _ => Body::from_stream(futures_util::stream::iter([Ok(half), Err(broken())])),
        }
    }
}

/// The error that makes hyper break the stream of an answer.
pub fn broken() -> std::io::Error {
    std::io::Error::other("broken on purpose")
}

fn typed(content_type: &'static str, body: Body) -> Response {
    let mut response = Response::new(body);
    response.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static(content_type));
    response
}
