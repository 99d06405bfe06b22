//! Tokens of the pod's service account: the requests, and the time of the next one.

use std::fs;
use std::path::PathBuf;
use std::time::Duration;

use serde_json::{Value, json};

use crate::api_server::{Answer, ApiRequest, Order, claims};
use crate::common::*;
use crate::rig::{NODE, Rig};

const TOKENS: &str = "serviceaccounts/token";

/// The volume that a cluster adds to each pod: a token, the cluster's CA, and the namespace.
const ACCESS: &str = "[{name: access, projected: {defaultMode: 292, sources: [{serviceAccountToken: {path: token}}, \
    {configMap: {name: kube-root-ca.crt, items: [{key: ca.crt, path: ca.crt}]}}, \
    {downwardAPI: {items: [{path: namespace, fieldRef: {fieldPath: metadata.namespace}}]}}]}}]";

/// A server with the pod's service account. The server issues tokens with a lifetime of so many seconds.
fn rig(volumes: &str, lifetime: Option<u64>) -> Rig {
    let rig = Rig::new(volumes);
    rig.server.put(&service_account("default"));
    rig.server.put(&config_map("kube-root-ca.crt", &[("ca.crt", "anchors")]));
    rig.server.change_behaviour(|behaviour| behaviour.token_lifetime = lifetime.map(Duration::from_secs));
    rig
}

pub fn service_account(name: &str) -> String {
    json!({"apiVersion": "v1", "kind": "ServiceAccount", "metadata": {"name": name, "namespace": "default"}})
        .to_string()
}

/// The file of the volume `access`.
fn token(running: &Running) -> PathBuf {
    running.volume("access").join("token")
}

/// The claims of the token in a file.
fn claims_of(file: &PathBuf) -> Value {
    claims(&fs::read_to_string(file).expect("a token"))
}

fn serial(file: &PathBuf) -> u64 {
    claims_of(file)["jti"].as_str().and_then(|serial| serial.parse().ok()).expect("a number")
}

fn requests(rig: &Rig) -> Vec<ApiRequest> {
    rig.server.requests().into_iter().filter(|request| request.is("create", TOKENS)).collect()
}

#[test]
fn tk_01_tk_02_a_token_is_requested_as_the_volume_says_and_bound_to_the_pod() {
    let volumes = "[{name: access, projected: {defaultMode: 292, sources: [{serviceAccountToken: {path: token}}, \
        {serviceAccountToken: {path: again}}, \
        {serviceAccountToken: {path: vault, audience: vault, expirationSeconds: 7200}}]}}]";
    let rig = rig(volumes, None);
    let running = rig.run();
    let file = token(&running);
    let of_pod = &claims_of(&file)["kubernetes.io"]["pod"];
    assert_eq!(*of_pod, json!({"name": "web", "uid": rig.uid}));
    assert_eq!(claims_of(&running.volume("access").join("vault"))["aud"], json!(["vault"]));
    assert_eq!(fs::read(&file).expect("a file"), fs::read(running.volume("access").join("again")).expect("a file"));
    let mode = std::os::unix::fs::PermissionsExt::mode(&fs::metadata(&file).expect("a file").permissions());
    assert_eq!(mode & 0o7777, 0o444);
    let mut specs: Vec<Value> = requests(&rig).into_iter().map(|request| request.body["spec"].clone()).collect();
    specs.sort_by_key(|spec| spec["expirationSeconds"].as_i64());
    let bound = json!({"apiVersion": "v1", "kind": "Pod", "name": "web", "uid": rig.uid});
    assert_eq!(
        specs,
        [
            json!({"audiences": [], "expirationSeconds": 3600, "boundObjectRef": bound}),
            json!({"audiences": ["vault"], "expirationSeconds": 7200, "boundObjectRef": bound}),
        ]
    );
}

