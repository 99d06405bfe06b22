//! Requests that create tokens and events.

use super::caller::Caller;
use super::objects::put_pod;
use crate::api_server::{ApiServer, claims};
use reqwest::StatusCode;
use serde_json::json;
use std::time::Duration;

#[tokio::test]
async fn a_token_is_bound_to_a_pod_of_the_node() {
    let server = ApiServer::start();
    let uid = put_pod(&server);
    let caller = Caller::node(&server);
    let (code, answer) = caller.token("vault", 7200, &uid).await;
    assert_eq!(code, StatusCode::CREATED, "{answer}");
    let token = claims(answer["status"]["token"].as_str().expect("a token"));
    assert_eq!(token["aud"], json!(["vault"]));
    assert_eq!(token["sub"], "system:serviceaccount:default:default");
    assert_eq!(token["kubernetes.io"]["pod"], json!({"name": "web", "uid": uid}));
    assert_eq!(token["exp"].as_i64().expect("a time") - token["iat"].as_i64().expect("a time"), 7200);
    server.assert_conventions();
    for (audience, seconds, uid, text) in [
        ("vault", 599, uid.as_str(), "may not specify a duration less than 10 minutes"),
        ("vault", 600, "", "node requested token with a pod binding without a uid"),
        ("vault", 600, "other", "the UID in the bound object reference (other) does not match the UID in record"),
        ("other", 600, uid.as_str(), "audience \"other\" not found in pod spec volume"),
    ] {
        let (_, status) = caller.token(audience, seconds, uid).await;
        assert!(status["message"].as_str().expect("a text").contains(text), "{status}");
    }
    server.change_behaviour(|behaviour| behaviour.token_lifetime = Some(Duration::from_secs(5)));
    let (_, answer) = caller.token("vault", 7200, &uid).await;
    assert_eq!(answer["spec"]["expirationSeconds"], 5);
}

#[tokio::test]
async fn an_event_is_kept() {
    let server = ApiServer::start();
    let caller = Caller::node(&server);
    let event = json!({
        "apiVersion": "v1", "kind": "Event", "metadata": {"name": "web.1", "namespace": "default"},
        "involvedObject": {"kind": "Pod", "name": "web", "namespace": "default", "uid": "1"},
        "type": "Warning", "reason": "FailedMount", "message": "MountVolume.SetUp failed", "source": {"component": "podfs"},
    });
    let path = "/api/v1/namespaces/default/events";
    assert_eq!(caller.post(path, &event).await.0, StatusCode::CREATED);
    assert_eq!(server.objects("Event").len(), 1);
    let (code, status) = caller.post(path, &event).await;
    assert_eq!((code, &status["reason"]), (StatusCode::CONFLICT, &json!("AlreadyExists")));
    server.assert_conventions();
}
