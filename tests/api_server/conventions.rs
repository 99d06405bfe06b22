//! Checks whether requests follow the conventions of the Kubernetes API. A real server often accepts more than its
//! documentation allows; these checks are as strict as the documentation, so that a client that passes them works with every
//! real server.

use axum::http::header::{AUTHORIZATION, COOKIE};
use k8s_openapi::api::authentication::v1::TokenRequest;
use k8s_openapi::api::certificates::v1beta1::PodCertificateRequest;
use k8s_openapi::api::core::v1::{Event, Node, PersistentVolume, PersistentVolumeClaim};
use k8s_openapi::api::storage::v1::CSINode;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::DeleteOptions;
use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::Value;

use super::request::ApiRequest;

const LIST_PARAMETERS: [&str; 7] = [
    "fieldSelector",
    "labelSelector",
    "limit",
    "continue",
    "resourceVersion",
    "resourceVersionMatch",
    "timeoutSeconds",
];
const WATCH_PARAMETERS: [&str; 8] = [
    "watch",
    "fieldSelector",
    "labelSelector",
    "resourceVersion",
    "resourceVersionMatch",
    "allowWatchBookmarks",
    "sendInitialEvents",
    "timeoutSeconds",
];
const CREATE_PARAMETERS: [&str; 3] = ["dryRun", "fieldManager", "fieldValidation"];

/// The problems of a request.
pub fn problems(request: &ApiRequest) -> Vec<String> {
    let mut problems = Vec::new();
    path(request, &mut problems);
    query(request, &mut problems);
    headers(request, &mut problems);
    body(request, &mut problems);
    problems
}

fn path(request: &ApiRequest, problems: &mut Vec<String>) {
    let Some(resource) = request.resource else {
        problems.push("the path leads to no resource".to_owned());
        return;
    };
    if request.path.split('/').skip(1).any(str::is_empty) {
        problems.push("the path has an empty segment".to_owned());
    }
    if request.path.contains('%') {
        problems.push("no name needs to be escaped in a path".to_owned());
    }
    let of_all_namespaces = matches!(request.verb.as_str(), "list" | "watch") && request.name.is_none();
    if resource.namespaced != request.namespace.is_some() && !(resource.namespaced && of_all_namespaces) {
        problems.push(format!(
            "{} are {}in a namespace",
            resource.plural,
            if resource.namespaced { "" } else { "not " }
        ));
    }
    for (part, name) in [("name", &request.name), ("namespace", &request.namespace)] {
        if name.as_deref().is_some_and(|name| !is_subdomain(name)) {
            problems.push(format!("the {part} {name:?} is not valid for any object"));
        }
    }
    if !matches!(request.verb.as_str(), "get" | "list" | "watch" | "create" | "patch" | "delete") {
        problems.push(format!("podfs needs no verb {}", request.verb));
    }
}

fn query(request: &ApiRequest, problems: &mut Vec<String>) {
    let known: &[&str] = match request.verb.as_str() {
        "list" => &LIST_PARAMETERS,
        "watch" => &WATCH_PARAMETERS,
        "create" | "patch" => &CREATE_PARAMETERS,
        "delete" => &[],
        _ => &["resourceVersion"],
    };
    for (index, (key, value)) in request.query.iter().enumerate() {
        if !known.contains(&key.as_str()) {
            problems.push(format!("{} has no parameter {key}", request.verb));
        }
        if request.query[..index].iter().any(|(earlier, _)| earlier == key) {
            problems.push(format!("{key} is given twice"));
        }
        let is_good = match key.as_str() {
            "watch" | "allowWatchBookmarks" | "sendInitialEvents" => matches!(value.as_str(), "true" | "false" | "1"),
            "timeoutSeconds" | "limit" => value.parse::<u32>().is_ok_and(|number| number > 0),
            "resourceVersion" => value.parse::<u64>().is_ok(),
            "resourceVersionMatch" => matches!(value.as_str(), "Exact" | "NotOlderThan"),
            _ => !value.is_empty(),
        };
        if !is_good {
            problems.push(format!("{key} cannot be {value:?}"));
        }
    }
    let has = |key: &str| request.parameter(key).is_some();
    if has("resourceVersionMatch") && !has("resourceVersion") && !has("sendInitialEvents") {
        problems.push("resourceVersionMatch has no meaning without resourceVersion".to_owned());
    }
    let is_single = request.parameter("fieldSelector").is_some_and(|selector| selector.starts_with("metadata.name="));
    // A client can use a single object, or each bundle, without knowing that the list is complete.
    let needs_no_complete_list = is_single || request.plural == "clustertrustbundles";
    if request.verb == "watch" && !has("resourceVersion") && !has("sendInitialEvents") && !needs_no_complete_list {
        problems.push(
            "a watch of many objects without resourceVersion does not mark the end of the existing objects".to_owned(),
        );
    }
    if request.wants_initial_events() && !request.is_set("allowWatchBookmarks") {
        problems.push("initial events end with a bookmark, which needs allowWatchBookmarks".to_owned());
    }
    if request.verb == "watch" && !has("timeoutSeconds") {
        problems.push("without timeoutSeconds, the server chooses the end of the watch".to_owned());
    }
    if has("continue") && has("resourceVersion") {
        problems.push("continue already names a version: resourceVersion is not for it".to_owned());
    }
    encoding(request, problems);
}

