//! Pods with metrics.

use std::fs;
use std::path::PathBuf;

use crate::common::*;

/// A pod with a volume of each sort: `config` of the ConfigMap `app`, `data` of a claim, `host` and `scratch`.
pub fn of_all_sorts() -> Fixture {
    let fixture = Fixture::new("");
    for directory in ["host", "disk"] {
        fs::create_dir(fixture.path(directory)).expect("a directory");
    }
    let volumes = format!(
        "[{{name: config, configMap: {{name: app}}}}, {{name: data, persistentVolumeClaim: {{claimName: claim}}}}, \
         {{name: host, hostPath: {{path: {}}}}}, {{name: scratch, emptyDir: {{sizeLimit: 8Mi}}}}]",
        fixture.path("host").display()
    );
    fixture.write("pod.yaml", &pod(&volumes));
    put(&fixture, "1");
    let claim = "{apiVersion: v1, kind: PersistentVolumeClaim, metadata: {name: claim, uid: c-1}, \
        spec: {volumeName: disk}, status: {phase: Bound}}";
    let volume = format!(
        "{{apiVersion: v1, kind: PersistentVolume, metadata: {{name: disk}}, \
         spec: {{claimRef: {{namespace: default, name: claim, uid: c-1}}, local: {{path: {}}}}}}}",
        fixture.path("disk").display()
    );
    fixture.write("objects/claim.yaml", claim);
    fixture.write("objects/volume.yaml", &volume);
    fixture
}

/// A pod with a volume `config` of the ConfigMap `app`.
pub fn of_config() -> Fixture {
    let fixture = Fixture::new(&config_pod());
    put(&fixture, "1");
    fixture
}

/// Sets the value in the ConfigMap `app`.
pub fn put(fixture: &Fixture, value: &str) {
    fixture.write("objects/app.json", &config_map("app", &[("a", value)]));
}

/// Sets the value in the ConfigMap `app`, and waits until the volume shows it.
#[track_caller]
pub fn show(fixture: &Fixture, running: &Running, value: &str) {
    put(fixture, value);
    wait_content(&config(running), value);
}

/// The file of the volume `config`.
pub fn config(running: &Running) -> PathBuf {
    running.volume("config").join("a")
}

/// The label of a volume.
pub fn volume(name: &str) -> [(&'static str, &str); 1] {
    [("volume", name)]
}
