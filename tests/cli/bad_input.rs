//! Bad arguments and bad manifests: exit code 2, one sentence that says what, where and what to do, and
//! nothing left behind.

use std::ffi::OsStr;
use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::PathBuf;
use std::process::Command;

use nix::sys::signal::Signal;
use nix::sys::stat::Mode;
use nix::unistd::mkfifo;

use crate::common::outcome::{Outcome, finish};
use crate::common::*;

/// Runs podfs on this pod and these files of objects. Checks that podfs refuses with one sentence that has all of
/// `parts`.
#[track_caller]
fn assert_refused(pod: &str, objects: &[(&str, &str)], parts: &[&str]) -> Outcome {
    let fixture = Fixture::new(pod);
    for (name, content) in objects {
        fixture.write(&format!("objects/{name}"), content);
    }
    assert_refuses(&fixture, &[], parts)
}

/// Runs podfs with these further arguments. Checks that podfs refuses with one sentence that has all of `parts`.
#[track_caller]
fn assert_refuses(fixture: &Fixture, arguments: &[&OsStr], parts: &[&str]) -> Outcome {
    let outcome = fixture.refused(fixture.command().args(arguments));
    outcome.says(2, parts);
    fixture.assert_nothing_left();
    outcome
}

#[test]
fn a_line_end_in_a_manifest_begins_no_line_of_the_log_or_of_the_status() {
    let volumes = [
        r#"{name: v, hostPath: {path: "/nowhere\nforged", type: Directory}}"#,
        r#"{name: v, persistentVolumeClaim: {claimName: "c\nforged"}}"#,
        r#"{name: v, configMap: {name: app, items: [{key: "k\nforged", path: p}]}}"#,
        r#"{name: v, csi: {driver: "d\nforged"}}"#,
    ];
    let is_forged = |text: &str| text.lines().any(|line| line.trim_start().starts_with("forged"));
    for volume in volumes {
        let fixture = Fixture::new(&pod(&format!("[{volume}]")));
        fixture.write("objects/app.json", &config_map("app", &[("a", "1")]));
        let mut running = fixture.start();
        running.wait_log("forged");
        let status = fixture.status(&[]);
        running.signal(Signal::SIGTERM);
        running.wait();
        assert!(running.log().contains("\\nforged") || running.log().contains("\\u000aforged"), "{}", running.log());
        assert!(!is_forged(&running.log()), "{volume}: {}", running.log());
        assert!(!is_forged(&status.stdout), "{volume}: {}", status.stdout);
    }
}

#[test]
fn malformed_text_is_refused_with_file_line_and_column() {
    assert_refused("apiVersion: v1\nkind: Pod\nmetadata: [", &[], &["/pod.yaml:3:11: unclosed bracket '['"]);
    assert_refused(&config_pod(), &[("app.yaml", "kind: ConfigMap\ndata: a: b\n")], &["/objects/app.yaml:2:8: "]);
    assert_refused(
        &config_pod(),
        &[("app.yml", "a: 1\na: 2\n")],
        &["/objects/app.yml:2:1: ", "`a` appears twice", "remove one"],
    );
    assert_refused(&config_pod(), &[("app.json", "{\n \"data\": }")], &["/objects/app.json:2:10: expected value"]);
    assert_refused(&config_pod(), &[("app.json", "{\"data\": ")], &["/objects/app.json:1:9: EOF"]);
}

