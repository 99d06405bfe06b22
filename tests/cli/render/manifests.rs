//! Manifests: volumes that would wait, containers, pod templates, and bad input.

use std::fs::{self, Permissions};
use std::os::unix::fs::PermissionsExt;
use std::process::Command;

use serde_json::Value;

use super::render;
use crate::common::outcome::finish;
use crate::common::packages::top;
use crate::common::*;
use crate::manual::source::sources;

#[test]
fn a_volume_that_would_wait_fails_with_the_kubelets_reason() {
    let volumes = "[{name: config, configMap: {name: app}}, {name: keys, secret: {secretName: keys}},
        {name: fine, downwardAPI: {items: [{path: name, fieldRef: {fieldPath: metadata.name}}]}}]";
    let fixture = Fixture::new(&pod(volumes));
    let first = "MountVolume.SetUp failed for volume \"config\" : configmap \"app\" not found";
    let second = "MountVolume.SetUp failed for volume \"keys\" : secret \"keys\" not found";
    let outcome = fixture.render(&[]);
    outcome.says(1, &[second]);
    assert!(outcome.stderr.starts_with(&format!("podfs: {first}\n")), "{}", outcome.stderr);
    assert!(outcome.stdout.contains("\nconfig  configMap waits: configmap \"app\" not found\n"), "{}", outcome.stdout);
    assert!(outcome.stdout.contains("| web\n"), "the others are shown: {}", outcome.stdout);
    let document: Value = serde_json::from_str(&fixture.render(&["--output", "json"]).stdout).expect("a document");
    assert_eq!(document["volumes"][0]["reason"], "configmap \"app\" not found");
    // podfs writes no directory and no archive if a volume would be missing in it.
    let out = fixture.path("out");
    fixture.render(&["--output", &format!("dir:{}", out.display())]).says(1, &[second]);
    assert!(!out.exists());
    let outcome = fixture.render(&["--output", "tar"]);
    outcome.says(1, &[second]);
    assert_eq!(outcome.stdout, "");
    // With the objects, the same command succeeds.
    fixture.write("objects/app.yaml", &config_map("app", &[("a", "b")]));
    fixture.write("objects/keys.yaml", &secret("keys", &[("a", "b")]));
    assert_eq!(fixture.render(&[]).code, Some(0));
}

#[test]
fn a_container_has_its_mount_paths() {
    let pod = "{apiVersion: v1, kind: Pod, metadata: {name: web}, spec: {
        initContainers: [{name: first, volumeMounts: [{name: keys, mountPath: /keys}]}],
        containers: [{name: web, volumeMounts: [
            {name: keys, mountPath: /etc/web/keys}, {name: config, mountPath: /etc/web/},
            {name: config, mountPath: /etc/one.conf, subPath: sub/one.conf},
            {name: config, mountPath: /srv/sub, subPath: sub},
            {name: config, mountPath: /srv/expression, subPathExpr: $(NAME)}]},
          {name: typing, volumeMounts: [{name: config, mountPath: /x, subPath: tpyo}]}],
        volumes: [{name: config, configMap: {name: app, items: [{key: a, path: sub/one.conf}, {key: a, path: keys}]}},
          {name: keys, secret: {secretName: keys}}]}}";
    let fixture = Fixture::new(pod);
    fixture.write("objects/app.yaml", &config_map("app", &[("a", "alpha")]));
    fixture.write("objects/keys.yaml", &secret("keys", &[("k", "kappa")]));
    let outcome = fixture.render(&["--container", "web", "--output", "tar", "--reveal"]);
    assert_eq!(outcome.code, Some(0), "{}", outcome.stderr);
    let archive = fixture.path("volumes.tar");
    fs::write(&archive, outcome.stdout).expect("written");
    let out = fixture.path("out");
    let written = fixture.render(&["--container", "web", "--reveal", "--output", &format!("dir:{}", out.display())]);
    assert_eq!(written.code, Some(0), "{}", written.stderr);
    let extracted = fixture.path("extracted");
    fs::create_dir(&extracted).expect("a directory");
    let mut tar = Command::new("tar");
    assert_eq!(finish(tar.arg("-xf").arg(&archive).arg("-C").arg(&extracted)).code, Some(0));
    for root in [out, extracted] {
        let read = |path: &str| fs::read_to_string(root.join(path)).expect(path);
        assert_eq!(read("etc/one.conf"), "alpha");
        assert_eq!(read("srv/sub/one.conf"), "alpha");
        assert_eq!(read("etc/web/sub/one.conf"), "alpha");
        assert_eq!(read("etc/web/keys/k"), "kappa", "the inner volume covers the key of that name");
        assert!(!root.join("srv/expression").exists());
    }
    let tree = fixture.render(&["--container", "web"]).stdout;
    assert!(tree.starts_with("pod default/web, container web\n\n/etc/one.conf  configMap config\n"), "{tree}");
    assert!(tree.contains("/srv/expression  configMap config: subPathExpr $(NAME)"), "{tree}");
    assert_eq!(fixture.render(&["--container", "first"]).code, Some(0));
    fixture.render(&["--container", "typing"]).says(1, &["subPath \"tpyo\" does not exist in the volume"]);
    let parts = ["the pod has no container \"wbe\"; its containers are first, web, typing"];
    fixture.render(&["--container", "wbe"]).says(2, &parts);
}

