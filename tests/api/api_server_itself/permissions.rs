//! Permissions of users, and the answers to requests without permission.

use super::caller::{Caller, client, client_with_token};
use super::objects::{APP, OF_APP, names, put_app, put_config_map, put_pod, watch_of_app};
use crate::api_server::{ApiServer, User};
use reqwest::StatusCode;
use serde_json::json;
use std::time::Duration;
use std::time::SystemTime;

#[tokio::test]
async fn anonymous_requests_are_refused() {
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
async fn a_node_reads_the_objects_of_its_pods_one_by_one() {
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
async fn other_users_have_the_rights_of_their_rules() {
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
