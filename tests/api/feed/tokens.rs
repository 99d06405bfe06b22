//! Tokens: each pod has its own, issued and replaced by the daemon.

use super::*;
use crate::api_server::{Answer, claims};

const TOKENS: &str = "serviceaccounts/token";
const ACCESS: &str = "[{name: a, projected: {sources: [{serviceAccountToken: {path: token}}]}}]";
const ACCOUNT: &str = "{apiVersion: v1, kind: ServiceAccount, metadata: {name: default, namespace: default}}";

/// The claims and the expiration of the token in a push.
fn token_of(push: &Push) -> Option<(Value, Value)> {
    let request = push.objects.iter().find(|object| object["kind"] == "TokenRequest")?;
    Some((claims(request["status"]["token"].as_str()?), request["status"]["expirationTimestamp"].clone()))
}

#[tokio::test]
async fn tk_02_tk_05_each_pod_has_tokens_of_its_own_and_they_are_replaced_in_time() {
    let pods: Vec<_> = (1..=2).map(|number| pod(&format!("web-{number}"), &format!("u{number}"), ACCESS)).collect();
    let server = ApiServer::start();
    put_all(&server, &pods);
    server.put(ACCOUNT);
    server.change_behaviour(|behaviour| behaviour.token_lifetime = Some(Duration::from_secs(4)));
    let mut node = Node::at(server, None, &[]).await;
    let mut followers = node.followers().await;
    for (follower, number) in followers.iter_mut().zip(1..) {
        let first = push(follower).await;
        let (claims, expires) = token_of(&first).expect("a token");
        let expected = json!({"name": format!("web-{number}"), "uid": format!("u{number}")});
        assert_eq!(claims["kubernetes.io"]["pod"], expected);
        assert!(expires.is_string() && first.unknown.is_empty());
    }
    let (before, mut follower) = (node.server.count("create", TOKENS), followers.remove(0));
    until(&mut follower, "another token", |push| token_of(push).is_some()).await;
    assert!(node.server.count("create", TOKENS) > before);
    node.server.assert_conventions();
}

#[tokio::test]
async fn tk_06_a_token_that_cannot_be_replaced_is_unknown_when_it_has_expired() {
    let server = ApiServer::start();
    server.put(&pod("web", "u1", ACCESS));
    server.put(ACCOUNT);
    server.change_behaviour(|behaviour| behaviour.token_lifetime = Some(Duration::from_secs(3)));
    let mut node = Node::at(server, None, &[]).await;
    let mut followers = node.followers().await;
    assert!(token_of(&push(&mut followers[0]).await).is_some());
    node.server.fail_always("create", TOKENS, Answer::Error(500));
    let expired = until(&mut followers[0], "it has expired", |push| !push.unknown.is_empty()).await;
    assert_eq!((expired.unknown[0].kind.as_str(), expired.objects.len()), ("TokenRequest", 0));
    assert!(expired.unknown[0].reason.contains("the token has expired and refresh failed: "), "{expired:?}");
    node.server.heal();
    let fresh = until(&mut followers[0], "another token", |push| token_of(push).is_some()).await;
    assert!(fresh.unknown.is_empty());
}

#[tokio::test]
async fn a_token_that_is_refused_is_unknown_with_the_words_of_the_server_and_comes_when_it_is_not() {
    let mut node = Node::of(&[pod("web", "u1", ACCESS)]).await;
    let mut followers = node.followers().await;
    let is_refused = |push: &Push| push.unknown.iter().any(|entry| entry.reason.contains("\"default\\\" not found"));
    until(&mut followers[0], "there is no account", is_refused).await;
    node.server.put(ACCOUNT);
    until(&mut followers[0], "a token", |push| token_of(push).is_some()).await;
}

#[tokio::test]
async fn tk_05_tokens_are_shown_and_replaced_in_time_when_the_clock_of_the_node_is_set_a_day_ahead_or_back() {
    const DAY: i64 = 24 * 60 * 60;
    for ahead in [-DAY, DAY] {
        let server = ApiServer::start();
        server.put(&pod("web", "u1", ACCESS));
        server.put(ACCOUNT);
        server.change_behaviour(|behaviour| {
            (behaviour.token_lifetime, behaviour.clock_ahead) = (Some(Duration::from_secs(4)), ahead)
        });
        let mut node = Node::at(server, None, &[]).await;
        let mut followers = node.followers().await;
        let first = push(&mut followers[0]).await;
        assert!(token_of(&first).is_some() && first.unknown.is_empty(), "{first:?}");
        // The clock is set while the pod runs.
        node.server.change_behaviour(|behaviour| behaviour.clock_ahead = -ahead);
        for _ in 0..2 {
            until(&mut followers[0], "another token", |push| token_of(push).is_some()).await;
        }
    }
}