#[test]
fn a_bad_document_that_the_pod_does_not_need_is_named_and_the_rest_is_served() {
    let fixture = Fixture::new(&config_pod());
    let other = "{apiVersion: v1, kind: ConfigMap, metadata: {name: other}, data: {k: [hunter2]}}";
    fixture.write("objects/all.yaml", &format!("{other}\n---\na: [\n---\n{}", config_map("app", &[("a", "1")])));
    let mistyped = "objects/all.yaml, document 1: data.k: must be a string; until then, podfs leaves this document out";
    let unreadable = "objects/all.yaml:3:4: unclosed bracket '['; until then, podfs leaves this document out";
    let rendered = finish(
        Command::new(PODFS)
            .arg("render")
            .arg("--pod")
            .arg(fixture.pod())
            .arg("--objects")
            .arg(fixture.objects())
            .env("PODFS_CONFIG", "/dev/null"),
    );
    assert_eq!(rendered.code, Some(0), "{}", rendered.stderr);
    assert!(rendered.stderr.contains(mistyped) && rendered.stderr.contains(unreadable), "{}", rendered.stderr);
    let running = fixture.run();
    running.wait_log(mistyped);
    running.wait_log(unreadable);
    let volume = running.volume("config");
    wait_content(&volume.join("a"), "1");
    fixture.write("objects/all.yaml", &format!("a: [\n---\n{}", config_map("app", &[("a", "2")])));
    wait_content(&volume.join("a"), "2");
    assert!(!running.log().contains("hunter2"), "{}", running.log());
}

#[test]
fn text_that_is_not_utf_8_is_refused_with_line_and_column() {
    let fixture = Fixture::new(&config_pod());
    let mut bytes = b"apiVersion: v1\nkind: ConfigMap\nmetadata: {name: app}\ndata: {a: ".to_vec();
    bytes.extend(b"\xff}\n");
    fs::write(fixture.path("objects/app.yaml"), bytes).expect("written");
    assert_refuses(&fixture, &[], &["/objects/app.yaml:4:11: the text is not UTF-8", "binaryData as base64"]);
}