#[test]
fn tk_03_the_token_of_a_pod_with_one_user_is_that_users_alone() {
    let rig = rig(ACCESS, None);
    rig.server.put(&format!(
        "{{apiVersion: v1, kind: Pod, metadata: {{name: web, namespace: default, uid: {}}}, spec: {{nodeName: {NODE}, \
         serviceAccountName: app, securityContext: {{runAsUser: 1000}}, \
         containers: [{{name: web, image: web}}], volumes: {ACCESS}}}}}",
        rig.uid
    ));
    rig.server.put(&service_account("app"));
    let running = rig.run();
    let metadata = fs::metadata(token(&running)).expect("a file");
    let mode = std::os::unix::fs::PermissionsExt::mode(&metadata.permissions());
    assert_eq!((mode & 0o7777, std::os::unix::fs::MetadataExt::uid(&metadata)), (0o600, 1000));
    assert_eq!(claims_of(&token(&running))["sub"], "system:serviceaccount:default:app");
}

#[test]
fn tk_05_tk_09_a_token_is_replaced_before_it_ends_in_one_switch_with_its_other_sources() {
    let rig = rig(ACCESS, Some(4));
    let running = rig.run();
    let file = token(&running);
    let (first, before) = (serial(&file), generation(&running.volume("access")));
    eventually("there is another token", || serial(&file) > first);
    assert_ne!(generation(&running.volume("access")), before);
    for (name, content) in [("ca.crt", "anchors"), ("namespace", "default")] {
        assert_eq!(fs::read_to_string(running.volume("access").join(name)).expect("a file"), content);
    }
}

#[test]
fn tk_10_a_token_is_replaced_while_the_pod_terminates() {
    let rig = rig(ACCESS, Some(4));
    let running = rig.run();
    rig.wait_watched("Pod", "web");
    let mut pod = rig.server.object("Pod", "default", "web").expect("a pod");
    pod["metadata"]["deletionTimestamp"] = json!("2030-01-01T00:00:00Z");
    pod["metadata"]["deletionGracePeriodSeconds"] = json!(3600);
    rig.server.put_value(pod);
    let (file, before) = (token(&running), requests(&rig).len());
    let first = serial(&file);
    eventually("there is another token", || serial(&file) > first);
    assert!(requests(&rig).len() > before);
}

#[test]
fn tk_06_a_token_that_cannot_be_replaced_stays_and_is_complained_about_when_it_has_expired() {
    let rig = rig(ACCESS, Some(4));
    let running = rig.run();
    let (file, first) = (token(&running), generation(&running.volume("access")));
    let content = fs::read_to_string(&file).expect("a token");
    rig.server.fail_always("create", TOKENS, Answer::Error(500));
    let title = "Token default/default, 3600 s";
    eventually("it cannot be replaced", || rig.object(title).is_some_and(|token| token["trouble"].is_string()));
    assert_eq!(rig.reason("access"), None);
    running.wait_log("failed to fetch token: the token has expired and refresh failed: ");
    eventually("the reason is reported", || {
        rig.reason("access").is_some_and(|reason| reason.starts_with("failed to fetch token: "))
    });
    assert_eq!((fs::read_to_string(&file).expect("a token"), generation(&running.volume("access"))), (content, first));
    let last = serial(&file);
    rig.server.heal();
    eventually("there is another token", || serial(&file) > last);
}

#[test]
fn a_volume_waits_for_a_refused_token_with_the_words_of_the_server() {
    let rig = Rig::new(ACCESS);
    rig.server.put(&config_map("kube-root-ca.crt", &[("ca.crt", "anchors")]));
    let mut running = rig.start();
    running.wait_log("failed to fetch token: cannot create serviceaccounts/default/token in namespace default");
    let words = r#"serviceaccounts \"default\" not found"#;
    eventually("the reason is reported", || rig.reason("access").is_some_and(|reason| reason.contains(words)));
    rig.server.put(&service_account("default"));
    running.wait_ready();
    assert_eq!(claims_of(&token(&running))["kubernetes.io"]["serviceaccount"]["name"], "default");
}

#[test]
fn a_token_that_was_issued_expired_is_not_shown() {
    let rig = rig(ACCESS, Some(0));
    let mut running = rig.start();
    running.wait_log("the server issued a token that has expired already");
    assert!(!running.is_ready());
    rig.server.change_behaviour(|behaviour| behaviour.token_lifetime = None);
    running.wait_ready();
}

#[test]
fn a_token_is_requested_when_the_server_is_back() {
    let rig = rig(ACCESS, Some(6));
    let running = rig.run();
    let (file, first) = (token(&running), serial(&token(&running)));
    rig.server.connections(Order::Refuse);
    running.wait_log("is unreachable");
    rig.server.connections(Order::Serve);
    eventually("there is another token", || serial(&file) > first);
}