#[test]
fn a_list_may_hold_the_pod_or_its_workload_and_the_objects() {
    let object = config_map("app", &[("a", "alpha")]);
    let volumes = "spec: {volumes: [{name: config, configMap: {name: app}}], containers: [{name: a}]}";
    for (pod, heading) in [
        (format!("{{apiVersion: v1, kind: Pod, metadata: {{name: web}}, {volumes}}}"), "pod default/web\n"),
        (
            format!(
                "{{apiVersion: apps/v1, kind: DaemonSet, metadata: {{name: logs}}, spec: {{template: {{{volumes}}}}}}}"
            ),
            "pod default/logs\n",
        ),
    ] {
        let fixture = Fixture::new(&format!("{{apiVersion: v1, kind: List, items: [{object}, {pod}]}}"));
        let outcome = fixture.render(&[]);
        assert_eq!(outcome.code, Some(0), "{}", outcome.stderr);
        assert!(outcome.stdout.starts_with(heading) && outcome.stdout.contains("| alpha\n"), "{}", outcome.stdout);
    }
}

/// A workload of this kind, whose template mounts the ConfigMap `app`.
fn workload(version: &str, kind: &str) -> String {
    let template = "{metadata: {name: ignored, labels: {app: web}}, spec: {
        containers: [{name: a, volumeMounts: [{name: config, mountPath: /a}]},
            {name: b, volumeMounts: [{name: config, mountPath: /b}]}],
        volumes: [{name: config, configMap: {name: app}},
            {name: about, downwardAPI: {items: [{path: name, fieldRef: {fieldPath: metadata.name}}]}}]}}";
    let spec = match kind {
        "CronJob" => format!("{{jobTemplate: {{spec: {{template: {template}}}}}}}"),
        _ => format!("{{template: {template}, volumeClaimTemplates: [{{metadata: {{name: data}}}}]}}"),
    };
    let spec = if kind == "StatefulSet" {
        spec
    } else {
        spec.replace(", volumeClaimTemplates: [{metadata: {name: data}}]", "")
    };
    format!("{{apiVersion: {version}, kind: {kind}, metadata: {{name: web, namespace: shop}}, spec: {spec}}}")
}

#[test]
fn pod_templates_are_rendered_as_the_pods_they_make() {
    let objects = config_map("app", &[("a", "alpha")]).replace("{\"name\"", "{\"namespace\":\"shop\",\"name\"");
    for (version, kind) in [
        ("apps/v1", "Deployment"),
        ("apps/v1", "StatefulSet"),
        ("apps/v1", "DaemonSet"),
        ("apps/v1", "ReplicaSet"),
        ("v1", "ReplicationController"),
        ("batch/v1", "Job"),
        ("batch/v1", "CronJob"),
    ] {
        // A file may have objects besides the workload.
        let fixture = Fixture::new(&format!("{}\n---\n{objects}", workload(version, kind)));
        let outcome = fixture.render(&[]);
        assert_eq!(outcome.code, Some(0), "{kind}: {}", outcome.stderr);
        let name = if kind == "StatefulSet" { "web-0" } else { "web" };
        assert!(outcome.stdout.starts_with(&format!("pod shop/{name}\n")), "{kind}: {}", outcome.stdout);
        assert!(outcome.stdout.contains("| alpha\n"), "{kind}: {}", outcome.stdout);
        assert!(outcome.stdout.contains(&format!("| {name}\n")), "{kind}: {}", outcome.stdout);
        let claim = "data  persistentVolumeClaim: the volume of claim data-web-0\n";
        assert_eq!(outcome.stdout.contains(claim), kind == "StatefulSet", "{kind}: {}", outcome.stdout);
        for container in ["a", "b"] {
            assert_eq!(fixture.render(&["--container", container]).code, Some(0), "{kind}");
        }
    }
}

