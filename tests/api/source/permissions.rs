//! A service account with the rules of `packaging/examples/rbac.yaml`, in a pod of the cluster (`--in-cluster`).

use std::collections::BTreeSet;
use std::fs;
use std::path::PathBuf;
use std::process::Command;

use serde_json::{Value, json};

use crate::api_server::{InitialEvents, User};
use crate::common::*;
use crate::rig::Rig;
use crate::signer::Signer;

const RULES: &str = include_str!("../../../packaging/examples/rbac.yaml");

/// A volume of each kind for which podfs sends requests to the API server.
const VOLUMES: &str = "[{name: config, configMap: {name: app}}, {name: keys, secret: {secretName: tls}}, \
    {name: late, configMap: {name: late}}, \
    {name: data, persistentVolumeClaim: {claimName: data}}, \
    {name: identity, projected: {sources: [{podCertificate: {signerName: example.com/server, keyType: ED25519, \
        credentialBundlePath: both.pem}}]}}, \
    {name: all, projected: {sources: [{serviceAccountToken: {path: token}}, \
        {clusterTrustBundle: {path: ca, name: roots}}, \
        {downwardAPI: {items: [{path: cpu, \
            resourceFieldRef: {containerName: web, resource: limits.cpu, divisor: 1m}}]}}]}}]";

/// `podfs run --in-cluster` in a mount namespace with its own `/run`, where a pod's credentials are.
const IN_A_POD: &str = r#"
    mount -t tmpfs -o mode=755 none /run
    mkdir -p /run/secrets/kubernetes.io/serviceaccount
    printf %s "$TOKEN" >/run/secrets/kubernetes.io/serviceaccount/token
    printf %s "$AUTHORITY" >/run/secrets/kubernetes.io/serviceaccount/ca.crt
    exec "$@"
"#;

/// Verb and resource of each rule of the manifest's cluster roles for podfs in a pod.
fn rules() -> BTreeSet<(String, String)> {
    ["podfs", "podfs-cluster"].into_iter().flat_map(rules_of).collect()
}

/// Verb and resource of each rule of a cluster role of the manifest.
pub fn rules_of(role: &str) -> BTreeSet<(String, String)> {
    let documents: Vec<Value> = serde_saphyr::from_multiple(RULES).expect("YAML documents");
    let roles = documents.iter().filter(|document| document["kind"] == "ClusterRole");
    let roles = roles.filter(|document| document["metadata"]["name"] == role);
    let texts = |value: &Value| -> Vec<String> {
        value.as_array().expect("a list").iter().map(|text| text.as_str().expect("a text").to_owned()).collect()
    };
    let rules = roles.flat_map(|role| role["rules"].as_array().expect("rules"));
    rules
        .flat_map(|rule| {
            let resources = texts(&rule["resources"]);
            texts(&rule["verbs"])
                .into_iter()
                .flat_map(move |verb| resources.clone().into_iter().map(move |resource| (verb.clone(), resource)))
        })
        .collect()
}

fn put_objects(rig: &Rig) {
    let server = &rig.server;
    rig.put_config("1");
    server.put(&secret("tls", &[("key", "pem")]));
    server.put("{apiVersion: v1, kind: ServiceAccount, metadata: {name: default, namespace: default}}");
    server.put("{apiVersion: v1, kind: Node, metadata: {name: n1}, status: {allocatable: {cpu: 2, memory: 1Gi}}}");
    let bundle = "-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n";
    let bundle = json!({
        "apiVersion": "certificates.k8s.io/v1beta1", "kind": "ClusterTrustBundle",
        "metadata": {"name": "roots"}, "spec": {"trustBundle": bundle},
    });
    server.put(&bundle.to_string());
    let source = rig.fixture.path("source");
    fs::create_dir(&source).expect("a directory");
    server.put(
        "{apiVersion: v1, kind: PersistentVolumeClaim, metadata: {name: data, namespace: default, uid: c-1}, \
         spec: {volumeName: pv-1, accessModes: [ReadWriteOnce]}, status: {phase: Bound}}",
    );
    server.put(&format!(
        "{{apiVersion: v1, kind: PersistentVolume, metadata: {{name: pv-1}}, spec: {{hostPath: {{path: {source:?}}}, \
         accessModes: [ReadWriteOnce], claimRef: {{namespace: default, name: data, uid: c-1}}}}, \
         status: {{phase: Bound}}}}"
    ));
}

#[test]
fn the_example_rules_are_enough_for_podfs_in_a_pod_and_each_is_needed() {
    let rig = Rig::new(VOLUMES);
    // podfs also has to send list requests.
    rig.server.initial_events(InitialEvents::Refused);
    put_objects(&rig);
    let user = User::new("system:serviceaccount:podfs:podfs", "system:serviceaccounts");
    for (verb, resource) in rules() {
        rig.server.permit(&user, &[&verb], &resource);
    }

    let mut podfs = rig.bare_command();
    podfs.args(["--in-cluster", "--pod-name", "default/web", "--node-name", "n1"]);
    let mut command = Command::new("unshare");
    command.args(["--mount", "sh", "-ec", IN_A_POD, "sh"]).arg(podfs.get_program()).args(podfs.get_args());
    let address = rig.server.url();
    let (host, port) =
        address.strip_prefix("https://").and_then(|address| address.rsplit_once(':')).expect("an address");
    command.env("KUBERNETES_SERVICE_HOST", host).env("KUBERNETES_SERVICE_PORT", port);
    command.env("TOKEN", rig.server.new_token(&user)).env("AUTHORITY", rig.server.authority());
    let mut running = rig.fixture.start_command(command);
    eventually("an event reports the missing object", || !rig.server.objects("Event").is_empty());
    rig.server.put(&config_map("late", &[("key", "there")]));
    let signer = Signer::new();
    signer.issue(&rig.server, signer.next(&rig.server), 3600, 7200);
    running.wait_ready();

    let root = PathBuf::from(format!("/proc/{}/root", running.pid()));
    let inside = |volume: &str, file: &str| {
        let volume = running.volume(volume);
        root.join(volume.strip_prefix("/").expect("an absolute path")).join(file)
    };
    for (volume, file, content) in
        [("config", "key", "1"), ("keys", "key", "pem"), ("late", "key", "there"), ("all", "cpu", "2000")]
    {
        wait_content(&inside(volume, file), content);
    }
    assert!(fs::metadata(inside("data", "")).expect("the claim's directory").is_dir());
    assert!(fs::read_to_string(inside("all", "token")).expect("a token").contains('.'));
    rig.put_config("2");
    wait_content(&inside("config", "key"), "2");

    let is_used = |(verb, resource): &(String, String)| rig.server.count(verb, resource) > 0;
    // podfs patches an event only for a repeated problem, which this start does not have.
    let unused: Vec<_> = rules().into_iter().filter(|rule| !is_used(rule) && rule.0 != "patch").collect();
    assert_eq!(unused, [], "rules that podfs does not need");
    let log = running.log();
    assert!(!log.contains("orbidden"), "{log}");
    assert_eq!(running.stop().code(), Some(0));
}
