//! Connections that the server refuses, holds or freezes, and certificates of the server that a client does not trust.

use super::caller::Caller;
use super::objects::{APP, put_app, watch_of_app};
use crate::api_server::{ApiServer, End, Order, Presents};
use reqwest::StatusCode;

#[tokio::test]
async fn a_server_that_is_away_refuses_and_comes_back_with_its_objects() {
    let server = ApiServer::start();
    let version = put_app(&server, "1");
    let caller = Caller::admin(&server);
    let path = format!("{APP}/app");
    let mut watch = caller.watch(&watch_of_app(version)).await;
    server.connections(Order::Refuse);
    assert_eq!(watch.end().await, End::Broken);
    assert!(caller.send(&path).await.expect_err("the server refuses connections").is_connect());
    server.connections(Order::Serve);
    assert_eq!(caller.get(&path).await["data"]["a"], "1");
    put_app(&server, "2");
    let mut watch = caller.watch(&watch_of_app(version)).await;
    assert_eq!(watch.change().await.1, "2");
}

#[tokio::test]
async fn frozen_connections_are_silent_and_new_ones_are_not() {
    let server = ApiServer::start();
    let version = put_app(&server, "1");
    let (frozen, fresh) = (Caller::admin(&server), Caller::admin(&server));
    let mut watch = frozen.watch(&watch_of_app(version)).await;
    server.connections(Order::Freeze);
    put_app(&server, "2");
    let path = format!("{APP}/app");
    let mut silent = std::pin::pin!(watch.line());
    tokio::select! {
        biased;
        _ = &mut silent => panic!("a line"),
        app = fresh.get(&path) => assert_eq!(app["data"]["a"], "2"),
    }
    tokio::select! {
        biased;
        _ = silent => panic!("a line"),
        () = tokio::task::yield_now() => {}
    }
}

#[tokio::test]
async fn held_connections_are_taken_and_not_answered() {
    let server = ApiServer::start();
    let (held, fresh) = (Caller::admin(&server), Caller::admin(&server));
    server.connections(Order::Hold);
    let mut answer = std::pin::pin!(held.send(APP));
    tokio::select! {
        biased;
        _ = &mut answer => panic!("an answer"),
        _ = async { while server.connection_count() == 0 { tokio::task::yield_now().await } } => {}
    }
    server.connections(Order::Serve);
    tokio::select! {
        biased;
        _ = answer => panic!("an answer"),
        (code, _) = fresh.try_get(APP) => assert_eq!(code, StatusCode::OK),
    }
}

#[tokio::test]
async fn the_server_can_present_a_wrong_certificate() {
    let server = ApiServer::start();
    for presents in [Presents::Expired, Presents::OtherName, Presents::OtherAuthority] {
        server.present(presents);
        let error = Caller::admin(&server).send(APP).await.expect_err("no trust");
        assert!(error.is_connect(), "{presents:?}: {error:?}");
    }
    server.present(Presents::Good);
    assert_eq!(Caller::admin(&server).try_get(APP).await.0, StatusCode::OK);
}
