//! Volumes that show the pod itself or several sources, and the effect of the pod's security context on files.

use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use crate::common::watch::Watcher;
use crate::common::*;
use nix::mount::{MsFlags, mount};

/// A pod manifest with additional fields in its metadata and its spec.
fn pod_with(metadata: &str, spec: &str, volumes: &str) -> String {
    format!(
        "apiVersion: v1\nkind: Pod\nmetadata: {{name: web, {metadata}}}\n\
         spec:\n  {spec}\n  volumes: {volumes}\n"
    )
}

const NO_CONTAINERS: &str = "containers: []";

/// A downwardAPI volume `about`. Each pair is the path of an item and the field of the pod that the item shows.
fn about(fields: &[(&str, &str)]) -> String {
    let item = |(path, field): &(&str, &str)| format!("{{path: {path}, fieldRef: {{fieldPath: \"{field}\"}}}}");
    let items: Vec<_> = fields.iter().map(item).collect();
    format!("[{{name: about, downwardAPI: {{items: [{}]}}}}]", items.join(", "))
}

#[track_caller]
fn assert_files(volume: &Path, expected: &[(&str, &str)]) {
    for (path, content) in expected {
        assert_eq!(fs::read_to_string(volume.join(path)).expect(path), *content, "{path}");
    }
}

/// Permission bits, owner and group of the file at `path`. Follows symbolic links.
fn mode_and_owner(path: PathBuf) -> (u32, u32, u32) {
    let metadata = fs::metadata(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
    (metadata.mode() & 0o7777, metadata.uid(), metadata.gid())
}

#[test]
fn name_namespace_and_uid_are_raw_and_maps_are_sorted_and_quoted() {
    // DA-01, DA-02, DA-04, DA-07: podfs shows the annotations of the manifest, and adds none.
    let metadata = r#"namespace: shop, uid: 0f-1, labels: {b: "2", a: "one\n"}, annotations: {json: '{"x": "y"}'}"#;
    let volumes = about(&[
        ("name", "metadata.name"),
        ("namespace", "metadata.namespace"),
        ("uid", "metadata.uid"),
        ("these/are/my/labels", "metadata.labels"),
        ("annotations", "metadata.annotations"),
        ("one-label", "metadata.labels['a']"),
        ("absent", "metadata.annotations['absent']"),
    ]);
    let fixture = Fixture::new(&pod_with(metadata, NO_CONTAINERS, &volumes));
    let running = fixture.run();
    assert_files(
        &running.volume("about"),
        &[
            ("name", "web"),
            ("namespace", "shop"),
            ("uid", "0f-1"),
            ("these/are/my/labels", "a=\"one\\n\"\nb=\"2\""),
            ("annotations", r#"json="{\"x\": \"y\"}""#),
            ("one-label", "one\n"),
            ("absent", ""),
        ],
    );
}

#[test]
fn an_edited_label_or_annotation_becomes_visible() {
    // DA-06
    let volumes = about(&[("labels", "metadata.labels"), ("note", "metadata.annotations['note']")]);
    let manifest = |metadata| pod_with(metadata, NO_CONTAINERS, &volumes);
    let fixture = Fixture::new(&manifest("labels: {a: b}"));
    let mut running = fixture.run();
    let volume = running.volume("about");
    assert_files(&volume, &[("labels", r#"a="b""#), ("note", "")]);
    fixture.write("pod.yaml", &manifest("labels: {a: c, d: e}"));
    wait_content(&volume.join("labels"), "a=\"c\"\nd=\"e\"");
    fixture.write("pod.yaml", &manifest("labels: {a: c, d: e}, annotations: {note: hello}"));
    wait_content(&volume.join("note"), "hello");
    assert_files(&volume, &[("labels", "a=\"c\"\nd=\"e\"")]);
    assert_eq!(running.stop().code(), Some(0));
}

#[test]
fn items_of_a_downward_api_volume_have_modes() {
    // DA-12
    let volumes = "[{name: plain, downwardAPI: {items: [{path: name, fieldRef: {fieldPath: metadata.name}},
          {path: private, mode: 0400, fieldRef: {fieldPath: metadata.name}}]}},
        {name: strict, downwardAPI: {defaultMode: 0440, items: [{path: name, fieldRef: {fieldPath: metadata.name}}]}}]";
    let fixture = Fixture::new(&pod_with("", NO_CONTAINERS, volumes));
    let running = fixture.run();
    assert_eq!(mode_and_owner(running.volume("plain").join("name")).0, 0o644);
    assert_eq!(mode_and_owner(running.volume("plain").join("private")).0, 0o400);
    assert_eq!(mode_and_owner(running.volume("strict").join("name")).0, 0o440);
}

/// A pod with a container `c` and a downwardAPI volume `about`. Each pair is a resource of the container and a divisor;
/// the volume shows the resource in units of the divisor, in a file `<resource>-<divisor>`.
fn resources(container: &str, fields: &[(&str, &str)]) -> String {
    let item = |(resource, divisor): &(&str, &str)| {
        let field = format!("{{containerName: c, resource: {resource}, divisor: {divisor}}}");
        format!("{{path: {resource}-{divisor}, resourceFieldRef: {field}}}")
    };
    let items: Vec<_> = fields.iter().map(item).collect();
    let volumes = format!("[{{name: about, downwardAPI: {{items: [{}]}}}}]", items.join(", "));
    pod_with("", &format!("containers: [{{name: c, resources: {container}}}]"), &volumes)
}

#[test]
fn limits_and_requests_are_rounded_up_to_the_divisor() {
    // DA-08
    let container = "{limits: {cpu: 1250m, memory: 100Mi, ephemeral-storage: 128M, hugepages-2Mi: 4Mi},
        requests: {cpu: 250m, memory: 33554433}}";
    let fixture = Fixture::new(&resources(
        container,
        &[
            ("limits.cpu", "1"),
            ("limits.cpu", "1m"),
            ("requests.cpu", "1"),
            ("limits.memory", "1"),
            ("requests.memory", "1Mi"),
            ("limits.ephemeral-storage", "1Mi"),
            ("limits.hugepages-2Mi", "1Mi"),
            ("requests.hugepages-2Mi", "1Mi"),
        ],
    ));
    let running = fixture.run();
    assert_files(
        &running.volume("about"),
        &[
            ("limits.cpu-1", "2"),
            ("limits.cpu-1m", "1250"),
            ("requests.cpu-1", "1"),
            ("limits.memory-1", "104857600"),
            ("requests.memory-1Mi", "33"),
            ("limits.ephemeral-storage-1Mi", "123"),
            ("limits.hugepages-2Mi-1Mi", "4"),
            ("requests.hugepages-2Mi-1Mi", "4"),
        ],
    );
}

