//! The API server of the tests behaves as a real one: tests against it would show nothing otherwise.

#[path = "api_server/mod.rs"]
mod api_server;

use std::sync::Arc;
use std::time::{Duration, SystemTime};

use api_server::{Answer, ApiServer, Disturbance, End, MASTERS, Order, Presents, User, claims};
use axum::http::Version;
use reqwest::{Client, ClientBuilder, Response, StatusCode};
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use rustls::{ClientConfig, RootCertStore};
use serde_json::{Value, json};

/// How long anything may take that takes milliseconds on a quiet machine.
const PATIENCE: Duration = Duration::from_secs(20);

const APP: &str = "/api/v1/namespaces/default/configmaps";
const OF_APP: &str = "fieldSelector=metadata.name%3Dapp";

// Get and list.

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
async fn what_is_not_there_is_told_as_a_status() {
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
async fn a_list_is_of_the_version_that_is_asked_for() {
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
    let caller = Caller::admin(&server);
    for (selector, selected) in [
        ("fieldSelector=spec.signerName%3Dx.io%2Fs", &["a", "b"][..]),
        ("fieldSelector=metadata.name%21%3Db", &["a", "c"]),
        ("labelSelector=team%3Dred", &["a", "c"]),
        ("labelSelector=team%21%3Dred", &["b"]),
        ("labelSelector=team+in+%28blue%2Cgreen%29", &["b"]),
        ("labelSelector=team+notin+%28blue%29%2Cteam", &["a", "c"]),
        ("labelSelector=%21team", &[]),
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

// Watch.

#[tokio::test]
async fn a_watch_goes_on_after_its_version() {
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
async fn a_watch_without_a_version_begins_with_what_there_is() {
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
async fn a_watch_from_a_forgotten_version_is_told_so_in_its_stream() {
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
async fn bookmarks_are_for_those_who_allow_them() {
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

// Who may do what.

#[tokio::test]
async fn nobody_is_anonymous() {
    let server = ApiServer::start();
    for client in [client(&server).build(), client_with_token(&server, "wrong")] {
        let caller = Caller { client: client.expect("a client"), server: server.url() };
        let (code, status) = caller.try_get(APP).await;
        assert_eq!((code, &status["message"]), (StatusCode::UNAUTHORIZED, &json!("Unauthorized")));
    }
}

#[tokio::test]
async fn a_certificate_that_is_over_is_not_accepted_and_the_connection_is() {
    let server = ApiServer::start();
    let yesterday = SystemTime::now() - Duration::from_secs(86_400);
    let caller = Caller::with_certificate(&server, &User::node("n"), yesterday);
    assert_eq!(caller.try_get(APP).await.0, StatusCode::UNAUTHORIZED);
}

#[tokio::test]
async fn a_node_reads_what_its_pods_refer_to_one_by_one() {
    let server = ApiServer::start();
    put_app(&server, "1");
    put_config_map(&server, "other", "2");
    put_pod(&server);
    let caller = Caller::node(&server);
    assert_eq!(caller.get(&format!("{APP}/app")).await["data"]["a"], "1");
    assert_eq!(names(&caller.get(&format!("{APP}?{OF_APP}")).await), ["app"]);
    let mut watch = caller.watch(&watch_of_app(server.version())).await;
    put_app(&server, "2");
    assert_eq!(watch.change().await.1, "2");
    let node = "User \"system:node:n\" cannot";
    let place = "in API group \"\" in the namespace \"default\"";
    for (path, text) in [
        (
            format!("{APP}/other"),
            format!(
                "configmaps \"other\" is forbidden: {node} get resource \"configmaps\" {place}: no relationship found between \
                 node 'n' and this object"
            ),
        ),
        (
            APP.to_owned(),
            format!("configmaps is forbidden: {node} list resource \"configmaps\" {place}: No Object name found"),
        ),
        (
            format!(
                "{}&resourceVersion=1",
                "/api/v1/namespaces/default/persistentvolumeclaims?watch=true&\
                 fieldSelector=metadata.name%3Ddata"
            ),
            format!(
                "persistentvolumeclaims \"data\" is forbidden: {node} watch resource \"persistentvolumeclaims\" {place}: can \
                 only get individual resources of this type"
            ),
        ),
        (
            "/api/v1/namespaces/default/pods".to_owned(),
            format!(
                "pods is forbidden: {node} list resource \"pods\" {place}: can only list/watch pods with spec.nodeName field \
                 selector"
            ),
        ),
        (
            "/api/v1/nodes/m".to_owned(),
            format!(
                "nodes \"m\" is forbidden: {node} get resource \"nodes\" in API group \"\" at the cluster scope: node 'n' cannot \
                 read 'm', only its own Node object"
            ),
        ),
    ] {
        let (code, status) = caller.try_get(&path).await;
        assert_eq!(code, StatusCode::FORBIDDEN, "{path}");
        assert_eq!(status["message"], text);
    }
}

#[tokio::test]
async fn a_node_gets_claims_and_volumes_of_its_pods() {
    let server = ApiServer::start();
    put_pod(&server);
    let claim = json!({
        "apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": {"name": "data"}, "spec": {"volumeName": "pv"},
    });
    let volume = |name: &str, claim: &str| {
        json!({
            "apiVersion": "v1", "kind": "PersistentVolume", "metadata": {"name": name},
            "spec": {"claimRef": {"namespace": "default", "name": claim}},
        })
    };
    for object in [claim, volume("pv", "data"), volume("foreign", "other")] {
        server.put_value(object);
    }
    let caller = Caller::node(&server);
    let claim = caller.get("/api/v1/namespaces/default/persistentvolumeclaims/data").await;
    assert_eq!(claim["spec"]["volumeName"], "pv");
    assert_eq!(caller.get("/api/v1/persistentvolumes/pv").await["metadata"]["name"], "pv");
    assert_eq!(caller.try_get("/api/v1/persistentvolumes/foreign").await.0, StatusCode::FORBIDDEN);
}

#[tokio::test]
async fn other_users_may_what_a_rule_says() {
    let server = ApiServer::start();
    put_app(&server, "1");
    let user = User::new("system:serviceaccount:kube-system:podfs", "system:serviceaccounts");
    let token = server.new_token(&user);
    let client = client_with_token(&server, &token).expect("a client");
    let caller = Caller { client, server: server.url() };
    let (code, status) = caller.try_get(&format!("{APP}/app")).await;
    assert_eq!(code, StatusCode::FORBIDDEN);
    assert_eq!(
        status["message"],
        "configmaps \"app\" is forbidden: User \"system:serviceaccount:kube-system:podfs\" cannot get resource \"configmaps\" \
         in API group \"\" in the namespace \"default\""
    );
    server.permit(&user, &["get"], "configmaps");
    assert_eq!(caller.get(&format!("{APP}/app")).await["data"]["a"], "1");
    server.refuse_tokens_of(&user);
    assert_eq!(caller.try_get(&format!("{APP}/app")).await.0, StatusCode::UNAUTHORIZED);
}

// Create.

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
    server.mood(|mood| mood.token_lifetime = Some(Duration::from_secs(5)));
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

// Faults.

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
        // One that is under way hears of it.
        server.heal();
        let mut watch = caller.watch(&watch_of_app(server.version())).await;
        server.cut(None, Some(Duration::ZERO), end);
        assert_eq!(watch.end().await, end);
        server.heal();
    }
}

#[tokio::test]
async fn changes_are_told_twice_and_out_of_order() {
    let server = ApiServer::start();
    let version = put_app(&server, "1");
    server.mood(|mood| mood.disturbance = Disturbance { duplicate: true, outdated: true });
    let mut watch = Caller::admin(&server).watch(&watch_of_app(version)).await;
    put_app(&server, "2");
    let mut told = Vec::new();
    for _ in 0..3 {
        told.push(watch.change().await.1);
    }
    assert_eq!(told, ["2", "2", "1"]);
}

#[tokio::test]
async fn answers_can_be_late_or_never_come() {
    let server = ApiServer::start();
    put_app(&server, "1");
    let caller = Caller::admin(&server);
    let path = format!("{APP}/app");
    server.mood(|mood| mood.delay = Duration::from_millis(50));
    let begun = std::time::Instant::now();
    caller.get(&path).await;
    assert!(begun.elapsed() >= Duration::from_millis(50));
    server.heal();
    server.fail(1, Answer::Never);
    let never = caller.send(&path);
    let mut never = std::pin::pin!(never);
    // It is under way, and another that begins later is answered.
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

// Connections.

#[tokio::test]
async fn a_server_that_is_away_refuses_and_comes_back_with_its_objects() {
    let server = ApiServer::start();
    let version = put_app(&server, "1");
    let caller = Caller::admin(&server);
    let path = format!("{APP}/app");
    let mut watch = caller.watch(&watch_of_app(version)).await;
    server.connections(Order::Refuse);
    assert_eq!(watch.end().await, End::Broken);
    assert!(caller.send(&path).await.expect_err("nobody is there").is_connect());
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
    server.connections(Order::Hold);
    let mut held = tokio::net::TcpStream::connect(server.url().trim_start_matches("https://")).await.expect("taken");
    let answer = tokio::io::AsyncReadExt::read_u8(&mut held);
    let mut answer = std::pin::pin!(answer);
    server.connections(Order::Serve);
    let caller = Caller::admin(&server);
    tokio::select! {
        biased;
        _ = &mut answer => panic!("an answer"),
        (code, _) = caller.try_get(APP) => assert_eq!(code, StatusCode::OK),
    }
}

#[tokio::test]
async fn what_the_server_presents_can_be_wrong() {
    let server = ApiServer::start();
    for presents in [Presents::Expired, Presents::OtherName, Presents::OtherAuthority] {
        server.present(presents);
        let error = Caller::admin(&server).send(APP).await.expect_err("no trust");
        assert!(error.is_connect(), "{presents:?}: {error:?}");
    }
    server.present(Presents::Good);
    assert_eq!(Caller::admin(&server).try_get(APP).await.0, StatusCode::OK);
}

// What it writes down.

#[tokio::test]
async fn requests_are_written_down_with_their_connection() {
    let server = ApiServer::start();
    let caller = Caller::node(&server);
    caller.try_get("/api/v1/nodes/n").await;
    caller.try_get(&watch_of_app(1)).await;
    let old = client_with(tls(&server, None)).build().expect("a client");
    Caller { client: old, server: server.url() }.try_get(APP).await;
    let requests = server.requests();
    let seen: Vec<_> = requests
        .iter()
        .map(|asked| {
            (asked.verb.as_str(), asked.plural.as_str(), asked.name.as_deref(), asked.version, asked.connection)
        })
        .collect();
    assert_eq!(
        seen,
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
async fn requests_against_the_conventions_are_told() {
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
        let judged = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| server.assert_conventions()));
        assert!(judged.is_err(), "{path}");
    }
    server.forget_requests();
    let unknown = json!({"apiVersion": "v1", "kind": "Event", "involvedobject": {}});
    caller.post("/api/v1/namespaces/default/events", &unknown).await;
    let judged = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| server.assert_conventions()));
    let text = judged.expect_err("complaints").downcast::<String>().expect("a text");
    assert!(text.contains(".involvedobject is an unknown field"), "{text}");
}

// Callers.

/// A plain client.
struct Caller {
    client: Client,
    server: String,
}

impl Caller {
    fn admin(server: &ApiServer) -> Self {
        Self::with_certificate(server, &User::new("admin", MASTERS), tomorrow())
    }

    /// The node `n`.
    fn node(server: &ApiServer) -> Self {
        Self::with_certificate(server, &User::node("n"), tomorrow())
    }

    fn with_certificate(server: &ApiServer, user: &User, until: SystemTime) -> Self {
        let client = client_builder(server, Some((user, until))).build().expect("a client");
        Self { client, server: server.url() }
    }

    async fn send(&self, path: &str) -> Result<Response, reqwest::Error> {
        let request = self.client.get(format!("{}{path}", self.server)).header("accept", "application/json");
        request.send().await
    }

    async fn bytes(&self, path: &str) -> Result<Vec<u8>, reqwest::Error> {
        Ok(self.send(path).await?.bytes().await?.to_vec())
    }

    async fn try_get(&self, path: &str) -> (StatusCode, Value) {
        let answer = self.send(path).await.expect("an answer");
        if answer.status().is_success() && path.contains("watch=") {
            return (answer.status(), Value::Null);
        }
        assert_eq!(answer.headers()["content-type"], "application/json");
        (answer.status(), json_of(answer).await)
    }

    async fn get(&self, path: &str) -> Value {
        let (code, body) = self.try_get(path).await;
        assert_eq!(code, StatusCode::OK, "{body}");
        body
    }

    async fn post(&self, path: &str, body: &Value) -> (StatusCode, Value) {
        let request = self.client.post(format!("{}{path}", self.server)).header("accept", "application/json");
        let answer = request.header("content-type", "application/json").body(body.to_string()).send().await;
        let answer = answer.expect("an answer");
        (answer.status(), json_of(answer).await)
    }

    async fn token(&self, audience: &str, seconds: i64, uid: &str) -> (StatusCode, Value) {
        let reference = json!({"apiVersion": "v1", "kind": "Pod", "name": "web", "uid": uid});
        let request = json!({
            "apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest",
            "spec": {"audiences": [audience], "expirationSeconds": seconds, "boundObjectRef": reference},
        });
        self.post("/api/v1/namespaces/default/serviceaccounts/default/token", &request).await
    }

    async fn watch(&self, path: &str) -> Watch {
        let answer = self.send(path).await.expect("an answer");
        assert_eq!(answer.status(), StatusCode::OK);
        Watch { answer, rest: Vec::new() }
    }
}

/// A watch, line by line.
struct Watch {
    answer: Response,
    rest: Vec<u8>,
}

impl Watch {
    /// The next line, if there is a whole one.
    async fn next(&mut self) -> Result<Option<Value>, reqwest::Error> {
        loop {
            if let Some(end) = self.rest.iter().position(|byte| *byte == b'\n') {
                let line: Vec<u8> = self.rest.drain(..=end).collect();
                return Ok(Some(serde_json::from_slice(&line).expect("JSON")));
            }
            let chunk = tokio::time::timeout(PATIENCE, self.answer.chunk()).await.expect("something happens");
            match chunk? {
                Some(chunk) => self.rest.extend_from_slice(&chunk),
                None => return Ok(None),
            }
        }
    }

    async fn line(&mut self) -> Value {
        self.next().await.expect("no break").expect("no end")
    }

    /// What kind of change, and the value of the key `a`.
    async fn change(&mut self) -> (String, Value) {
        let line = self.line().await;
        (line["type"].as_str().expect("a text").to_owned(), line["object"]["data"]["a"].clone())
    }

    async fn is_over(&mut self) -> bool {
        matches!(self.next().await, Ok(None))
    }

    /// How it ends, now.
    async fn end(&mut self) -> End {
        match self.next().await {
            Ok(Some(line)) => panic!("it goes on: {line}"),
            Ok(None) if self.rest.is_empty() => End::Clean,
            Ok(None) => End::MidLine,
            Err(_) => End::Broken,
        }
    }
}

fn client(server: &ApiServer) -> ClientBuilder {
    client_builder(server, None)
}

fn client_with_token(server: &ApiServer, token: &str) -> Result<Client, reqwest::Error> {
    let headers = [("authorization".parse().expect("a name"), format!("Bearer {token}").parse().expect("a value"))];
    client(server).default_headers(headers.into_iter().collect()).build()
}

fn client_builder(server: &ApiServer, certificate: Option<(&User, SystemTime)>) -> ClientBuilder {
    let mut tls = tls(server, certificate);
    tls.alpn_protocols = vec![b"h2".to_vec()];
    client_with(tls)
}

fn client_with(tls: ClientConfig) -> ClientBuilder {
    let client = Client::builder().tls_backend_preconfigured(tls).no_proxy();
    client.redirect(reqwest::redirect::Policy::none()).user_agent("test/1")
}

fn tls(server: &ApiServer, certificate: Option<(&User, SystemTime)>) -> ClientConfig {
    let mut roots = RootCertStore::empty();
    roots.add(CertificateDer::from_pem_slice(server.authority().as_bytes()).expect("a certificate")).expect("a root");
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let config = ClientConfig::builder_with_provider(provider).with_safe_default_protocol_versions();
    let config = config.expect("ring has them").with_root_certificates(roots);
    match certificate {
        Some((user, until)) => {
            let pair = server.client_certificate(user, until);
            let chain = vec![CertificateDer::from_pem_slice(pair.certificate.as_bytes()).expect("a certificate")];
            let key = PrivateKeyDer::from_pem_slice(pair.key.as_bytes()).expect("a key");
            config.with_client_auth_cert(chain, key).expect("they fit")
        }
        None => config.with_no_client_auth(),
    }
}

fn tomorrow() -> SystemTime {
    SystemTime::now() + Duration::from_secs(86_400)
}

async fn json_of(answer: Response) -> Value {
    serde_json::from_slice(&answer.bytes().await.expect("a body")).expect("JSON")
}

// Objects.

fn put_app(server: &ApiServer, value: &str) -> u64 {
    put_config_map(server, "app", value)
}

fn put_config_map(server: &ApiServer, name: &str, value: &str) -> u64 {
    server.put(&format!("{{apiVersion: v1, kind: ConfigMap, metadata: {{name: {name}}}, data: {{a: \"{value}\"}}}}"))
}

/// The pod `web` on node `n`, with the ConfigMap `app`, the claim `data` and a token. Gives its uid.
fn put_pod(server: &ApiServer) -> String {
    server.put("{apiVersion: v1, kind: ServiceAccount, metadata: {name: default}}");
    let token = json!({"serviceAccountToken": {"path": "token", "audience": "vault"}});
    server.put_value(json!({
        "apiVersion": "v1", "kind": "Pod", "metadata": {"name": "web"},
        "spec": {"nodeName": "n", "volumes": [
            {"name": "config", "configMap": {"name": "app"}},
            {"name": "data", "persistentVolumeClaim": {"claimName": "data"}},
            {"name": "token", "projected": {"sources": [token]}},
        ]},
    }));
    let pod = server.object("Pod", "default", "web").expect("it was put");
    pod["metadata"]["uid"].as_str().expect("a uid").to_owned()
}

fn watch_of_app(version: u64) -> String {
    format!("{APP}?watch=true&{OF_APP}&resourceVersion={version}&timeoutSeconds=600")
}

fn names(list: &Value) -> Vec<&str> {
    let items = list["items"].as_array().expect("items");
    items.iter().map(|item| item["metadata"]["name"].as_str().expect("a name")).collect()
}

/// A token of a list, in a query.
fn encode(token: &str) -> String {
    token.replace('=', "%3D").replace('/', "%2F").replace('+', "%2B")
}