#[test]
fn a_pod_with_another_uid_than_the_option_is_refused() {
    let given = config_pod().replace("name: web, labels", "name: web, uid: 0f-given, labels");
    let fixture = Fixture::new(&given);
    let parts = ["pod default/web has the uid 0f-given, and not 1e-other as asked for", "correct its metadata.uid"];
    assert_refuses(&fixture, &["--uid", "1e-other"].map(OsStr::new), &parts);
    let mut command = fixture.command();
    command.args(["--uid", "0f-given"]);
    let mut running = fixture.start_command(command);
    running.wait_log(r#"configmap "app" not found"#);
    assert!(running.stop().success());
}

#[test]
fn a_command_without_a_pod_names_all_ways_to_give_one() {
    for (command, ways) in [
        ("metrics", "<--pod <UID>|--all>"),
        ("upgrade", "<--pod <UID>|--all>"),
        ("run", "<--pod <FILE|->|--pod-name <NAMESPACE/NAME>>"),
        ("render", "<--pod <FILE|->|--pod-name <NAMESPACE/NAME>|pod/NAME>"),
    ] {
        let outcome = finish(Command::new(PODFS).arg(command));
        assert_eq!(outcome.code, Some(2), "{}", outcome.stderr);
        assert!(outcome.stderr.contains(&format!("not provided:\n  {ways}")), "{}", outcome.stderr);
    }
}

#[test]
fn an_address_without_a_host_and_a_time_with_a_unit_get_an_example() {
    let run = |arguments: &[&str]| {
        let outcome = finish(Command::new(PODFS).args(arguments).env("PODFS_CONFIG", "/dev/null"));
        assert_eq!(outcome.code, Some(2), "{}", outcome.stderr);
        outcome.stderr
    };
    let address = |port: &str| format!("127.0.0.1:{port} for this machine alone, 0.0.0.0:{port} for all");
    for command in [&["run", "--pod", "x"][..], &["node", "--manifests", "/x"], &["metrics", "--all"]] {
        for (text, port) in [("19754", "19754"), (":19754", "19754"), ("localhost:80", "80"), ("host", "9753")] {
            let errors = run(&[command, &["--metrics-addr", text]].concat());
            assert!(errors.contains(&address(port)), "{text}: {errors}");
        }
    }
    let errors = run(&["node", "wait", "default/web", "--timeout", "5s"]);
    assert!(errors.contains("it is a number of seconds without a unit, such as 5"), "{errors}");
}

#[test]
fn an_option_of_a_daemon_without_the_one_that_it_belongs_to_is_refused() {
    let fixture = Fixture::new("");
    let refused = |command: &mut Command, option: &str, companion: &str| {
        let sentence = format!("{option} has no effect without {companion}; give {companion}, too");
        finish(command.arg("--manifests").arg(fixture.objects())).says(2, &[&sentence]);
    };
    for (option, value, companion) in [
        ("--csi-allow", "/srv", "--csi"),
        ("--csi-read-as", "pod", "--csi"),
        ("--nri-pods", "all", "--nri"),
        ("--nri-index", "07", "--nri"),
    ] {
        refused(Command::new(PODFS).args(["node", option, value]), option, companion);
    }
    refused(Command::new(PODFS).arg("node").env("PODFS_CSI_ALLOW", "/srv"), "--csi-allow", "--csi");
}

#[test]
fn exactly_one_pod_is_needed() {
    let app = config_map("app", &[]);
    let pods = format!("{}\n---\n{app}\n---\n{}", config_pod(), config_pod());
    assert_refused(
        &pods,
        &[],
        &["/pod.yaml: expected one Pod, found 2", "pod.yaml, document 1", "pod.yaml, document 3"],
    );
    assert_refused(&app, &[], &["/pod.yaml: expected one Pod, found ConfigMap"]);
    assert_refused("", &[], &["/pod.yaml: expected one Pod, found nothing"]);
    assert_refused("---\n# Only a comment.\n", &[], &["/pod.yaml: expected one Pod, found nothing"]);
}

#[test]
fn another_kind_is_no_pod() {
    let deployment = "{apiVersion: apps/v1, kind: Deployment, metadata: {name: web}}";
    assert_refused(deployment, &[], &["/pod.yaml: expected one Pod, found Deployment"]);
    let other_version = config_pod().replace("apiVersion: v1", "apiVersion: v2");
    assert_refused(&other_version, &[], &["/pod.yaml: apiVersion: must be v1 for a Pod, not \"v2\""]);
    assert_refused(
        "kind: Pod\nmetadata: {name: web}\n",
        &[],
        &["/pod.yaml: apiVersion is missing; every object needs apiVersion and kind"],
    );
    assert_refused("just text\n", &[], &["/pod.yaml: "]);
}

#[test]
fn a_path_that_leads_to_no_manifest_is_refused() {
    let fixture = Fixture::new(&config_pod());
    fixture.remove("pod.yaml");
    assert_refuses(&fixture, &[], &["/pod.yaml: there is no such file or directory"]);
    fs::create_dir(fixture.pod()).expect("a directory");
    assert_refuses(&fixture, &[], &["/pod.yaml: is a directory; give a regular file, or - for"]);
    fs::remove_dir(fixture.pod()).expect("removed");
    mkfifo(&fixture.pod(), Mode::S_IRWXU).expect("a pipe");
    assert_refuses(&fixture, &[], &["/pod.yaml: is a pipe; give a regular file, or - for standard input"]);
    fixture.remove("pod.yaml");
    std::os::unix::fs::symlink("nowhere", fixture.pod()).expect("a link");
    assert_refuses(&fixture, &[], &["/pod.yaml: the symbolic link leads to nothing"]);
    fixture.write("pod.yaml", &config_pod());
    let missing = fixture.path("missing.yaml");
    let more = [OsStr::new("--objects"), missing.as_os_str()];
    assert_refuses(&fixture, &more, &["/missing.yaml: there is no such file or directory"]);
}

#[test]
fn an_object_in_two_files_is_refused_with_both_named() {
    let app = config_map("app", &[("a", "1")]);
    let parts = ["ConfigMap default/app is described twice", "/objects/one.yaml", "/objects/two.json", "remove one"];
    assert_refused(&config_pod(), &[("one.yaml", &app), ("two.json", &app)], &parts);
    let pod = format!("{}\n---\n{app}", config_pod());
    let parts = ["ConfigMap default/app is described twice", "/pod.yaml, document 2", "/objects/one.yaml"];
    assert_refused(&pod, &[("one.yaml", &app)], &parts);
}

#[test]
fn every_path_rule_is_applied_to_every_kind_of_volume() {
    // AW-08
    let (long_path, long_name) = ("a/".repeat(2048) + "a", "a".repeat(256));
    for (path, text) in [
        ("", r#"invalid path: must not be empty: """#),
        ("/dev/null", "invalid path: must be relative path: /dev/null"),
        (&long_path, "invalid path: must be less than or equal to 4096 characters"),
        ("hello/../etc/somethingbad", "invalid path: must not contain '..': hello/../etc/somethingbad"),
        (&long_name, "invalid path: filenames must be less than or equal to 255 characters"),
        ("..sneaky.txt", "invalid path: must not start with '..': ..sneaky.txt"),
        ("./..data/a", "invalid path: must not start with '..': ./..data/a"),
    ] {
        let path = format!("path: \"{path}\"");
        let (item, field) =
            (format!("{{key: a, {path}}}"), format!("{{{path}, fieldRef: {{fieldPath: metadata.name}}}}"));
        for (source, place) in [
            (format!("configMap: {{name: o, items: [{item}]}}"), "configMap.items[0].path"),
            (format!("secret: {{secretName: o, items: [{item}]}}"), "secret.items[0].path"),
            (format!("downwardAPI: {{items: [{field}]}}"), "downwardAPI.items[0].path"),
            (
                format!("projected: {{sources: [{{secret: {{name: o, items: [{item}]}}}}]}}"),
                "projected.sources[0].secret.items[0].path",
            ),
        ] {
            let place = format!("/pod.yaml: spec.volumes[0].{place}: volume \"v\": ");
            assert_refused(&pod(&format!("[{{name: v, {source}}}]")), &[], &[&place, text]);
        }
    }
}

#[test]
fn modes_out_of_range_are_refused() {
    // CM-03
    let range = "must be a number between 0 and 0777 (octal), both inclusive; it is ";
    for (source, place, is) in [
        ("configMap: {name: o, defaultMode: 01000}", "configMap.defaultMode", "512, octal 1000"),
        ("secret: {secretName: o, defaultMode: -1}", "secret.defaultMode", "-1"),
        // The leading zero is missing.
        ("secret: {secretName: o, defaultMode: 644}", "secret.defaultMode", "644, octal 1204"),
        ("configMap: {name: o, items: [{key: a, path: a, mode: 1000}]}", "configMap.items[0].mode", "1000, octal 1750"),
        (
            "downwardAPI: {items: [{path: a, mode: 0o1777, fieldRef: {fieldPath: metadata.name}}]}",
            "downwardAPI.items[0].mode",
            "1023, octal 1777",
        ),
    ] {
        let parts = [&format!("/pod.yaml: spec.volumes[0].{place}: volume \"v\": "), range, is];
        assert_refused(&pod(&format!("[{{name: v, {source}}}]")), &[], &parts.map(AsRef::as_ref));
    }
}

#[test]
fn modes_are_read_as_yaml_reads_them() {
    // CM-03
    let modes = ["0644", "0o644", "420"];
    let volume = |mode| format!("{{name: v{mode}, configMap: {{name: app, defaultMode: {mode}}}}}");
    let fixture = Fixture::new(&pod(&format!("[{}]", modes.map(volume).join(", "))));
    fixture.write("objects/app.json", &config_map("app", &[("a", "1")]));
    let running = fixture.run();
    for mode in modes {
        let file = fs::metadata(running.volume(&format!("v{mode}")).join("a")).expect("a file");
        assert_eq!(file.mode() & 0o7777, 0o644, "{mode}");
    }
    let quoted = pod(r#"[{name: v, configMap: {name: app, defaultMode: "0644"}}]"#);
    assert_refused(&quoted, &[], &["/pod.yaml: spec.volumes[0].configMap.defaultMode: "]);
}

#[test]
fn bad_base64_is_refused_with_the_key_and_without_the_value() {
    // SE-02
    let text = "apiVersion: v1\nkind: Secret\nmetadata: {name: tls}\ndata: {pass.word: hunter2!}\n";
    let parts = ["/objects/tls.yaml: data[pass.word]: is not base64", "encode the value, or move it to stringData"];
    let pod = config_pod().replace("configMap: {name: app}", "secret: {secretName: tls}");
    let outcome = assert_refused(&pod, &[("tls.yaml", text)], &parts);
    assert!(!outcome.stderr.contains("hunter2"), "{}", outcome.stderr);
    for wrong in
        ["stringData: {k: [hunter2]}", "data: hunter2", "data: {k: hunter2", "stringData: {k: \"hunter2\n  metadata: }"]
    {
        let text = format!("apiVersion: v1\nkind: Secret\nmetadata: {{name: tls}}\n{wrong}\n");
        let outcome = assert_refused(&pod, &[("tls.yaml", &text)], &["/objects/tls.yaml"]);
        assert!(!outcome.stderr.contains("hunter2"), "{}", outcome.stderr);
    }
}

#[test]
fn objects_that_the_api_would_refuse_are_refused() {
    // CM-09
    let object = |fields: &str| format!("{{apiVersion: v1, kind: ConfigMap, {fields}}}");
    for (fields, parts) in [
        ("metadata: {name: app}, data: {k: v}, binaryData: {k: dg==}", ["binaryData.k: ", "the key is in data, too"]),
        ("metadata: {name: app}, data: {..k: v}", ["data[..k]: ", "a key must not start with '..'"]),
        ("metadata: {name: app}, data: {k: 1}", ["data.k: ", "string"]),
        ("metadata: {}, data: {k: v}", ["metadata.name: ", "a ConfigMap needs a name"]),
    ] {
        let parts = [&["/objects/app.yaml: "], &parts[..]].concat();
        assert_refused(&config_pod(), &[("app.yaml", &object(fields))], &parts);
    }
    let large = config_map("app", &[("a", &"x".repeat((1 << 20) + 1))]);
    assert_refused(&config_pod(), &[("app.json", &large)], &["/objects/app.json: ", "at most 1048576"]);
}

#[test]
fn volumes_that_podfs_cannot_serve_are_named() {
    // DA-13, PR-05
    for (volume, parts) in [
        (
            "{name: data, configmap: {name: app}}",
            ["spec.volumes[0].configmap: volume \"data\": ", "did you mean \"configMap\"?"],
        ),
        ("{name: data, ofALaterApi: [a]}", ["spec.volumes[0].ofALaterApi: volume \"data\": ", "must be a mapping"]),
        (
            "{name: data, configMap: {name: a}, secret: {secretName: a}}",
            ["spec.volumes[0]: volume \"data\": may not specify more than 1 volume type", "configMap and secret"],
        ),
        ("{name: a/b, configMap: {name: a}}", ["spec.volumes[0].name: volume \"a/b\": ", "lower-case letters, digits"]),
        ("{name: .., configMap: {name: a}}", ["spec.volumes[0].name: volume \"..\": ", "lower-case letters, digits"]),
        (
            "{name: v, downwardAPI: {items: [{path: a, fieldRef: {fieldPath: spec.nodeName}}]}}",
            ["spec.volumes[0].downwardAPI.items[0]", "volume \"v\": "],
        ),
        (
            "{name: v, projected: {sources: [{secret: {name: a}, configMap: {name: a}}]}}",
            [
                "spec.volumes[0].projected.sources[0]: volume \"v\": ",
                "may not specify more than 1 volume type per source",
            ],
        ),
    ] {
        let parts = [&["/pod.yaml: "], &parts[..]].concat();
        assert_refused(&pod(&format!("[{volume}]")), &[], &parts);
    }
}

#[test]
fn misspelled_fields_are_named_with_the_field_that_is_meant() {
    for (volume, parts) in [
        ("{name: v, configMap: {nam: app}}", ["configMap.nam: volume \"v\": unknown field", "did you mean \"name\"?"]),
        (
            "{name: v, projected: {sources: [{configMap: {name: app, itms: []}}]}}",
            ["projected.sources[0].configMap.itms: volume \"v\": unknown field", "did you mean \"items\"?"],
        ),
        (
            "{name: v, secret: {secretName: app, items: [{key: a, path: b, Mode: 0400}]}}",
            ["secret.items[0].Mode: volume \"v\": unknown field", "did you mean \"mode\"?"],
        ),
    ] {
        let parts = [&["/pod.yaml: spec.volumes[0]."], &parts[..]].concat();
        assert_refused(&pod(&format!("[{volume}]")), &[], &parts);
    }
    let app = "{apiVersion: v1, kind: ConfigMap, metadata: {name: app}, Data: {a: \"1\"}}";
    let parts = ["/objects/app.yaml: Data: unknown field; did you mean \"data\"?"];
    assert_refused(&config_pod(), &[("app.yaml", app)], &parts);
}

#[test]
fn misspelled_kinds_are_named_with_the_kind_that_is_meant() {
    let parts = ["/pod.yaml: kind: \"pod\" is no kind of object; did you mean \"Pod\"?"];
    assert_refused(&config_pod().replace("kind: Pod", "kind: pod"), &[], &parts);
    let app = config_map("app", &[("a", "1")]).replace("ConfigMap", "configMap");
    let parts = ["/objects/app.yaml: kind: \"configMap\" is no kind of object; did you mean \"ConfigMap\"?"];
    assert_refused(&config_pod(), &[("app.yaml", &app)], &parts);
}

#[test]
fn a_pod_needs_a_name_and_a_uid_that_can_be_a_directory() {
    let nameless = config_pod().replace("name: web, labels", "labels");
    assert_refused(&nameless, &[], &["/pod.yaml: metadata.name: is required"]);
    let escaping = config_pod().replace("name: web, labels", "name: web, uid: ../../etc, labels");
    assert_refused(&escaping, &[], &["/pod.yaml: metadata.uid: must be letters, digits and '-'", "leave it out"]);
}

#[test]
fn a_file_and_a_directory_cannot_have_one_name_and_the_other_volumes_do_not_care() {
    // AW-20
    let volumes = "[{name: bad, configMap: {name: app, items: [{key: k, path: a}, {key: k, path: a/b}]}},
        {name: config, configMap: {name: app}}]";
    let fixture = Fixture::new(&pod(volumes));
    fixture.write("objects/app.json", &config_map("app", &[("k", "1")]));
    let mut running = fixture.start();
    running.wait_log(
        r#"MountVolume.SetUp failed for volume "bad" : "a" of key "k" of configMap "app" is a file, and "a/b" of key "k" of configMap "app" needs a directory in its place"#,
    );
    eventually("the other volume is up", || fixture.mounts().len() == 1);
    assert!(!running.is_ready());
    assert_eq!(running.stop().code(), Some(0));
    fixture.assert_nothing_left();
}

#[test]
fn unknown_flags_and_descriptors_that_are_not_open_are_refused() {
    let fixture = Fixture::new(&config_pod());
    let outcome = fixture.refused(fixture.command().arg("--frobnicate"));
    assert_eq!(outcome.code, Some(2));
    assert!(outcome.stderr.contains("unexpected argument '--frobnicate'"), "{}", outcome.stderr);
    for (number, text) in [("77", "--ready-fd 77: there is no such open descriptor"), ("-1", "--ready-fd")] {
        let outcome = fixture.refused(fixture.command().arg(format!("--ready-fd={number}")));
        assert_eq!(outcome.code, Some(2));
        assert!(outcome.stderr.contains(text), "{}", outcome.stderr);
    }
    fixture.assert_nothing_left();
    assert_eq!(fixture.mounts(), [] as [PathBuf; 0]);
}