#[test]
fn an_unset_limit_is_what_the_node_offers_and_an_unset_request_is_zero() {
    // DA-09
    let fixture = Fixture::new(&resources(
        "{}",
        &[
            ("limits.cpu", "1"),
            ("limits.memory", "1"),
            ("limits.ephemeral-storage", "1"),
            ("requests.cpu", "1"),
            ("requests.memory", "1"),
        ],
    ));
    let mut running = fixture.run();
    let volume = running.volume("about");
    let cpus = std::thread::available_parallelism().expect("CPUs").to_string();
    let disk = rustix::fs::statvfs(fixture.objects()).expect("a file system");
    assert_files(
        &volume,
        &[
            ("limits.cpu-1", &cpus),
            ("limits.memory-1", &memory_of_this_machine().to_string()),
            ("limits.ephemeral-storage-1", &(disk.f_blocks * disk.f_frsize).to_string()),
            ("requests.cpu-1", "0"),
            ("requests.memory-1", "0"),
        ],
    );
    let node = "{apiVersion: v1, kind: Node, metadata: {name: n1},
        status: {allocatable: {cpu: 3500m, memory: 16Gi, ephemeral-storage: 1G}}}";
    fixture.write("objects/node.yaml", node);
    wait_content(&volume.join("limits.memory-1"), "17179869184");
    assert_files(
        &volume,
        &[("limits.cpu-1", "4"), ("limits.ephemeral-storage-1", "1000000000"), ("requests.cpu-1", "0")],
    );
    assert_eq!(running.stop().code(), Some(0));
}

fn memory_of_this_machine() -> u64 {
    let table = fs::read_to_string("/proc/meminfo").expect("a table");
    let line = table.lines().find(|line| line.starts_with("MemTotal:")).expect("a line");
    let kibibytes: u64 = line.split_whitespace().nth(1).expect("a number").parse().expect("a number");
    kibibytes * 1024
}