/// Checks that the values of the query are escaped: `metadata.name%3Dapp`.
fn encoding(request: &ApiRequest, problems: &mut Vec<String>) {
    for pair in request.raw_query.split('&').filter(|pair| !pair.is_empty()) {
        let Some((key, value)) = pair.split_once('=') else {
            problems.push(format!("{pair} has no value"));
            continue;
        };
        let plain = |character: char| character.is_ascii_alphanumeric() || "-._~%+*".contains(character);
        if !value.chars().all(plain) {
            problems.push(format!("the value of {key} is not escaped: {value}"));
        }
    }
}

fn headers(request: &ApiRequest, problems: &mut Vec<String>) {
    let accepts: &[&str] = match request.verb.as_str() {
        "list" => {
            &["application/json", "application/json;as=PartialObjectMetadataList;g=meta.k8s.io;v=v1,application/json"]
        }
        "watch" => {
            &["application/json", "application/json;as=PartialObjectMetadata;g=meta.k8s.io;v=v1,application/json"]
        }
        _ => &["application/json"],
    };
    if !accepts.contains(&request.accept.as_str()) {
        problems.push(format!("Accept is {:?}", request.accept));
    }
    let mut agent = request.agent.splitn(2, '/');
    if agent.by_ref().take(2).filter(|part| !part.is_empty()).count() != 2 {
        problems.push(format!("User-Agent is {:?}, and not a program with its version", request.agent));
    }
    for unwanted in [COOKIE, AUTHORIZATION] {
        if request.query.iter().any(|(key, _)| key.eq_ignore_ascii_case(unwanted.as_str())) {
            problems.push(format!("{unwanted} is not for a query"));
        }
    }
}

fn body(request: &ApiRequest, problems: &mut Vec<String>) {
    if request.verb == "patch" {
        if request.content_type != "application/merge-patch+json" {
            problems.push(format!("Content-Type of a patch is {:?}", request.content_type));
        }
        let body = without_nulls(&request.body);
        match request.resource_and_subresource().as_str() {
            "events" => fields::<Event>(&body, problems),
            "nodes/status" => fields::<Node>(&body, problems),
            "csinodes" => fields::<CSINode>(&body, problems),
            "persistentvolumeclaims/status" => fields::<PersistentVolumeClaim>(&body, problems),
            resource => problems.push(format!("podfs patches no {resource}")),
        }
        return;
    }
    if request.verb == "delete" {
        fields::<DeleteOptions>(&request.body, problems);
        if request.content_type != "application/json" || request.body["preconditions"]["uid"].is_null() {
            problems.push("a deletion without the UID may delete a later object of the same name".to_owned());
        }
        return;
    }
    if request.verb != "create" {
        if !request.body.is_null() || !request.content_type.is_empty() {
            problems.push(format!("{} has no body", request.verb));
        }
        return;
    }
    if request.content_type != "application/json" {
        problems.push(format!("Content-Type is {:?}", request.content_type));
    }
    let (api_version, kind) = match request.resource_and_subresource().as_str() {
        "serviceaccounts/token" => {
            fields::<TokenRequest>(&request.body, problems);
            ("authentication.k8s.io/v1", "TokenRequest")
        }
        "events" => {
            fields::<Event>(&request.body, problems);
            event(request, problems);
            ("v1", "Event")
        }
        "persistentvolumes" => {
            fields::<PersistentVolume>(&request.body, problems);
            ("v1", "PersistentVolume")
        }
        "csinodes" => {
            fields::<CSINode>(&request.body, problems);
            ("storage.k8s.io/v1", "CSINode")
        }
        "podcertificaterequests" => {
            fields::<PodCertificateRequest>(&request.body, problems);
            ("certificates.k8s.io/v1beta1", "PodCertificateRequest")
        }
        resource => {
            problems.push(format!("podfs creates no {resource}"));
            return;
        }
    };
    if request.body["apiVersion"] != api_version || request.body["kind"] != kind {
        problems.push(format!("the body is no {kind} of {api_version}"));
    }
    let namespace = &request.body["metadata"]["namespace"];
    if !namespace.is_null() && namespace.as_str() != request.namespace.as_deref() {
        problems.push(format!("the body is of namespace {namespace}, the path of {:?}", request.namespace));
    }
}

