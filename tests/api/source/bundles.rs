//! ClusterTrustBundles: one by its name, and those of a signer by their labels.

use std::fs;

use serde_json::json;

use crate::common::*;
use crate::rig::Rig;

const BUNDLES: &str = "clustertrustbundles";

pub fn pem(bodies: &[&str]) -> String {
    bodies.iter().map(|body| format!("-----BEGIN CERTIFICATE-----\n{body}\n-----END CERTIFICATE-----\n")).collect()
}

pub fn bundle(name: &str, signer: Option<&str>, tier: &str, bodies: &[&str]) -> String {
    let mut bundle = json!({
        "apiVersion": "certificates.k8s.io/v1beta1", "kind": "ClusterTrustBundle",
        "metadata": {"name": name, "labels": {"tier": tier}}, "spec": {"trustBundle": pem(bodies)},
    });
    if let Some(signer) = signer {
        bundle["spec"]["signerName"] = signer.into();
    }
    bundle.to_string()
}

/// A volume `trust` with the file `ca` of this source.
fn volume(source: &str) -> String {
    format!("[{{name: trust, projected: {{sources: [{{clusterTrustBundle: {{path: ca, {source}}}}}]}}}}]")
}

#[test]
fn cb_01_cb_02_a_bundle_by_name_is_shown_and_followed() {
    let rig = Rig::new(&volume("name: roots"));
    let mut running = rig.start();
    running.wait_log(r#"clustertrustbundle "roots" not found"#);
    rig.server.put(&bundle("roots", None, "a", &["BBBB", "AAAA", "BBBB"]));
    running.wait_ready();
    let file = running.volume("trust").join("ca");
    wait_content(&file, &pem(&["AAAA", "BBBB"]));
    rig.server.put(&bundle("roots", None, "a", &["CCCC"]));
    wait_content(&file, &pem(&["CCCC"]));
}

#[test]
fn cb_01_bundles_of_a_signer_are_picked_by_labels_with_one_watch_for_all() {
    let volumes = "[{name: trust, projected: {sources: [\
        {clusterTrustBundle: {path: ca, signerName: x.io/y, labelSelector: {matchLabels: {tier: live}}}}, \
        {clusterTrustBundle: {path: all, signerName: x.io/y, labelSelector: {}}}, \
        {clusterTrustBundle: {path: none, signerName: x.io/y, optional: true}}]}}]";
    let rig = Rig::new(volumes);
    rig.server.put(&bundle("x.io:y:one", Some("x.io/y"), "live", &["AAAA", "BBBB"]));
    rig.server.put(&bundle("x.io:y:two", Some("x.io/y"), "canary", &["CCCC"]));
    rig.server.put(&bundle("x.io:z:one", Some("x.io/z"), "live", &["DDDD"]));
    let running = rig.run();
    let file = |name: &str| running.volume("trust").join(name);
    let shown = |name: &str| fs::read_to_string(file(name)).expect("a file");
    assert_eq!(shown("ca"), pem(&["AAAA", "BBBB"]));
    assert_eq!(shown("all"), pem(&["AAAA", "BBBB", "CCCC"]));
    assert_eq!(shown("none"), "");
    eventually("there is a watch", || rig.server.count("watch", BUNDLES) == 1);
    assert_eq!(rig.server.lists(BUNDLES), 1);
    rig.server.put(&bundle("x.io:y:two", Some("x.io/y"), "live", &["CCCC"]));
    wait_content(&file("ca"), &pem(&["AAAA", "BBBB", "CCCC"]));
    rig.server.delete("ClusterTrustBundle", "", "x.io:y:one");
    wait_content(&file("all"), &pem(&["CCCC"]));
    let object = rig.object("ClusterTrustBundles of x.io/y").expect("it is in the status");
    assert_eq!(object["watch"], "watching");
}

#[test]
fn cb_03_a_change_that_leaves_the_set_as_it_is_changes_no_file() {
    let volumes = "[{name: trust, projected: {sources: [\
        {clusterTrustBundle: {path: ca, signerName: x.io/y, labelSelector: {}}}, {configMap: {name: app}}]}}]";
    let rig = Rig::new(volumes);
    rig.server.put(&bundle("x.io:y:one", Some("x.io/y"), "a", &["AAAA", "BBBB"]));
    rig.put_config("1");
    let running = rig.run();
    eventually("there is a watch", || rig.server.count("watch", BUNDLES) == 1);
    let (volume, first) = (running.volume("trust"), generation(&running.volume("trust")));
    let object = "ClusterTrustBundles of x.io/y";
    let version = rig.server.put(&bundle("x.io:y:two", Some("x.io/y"), "b", &["BBBB", "AAAA"])).to_string();
    eventually("podfs has the change", || {
        rig.object(object).is_some_and(|entry| entry["resourceVersion"] == version.as_str())
    });
    // A new generation because of the bundles would show before the later change of the ConfigMap.
    assert_eq!(generation(&volume), first);
    rig.put_config("2");
    wait_content(&volume.join("key"), "2");
    assert_eq!(fs::read_to_string(volume.join("ca")).expect("a file"), pem(&["AAAA", "BBBB"]));
}

#[test]
fn cb_01_volumes_wait_for_missing_bundles_unless_they_are_optional() {
    let rig = Rig::new(&volume("signerName: x.io/y, labelSelector: {}"));
    let mut running = rig.start();
    running.wait_log("combination of signerName and labelSelector matched zero ClusterTrustBundles");
    rig.server.put(&bundle("x.io:y:one", Some("x.io/y"), "a", &["AAAA"]));
    running.wait_ready();
    drop(running);
    rig.fixture.kill_all();
    let rig = Rig::new(&volume("signerName: x.io/y, labelSelector: {}, optional: true"));
    let running = rig.run();
    assert_eq!(fs::read_to_string(running.volume("trust").join("ca")).expect("a file"), "");
}

#[test]
fn cb_01_podfs_uses_the_version_of_bundles_that_the_server_has() {
    for unserved in ["certificates.k8s.io/v1", "certificates.k8s.io/v1beta1"] {
        let volumes = "[{name: trust, projected: {sources: [{clusterTrustBundle: {path: ca, name: roots}}, \
            {clusterTrustBundle: {path: all, signerName: x.io/y, labelSelector: {}}}]}}]";
        let rig = Rig::new(volumes);
        rig.server.change_behaviour(|behaviour| behaviour.unserved = Some(unserved));
        rig.server.put(&bundle("roots", None, "a", &["AAAA"]));
        rig.server.put(&bundle("x.io:y:one", Some("x.io/y"), "a", &["BBBB"]));
        let running = rig.run();
        let shown = |name: &str| fs::read_to_string(running.volume("trust").join(name)).expect("a file");
        assert_eq!((shown("ca"), shown("all")), (pem(&["AAAA"]), pem(&["BBBB"])), "{unserved}");
    }
}
