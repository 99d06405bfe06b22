//! A manifest file that was changed before `podfs run` is killed: the next one serves mounted volumes as they were.

use std::fs;
use std::path::Path;

use tempfile::TempDir;

use super::adoption::kill_supervisor;
use crate::common::identity::identity;
use crate::common::passthrough::disk_directory;
use crate::common::*;

#[test]
fn after_a_kill_volumes_stay_as_they_were_although_the_manifest_was_changed() {
    let (source, other) = (disk_directory(), disk_directory());
    fs::write(other.path().join("other"), "").expect("written");
    let manifest = |disk: &str, config: &str, source: &TempDir| {
        let host = format!("{{name: host, hostPath: {{path: {}, type: Directory}}}}", source.path().display());
        pod(&format!("[{disk}, {{name: config, {config}}}, {host}]"))
    };
    let two = "{name: disk, emptyDir: {}}, {name: gone, emptyDir: {}}";
    let fixture = Fixture::new(&manifest(two, "configMap: {name: app}", &source));
    fixture.write("objects/app.json", &config_map("app", &[("a", "1")]));
    let mut running = fixture.run();
    let names = ["disk", "gone", "config", "host"];
    for volume in ["disk", "gone", "host"] {
        fs::write(running.volume(volume).join("f"), volume).expect("written");
    }
    let identities = |running: &Running| names.map(|name| identity(&running.volume(name)));
    let before = identities(&running);
    let changed = manifest("{name: disk, emptyDir: {medium: Memory}}", "emptyDir: {}", &other);
    fixture.write("pod.yaml", &changed);
    // A second kill finds the record of the second supervisor.
    for _ in 0..2 {
        kill_supervisor(&mut running);
        running = fixture.run();
        for name in ["disk", "config", "host"] {
            running.wait_log(&format!("volume \"{name}\" stays as it was mounted"));
        }
        running.wait_log("volume \"gone\" stays, although the manifest no longer has it");
        assert_eq!(identities(&running), before);
        for volume in ["disk", "gone", "host"] {
            assert_eq!(fs::read_to_string(running.volume(volume).join("f")).expect("a file"), volume);
        }
    }
    fixture.write("objects/app.json", &config_map("app", &[("a", "2")]));
    wait_content(&running.volume("config").join("a"), "2");
    assert!(running.stop().success());
    fixture.assert_nothing_left();
    let mut running = fixture.run();
    assert!(running.volume("host").join("other").exists(), "the new definitions take effect");
    assert_eq!(fs::read_dir(running.volume("config")).expect("a listing").count(), 0);
    assert!(running.stop().success());
    fixture.assert_nothing_left();
}

#[test]
fn after_a_kill_a_corrected_manifest_counts_for_volumes_that_were_never_mounted() {
    let source = disk_directory();
    let manifest = |config: &str, path: &Path| {
        let host = format!("{{name: host, hostPath: {{path: {}, type: Directory}}}}", path.display());
        pod(&format!("[{{name: config, configMap: {{name: {config}}}}}, {host}]"))
    };
    let fixture = Fixture::new(&manifest("typo", &source.path().join("typo")));
    fixture.write("objects/app.json", &config_map("app", &[("a", "1")]));
    let mut running = fixture.start();
    running.wait_log("configmap \"typo\" not found");
    running.wait_log("typo");
    fixture.write("pod.yaml", &manifest("app", source.path()));
    kill_supervisor(&mut running);
    let mut running = fixture.run();
    wait_content(&running.volume("config").join("a"), "1");
    assert!(running.stop().success());
    fixture.assert_nothing_left();
}
