//! The records of requests, and the complaints about them.

use super::caller::{Caller, client_with, tls};
use super::objects::{APP, watch_of_app};
use crate::api_server::ApiServer;
use axum::http::Version;
use serde_json::json;

#[tokio::test]
async fn requests_are_written_down_with_their_connection() {
    let server = ApiServer::start();
    let caller = Caller::node(&server);
    caller.try_get("/api/v1/nodes/n").await;
    caller.try_get(&watch_of_app(1)).await;
    let old = client_with(tls(&server, None)).build().expect("a client");
    Caller { client: old, server: server.url() }.try_get(APP).await;
    let requests = server.requests();
    let recorded: Vec<_> = requests
        .iter()
        .map(|request| {
            let (verb, plural) = (request.verb.as_str(), request.plural.as_str());
            (verb, plural, request.name.as_deref(), request.version, request.connection)
        })
        .collect();
    assert_eq!(
        recorded,
        [
            ("get", "nodes", Some("n"), Version::HTTP_2, 0),
            ("watch", "configmaps", Some("app"), Version::HTTP_2, 0),
            ("list", "configmaps", None, Version::HTTP_11, 1),
        ]
    );
    assert_eq!((requests[0].user.as_str(), requests[0].agent.as_str()), ("system:node:n", "test/1"));
    assert_eq!(requests[2].user, "");
}

#[tokio::test]
async fn requests_against_the_conventions_are_recorded() {
    let server = ApiServer::start();
    let caller = Caller::admin(&server);
    for path in [
        "/api/v1/namespaces/default//configmaps",
        "/api/v1/configmaps?fieldSelector=metadata.name%3Dapp",
        "/api/v1/namespaces/default/configmaps?fieldSelector=metadata.name=app",
        "/api/v1/namespaces/default/configmaps?fieldselector=metadata.name%3Dapp",
        "/api/v1/namespaces/default/configmaps?watch=true&timeoutSeconds=5",
        "/api/v1/namespaces/default/configmaps?watch=yes&resourceVersion=1",
        "/api/v1/namespaces/default/configmaps?limit=0",
        "/api/v1/namespaces/default/configmaps?limit=5&limit=6",
        "/api/v1/namespaces/default/configmaps/App",
        "/api/v1/namespaces/default/nodes/n",
        "/api/v1/namespaces/default/configmaps?resourceVersionMatch=Exact",
    ] {
        server.forget_requests();
        caller.try_get(path).await;
        let outcome = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| server.assert_conventions()));
        assert!(outcome.is_err(), "{path}");
    }
    server.forget_requests();
    let unknown = json!({"apiVersion": "v1", "kind": "Event", "involvedobject": {}});
    caller.post("/api/v1/namespaces/default/events", &unknown).await;
    let outcome = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| server.assert_conventions()));
    let text = outcome.expect_err("complaints").downcast::<String>().expect("a text");
    assert!(text.contains(".involvedobject is an unknown field"), "{text}");
}
