//! Whether requests are what the conventions of the Kubernetes API ask for, so that a client that works here works with a
//! real server, which is often lenient where its documentation is not.

use axum::http::header::{AUTHORIZATION, COOKIE};
use k8s_openapi::api::authentication::v1::TokenRequest;
use k8s_openapi::api::certificates::v1beta1::PodCertificateRequest;
use k8s_openapi::api::core::v1::{Event, Node, PersistentVolume, PersistentVolumeClaim};
use k8s_openapi::api::storage::v1::CSINode;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::DeleteOptions;
use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::Value;

use super::request::Asked;

const OF_LIST: [&str; 7] = [
    "fieldSelector",
    "labelSelector",
    "limit",
    "continue",
    "resourceVersion",
    "resourceVersionMatch",
    "timeoutSeconds",
];
const OF_WATCH: [&str; 8] = [
    "watch",
    "fieldSelector",
    "labelSelector",
    "resourceVersion",
    "resourceVersionMatch",
    "allowWatchBookmarks",
    "sendInitialEvents",
    "timeoutSeconds",
];
const OF_CREATE: [&str; 3] = ["dryRun", "fieldManager", "fieldValidation"];

/// The problems of a request.
pub fn problems(asked: &Asked) -> Vec<String> {
    let mut problems = Vec::new();
    path(asked, &mut problems);
    query(asked, &mut problems);
    headers(asked, &mut problems);
    body(asked, &mut problems);
    problems
}

fn path(asked: &Asked, problems: &mut Vec<String>) {
    let Some(resource) = asked.resource else {
        problems.push("the path leads to no resource".to_owned());
        return;
    };
    if asked.path.split('/').skip(1).any(str::is_empty) {
        problems.push("the path has an empty segment".to_owned());
    }
    if asked.path.contains('%') {
        problems.push("no name needs to be escaped in a path".to_owned());
    }
    let of_all_namespaces = matches!(asked.verb.as_str(), "list" | "watch") && asked.name.is_none();
    if resource.namespaced != asked.namespace.is_some() && !(resource.namespaced && of_all_namespaces) {
        problems.push(format!(
            "{} are {}in a namespace",
            resource.plural,
            if resource.namespaced { "" } else { "not " }
        ));
    }
    for (what, name) in [("name", &asked.name), ("namespace", &asked.namespace)] {
        if name.as_deref().is_some_and(|name| !is_subdomain(name)) {
            problems.push(format!("the {what} {name:?} is one that no object has"));
        }
    }
    if !matches!(asked.verb.as_str(), "get" | "list" | "watch" | "create" | "patch" | "delete") {
        problems.push(format!("{} is not a verb that is needed", asked.verb));
    }
}

