//! Volumes of CSI drivers whose objects come from an API server, read with the credentials of a node.

use std::fs;
use std::path::PathBuf;
use std::time::Duration;

use serde_json::{Value, json};

use super::tokens::service_account;
use crate::api_server::claims;
use crate::common::*;
use crate::csi_driver::{CsiDriver, DRIVER};
use crate::rig::{NODE, Rig};
use podfs::csi::v1::NodePublishVolumeRequest;
use podfs::csi::v1::node_service_capability::rpc::Type;

const CLAIM: &str = "[{name: data, persistentVolumeClaim: {claimName: data}}]";
const TOKENS: &str = "csi.storage.k8s.io/serviceAccount.tokens";

/// A server with the PersistentVolume `pv-1` of handle `h` and all objects that it refers to, without its
/// VolumeAttachment, and a driver on the node.
fn rig(driver: Value) -> (Rig, CsiDriver, PathBuf) {
    let rig = Rig::new(CLAIM);
    let source = rig.fixture.path("source");
    fs::create_dir(&source).expect("a directory");
    fs::write(source.join("file"), "1").expect("written");
    rig.server.put(&service_account("default"));
    rig.server.put(&secret("key", &[("password", "hunter2")]));
    let meta = |name: &str| json!({"name": name});
    let reference = json!({"name": "key", "namespace": "default"});
    for object in [
        json!({"apiVersion": "storage.k8s.io/v1", "kind": "CSIDriver", "metadata": meta(DRIVER), "spec": driver}),
        json!({"apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": {"name": "data", "namespace": "default",
               "uid": "c-1"}, "spec": {"volumeName": "pv-1"}, "status": {"phase": "Bound"}}),
        json!({"apiVersion": "v1", "kind": "PersistentVolume", "metadata": meta("pv-1"), "spec": {
               "accessModes": ["ReadWriteOnce"], "claimRef": {"namespace": "default", "name": "data", "uid": "c-1"},
               "csi": {"driver": DRIVER, "volumeHandle": "h", "nodeStageSecretRef": reference,
                       "nodePublishSecretRef": reference}}}),
    ] {
        rig.server.put_value(object);
    }
    let csi = CsiDriver::start(&rig.fixture.path("root"), &source, &[Type::StageUnstageVolume]);
    (rig, csi, source)
}

/// Attaches the volume to the node, in the role of the cluster's controller.
fn attach(rig: &Rig) {
    let name = format!("csi-{}", podfs::volume::csi::sha256(&["h", DRIVER, NODE]));
    rig.server.put_value(json!({
        "apiVersion": "storage.k8s.io/v1", "kind": "VolumeAttachment", "metadata": {"name": name},
        "spec": {"attacher": DRIVER, "nodeName": NODE, "source": {"persistentVolumeName": "pv-1"}},
        "status": {"attached": true, "attachmentMetadata": {"device": "/dev/sdx"}},
    }));
}

/// The tokens in a text, by audience.
fn tokens(text: &str) -> Value {
    serde_json::from_str(text).expect("JSON")
}

fn of_audience(request: &NodePublishVolumeRequest, audience: &str) -> Value {
    let tokens = tokens(&request.volume_context[TOKENS]);
    claims(tokens[audience]["token"].as_str().expect("a token"))
}

#[track_caller]
fn stop(rig: &Rig, mut running: Running) {
    assert_eq!(running.stop().code(), Some(0), "{}", running.log());
    assert_eq!(rig.fixture.mounts(), Vec::<PathBuf>::new());
}

#[test]
fn cs_04_the_objects_of_a_drivers_volume_are_read_from_the_api_server() {
    let (rig, driver, _) = rig(json!({"attachRequired": true, "podInfoOnMount": true}));
    let mut running = rig.start();
    running.wait_log("is not attached to node \"n1\" yet: ");
    assert_eq!(driver.count("NodeStageVolume"), 0);
    attach(&rig);
    running.wait_ready();
    assert_eq!(fs::read_to_string(running.volume("data").join("file")).expect("shown"), "1");
    let (staged, published) = (driver.staged(), driver.published());
    for (secrets, context) in
        [(&staged.secrets, &staged.publish_context), (&published.secrets, &published.publish_context)]
    {
        assert_eq!((secrets["password"].as_str(), context["device"].as_str()), ("hunter2", "/dev/sdx"));
    }
    assert_eq!(published.volume_context["csi.storage.k8s.io/pod.uid"], rig.uid);
    assert!(!running.log().contains("hunter2"), "a secret is logged");
    stop(&rig, running);
}

#[test]
fn cs_15_a_driver_gets_the_tokens_that_it_wants_and_newer_ones_before_they_end() {
    let requests = json!([{"audience": ""}, {"audience": "vault", "expirationSeconds": 7200}]);
    let (rig, driver, _) = rig(json!({"attachRequired": false, "requiresRepublish": true, "tokenRequests": requests}));
    rig.server.change_behaviour(|behaviour| behaviour.token_lifetime = Some(Duration::from_secs(4)));
    let running = rig.run();
    let first = driver.published();
    let of_vault = of_audience(&first, "vault");
    assert_eq!(of_vault["aud"], json!(["vault"]));
    assert_eq!(of_vault["kubernetes.io"]["pod"], json!({"name": "web", "uid": rig.uid}));
    assert!(tokens(&first.volume_context[TOKENS])["vault"]["expirationTimestamp"].is_string());
    assert_ne!(of_audience(&first, "")["aud"], json!(["vault"]));
    assert!(first.secrets.keys().all(|key| key == "password"), "the driver does not want them there");
    eventually("the driver has newer tokens", || of_audience(&driver.published(), "vault")["jti"] != of_vault["jti"]);
    let token = tokens(&first.volume_context[TOKENS])["vault"]["token"].as_str().expect("a token").to_owned();
    assert!(!running.log().contains(&token), "a token is logged");
    assert!(driver.count("NodeUnpublishVolume") == 0);
    stop(&rig, running);
}

#[test]
fn cs_15_tokens_go_among_the_secrets_of_a_driver_that_wants_them_there() {
    let requests = json!([{"audience": "vault"}]);
    let (rig, driver, _) =
        rig(json!({"attachRequired": false, "tokenRequests": requests, "serviceAccountTokenInSecrets": true}));
    let running = rig.run();
    let published = driver.published();
    assert!(!published.volume_context.contains_key(TOKENS));
    assert!(tokens(&published.secrets[TOKENS])["vault"]["token"].is_string());
    stop(&rig, running);
}
