//! The values of labels.

use std::collections::BTreeSet;

use podfs::metrics::families::POD_LABELS;
use podfs::metrics::{FAMILIES, Family};
use serde_json::{Value, json};

use crate::common::outcome::finish;
use crate::common::*;
use crate::metrics::pods::{of_all_sorts, put, volume};
use crate::metrics::scrape::Scrape;

/// A value with all characters and words that have a meaning in the text formats.
const HOSTILE: &str = "a\"b\\c\nd{e=\"f\"} 1 # EOF\n# EOF\u{7f}ü";

#[test]
fn hostile_names_are_labels_and_nothing_else() {
    let token = json!([{"serviceAccountToken": {"path": "token", "audience": HOSTILE}}]);
    let manifest = json!({
        "apiVersion": "v1", "kind": "Pod",
        "metadata": {"name": "web", "namespace": "shop", "uid": "hostile-labels"},
        "spec": {
            "containers": [{"name": "web", "image": "web"}],
            "volumes": [
                {"name": "config", "configMap": {"name": "app", "optional": true}},
                {"name": "access", "projected": {"sources": token}},
                {"name": "data", "persistentVolumeClaim": {"claimName": HOSTILE}},
            ],
        },
    });
    let request = json!({
        "apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest", "spec": {"audiences": [HOSTILE]},
        "status": {"token": "hunter2", "expirationTimestamp": "2030-03-17T17:46:40Z"},
    });
    let fixture = Fixture::new(&manifest.to_string());
    let mut command = fixture.command();
    command.arg("--push");
    let running = fixture.start_command(command);
    running.wait_log("failed to fetch token: it was not pushed");
    fixture.write("push.json", &request.to_string());
    let pushed =
        finish(fixture.operator("push").args(["--pod", "hostile-labels", "-f"]).arg(fixture.path("push.json")));
    assert_eq!(pushed.code, Some(0), "{}", pushed.stderr);
    let labels_of_token = |scrape: &Scrape| {
        let is_of_token = |(name, ..): &(String, Value, f64)| name == "podfs_token_expiration_timestamp_seconds";
        scrape.strictly().into_iter().find(is_of_token).map(|(_, labels, _)| labels)
    };
    let mut labels = None;
    eventually("the token has a metric", || {
        labels = labels_of_token(&fixture.scrape());
        labels.is_some()
    });
    let [namespace, pod, uid] = POD_LABELS;
    let values = [namespace, pod, uid, "audience"].map(|label| labels.as_ref().expect("a token")[label].clone());
    // The names of the pod cannot be hostile, because podfs accepts only DNS names.
    assert_eq!(values, ["shop", "web", "hostile-labels", HOSTILE]);
}

#[test]
fn the_scrape_has_exactly_the_described_families() {
    let fixture = of_all_sorts();
    let running = fixture.run();
    fixture.remove("objects/app.json");
    fixture.scrape_until("podfs_volume_refresh_errors_total", &volume("config"), |errors| errors > 0.0);
    put(&fixture, "2");
    wait_content(&running.volume("config").join("a"), "2");
    let scrape = fixture.scrape();
    for (name, labels, _) in scrape.strictly() {
        let ends = ["", "_bucket", "_sum", "_count"];
        let family = ends.iter().find_map(|end| Family::find(name.strip_suffix(end)?)).expect(&name);
        for label in labels.as_object().expect("labels").keys().map(String::as_str) {
            let known = POD_LABELS.contains(&label) || family.labels.contains(&label) || label == "le";
            assert!(known, "{name} has a label {label:?}");
        }
    }
    // Metrics of an API server and of a CSI driver exist only if the pod has one, and metrics of a node only in podfs node.
    let of_server = |name: &str| name.starts_with("podfs_source_") || name.starts_with("podfs_token_");
    let of_driver = |name: &str| name == "podfs_volume_stats_health_status_abnormal";
    // Metrics of errors exist only after the first error.
    let of_errors = |name: &str| ["podfs_volume_source_errors_total", "podfs_volume_disk_errors"].contains(&name);
    let of_node = |name: &str| {
        [
            "csi_operations_",
            "podfs_local_volume",
            "podfs_nri_",
            "reconstruct_volume_operations_",
            "volume_manager_",
            "volume_operation_",
        ]
        .iter()
        .any(|all| name.starts_with(all))
    };
    let all: BTreeSet<_> = FAMILIES.iter().map(|family| family.name.to_owned()).collect();
    let expected: BTreeSet<_> = all
        .into_iter()
        .filter(|name| !of_server(name) && !of_driver(name) && !of_errors(name) && !of_node(name))
        .collect();
    assert_eq!(scrape.families(), expected);
}