#[test]
fn tk_08_another_podfs_asks_for_tokens_of_its_own_and_tokens_are_never_logged() {
    let rig = rig(ACCESS, None);
    let mut running = rig.run();
    let (file, first) = (token(&running), serial(&token(&running)));
    let secret = fs::read_to_string(&file).expect("a token");
    rig.fixture.kill_supervisor(&mut running);
    let running = rig.run();
    eventually("there is another token", || serial(&file) > first);
    assert!(!running.log().contains(&secret));
    let watch = rig.object("Token default/default, 3600 s").map(|token| token["watch"].clone());
    assert_eq!(watch, Some("issued".into()));
}

#[test]
fn tk_07_another_service_account_gets_tokens_of_its_own() {
    let rig = rig(ACCESS, None);
    rig.server.put(&service_account("app"));
    let manifest = |account: &str| {
        format!(
            "{{apiVersion: v1, kind: Pod, metadata: {{name: web, namespace: default, uid: {}}}, spec: {{nodeName: {NODE}, \
             serviceAccountName: {account}, containers: [{{name: web, image: web}}], volumes: {ACCESS}}}}}",
            rig.uid
        )
    };
    let account_of = |file: &PathBuf| claims_of(file)["kubernetes.io"]["serviceaccount"]["name"].clone();
    rig.fixture.write("pod.yaml", &manifest("default"));
    let mut command = rig.bare_command();
    command.arg("--pod").arg(rig.fixture.pod()).arg("--kubeconfig").arg(&rig.kubeconfig);
    let mut running = rig.fixture.start_command(command);
    running.wait_ready();
    assert_eq!(account_of(&token(&running)), "default");
    rig.server.put(&manifest("app"));
    rig.fixture.write("pod.yaml", &manifest("app"));
    eventually("there is a token of the other account", || account_of(&token(&running)) == "app");
}

#[test]
fn tk_07_an_account_that_was_created_again_has_its_own_token_when_the_next_is_due() {
    let rig = rig(ACCESS, Some(6));
    let running = rig.run();
    let account = |file: &PathBuf| claims_of(file)["kubernetes.io"]["serviceaccount"]["uid"].clone();
    let (file, first) = (token(&running), account(&token(&running)));
    rig.server.delete("ServiceAccount", "default", "default");
    rig.server.put(&service_account("default"));
    eventually("there is a token of the new account", || account(&file) != first);
}

#[test]
fn pr_01_a_token_and_the_other_kinds_of_sources_are_in_one_volume_and_switch_together() {
    let volumes = "[{name: access, projected: {sources: [{serviceAccountToken: {path: token}}, \
        {configMap: {name: app}}, {secret: {name: tls}}, {clusterTrustBundle: {path: ca, name: roots}}, \
        {downwardAPI: {items: [{path: name, fieldRef: {fieldPath: metadata.name}}]}}]}}]";
    let rig = rig(volumes, None);
    let certificate = "-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n";
    let bundle = json!({
        "apiVersion": "certificates.k8s.io/v1beta1", "kind": "ClusterTrustBundle",
        "metadata": {"name": "roots"}, "spec": {"trustBundle": certificate},
    });
    rig.server.put(&bundle.to_string());
    rig.server.put(&secret("tls", &[("key", "pem")]));
    rig.server.put(&config_map("app", &[("config", "1")]));
    let running = rig.run();
    let volume = running.volume("access");
    let token = fs::read_to_string(token(&running)).expect("a token");
    for (file, content) in [("config", "1"), ("key", "pem"), ("ca", certificate), ("name", "web")] {
        assert_eq!(fs::read_to_string(volume.join(file)).expect("a file"), content, "{file}");
    }
    let first = generation(&volume);
    rig.wait_watched("ConfigMap", "app");
    rig.server.put(&config_map("app", &[("config", "2")]));
    wait_content(&volume.join("config"), "2");
    assert_ne!(generation(&volume), first);
    for (file, content) in [("key", "pem"), ("ca", certificate), ("name", "web"), ("token", &token)] {
        assert_eq!(fs::read_to_string(volume.join(file)).expect("a file"), content, "{file}");
    }
}