#[test]
fn all_sources_of_a_projected_volume_switch_together() {
    // PR-01: all kinds of sources that podfs can read from manifest files. The test has no token, which needs an API
    // server (see tests/api/source), and no podCertificate, because without an API server its volume never becomes
    // ready.
    let volumes = "[{name: all, projected: {sources: [{configMap: {name: app}}, {secret: {name: tls}},
        {clusterTrustBundle: {path: ca, name: roots}},
        {downwardAPI: {items: [{path: labels, fieldRef: {fieldPath: metadata.labels}}]}}]}}]";
    let pem = |body: &str| format!("-----BEGIN CERTIFICATE-----\n{body}\n-----END CERTIFICATE-----\n");
    let manifest = |label, config, key, certificate| {
        let pod = pod_with(&format!("labels: {{a: {label}}}"), NO_CONTAINERS, volumes);
        let bundle = serde_json::json!({
            "apiVersion": "certificates.k8s.io/v1beta1", "kind": "ClusterTrustBundle", "metadata": {"name": "roots"},
            "spec": {"trustBundle": pem(certificate)},
        });
        let (config, key) = (config_map("app", &[("config", config)]), secret("tls", &[("key", key)]));
        [pod, config, key, bundle.to_string()].join("\n---\n")
    };
    let fixture = Fixture::new(&manifest("one", "1", "k1", "AAAA"));
    let running = fixture.run();
    let volume = running.volume("all");
    assert_files(&volume, &[("config", "1"), ("key", "k1"), ("ca", &pem("AAAA")), ("labels", r#"a="one""#)]);
    let watcher = Watcher::on("root", &volume);
    fixture.write("pod.yaml", &manifest("two", "2", "k2", "BBBB"));
    let mut switches = 0;
    eventually("the volume switches", || {
        switches += watcher.switches();
        switches > 0
    });
    assert_eq!(switches, 1);
    assert_files(&volume, &[("config", "2"), ("key", "k2"), ("ca", &pem("BBBB")), ("labels", r#"a="two""#)]);
}

#[test]
fn of_two_sources_with_one_path_the_later_is_shown_and_the_log_names_both() {
    // PR-02
    let volumes = "[{name: all, projected: {sources: [{configMap: {name: first}}, {configMap: {name: second}}]}}]";
    let fixture = Fixture::new(&pod(volumes));
    fixture.write("objects/first.json", &config_map("first", &[("a", "first"), ("b", "first")]));
    fixture.write("objects/second.json", &config_map("second", &[("a", "second")]));
    let running = fixture.run();
    assert_files(&running.volume("all"), &[("a", "second"), ("b", "first")]);
    let warning = r#"volume "all": two files are called "a": key "a" of configMap "first" is hidden by key "a" of configMap "second""#;
    assert!(running.log().contains(warning), "{}", running.log());
}

#[test]
fn one_failing_source_stops_the_whole_volume_and_all_failures_are_reported() {
    // PR-03, PR-04
    let volumes = "[{name: all, projected: {sources: [{configMap: {name: app}}, {secret: {name: none}},
        {configMap: {name: app, items: [{key: b, path: b}]}}]}}]";
    let fixture = Fixture::new(&pod(volumes));
    fixture.write("objects/app.json", &config_map("app", &[("a", "1")]));
    let mut running = fixture.start();
    running.wait_log(
        r#"MountVolume.SetUp failed for volume "all" : secret "none" not found; configmap references non-existent config key: b"#,
    );
    assert_eq!(fixture.mounts(), [] as [PathBuf; 0]);
    fixture.write("objects/none.json", &secret("none", &[("s", "1")]));
    fixture.write("objects/app.json", &config_map("app", &[("a", "2"), ("b", "2")]));
    running.wait_ready();
    let volume = running.volume("all");
    assert_files(&volume, &[("a", "2"), ("b", "2"), ("s", "1")]);

    // While one source fails, podfs does not update the files of the other sources.
    fixture.remove("objects/none.json");
    running.wait_log(r#"MountVolume.SetUp failed for volume "all" : secret "none" not found"#);
    fixture.write("objects/app.json", &config_map("app", &[("a", "3"), ("b", "3")]));
    fixture.write("objects/none.json", &secret("none", &[("s", "3")]));
    wait_content(&volume.join("s"), "3");
    assert_files(&volume, &[("a", "3"), ("b", "3")]);
}

/// A pod with an fsGroup, a volume `keys` of a Secret (mode 0400), and a volume `config` of a ConfigMap.
fn grouped(policy: &str) -> Fixture {
    let volumes =
        "[{name: keys, secret: {secretName: o, defaultMode: 0400, items: [{key: a, path: a}, {key: a, path: d/a}]}},
        {name: config, configMap: {name: o}}]";
    let spec = format!("securityContext: {{fsGroup: 1001{policy}}}\n  {NO_CONTAINERS}");
    let fixture = Fixture::new(&pod_with("", &spec, volumes));
    fixture.write("objects/all.yaml", &[secret("o", &[("a", "1")]), config_map("o", &[("a", "1")])].join("\n---\n"));
    fixture
}

#[track_caller]
fn assert_shared_with_the_group(running: &Running) {
    let (keys, config) = (running.volume("keys"), running.volume("config"));
    assert_eq!(mode_and_owner(keys.clone()), (0o3777, 0, 1001));
    assert_eq!(mode_and_owner(config.clone()), (0o2777, 0, 1001));
    assert_eq!(mode_and_owner(keys.join("..data")), (0o2755, 0, 1001));
    assert_eq!(mode_and_owner(keys.join("d")), (0o2755, 0, 1001));
    assert_eq!(mode_and_owner(keys.join("a")), (0o440, 0, 1001));
    assert_eq!(mode_and_owner(keys.join("d/a")), (0o440, 0, 1001));
    assert_eq!(mode_and_owner(config.join("a")), (0o644, 0, 1001));
    let link = fs::symlink_metadata(keys.join("a")).expect("a link");
    assert_eq!((link.uid(), link.gid()), (0, 1001));
}

#[test]
fn an_fs_group_shares_files_and_directories_with_the_group() {
    // FG-01, FG-06, SE-05
    let fixture = grouped("");
    let running = fixture.run();
    assert_shared_with_the_group(&running);
    // The group and the modes of the next generation are the same.
    fixture.write("objects/all.yaml", &[secret("o", &[("a", "2")]), config_map("o", &[("a", "2")])].join("\n---\n"));
    wait_content(&running.volume("keys").join("d/a"), "2");
    wait_content(&running.volume("config").join("a"), "2");
    assert_shared_with_the_group(&running);
}

#[test]
fn the_change_policy_of_the_fs_group_makes_no_difference() {
    // FG-04
    for policy in [", fsGroupChangePolicy: OnRootMismatch", ", fsGroupChangePolicy: Always"] {
        let fixture = grouped(policy);
        assert_shared_with_the_group(&fixture.run());
    }
}

#[test]
fn without_an_fs_group_the_root_shows_the_medium() {
    // SE-05
    let volumes =
        "[{name: config, configMap: {name: o, optional: true}}, {name: keys, secret: {secretName: o, optional: true}},
        {name: about, downwardAPI: {}}, {name: all, projected: {sources: []}}]";
    let fixture = Fixture::new(&pod(volumes));
    let running = fixture.run();
    assert_eq!(mode_and_owner(running.volume("config")), (0o777, 0, 0));
    for volume in ["keys", "about", "all"] {
        assert_eq!(mode_and_owner(running.volume(volume)), (0o1777, 0, 0), "{volume}");
    }
}