fn query(asked: &Asked, problems: &mut Vec<String>) {
    let known: &[&str] = match asked.verb.as_str() {
        "list" => &OF_LIST,
        "watch" => &OF_WATCH,
        "create" | "patch" => &OF_CREATE,
        "delete" => &[],
        _ => &["resourceVersion"],
    };
    for (index, (key, value)) in asked.query.iter().enumerate() {
        if !known.contains(&key.as_str()) {
            problems.push(format!("{} has no parameter {key}", asked.verb));
        }
        if asked.query[..index].iter().any(|(before, _)| before == key) {
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
    let has = |key: &str| asked.parameter(key).is_some();
    if has("resourceVersionMatch") && !has("resourceVersion") && !has("sendInitialEvents") {
        problems.push("resourceVersionMatch says nothing without resourceVersion".to_owned());
    }
    let is_single = asked.parameter("fieldSelector").is_some_and(|selector| selector.starts_with("metadata.name="));
    let is_of_use_in_parts = is_single || asked.plural == "clustertrustbundles";
    if asked.verb == "watch" && !has("resourceVersion") && !has("sendInitialEvents") && !is_of_use_in_parts {
        problems.push("a watch of many without resourceVersion begins with no end of what there was".to_owned());
    }
    if asked.wants_initial_events() && !asked.is_set("allowWatchBookmarks") {
        problems.push("initial events end with a bookmark".to_owned());
    }
    if asked.verb == "watch" && !has("timeoutSeconds") {
        problems.push("a watch without timeoutSeconds ends when the server likes".to_owned());
    }
    if has("continue") && has("resourceVersion") {
        problems.push("continue has a resourceVersion of its own".to_owned());
    }
    encoding(asked, problems);
}

/// Values of a query are escaped: `metadata.name%3Dapp`.
fn encoding(asked: &Asked, problems: &mut Vec<String>) {
    for pair in asked.raw_query.split('&').filter(|pair| !pair.is_empty()) {
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

fn headers(asked: &Asked, problems: &mut Vec<String>) {
    let accepts: &[&str] = match asked.verb.as_str() {
        "list" => {
            &["application/json", "application/json;as=PartialObjectMetadataList;g=meta.k8s.io;v=v1,application/json"]
        }
        "watch" => {
            &["application/json", "application/json;as=PartialObjectMetadata;g=meta.k8s.io;v=v1,application/json"]
        }
        _ => &["application/json"],
    };
    if !accepts.contains(&asked.accept.as_str()) {
        problems.push(format!("Accept is {:?}", asked.accept));
    }
    let mut agent = asked.agent.splitn(2, '/');
    if agent.by_ref().take(2).filter(|part| !part.is_empty()).count() != 2 {
        problems.push(format!("User-Agent is {:?} and names no program and version", asked.agent));
    }
    for unwanted in [COOKIE, AUTHORIZATION] {
        if asked.query.iter().any(|(key, _)| key.eq_ignore_ascii_case(unwanted.as_str())) {
            problems.push(format!("{unwanted} is not for a query"));
        }
    }
}

fn body(asked: &Asked, problems: &mut Vec<String>) {
    if asked.verb == "patch" {
        if asked.content_type != "application/merge-patch+json" {
            problems.push(format!("Content-Type of a patch is {:?}", asked.content_type));
        }
        let body = without_nulls(&asked.body);
        match asked.resource_and_subresource().as_str() {
            "events" => fields::<Event>(&body, problems),
            "nodes/status" => fields::<Node>(&body, problems),
            "csinodes" => fields::<CSINode>(&body, problems),
            "persistentvolumeclaims/status" => fields::<PersistentVolumeClaim>(&body, problems),
            other => problems.push(format!("{other} is nothing to be patched")),
        }
        return;
    }
    if asked.verb == "delete" {
        fields::<DeleteOptions>(&asked.body, problems);
        if asked.content_type != "application/json" || asked.body["preconditions"]["uid"].is_null() {
            problems.push("an object is deleted that may be another one by now".to_owned());
        }
        return;
    }
    if asked.verb != "create" {
        if !asked.body.is_null() || !asked.content_type.is_empty() {
            problems.push(format!("{} has no body", asked.verb));
        }
        return;
    }
    if asked.content_type != "application/json" {
        problems.push(format!("Content-Type is {:?}", asked.content_type));
    }
    let (api_version, kind) = match asked.resource_and_subresource().as_str() {
        "serviceaccounts/token" => {
            fields::<TokenRequest>(&asked.body, problems);
            ("authentication.k8s.io/v1", "TokenRequest")
        }
        "events" => {
            fields::<Event>(&asked.body, problems);
            event(asked, problems);
            ("v1", "Event")
        }
        "persistentvolumes" => {
            fields::<PersistentVolume>(&asked.body, problems);
            ("v1", "PersistentVolume")
        }
        "csinodes" => {
            fields::<CSINode>(&asked.body, problems);
            ("storage.k8s.io/v1", "CSINode")
        }
        "podcertificaterequests" => {
            fields::<PodCertificateRequest>(&asked.body, problems);
            ("certificates.k8s.io/v1beta1", "PodCertificateRequest")
        }
        other => {
            problems.push(format!("{other} is nothing to be created"));
            return;
        }
    };
    if asked.body["apiVersion"] != api_version || asked.body["kind"] != kind {
        problems.push(format!("the body is no {kind} of {api_version}"));
    }
    let namespace = &asked.body["metadata"]["namespace"];
    if !namespace.is_null() && namespace.as_str() != asked.namespace.as_deref() {
        problems.push(format!("the body is of namespace {namespace}, the path of {:?}", asked.namespace));
    }
}

fn event(asked: &Asked, problems: &mut Vec<String>) {
    let event = &asked.body;
    if event["metadata"]["name"].is_null() && event["metadata"]["generateName"].is_null() {
        problems.push("the event has no name".to_owned());
    }
    let about = &event["involvedObject"];
    if ["kind", "name", "namespace", "uid"].iter().any(|field| about[field].as_str().is_none_or(str::is_empty)) {
        problems.push("the event does not say about whom it is".to_owned());
    }
    if about["namespace"].as_str() != asked.namespace.as_deref() {
        problems.push("the event is not in the namespace of whom it is about".to_owned());
    }
    if !matches!(event["type"].as_str(), Some("Normal" | "Warning")) {
        problems.push(format!("an event cannot be {}", event["type"]));
    }
    if event["reason"].as_str().is_none_or(|reason| reason.is_empty() || reason.contains(' ')) {
        problems.push(format!("{} is no reason: it is one word", event["reason"]));
    }
    if event["message"].as_str().is_none_or(|message| message.is_empty() || message.len() > 1024) {
        problems.push("the event's message is empty or longer than 1 KiB".to_owned());
    }
    let source = event["source"]["component"].as_str().or(event["reportingComponent"].as_str());
    if source.is_none_or(str::is_empty) {
        problems.push("the event does not say from whom it is".to_owned());
    }
}

/// A merge patch without the fields that it removes.
fn without_nulls(change: &Value) -> Value {
    match change {
        Value::Object(fields) => {
            let given = fields.iter().filter(|(_, value)| !value.is_null());
            given.map(|(field, value)| (field.clone(), without_nulls(value))).collect()
        }
        value => value.clone(),
    }
}

/// Whether an object has only the fields that its type has, spelt so.
fn fields<T: Serialize + DeserializeOwned>(body: &Value, problems: &mut Vec<String>) {
    match serde_json::from_value::<T>(body.clone()).map(|typed| serde_json::to_value(typed).expect("JSON")) {
        Ok(typed) => unknown(body, &typed, "", problems),
        Err(error) => problems.push(format!("the body is not of its type: {error}")),
    }
}

fn unknown(given: &Value, typed: &Value, path: &str, problems: &mut Vec<String>) {
    match given {
        Value::Object(fields) => {
            for (field, given) in fields.iter().filter(|(_, given)| !given.is_null()) {
                let path = format!("{path}.{field}");
                match typed.get(field) {
                    Some(typed) => unknown(given, typed, &path, problems),
                    None => problems.push(format!("{path} is an unknown field")),
                }
            }
        }
        Value::Array(items) => {
            items.iter().enumerate().for_each(|(index, item)| unknown(item, &typed[index], path, problems));
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
