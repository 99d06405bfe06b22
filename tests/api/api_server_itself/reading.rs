//! Requests that get and list objects.

use super::caller::Caller;
use super::objects::{APP, OF_APP, encode, names, put_app, put_config_map};
use crate::api_server::ApiServer;
use reqwest::StatusCode;
use serde_json::json;

#[tokio::test]
async fn an_object_is_got_with_its_version() {
    let server = ApiServer::start();
    let version = put_app(&server, "1");
    let app = Caller::admin(&server).get(&format!("{APP}/app")).await;
    assert_eq!(app["data"]["a"], "1");
    assert_eq!(app["metadata"]["resourceVersion"], version.to_string());
    assert_eq!((&app["kind"], &app["apiVersion"]), (&json!("ConfigMap"), &json!("v1")));
    server.assert_conventions();
}

#[tokio::test]
async fn a_missing_object_is_answered_with_a_status() {
    let server = ApiServer::start();
    let caller = Caller::admin(&server);
    let (code, status) = caller.try_get(&format!("{APP}/app")).await;
    assert_eq!(code, StatusCode::NOT_FOUND);
    let details = json!({"name": "app", "kind": "configmaps"});
    assert_eq!(
        status,
        json!({
            "kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Failure", "details": details,
            "message": "configmaps \"app\" not found", "reason": "NotFound", "code": 404,
        })
    );
    let (code, status) = caller.try_get("/api/v1/namespaces/default/gizmos/app").await;
    assert_eq!(code, StatusCode::NOT_FOUND);
    assert_eq!(status["message"], "the server could not find the requested resource");
}

#[tokio::test]
async fn a_list_names_its_version_and_its_items_do_not_say_what_they_are() {
    let server = ApiServer::start();
    put_app(&server, "1");
    put_config_map(&server, "other", "2");
    let list = Caller::admin(&server).get(&format!("{APP}?{OF_APP}")).await;
    assert_eq!((&list["kind"], &list["apiVersion"]), (&json!("ConfigMapList"), &json!("v1")));
    assert_eq!(list["metadata"]["resourceVersion"], server.version().to_string());
    assert_eq!(names(&list), ["app"]);
    assert!(list["items"][0]["kind"].is_null());
}

#[tokio::test]
async fn pages_of_a_list_are_of_one_version() {
    let server = ApiServer::start();
    for name in ["a", "b", "c"] {
        put_config_map(&server, name, "1");
    }
    let caller = Caller::admin(&server);
    let first = caller.get(&format!("{APP}?limit=2")).await;
    assert_eq!(names(&first), ["a", "b"]);
    assert_eq!(first["metadata"]["remainingItemCount"], 1);
    put_config_map(&server, "d", "1");
    server.delete("ConfigMap", "default", "c");
    let next = encode(first["metadata"]["continue"].as_str().expect("a token"));
    let second = caller.get(&format!("{APP}?limit=2&continue={next}")).await;
    assert_eq!(names(&second), ["c"]);
    assert_eq!(second["metadata"]["resourceVersion"], first["metadata"]["resourceVersion"]);
    server.compact();
    let (code, status) = caller.try_get(&format!("{APP}?limit=2&continue={next}")).await;
    assert_eq!((code, &status["reason"]), (StatusCode::GONE, &json!("Expired")));
}

#[tokio::test]
async fn a_list_has_the_requested_version() {
    let server = ApiServer::start();
    let version = put_app(&server, "1");
    put_app(&server, "2");
    let caller = Caller::admin(&server);
    let exact = caller.get(&format!("{APP}?resourceVersion={version}&resourceVersionMatch=Exact")).await;
    assert_eq!(exact["items"][0]["data"]["a"], "1");
    let newer = caller.get(&format!("{APP}?resourceVersion={version}&resourceVersionMatch=NotOlderThan")).await;
    assert_eq!(newer["items"][0]["data"]["a"], "2");
    let (code, status) = caller.try_get(&format!("{APP}?resourceVersion=99")).await;
    assert_eq!(code, StatusCode::GATEWAY_TIMEOUT);
    assert_eq!(status["message"], "Too large resource version: 99, current: 2");
}

#[tokio::test]
async fn selectors_select() {
    let server = ApiServer::start();
    for (name, signer, team) in [("a", "x.io/s", "red"), ("b", "x.io/s", "blue"), ("c", "y.io/s", "red")] {
        server.put_value(json!({
            "apiVersion": "certificates.k8s.io/v1beta1", "kind": "ClusterTrustBundle",
            "metadata": {"name": name, "labels": {"team": team}}, "spec": {"signerName": signer, "trustBundle": ""},
        }));
    }
    server.put("{apiVersion: certificates.k8s.io/v1, kind: ClusterTrustBundle, metadata: {name: plain}}");
    let caller = Caller::admin(&server);
    for (selector, selected) in [
        ("fieldSelector=spec.signerName%3Dx.io%2Fs", &["a", "b"][..]),
        ("fieldSelector=metadata.name%21%3Db", &["a", "c", "plain"]),
        ("labelSelector=team%3Dred", &["a", "c"]),
        ("labelSelector=team%21%3Dred", &["b", "plain"]),
        ("labelSelector=team+in+%28blue%2Cgreen%29", &["b"]),
        ("labelSelector=team+notin+%28blue%29%2Cteam", &["a", "c"]),
        ("labelSelector=team+notin+%28blue%29", &["a", "c", "plain"]),
        ("labelSelector=%21team", &["plain"]),
        ("labelSelector=team%3Dred&fieldSelector=spec.signerName%3Dy.io%2Fs", &["c"]),
    ] {
        for version in ["v1beta1", "v1"] {
            let path = format!("/apis/certificates.k8s.io/{version}/clustertrustbundles?{selector}");
            let list = caller.get(&path).await;
            assert_eq!(names(&list), selected, "{selector}");
            assert_eq!(list["apiVersion"], format!("certificates.k8s.io/{version}"));
        }
    }
    let (code, status) = caller.try_get(&format!("{APP}?fieldSelector=data.a%3D1")).await;
    assert_eq!((code, &status["reason"]), (StatusCode::BAD_REQUEST, &json!("BadRequest")));
}
