//! Errors: `Status` objects with the codes, reasons and texts of a real server.

use axum::body::Body;
use axum::http::header::{CONTENT_TYPE, RETRY_AFTER};
use axum::http::{HeaderValue, StatusCode};
use axum::response::Response;
use serde_json::{Value, json};

use super::request::ApiRequest;

/// The error of a request.
#[derive(Debug)]
pub struct Failure {
    code: u16,
    reason: &'static str,
    message: String,
    details: Value,
}

impl Failure {
    fn new(code: u16, reason: &'static str, message: impl Into<String>) -> Self {
        Self { code, reason, message: message.into(), details: Value::Null }
    }

    pub fn unauthorized() -> Self {
        Self::new(401, "Unauthorized", "Unauthorized")
    }

    /// Neither the Node authorizer nor a rule allows the request.
    pub fn forbidden(request: &ApiRequest, user: &str, why: &str) -> Self {
        let resource = request.resource_and_subresource();
        let place = match &request.namespace {
            Some(namespace) => format!("in the namespace {namespace:?}"),
            None => "at the cluster scope".to_owned(),
        };
        let group = request.group();
        let verb = &request.verb;
        let why = if why.is_empty() { String::new() } else { format!(": {why}") };
        let cannot = format!("User {user:?} cannot {verb} resource {resource:?} in API group {group:?} {place}{why}");
        Self::not_admitted(request, &cannot)
    }

    /// The authorizer allows the request, but the admission refuses its content.
    pub fn not_admitted(request: &ApiRequest, why: &str) -> Self {
        let failure = Self::new(403, "Forbidden", format!("{} is forbidden: {why}", request.title()));
        failure.about(request)
    }

    pub fn not_found(request: &ApiRequest) -> Self {
        Self::new(404, "NotFound", format!("{} not found", request.title())).about(request)
    }

    /// An object other than the requested one is missing.
    pub fn missing(plural: &str, name: &str) -> Self {
        let details = json!({"name": name, "kind": plural});
        Self { details, ..Self::new(404, "NotFound", format!("{plural} {name:?} not found")) }
    }

    /// The path names no resource that the server has.
    pub fn no_resource() -> Self {
        Self::new(404, "NotFound", "the server could not find the requested resource")
    }

    pub fn no_method() -> Self {
        Self::new(405, "MethodNotAllowed", "the server does not allow this method on the requested resource")
    }

    pub fn exists(request: &ApiRequest, name: &str) -> Self {
        let resource = &request.plural;
        Self::new(409, "AlreadyExists", format!("{resource} {name:?} already exists")).about(request)
    }

    /// The object does not fulfil the preconditions of the request.
    pub fn conflict(request: &ApiRequest, why: &str) -> Self {
        let (resource, name) = (&request.plural, request.name.as_deref().unwrap_or_default());
        let message = format!("Operation cannot be fulfilled on {resource} {name:?}: Precondition failed: {why}");
        Self::new(409, "Conflict", message).about(request)
    }

    pub fn bad_request(message: impl Into<String>) -> Self {
        Self::new(400, "BadRequest", message)
    }

    pub fn invalid(kind: &str, name: &str, message: &str) -> Self {
        Self::new(422, "Invalid", format!("{kind} {name:?} is invalid: {message}"))
    }

    /// A watch from a version that the server has forgotten.
    pub fn too_old(version: u64, oldest: u64) -> Self {
        Self::new(410, "Expired", format!("too old resource version: {version} ({oldest})"))
    }

    /// The continuation of a list at a version that the server has forgotten.
    pub fn page_expired() -> Self {
        let message = "The provided continue parameter is too old to display a consistent list result. You can start a new \
                       list without the continue parameter.";
        Self::new(410, "Expired", message)
    }

    /// A version that the server has not reached yet.
    pub fn too_new(version: u64, current: u64) -> Self {
        let causes = json!([{"reason": "ResourceVersionTooLarge", "message": "Too large resource version"}]);
        let details = json!({"causes": causes, "retryAfterSeconds": 1});
        let message = format!("Too large resource version: {version}, current: {current}");
        Self { details, ..Self::new(504, "Timeout", message) }
    }

    pub fn too_many(seconds: u64) -> Self {
        let message = "the server has received too many requests and has asked us to try again later";
        Self { details: json!({"retryAfterSeconds": seconds}), ..Self::new(429, "TooManyRequests", message) }
    }

    pub fn server_error(code: u16) -> Self {
        let (reason, message) = match code {
            503 => ("ServiceUnavailable", "the server is currently unable to handle the request"),
            504 => ("Timeout", "the server was unable to return a response in the time allotted"),
            409 => (
                "Conflict",
                "the object has been modified; please apply your changes to the latest version and try again",
            ),
            _ => ("InternalError", "Internal error occurred: etcdserver: leader changed"),
        };
        Self::new(code, reason, message)
    }

    fn about(self, request: &ApiRequest) -> Self {
        let mut details = json!({"kind": request.plural});
        if let Some(name) = &request.name {
            details["name"] = name.as_str().into();
        }
        if !request.group().is_empty() {
            details["group"] = request.group().into();
        }
        Self { details, ..self }
    }

    /// The `Status` object.
    pub fn status(&self) -> Value {
        let mut status = json!({
            "kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Failure",
            "message": self.message, "reason": self.reason, "code": self.code,
        });
        if !self.details.is_null() {
            status["details"] = self.details.clone();
        }
        status
    }

    pub fn response(&self) -> Response {
        let code = StatusCode::from_u16(self.code).expect("a code");
        let mut response = json_response(code, &self.status());
        if let (429, Some(seconds)) = (self.code, self.details["retryAfterSeconds"].as_u64()) {
            response.headers_mut().insert(RETRY_AFTER, HeaderValue::from(seconds));
        }
        response
    }
}

/// An answer with JSON.
pub fn json_response(code: StatusCode, body: &Value) -> Response {
    let mut response = Response::new(Body::from(body.to_string()));
    *response.status_mut() = code;
    response.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static("application/json"));
    response
}