#[test]
fn an_items_user_owns_its_file_before_the_volumes_default_user() {
    // EX-01: `runAsUser` of the pod has no influence on the owner of the files.
    let volumes = "[{name: config, configMap: {name: o, defaultUser: 2000, items: [{key: a, path: a}, {key: a, path: b, user: 3000}]}},
        {name: keys, projected: {defaultUser: 2000, sources: [{secret: {name: o, items: [{key: a, path: a, user: 0}]}},
          {downwardAPI: {items: [{path: name, fieldRef: {fieldPath: metadata.name}}]}}]}},
        {name: plain, configMap: {name: o}}]";
    let spec = "securityContext: {runAsUser: 1000}\n  containers: [{name: web}]";
    let fixture = Fixture::new(&pod_with("", spec, volumes));
    fixture.write("objects/all.yaml", &[secret("o", &[("a", "1")]), config_map("o", &[("a", "1")])].join("\n---\n"));
    let running = fixture.run();
    let user = |volume: &str, file: &str| mode_and_owner(running.volume(volume).join(file)).1;
    assert_eq!((user("config", "a"), user("config", "b")), (2000, 3000));
    assert_eq!((user("keys", "a"), user("keys", "name")), (0, 2000));
    assert_eq!(user("plain", "a"), 0);
}

#[test]
fn another_volume_can_be_mounted_inside_and_both_stay_usable() {
    // NM-02
    let mounts = "[{name: config, mountPath: /etc/app}, {name: keys, mountPath: /etc/app/tls/private}]";
    let spec = format!("containers: [{{name: web, volumeMounts: {mounts}}}]");
    let volumes = "[{name: config, configMap: {name: o}}, {name: keys, secret: {secretName: o}}]";
    let fixture = Fixture::new(&pod_with("", &spec, volumes));
    fixture.write("objects/config.json", &config_map("o", &[("a", "1")]));
    fixture.write("objects/keys.json", &secret("o", &[("key", "1")]));
    let mut running = fixture.run();
    let (config, inside) = (running.volume("config"), running.volume("config").join("tls/private"));
    mount(Some(&running.volume("keys")), &inside, None::<&str>, MsFlags::MS_BIND, None::<&str>).expect("a bind mount");
    assert_files(&config, &[("a", "1"), ("tls/private/key", "1")]);
    fixture.write("objects/config.json", &config_map("o", &[("a", "2"), ("tls-of-its-own", "x")]));
    wait_content(&config.join("a"), "2");
    fixture.write("objects/keys.json", &secret("o", &[("key", "2")]));
    wait_content(&inside.join("key"), "2");
    assert!(fixture.mounts().contains(&inside), "a commit does not detach a mount inside the volume");
    assert_eq!(running.stop().code(), Some(0), "{}", running.log());
    fixture.assert_nothing_left();
}