#[test]
fn a_bad_pod_template_is_refused_with_its_workload() {
    let deployment = workload("apps/v1", "Deployment");
    let bad = deployment.replace("configMap: {name: app}", "configMap: {name: app, items: [{key: a, path: ../a}]}");
    let path = "/pod.yaml, pod template of Deployment web: spec.volumes[0].configMap.items[0].path: ";
    Fixture::new(&bad).render(&[]).says(2, &[path]);
    let empty = "{apiVersion: apps/v1, kind: Deployment, metadata: {name: web}, spec: {}}";
    Fixture::new(empty).render(&[]).says(2, &["/pod.yaml: spec.template: is required"]);
    let two = format!("{deployment}\n---\n{}", workload("batch/v1", "CronJob"));
    let parts = [
        "expected one Pod, found 2",
        "document 1, pod template of Deployment web",
        "document 2, pod template of CronJob web",
    ];
    Fixture::new(&two).render(&[]).says(2, &parts);
    // podfs run takes no pod template.
    let fixture = Fixture::new(&deployment);
    fixture.refused(&mut fixture.command()).says(2, &["expected one Pod, found Deployment"]);
}

#[test]
fn bad_input_is_refused_in_one_sentence() {
    let fixture = Fixture::new(&config_pod());
    fixture.write("objects/app.yaml", &config_map("app", &[("a", "b")]));
    fs::set_permissions(fixture.path(""), Permissions::from_mode(0o755)).expect("the mode is set");
    fixture.write("file", "");
    fixture.write("two.yaml", &format!("{}\n---\n{}", config_pod(), config_pod()));
    let path = |name: &str| fixture.path(name).display().to_string();
    let (file, missing) = (path("file"), path("missing/out"));
    for (arguments, part) in [
        (&["--output", &format!("dir:{file}")][..], "is not a directory"),
        (&["--output", &format!("dir:{missing}")], "cannot be used: No such file or directory"),
        (&["--output", &format!("dir:{}", path(""))], "is not empty; remove it, or give another directory"),
        (&["--output", &format!("tar:{file}")], "exists already; remove it, or give another file"),
        (&["--output", &format!("tar:{missing}")], "cannot be made: No such file or directory"),
        (&["--container", ""], "the pod has no container"),
    ] {
        fixture.render(arguments).says(2, &[part]);
    }
    let objects = fixture.objects();
    let two = finish(&mut render(&fixture.path("two.yaml"), &objects));
    two.says(2, &["two.yaml: expected one Pod, found 2", "document 1", "document 2"]);
    finish(&mut render(&objects.join("app.yaml"), &objects)).says(2, &["expected one Pod, found ConfigMap"]);
    finish(&mut render(&fixture.path("none.yaml"), &objects)).says(2, &["there is no such file or directory"]);
    // The parser of the command line refuses these arguments, with a text of its form.
    for (arguments, part) in [
        (&["--output", "dir"][..], "give tree, json, dir:DIR, tar or tar:FILE"),
        (&["--output", "xml"], "give tree, json, dir:DIR, tar or tar:FILE"),
        (&["--output", "tar:"], "give tree, json, dir:DIR, tar or tar:FILE"),
        (&["--pod-name", "default/web"], "cannot be used with"),
        (&["--diff", "old", "--output", "json"], "cannot be used with"),
    ] {
        let outcome = fixture.render(arguments);
        assert_eq!(outcome.code, Some(2), "{arguments:?}");
        assert!(outcome.stderr.contains(part), "{arguments:?}: {}", outcome.stderr);
    }
    let mut unnamed = Command::new(PODFS);
    let outcome = finish(unnamed.args(["render", "--pod-name", "default/web"]).env("PODFS_CONFIG", "/dev/null"));
    outcome.says(2, &["--pod-name is a pod of the API server; give --kubeconfig or --in-cluster, too"]);
}

#[test]
fn renderings_need_no_linux() {
    let allowed =
        ["crate::manifest", "crate::payload", "crate::types", "crate::volume", "super", "k8s_openapi", "serde"];
    let allowed_of_std =
        ["std::borrow", "std::collections", "std::fmt", "std::fs", "std::io", "std::os::unix", "std::path"];
    let mut count = 0;
    for file in sources(&top().join("src/render")) {
        let text = fs::read_to_string(&file).expect("a source");
        for line in
            text.split("#[cfg(test)]").next().expect("code").lines().filter_map(|line| line.strip_prefix("use "))
        {
            count += 1;
            let is_allowed = allowed
                .iter()
                .chain(&allowed_of_std)
                .any(|module| line.strip_prefix(module).is_some_and(|path| path.starts_with([':', ';'])));
            assert!(is_allowed, "{} imports {line}", file.display());
        }
        for word in ["libc::", "rustix::", " nix::", "podfs_fuse", "/proc"] {
            assert!(!text.contains(word), "{} has {word}", file.display());
        }
    }
    assert!(count > 10, "these are not all: {count}");
}
