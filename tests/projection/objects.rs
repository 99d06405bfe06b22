//! ConfigMaps and Secrets as volumes: which keys become which files, their modes, which users may read them.

use std::fs;
use std::path::Path;
use std::process::Command;

use crate::common::outcome::{Outcome, finish};
use crate::common::tree::{Files, files, parse};
use crate::common::*;

/// A running pod with these volumes. All objects are in one manifest file.
fn show(volumes: &str, objects: &[&str]) -> (Fixture, Running) {
    let fixture = Fixture::new(&pod(volumes));
    fixture.write("objects/all.yaml", &objects.join("\n---\n"));
    let running = fixture.run();
    (fixture, running)
}

/// Both kinds of objects with the keys `foo` and `bar`.
const OBJECTS: [&str; 2] = [
    "{apiVersion: v1, kind: ConfigMap, metadata: {name: o}, data: {foo: foo, bar: bar}}",
    "{apiVersion: v1, kind: Secret, metadata: {name: o}, data: {foo: Zm9v}, stringData: {bar: bar}}",
];

/// A running pod with four volumes, which have the same source: a configMap volume, a secret volume, and a projected
/// volume of each of the two kinds.
fn in_every_kind(source: &str, default_mode: &str) -> (Fixture, Running) {
    let volumes = format!(
        "[{{name: config, configMap: {{name: o, {default_mode} {source}}}}},
          {{name: keys, secret: {{secretName: o, {default_mode} {source}}}}},
          {{name: pconfig, projected: {{{default_mode} sources: [{{configMap: {{name: o, {source}}}}}]}}}},
          {{name: pkeys, projected: {{{default_mode} sources: [{{secret: {{name: o, {source}}}}}]}}}}]"
    );
    show(&volumes, &OBJECTS)
}

#[track_caller]
fn assert_in_every_kind(source: &str, default_mode: &str, expected: &str) {
    let (_fixture, running) = in_every_kind(source, default_mode);
    for volume in ["config", "keys", "pconfig", "pkeys"] {
        assert_eq!(files(&running.volume(volume)), parse(expected), "{volume}");
    }
}

#[test]
fn without_items_every_key_is_a_file_of_mode_0644() {
    // CM-01, CM-13, SE-01: no volume has a `defaultMode`, and podfs itself applies the default of the Kubernetes API.
    assert_in_every_kind("", "", "bar=bar; foo=foo");
}

#[test]
fn text_and_bytes_of_a_config_map_both_become_files() {
    // CM-01
    let object =
        "{apiVersion: v1, kind: ConfigMap, metadata: {name: o}, data: {text: t}, binaryData: {bytes: AP8KAA==}}";
    let (_fixture, running) = show("[{name: config, configMap: {name: o}}]", &[object]);
    let read = |key: &str| fs::read(running.volume("config").join(key)).expect("a file");
    assert_eq!((read("text"), read("bytes")), (b"t".to_vec(), vec![0, 0xff, b'\n', 0]));
}

#[test]
fn with_items_only_the_listed_keys_are_there_at_their_paths() {
    // CM-02, SE-01
    assert_in_every_kind("items: [{key: foo, path: path/to/1/2/3/foo.txt}]", "", "path/to/1/2/3/foo.txt=foo");
    assert_in_every_kind(
        "items: [{key: foo, path: path//to/./foo}, {key: bar, path: path/to/bar}, {key: foo, path: again}]",
        "",
        "path/to/foo=foo; path/to/bar=bar; again=foo",
    );
}

#[test]
fn an_items_mode_beats_the_default_mode_which_beats_0644() {
    // CM-03, SE-01
    assert_in_every_kind("", "defaultMode: 0400,", "bar=bar@400; foo=foo@400");
    assert_in_every_kind(
        "items: [{key: foo, path: foo, mode: 0777}, {key: bar, path: bar}]",
        "defaultMode: 0440,",
        "bar=bar@440; foo=foo@777",
    );
}

#[test]
fn optional_sources_show_the_existing_objects() {
    // CM-06, SE-01
    assert_in_every_kind("optional: true, items: [{key: foo, path: foo}, {key: zab, path: zab}]", "", "foo=foo");
    let volumes = "[{name: config, configMap: {name: absent, optional: true}},
        {name: keys, secret: {secretName: absent, optional: true}}]";
    let (_fixture, running) = show(volumes, &OBJECTS);
    for volume in ["config", "keys"] {
        let volume = running.volume(volume);
        assert_eq!(files(&volume), Files::new());
        assert!(volume.join("..data").is_dir(), "an empty volume has a generation, too");
    }
}

