//! Faults that a test orders from the server.

use super::caller::Caller;
use super::objects::{APP, put_app, put_pod, watch_of_app};
use crate::api_server::{Answer, ApiServer, Disturbance, End};
use reqwest::StatusCode;
use std::time::Duration;

#[tokio::test]
async fn planned_answers_are_given_once_each() {
    let server = ApiServer::start();
    put_app(&server, "1");
    let caller = Caller::admin(&server);
    let path = format!("{APP}/app");
    server.fail(1, Answer::TooMany(7));
    server.fail_only("list", "configmaps", 1, Answer::Gone);
    server.fail(1, Answer::Error(503));
    let answer = caller.send(&path).await.expect("an answer");
    assert_eq!(
        (answer.status(), &answer.headers()["retry-after"]),
        (StatusCode::TOO_MANY_REQUESTS, &"7".parse().expect(""))
    );
    assert_eq!(caller.try_get(&path).await.0, StatusCode::SERVICE_UNAVAILABLE);
    assert_eq!(caller.get(&path).await["data"]["a"], "1");
    assert_eq!(caller.try_get(APP).await.0, StatusCode::GONE);
    assert_eq!(server.pending_failures(), 0);
    server.fail_always("get", "configmaps", Answer::Unauthorized);
    for _ in 0..2 {
        assert_eq!(caller.try_get(&path).await.0, StatusCode::UNAUTHORIZED);
    }
    server.heal();
    assert_eq!(caller.get(&path).await["data"]["a"], "1");
}

#[tokio::test]
async fn a_server_that_starts_has_forgotten_its_history_and_does_not_know_what_nodes_may() {
    let server = ApiServer::start();
    let version = put_app(&server, "1");
    put_pod(&server);
    server.crash();
    assert!(Caller::node(&server).send(APP).await.is_err());
    server.boot();
    let (node, admin) = (Caller::node(&server), Caller::admin(&server));
    assert_eq!(node.send("/readyz").await.expect("an answer").status(), StatusCode::INTERNAL_SERVER_ERROR);
    let (code, status) = node.try_get(&format!("{APP}/app")).await;
    assert_eq!(code, StatusCode::FORBIDDEN);
    assert!(status["message"].as_str().is_some_and(|message| message.contains("no relationship found")), "{status}");
    assert_eq!(admin.watch(&watch_of_app(version)).await.line().await["object"]["code"], 410);
    server.become_ready();
    assert_eq!(node.send("/readyz").await.expect("an answer").text().await.expect("text"), "ok");
    assert_eq!(node.get(&format!("{APP}/app")).await["data"]["a"], "1");
}

#[tokio::test]
async fn a_client_that_asks_too_often_is_refused_in_plain_text() {
    let server = ApiServer::start();
    put_app(&server, "1");
    put_pod(&server);
    let (node, path) = (Caller::node(&server), format!("{APP}/app"));
    server.limit(2, Duration::from_secs(3600));
    node.get(&path).await;
    node.get(&path).await;
    let answer = node.send(&path).await.expect("an answer");
    assert_eq!(
        (answer.status(), &answer.headers()["retry-after"], &answer.headers()["content-type"]),
        (StatusCode::TOO_MANY_REQUESTS, &"1".parse().expect(""), &"text/plain; charset=utf-8".parse().expect(""))
    );
    assert_eq!(answer.text().await.expect("text"), "Too many requests, please try again later.\n");
    assert_eq!(Caller::admin(&server).get(&path).await["data"]["a"], "1", "administrators are exempt");
}

#[tokio::test]
async fn answers_are_spoilt() {
    let server = ApiServer::start();
    put_app(&server, "1");
    let caller = Caller::admin(&server);
    let path = format!("{APP}/app");
    let right = caller.bytes(&path).await.expect("an answer");
    let spoilt = async |answer: Answer| {
        server.fail(1, answer);
        caller.bytes(&path).await
    };
    assert!(spoilt(Answer::Html).await.expect("an answer").starts_with(b"<!DOCTYPE html>"));
    assert!(std::str::from_utf8(&spoilt(Answer::InvalidUtf8).await.expect("an answer")).is_err());
    assert_eq!(spoilt(Answer::Truncated).await.expect("an answer"), right[..right.len() / 2]);
    assert!(spoilt(Answer::Broken).await.is_err());
    assert_eq!(spoilt(Answer::Oversize(5 << 20)).await.expect("an answer").len(), 5 << 20);
    server.fail(1, Answer::Redirect("https://elsewhere.example/".to_owned()));
    let answer = caller.send(&path).await.expect("an answer");
    assert_eq!(
        (answer.status(), &answer.headers()["location"]),
        (StatusCode::FOUND, &"https://elsewhere.example/".parse().expect(""))
    );
}

#[tokio::test]
async fn watches_are_cut() {
    let server = ApiServer::start();
    let caller = Caller::admin(&server);
    for end in [End::Clean, End::Broken, End::MidLine] {
        let version = put_app(&server, "1");
        server.cut(Some(1), None, end);
        let mut watch = caller.watch(&watch_of_app(version)).await;
        put_app(&server, "2");
        assert_eq!(watch.change().await.1, "2");
        put_app(&server, "3");
        assert_eq!(watch.end().await, end);
        // The fault also applies to a running watch.
        server.heal();
        let mut watch = caller.watch(&watch_of_app(server.version())).await;
        server.cut(None, Some(Duration::ZERO), end);
        assert_eq!(watch.end().await, end);
        server.heal();
    }
}

#[tokio::test]
async fn changes_are_sent_twice_and_out_of_order() {
    let server = ApiServer::start();
    let version = put_app(&server, "1");
    server.change_behaviour(|behaviour| behaviour.disturbance = Disturbance { duplicate: true, outdated: true });
    let mut watch = Caller::admin(&server).watch(&watch_of_app(version)).await;
    put_app(&server, "2");
    let mut values = Vec::new();
    for _ in 0..3 {
        values.push(watch.change().await.1);
    }
    assert_eq!(values, ["2", "2", "1"]);
}

#[tokio::test]
async fn answers_can_be_late_or_never_come() {
    let server = ApiServer::start();
    put_app(&server, "1");
    let caller = Caller::admin(&server);
    let path = format!("{APP}/app");
    server.change_behaviour(|behaviour| behaviour.delay = Duration::from_millis(50));
    let begun = std::time::Instant::now();
    caller.get(&path).await;
    assert!(begun.elapsed() >= Duration::from_millis(50));
    server.heal();
    server.fail(1, Answer::Never);
    let never = caller.send(&path);
    let mut never = std::pin::pin!(never);
    // The server has the first request and does not answer it, but answers a later one.
    tokio::select! {
        biased;
        _ = &mut never => panic!("an answer"),
        _ = async { while server.pending_failures() > 0 { tokio::task::yield_now().await } } => {}
    }
    tokio::select! {
        biased;
        _ = never => panic!("an answer"),
        app = caller.get(&path) => assert_eq!(app["data"]["a"], "1"),
    }
}
