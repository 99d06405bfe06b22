//! Watches.

use super::caller::Caller;
use super::objects::{APP, OF_APP, put_app, put_config_map, watch_of_app};
use crate::api_server::{ApiServer, InitialEvents};
use reqwest::StatusCode;
use serde_json::json;

#[tokio::test]
async fn a_watch_continues_after_its_version() {
    let server = ApiServer::start();
    let first = put_app(&server, "1");
    put_app(&server, "2");
    put_config_map(&server, "other", "x");
    let caller = Caller::admin(&server);
    let mut watch = caller.watch(&watch_of_app(first)).await;
    assert_eq!(watch.change().await, ("MODIFIED".to_owned(), json!("2")));
    put_app(&server, "3");
    assert_eq!(watch.change().await, ("MODIFIED".to_owned(), json!("3")));
    let gone = server.delete("ConfigMap", "default", "app");
    let deleted = watch.line().await;
    assert_eq!(deleted["type"], "DELETED");
    assert_eq!(deleted["object"]["metadata"]["resourceVersion"], gone.to_string());
    put_app(&server, "4");
    assert_eq!(watch.change().await, ("ADDED".to_owned(), json!("4")));
    server.assert_conventions();
}

#[tokio::test]
async fn a_watch_without_a_version_begins_with_the_current_objects() {
    let server = ApiServer::start();
    put_app(&server, "1");
    let mut watch = Caller::admin(&server).watch(&format!("{APP}?watch=true&{OF_APP}")).await;
    assert_eq!(watch.change().await, ("ADDED".to_owned(), json!("1")));
}

#[tokio::test]
async fn a_watch_with_initial_events_says_where_they_end() {
    let server = ApiServer::start();
    let version = put_app(&server, "1");
    let query = "watch=true&allowWatchBookmarks=true&sendInitialEvents=true&resourceVersionMatch=NotOlderThan";
    let caller = Caller::admin(&server);
    let mut watch = caller.watch(&format!("{APP}?{query}&{OF_APP}")).await;
    assert_eq!(watch.change().await, ("ADDED".to_owned(), json!("1")));
    let end = watch.line().await;
    assert_eq!(end["type"], "BOOKMARK");
    assert_eq!(end["object"]["metadata"]["annotations"]["k8s.io/initial-events-end"], "true");
    assert_eq!(end["object"]["metadata"]["resourceVersion"], version.to_string());
    let (code, _) = caller.try_get(&format!("{APP}?watch=true&sendInitialEvents=true")).await;
    assert_eq!(code, StatusCode::UNPROCESSABLE_ENTITY);
}

#[tokio::test]
async fn a_server_may_know_nothing_of_initial_events() {
    let server = ApiServer::start();
    put_app(&server, "1");
    let query = "watch=true&allowWatchBookmarks=true&sendInitialEvents=true&resourceVersionMatch=NotOlderThan";
    let path = format!("{APP}?{query}&{OF_APP}");
    let caller = Caller::admin(&server);
    server.initial_events(InitialEvents::Refused);
    let answer = caller.send(&path).await.expect("an answer");
    assert_eq!(answer.status(), StatusCode::UNPROCESSABLE_ENTITY);
    assert!(answer.text().await.expect("text").contains("sendInitialEvents: Forbidden"));
    server.initial_events(InitialEvents::Ignored);
    let mut watch = caller.watch(&path).await;
    put_app(&server, "2");
    assert_eq!(watch.change().await, ("ADDED".to_owned(), json!("1")));
    assert_eq!(watch.change().await, ("MODIFIED".to_owned(), json!("2")));
}

#[tokio::test]
async fn lists_and_watches_may_be_of_metadata_only() {
    let server = ApiServer::start();
    let version = put_app(&server, "1");
    let caller = Caller::admin(&server);
    let part = |kind: &str| format!("application/json;as={kind};g=meta.k8s.io;v=v1,application/json");
    let list = caller.send_accepting(APP, &part("PartialObjectMetadataList")).await.text().await.expect("text");
    let list: serde_json::Value = serde_json::from_str(&list).expect("JSON");
    assert_eq!(list["kind"], "PartialObjectMetadataList");
    assert_eq!((&list["items"][0]["metadata"]["name"], &list["items"][0]["data"]), (&json!("app"), &json!(null)));
    let path = format!("{APP}?watch=true&{OF_APP}&resourceVersion={version}&timeoutSeconds=1");
    put_app(&server, "2");
    let watch = caller.send_accepting(&path, &part("PartialObjectMetadata")).await.text().await.expect("text");
    let line: serde_json::Value = serde_json::from_str(watch.lines().next().expect("a line")).expect("JSON");
    assert_eq!((&line["type"], &line["object"]["kind"]), (&json!("MODIFIED"), &json!("PartialObjectMetadata")));
    assert!(line["object"]["data"].is_null());
}

#[tokio::test]
async fn a_watch_from_a_forgotten_version_gets_an_error_in_its_stream() {
    let server = ApiServer::start();
    let version = put_app(&server, "1");
    server.compact();
    let mut watch = Caller::admin(&server).watch(&watch_of_app(version)).await;
    let error = watch.line().await;
    assert_eq!(error["type"], "ERROR");
    assert_eq!((&error["object"]["code"], &error["object"]["reason"]), (&json!(410), &json!("Expired")));
    assert_eq!(error["object"]["message"], "too old resource version: 1 (2)");
    assert!(watch.is_over().await);
}

#[tokio::test]
async fn bookmarks_go_only_to_watches_that_allow_them() {
    let server = ApiServer::start();
    let version = put_app(&server, "1");
    let caller = Caller::admin(&server);
    let mut allows = caller.watch(&format!("{}&allowWatchBookmarks=true", watch_of_app(version))).await;
    let mut does_not = caller.watch(&watch_of_app(version)).await;
    put_config_map(&server, "other", "x");
    server.bookmark();
    put_app(&server, "2");
    let bookmark = allows.line().await;
    assert_eq!(
        (&bookmark["type"], &bookmark["object"]["metadata"]["resourceVersion"]),
        (&json!("BOOKMARK"), &json!("2"))
    );
    assert_eq!(allows.change().await.1, "2");
    assert_eq!(does_not.change().await.1, "2");
}

#[tokio::test]
async fn a_watch_ends_when_its_time_is_over() {
    let server = ApiServer::start();
    let version = put_app(&server, "1");
    let mut watch = Caller::admin(&server).watch(&watch_of_app(version).replace("600", "1")).await;
    assert!(watch.is_over().await);
    assert_eq!(server.watches("ConfigMap", "app"), 0);
}

#[tokio::test]
async fn an_object_that_is_no_longer_selected_is_gone_for_a_watch() {
    let server = ApiServer::start();
    let labelled = |team: &str| {
        let metadata = json!({"name": "app", "labels": {"team": team}});
        server.put_value(json!({"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata}))
    };
    let version = labelled("red");
    let path = format!("{APP}?watch=true&labelSelector=team%3Dred&resourceVersion={version}");
    let mut watch = Caller::admin(&server).watch(&path).await;
    labelled("blue");
    labelled("green");
    labelled("red");
    assert_eq!(watch.change().await.0, "DELETED");
    assert_eq!(watch.change().await.0, "ADDED");
}