#[test]
fn an_optional_object_shows_when_it_comes_and_vanishes_when_it_goes() {
    // CM-07, SE-01
    for (source, object) in [
        ("configMap: {name: app, optional: true}", config_map("app", &[("a", "1")])),
        ("secret: {secretName: app, optional: true}", secret("app", &[("a", "1")])),
        ("projected: {sources: [{secret: {name: app, optional: true}}]}", secret("app", &[("a", "1")])),
    ] {
        let fixture = Fixture::new(&pod(&format!("[{{name: v, {source}}}]")));
        let running = fixture.run();
        let volume = running.volume("v");
        assert_eq!(files(&volume), Files::new(), "{source}");
        fixture.write("objects/app.json", &object);
        wait_content(&volume.join("a"), "1");
        fixture.remove("objects/app.json");
        eventually("the file vanishes", || fs::symlink_metadata(volume.join("a")).is_err());
        assert_eq!(files(&volume), Files::new(), "{source}");
        assert!(!running.log().contains("SetUp failed"), "{}", running.log());
    }
}

#[test]
fn an_immutable_object_keeps_its_content_until_it_was_deleted() {
    // CM-12, MG-03, SE-01
    for (source, object) in [
        ("configMap: {name: app}", config_map as fn(&str, &[(&str, &str)]) -> String),
        ("secret: {secretName: app}", secret),
    ] {
        let immutable = |value| object("app", &[("a", value)]).replace(r#""kind""#, r#""immutable":true,"kind""#);
        let fixture = Fixture::new(&pod(&format!("[{{name: v, {source}}}]")));
        fixture.write("objects/app.json", &immutable("1"));
        let running = fixture.run();
        let file = running.volume("v").join("a");
        fixture.write("objects/app.json", &immutable("2"));
        running.wait_log("field is immutable when `immutable` is set; delete the object and create it again");
        assert_eq!(fs::read_to_string(&file).expect("kept"), "1");
        fixture.remove("objects/app.json");
        running.wait_log(r#""app" not found"#);
        assert_eq!(fs::read_to_string(&file).expect("kept"), "1");
        fixture.write("objects/app.json", &immutable("3"));
        wait_content(&file, "3");
    }
}

#[test]
fn an_object_of_another_namespace_is_never_shown() {
    // SE-03
    let fixture =
        Fixture::new(&pod("[{name: config, configMap: {name: app}}, {name: keys, secret: {secretName: app}}]"));
    let in_other_namespace =
        |manifest: String| manifest.replace(r#""name":"app""#, r#""name":"app","namespace":"other""#);
    let objects = [config_map("app", &[("a", "theirs")]), secret("app", &[("a", "theirs")])];
    fixture.write("objects/other.yaml", &objects.map(in_other_namespace).join("\n---\n"));
    let mut running = fixture.start();
    running.wait_log(r#"configmap "app" not found"#);
    running.wait_log(r#"secret "app" not found"#);
    let objects = [config_map("app", &[("a", "ours")]), secret("app", &[("a", "ours")])];
    fixture.write("objects/own.yaml", &objects.join("\n---\n"));
    running.wait_ready();
    for volume in ["config", "keys"] {
        assert_eq!(fs::read_to_string(running.volume(volume).join("a")).expect("a file"), "ours");
    }
}

/// Reads a file of a volume as the user `nobody`. `groups` is the option of `setpriv` that sets the supplementary
/// groups.
fn read_as_nobody(groups: &str, volume: &Path, file: &str) -> Outcome {
    let mut command = Command::new("setpriv");
    command.args(["--reuid=65534", "--regid=65534", groups, "cat", file]);
    finish(command.current_dir(volume))
}

#[test]
fn two_volumes_show_one_config_map_and_every_user_reads_0644() {
    // CM-10
    let volumes = "[{name: one, configMap: {name: o}}, {name: two, configMap: {name: o, defaultMode: 0600}}]";
    let (fixture, running) = show(volumes, &OBJECTS);
    let (one, two) = (running.volume("one"), running.volume("two"));
    assert_eq!(read_as_nobody("--clear-groups", &one, "foo").stdout, "foo");
    let refused = read_as_nobody("--clear-groups", &two, "foo");
    assert!(refused.stderr.contains("Permission denied") && refused.stdout.is_empty(), "{}", refused.stderr);
    fixture.write("objects/all.yaml", &config_map("o", &[("foo", "new")]));
    wait_content(&one.join("foo"), "new");
    wait_content(&two.join("foo"), "new");
}

#[test]
fn the_pods_group_reads_a_secret_of_mode_0440_and_others_do_not() {
    // SE-04
    let pod = pod("[{name: keys, secret: {secretName: o, defaultMode: 0440}}]");
    let fixture = Fixture::new(&pod.replace("spec:\n", "spec:\n  securityContext: {fsGroup: 1001}\n"));
    fixture.write("objects/all.yaml", OBJECTS[1]);
    let running = fixture.run();
    let volume = running.volume("keys");
    assert_eq!(read_as_nobody("--groups=1001", &volume, "foo").stdout, "foo");
    let refused = read_as_nobody("--clear-groups", &volume, "foo");
    assert!(refused.stderr.contains("Permission denied") && refused.stdout.is_empty(), "{}", refused.stderr);
}