fn event(request: &ApiRequest, problems: &mut Vec<String>) {
    let event = &request.body;
    if event["metadata"]["name"].is_null() && event["metadata"]["generateName"].is_null() {
        problems.push("the event has no name".to_owned());
    }
    let involved = &event["involvedObject"];
    if ["kind", "name", "namespace", "uid"].iter().any(|field| involved[field].as_str().is_none_or(str::is_empty)) {
        problems.push("the event does not name its object completely".to_owned());
    }
    if involved["namespace"].as_str() != request.namespace.as_deref() {
        problems.push("the event is not in the namespace of its object".to_owned());
    }
    if !matches!(event["type"].as_str(), Some("Normal" | "Warning")) {
        problems.push(format!("an event cannot be {}", event["type"]));
    }
    if event["reason"].as_str().is_none_or(|reason| reason.is_empty() || reason.contains(' ')) {
        problems.push(format!("{} is no reason: a reason is one word", event["reason"]));
    }
    if event["message"].as_str().is_none_or(|message| message.is_empty() || message.len() > 1024) {
        problems.push("the event's message is empty or longer than 1 KiB".to_owned());
    }
    let source = event["source"]["component"].as_str().or(event["reportingComponent"].as_str());
    if source.is_none_or(str::is_empty) {
        problems.push("the event does not name the component that reports it".to_owned());
    }
}

/// A merge patch without the fields that it removes.
fn without_nulls(change: &Value) -> Value {
    match change {
        Value::Object(fields) => {
            let kept = fields.iter().filter(|(_, value)| !value.is_null());
            kept.map(|(field, value)| (field.clone(), without_nulls(value))).collect()
        }
        value => value.clone(),
    }
}

/// Checks that an object has no fields other than those of its type.
fn fields<T: Serialize + DeserializeOwned>(body: &Value, problems: &mut Vec<String>) {
    match serde_json::from_value::<T>(body.clone()).map(|typed| serde_json::to_value(typed).expect("JSON")) {
        Ok(typed) => unknown_fields(body, &typed, "", problems),
        Err(error) => problems.push(format!("the body is not of its type: {error}")),
    }
}

/// Adds the fields of `sent` that are lost when the object is parsed as its type.
fn unknown_fields(sent: &Value, typed: &Value, path: &str, problems: &mut Vec<String>) {
    match sent {
        Value::Object(fields) => {
            for (field, sent) in fields.iter().filter(|(_, sent)| !sent.is_null()) {
                let path = format!("{path}.{field}");
                match typed.get(field) {
                    Some(typed) => unknown_fields(sent, typed, &path, problems),
                    None => problems.push(format!("{path} is an unknown field")),
                }
            }
        }
        Value::Array(items) => {
            items.iter().enumerate().for_each(|(index, item)| unknown_fields(item, &typed[index], path, problems));
        }
        _ => {}
    }
}

fn is_subdomain(name: &str) -> bool {
    let is_label = |label: &str| {
        !label.is_empty()
            && !label.starts_with('-')
            && !label.ends_with('-')
            && label
                .chars()
                .all(|character| character.is_ascii_lowercase() || character.is_ascii_digit() || character == '-')
    };
    name.len() <= 253 && name.split('.').all(is_label)
}
