//! `podfs render`: the same entries as `podfs run`, without a privilege, and without a secret that was not asked for.

use std::collections::BTreeMap;
use std::fs::{self, Permissions};
use std::os::unix::fs::{MetadataExt, PermissionsExt, chown};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use fastrand::Rng;
use serde_json::{Value, json};
use tempfile::TempDir;

use crate::common::outcome::{Outcome, finish};
use crate::common::packages::top;
use crate::common::terminal::{Terminal, with_standard_output};
use crate::common::*;
use crate::manual::source::sources;

/// A user without any right.
const NOBODY: u32 = 65534;
/// What the Secret of the examples holds.
const SECRET: &str = "correct horse battery staple";

/// `podfs render` of this pod and these objects.
fn render(pod: &Path, objects: &Path) -> Command {
    let mut command = Command::new(PODFS);
    command.arg("render").arg("--pod").arg(pod).arg("--objects").arg(objects).stdin(Stdio::null());
    command.env("PODFS_CONFIG", "/dev/null").env_remove("RUST_LOG");
    command
}

impl Fixture {
    fn render(&self, arguments: &[&str]) -> Outcome {
        finish(render(&self.pod(), &self.objects()).args(arguments))
    }
}

/// `podfs render` of the examples, as a user without any right.
fn examples(arguments: &[&str]) -> Outcome {
    let examples = top().join("packaging/examples");
    let podfs = render(&examples.join("pod.yaml"), &examples.join("objects"));
    let mut command = Command::new("setpriv");
    command.args(["--reuid=65534", "--regid=65534", "--clear-groups", "--no-new-privs"]);
    command.arg(PODFS).args(podfs.get_args()).args(arguments).env("PODFS_CONFIG", "/dev/null").stdin(Stdio::null());
    finish(&mut command)
}

/// What `lstat` and a look inside show of an entry: type and permissions, owner, group; size and bytes, or target.
pub type Seen = (u32, u32, u32, u64, Vec<u8>);

/// Everything at and below a directory, with the time in the generation's name left out.
pub fn entries(root: &Path) -> BTreeMap<String, Seen> {
    let mut seen = BTreeMap::new();
    see(root, ".", &mut seen);
    seen
}

fn see(path: &Path, name: &str, seen: &mut BTreeMap<String, Seen>) {
    let found = fs::symlink_metadata(path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
    let (size, content) = match found.file_type() {
        kind if kind.is_dir() => (0, Vec::new()),
        kind if kind.is_symlink() => {
            (0, plain(fs::read_link(path).expect("a link").to_str().expect("text")).into_bytes())
        }
        _ => (found.size(), fs::read(path).expect("a file")),
    };
    seen.insert(name.to_owned(), (found.mode(), found.uid(), found.gid(), size, content));
    if found.is_dir() {
        for entry in fs::read_dir(path).expect("a listing") {
            let entry = entry.expect("an entry").file_name().into_string().expect("text");
            see(&path.join(&entry), &format!("{name}/{}", plain(&entry)), seen);
        }
    }
}

/// The name of a generation as a rendering has it; any other name as it is.
fn plain(name: &str) -> String {
    let is_generation = name.strip_prefix("..").is_some_and(|rest| rest.starts_with(|c: char| c.is_ascii_digit()));
    if is_generation { "..generation".to_owned() } else { name.to_owned() }
}

/// Renders the fixture as an archive, extracts it as root, and compares each volume with what `podfs run` mounts.
#[track_caller]
fn assert_archive_is_what_is_mounted(fixture: &Fixture, volumes: &[String], about: &str) {
    let archive = format!("tar:{}", fixture.path("volumes.tar").display());
    let outcome = fixture.render(&["--reveal", "--output", &archive]);
    assert_eq!(outcome.code, Some(0), "{about}: {}", outcome.stderr);
    fs::create_dir(fixture.path("extracted")).expect("a directory");
    let mut tar = Command::new("tar");
    tar.args(["--extract", "--preserve-permissions", "--same-owner", "--numeric-owner"]);
    tar.arg("--directory").arg(fixture.path("extracted")).arg("--file").arg(fixture.path("volumes.tar"));
    let extracted = finish(&mut tar);
    assert_eq!((extracted.code, extracted.stderr.as_str()), (Some(0), ""), "{about}");
    let mut running = fixture.run();
    for volume in volumes {
        let rendered = entries(&fixture.path("extracted").join(volume));
        assert_eq!(rendered, entries(&running.volume(volume)), "volume {volume} of {about}");
    }
    assert!(running.stop().success());
}

#[test]
fn an_archive_of_the_examples_has_every_entry_that_is_mounted() {
    let examples = top().join("packaging/examples");
    let fixture = Fixture::new(&fs::read_to_string(examples.join("pod.yaml")).expect("a pod"));
    for name in ["web-config.yaml", "web-secret.yaml"] {
        let object = fs::read_to_string(examples.join("objects").join(name)).expect("an object");
        fixture.write(&format!("objects/{name}"), &object);
    }
    let volumes = ["config", "credentials", "about", "everything"].map(str::to_owned);
    assert_archive_is_what_is_mounted(&fixture, &volumes, "the examples");
}

#[test]
fn archives_of_generated_pods_have_every_entry_that_is_mounted() {
    const PODS: u64 = 60;
    for seed in 0..PODS {
        let mut generator = Generator(Rng::with_seed(seed));
        let (pod, volumes) = generator.pod();
        let fixture = Fixture::new(&pod.to_string());
        fixture.write("objects/all.json", &generator.objects().to_string());
        assert_archive_is_what_is_mounted(&fixture, &volumes, &format!("seed {seed}: {pod}"));
    }
}

/// Random pods, and objects for them.
struct Generator(Rng);

impl Generator {
    fn objects(&mut self) -> Value {
        let bytes: Vec<u8> = (0..self.0.usize(1..3000)).map(|_| self.0.u8(..)).collect();
        let binary = k8s_openapi::ByteString(bytes);
        let long = "x".repeat(self.0.usize(0..9000));
        json!({"apiVersion": "v1", "kind": "List", "items": [
            {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "o"},
             "data": {"a": "text\n", "b": "", "c.conf": long}, "binaryData": {"d": binary}},
            {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "o"},
             "data": {"a": binary}, "stringData": {"b": "secret", "c.conf": "more", "d": ""}},
        ]})
    }

    fn pod(&mut self) -> (Value, Vec<String>) {
        let names: Vec<String> = (0..self.0.usize(1..5)).map(|number| format!("v{number}")).collect();
        let volumes: Vec<Value> = names.iter().map(|name| self.volume(name)).collect();
        let mut context = json!({});
        if self.0.bool() {
            // One that seven octal digits do not hold is among them.
            context["fsGroup"] = [0, 1001, 2_097_152].map(Value::from)[self.0.usize(..3)].clone();
        }
        if self.0.bool() {
            context["runAsUser"] = [0, 1000, 3_000_000].map(Value::from)[self.0.usize(..3)].clone();
        }
        let mut mounts: Vec<Value> =
            names.iter().map(|name| json!({"name": name, "mountPath": format!("/mnt/{name}")})).collect();
        if names.len() > 1 && self.0.bool() {
            let below = ["a", "other/deep", "c.conf"][self.0.usize(..3)];
            mounts.push(json!({"name": "v1", "mountPath": format!("/mnt/v0/{below}")}));
        }
        let pod = json!({
            "apiVersion": "v1", "kind": "Pod",
            "metadata": {"name": "web", "labels": {"app": "web", "n": self.0.u8(..).to_string()}},
            "spec": {
                "securityContext": context,
                "containers": [{"name": "c", "volumeMounts": mounts, "resources": {"limits": {"memory": "64Mi"}}}],
                "volumes": volumes,
            },
        });
        (pod, names)
    }

    fn volume(&mut self, name: &str) -> Value {
        let mut volume = json!({"name": name});
        let (field, mut source) = match self.0.u8(..4) {
            0 => ("configMap", self.object("name")),
            1 => ("secret", self.object("secretName")),
            2 => ("downwardAPI", self.downward()),
            _ => {
                let count = self.0.usize(1..4);
                let sources: Vec<Value> = (0..count).map(|number| self.source(number)).collect();
                ("projected", json!({"sources": sources}))
            }
        };
        if self.0.bool() {
            source["defaultMode"] = self.mode();
        }
        volume[field] = source;
        volume
    }

    /// Sources have directories of their own, so that no path is a file and a directory.
    fn source(&mut self, number: usize) -> Value {
        let prefix = format!("s{number}/");
        match self.0.u8(..3) {
            0 => json!({"configMap": {"name": "o", "items": self.items(&prefix)}}),
            1 => json!({"secret": {"name": "o", "items": self.items(&prefix)}}),
            _ => json!({"downwardAPI": {"items": [
                {"path": format!("{prefix}labels"), "fieldRef": {"fieldPath": "metadata.labels"}}]}}),
        }
    }

    fn object(&mut self, name_field: &str) -> Value {
        let mut source = json!({name_field: "o"});
        if self.0.bool() {
            source["items"] = self.items("");
        } else if self.0.u8(..4) == 0 {
            source[name_field] = "absent".into();
            source["optional"] = true.into();
        }
        source
    }

    fn items(&mut self, prefix: &str) -> Value {
        let paths = ["a", "dir/b", "dir/deep/er/b", "dir-2/x", ".hidden", "z"];
        let long = format!("{}/{}", "long".repeat(30), "name".repeat(30));
        let count = self.0.usize(1..5);
        let items = (0..count).map(|number| {
            let path = if self.0.u8(..8) == 0 { format!("l{number}/{long}") } else { paths[number].to_owned() };
            let key = ["a", "b", "c.conf", "d"][self.0.usize(..4)];
            let mut item = json!({"key": key, "path": prefix.to_owned() + &path});
            if self.0.bool() {
                item["mode"] = self.mode();
            }
            item
        });
        items.collect::<Vec<_>>().into()
    }

    fn downward(&mut self) -> Value {
        json!({"items": [
            {"path": "name", "fieldRef": {"fieldPath": "metadata.name"}, "mode": self.mode()},
            {"path": "sub/labels", "fieldRef": {"fieldPath": "metadata.labels"}},
            {"path": "memory", "resourceFieldRef": {"containerName": "c", "resource": "limits.memory"}},
        ]})
    }

    fn mode(&mut self) -> Value {
        [0o644, 0o400, 0o777, 0o440, 0o000, 0o555][self.0.usize(..6)].into()
    }
}

#[test]
fn the_tree_is_for_people() {
    let outcome = examples(&[]);
    assert_eq!((outcome.code, outcome.stderr.as_str()), (Some(0), ""));
    let begin = "\
pod default/web

config  configMap
  drwxrwsrwx  0:2000            ./
  lrwxrwxrwx  0:2000            ..data -> ..generation
  drwxr-sr-x  0:2000            ..generation/
  -rw-r--r--  0:2000        13    motd
                                  | Good morning
  -rw-r--r--  0:2000        21    web.conf
                                  | listen 8080
                                  | log info
  lrwxrwxrwx  0:2000            motd -> ..data/motd
  lrwxrwxrwx  0:2000            web.conf -> ..data/web.conf

credentials  secret
  drwxrwsrwt  0:2000            ./
  lrwxrwxrwx  0:2000            ..data -> ..generation
  drwxr-sr-x  0:2000            ..generation/
  -r--r-----  0:2000        28    password  <28 bytes>
  lrwxrwxrwx  0:2000            password -> ..data/password
";
    assert!(outcome.stdout.starts_with(begin), "{}", outcome.stdout);
    let revealed = examples(&["--reveal"]).stdout;
    assert!(revealed.contains(&format!("    password\n                                  | {SECRET}\n")), "{revealed}");
}

#[test]
fn json_has_every_attribute() {
    let outcome = examples(&["--output", "json", "--reveal"]);
    let document: Value = serde_json::from_str(&outcome.stdout).expect(&outcome.stderr);
    assert_eq!(document["pod"], json!({"namespace": "default", "name": "web"}));
    let volume = &document["volumes"][1];
    assert_eq!(
        (&volume["name"], &volume["kind"], &volume["state"]),
        (&json!("credentials"), &json!("secret"), &json!("ready"))
    );
    let entries = &volume["entries"];
    assert_eq!(entries[0], json!({"path": ".", "type": "directory", "mode": "3777", "uid": 0, "gid": 2000}));
    let link =
        json!({"path": "..data", "type": "link", "mode": "0777", "uid": 0, "gid": 2000, "target": "..generation"});
    assert_eq!(entries[1], link);
    let file = json!({"path": "..generation/password", "type": "file", "mode": "0440", "uid": 0, "gid": 2000, "size": 28,
        "secret": true, "content": SECRET});
    assert_eq!(entries[3], file);
    let objects = "{apiVersion: v1, kind: ConfigMap, metadata: {name: app}, binaryData: {bytes: AP8KAA==}}";
    let fixture = Fixture::new(&config_pod());
    fixture.write("objects/app.yaml", objects);
    let document: Value = serde_json::from_str(&fixture.render(&["--output", "json"]).stdout).expect("a document");
    let file = &document["volumes"][0]["entries"][3];
    assert_eq!(
        (&file["size"], &file["contentBase64"], &file["content"]),
        (&json!(4), &json!("AP8KAA=="), &Value::Null)
    );
}

#[test]
fn a_directory_has_names_links_contents_and_modes() {
    let home = TempDir::with_prefix("podfs-test-").expect("a directory");
    chown(home.path(), Some(NOBODY), Some(NOBODY)).expect("given to nobody");
    let output = format!("dir:{}", home.path().join("out").display());
    let outcome = examples(&["--reveal", "--output", &output]);
    assert_eq!((outcome.code, outcome.stderr.as_str(), outcome.stdout.as_str()), (Some(0), "", ""));
    let out = home.path().join("out");
    let mode = |path: &str| fs::metadata(out.join(path)).expect(path).mode() & 0o7777;
    assert_eq!(mode(""), 0o700, "nobody else is let in");
    assert_eq!((mode("config"), mode("credentials"), mode("config/..data")), (0o2777, 0o3777, 0o2755));
    assert_eq!((mode("config/motd"), mode("credentials/password")), (0o644, 0o440));
    assert_eq!(fs::read_link(out.join("config/motd")).expect("a link"), Path::new("..data/motd"));
    assert_eq!(fs::read_to_string(out.join("credentials/password")).expect("a file"), SECRET);
    assert_eq!(fs::read_to_string(out.join("everything/conf/web.conf")).expect("a file"), "listen 8080\nlog info\n");
    // It is not written to twice.
    examples(&["--output", &output]).says(2, &["is not empty; remove it, or give another directory"]);
}

#[test]
fn equal_manifests_give_equal_archives() {
    let archive = || {
        let examples = top().join("packaging/examples");
        let mut command = render(&examples.join("pod.yaml"), &examples.join("objects"));
        command.args(["--reveal", "--output", "tar"]).output().expect("podfs").stdout
    };
    let first = archive();
    assert!(first.len() > 10_000 && first == archive());
}

#[test]
fn no_secret_is_shown_unless_it_is_asked_for() {
    let home = TempDir::with_prefix("podfs-test-").expect("a directory");
    chown(home.path(), Some(NOBODY), Some(NOBODY)).expect("given to nobody");
    let (out, archive) = (home.path().join("out"), home.path().join("volumes.tar"));
    let dir = format!("dir:{}", out.display());
    let tar = format!("tar:{}", archive.display());
    for output in ["tree", "json", "tar", &dir, &tar] {
        for container in [&[][..], &["--container", "web"]] {
            let _ = fs::remove_dir_all(&out);
            let _ = fs::remove_file(&archive);
            let outcome = examples(&[&["--output", output, "--log", "trace"], container].concat());
            assert_eq!(outcome.code, Some(0), "{output}: {}", outcome.stderr);
            let mut all = outcome.stdout + &outcome.stderr;
            if output.contains(':') || output == "tar" {
                let told = "podfs: 2 secret files are empty here; --reveal writes their contents\n";
                assert!(outcome.stderr.ends_with(told), "{}", outcome.stderr);
            }
            if let Ok(archive) = fs::read(&archive) {
                all += &String::from_utf8_lossy(&archive);
            }
            if out.exists() {
                all.extend(files(&out).into_iter().map(|path| fs::read_to_string(path).expect("text")));
            }
            // Nor in Base64.
            for secret in [SECRET, "Y29ycmVjdCBob3JzZSBiYXR0ZXJ5IHN0YXBsZQ"] {
                assert!(!all.contains(secret), "{output}: {all}");
            }
        }
    }
}

/// The files below a directory.
fn files(directory: &Path) -> Vec<PathBuf> {
    let entries = fs::read_dir(directory).expect("a listing").map(|entry| entry.expect("an entry").path());
    entries
        .flat_map(|path| match fs::symlink_metadata(&path).expect("attributes").file_type() {
            kind if kind.is_dir() => files(&path),
            kind if kind.is_file() => vec![path],
            _ => Vec::new(),
        })
        .collect()
}

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
    // Half of an archive is none.
    let out = fixture.path("out");
    fixture.render(&["--output", &format!("dir:{}", out.display())]).says(1, &[second]);
    assert!(!out.exists());
    let outcome = fixture.render(&["--output", "tar"]);
    outcome.says(1, &[second]);
    assert_eq!(outcome.stdout, "");
    // Another key than there is, and all is well in the end.
    fixture.write("objects/app.yaml", &config_map("app", &[("a", "b")]));
    fixture.write("objects/keys.yaml", &secret("keys", &[("a", "b")]));
    assert_eq!(fixture.render(&[]).code, Some(0));
}

#[test]
fn volumes_of_the_node_are_one_line_each() {
    let volumes = "[{name: logs, hostPath: {path: /var/log}}, {name: work, emptyDir: {sizeLimit: 1Mi}},
        {name: fast, emptyDir: {medium: Memory}}, {name: share, nfs: {server: files, path: /srv, readOnly: true}},
        {name: data, persistentVolumeClaim: {claimName: data}}, {name: own, ephemeral: {volumeClaimTemplate: {spec: {}}}},
        {name: odd, iscsi: {targetPortal: a, iqn: b, lun: 0}}]";
    let fixture = Fixture::new(&pod(volumes));
    let outcome = fixture.render(&[]);
    assert_eq!((outcome.code, outcome.stderr.as_str()), (Some(0), ""));
    for line in [
        "logs  hostPath: /var/log of the node",
        "work  emptyDir: an empty directory on the node's disk, at most 1048576 bytes",
        "fast  emptyDir: an empty directory in memory",
        "share  nfs: files:/srv of an NFS server, read-only",
        "data  persistentVolumeClaim: what claim data is bound to",
        "own  ephemeral: what claim web-own is bound to",
        "odd  iscsi: iscsi volumes are not supported by this version",
    ] {
        assert!(outcome.stdout.contains(&format!("\n{line}")), "{line}: {}", outcome.stdout);
    }
    let outcome = fixture.render(&["--output", "tar"]);
    assert!(
        outcome.stderr.contains("podfs: volume \"logs\" is left out: /var/log of the node\n"),
        "{}",
        outcome.stderr
    );
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
    let told = ["the pod has no container \"wbe\"; its containers are first, web, typing"];
    fixture.render(&["--container", "wbe"]).says(2, &told);
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
        // Objects may stand beside the workload.
        let fixture = Fixture::new(&format!("{}\n---\n{objects}", workload(version, kind)));
        let outcome = fixture.render(&[]);
        assert_eq!(outcome.code, Some(0), "{kind}: {}", outcome.stderr);
        let name = if kind == "StatefulSet" { "web-0" } else { "web" };
        assert!(outcome.stdout.starts_with(&format!("pod shop/{name}\n")), "{kind}: {}", outcome.stdout);
        assert!(outcome.stdout.contains("| alpha\n"), "{kind}: {}", outcome.stdout);
        assert!(outcome.stdout.contains(&format!("| {name}\n")), "{kind}: {}", outcome.stdout);
        let claim = "data  persistentVolumeClaim: what claim data-web-0 is bound to\n";
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
    let told = [
        "expected one Pod, found 2",
        "document 1, pod template of Deployment web",
        "document 2, pod template of CronJob web",
    ];
    Fixture::new(&two).render(&[]).says(2, &told);
    // There is nothing to run.
    let fixture = Fixture::new(&deployment);
    fixture.refused(&mut fixture.command()).says(2, &["expected one Pod, found Deployment"]);
}

#[test]
fn a_diff_has_contents_modes_and_owners_and_no_secrets() {
    let pod = |mode, group| {
        format!(
            "{{apiVersion: v1, kind: Pod, metadata: {{name: web}}, spec: {{securityContext: {{fsGroup: {group}}}, volumes: [
                {{name: config, configMap: {{name: app}}}}, {{name: keys, secret: {{secretName: keys, defaultMode: {mode}}}}}]}}}}"
        )
    };
    let fixture = Fixture::new(&pod("0400", "2000"));
    let lines = |changed: &str| format!("1\n2\n3\n4\n5\n{changed}\n");
    fixture.write("objects/app.yaml", &config_map("app", &[("conf", &lines("new")), ("added", "a"), ("same", "s")]));
    fixture.write("objects/keys.yaml", &secret("keys", &[("k", "new-secret")]));
    fs::create_dir(fixture.path("old")).expect("a directory");
    fixture.write("old/app.yaml", &config_map("app", &[("conf", &lines("old")), ("removed", "r\n"), ("same", "s")]));
    fixture.write("old/keys.yaml", &secret("keys", &[("k", "old-secret!")]));
    let diff = |old: &str, arguments: &[&str]| {
        fixture.render(&[&["--diff", &fixture.path(old).display().to_string()], arguments].concat())
    };
    let outcome = diff("old", &[]);
    let expected = "\
--- /dev/null
+++ config/added
+[-rw-r--r-- 0:2000]
@@ -0,0 +1,1 @@
+a
\\ No newline at end of file
--- config/conf
+++ config/conf
@@ -3,4 +3,4 @@
 3
 4
 5
-old
+new
--- config/removed
+++ /dev/null
-[-rw-r--r-- 0:2000]
@@ -1,1 +0,0 @@
-r
--- keys/k
+++ keys/k
-<11 bytes>
+<10 bytes>
";
    assert_eq!((outcome.code, outcome.stdout.as_str(), outcome.stderr.as_str()), (Some(0), expected, ""));
    let revealed = diff("old", &["--reveal"]).stdout;
    assert!(revealed.contains("-old-secret!\n") && revealed.contains("+new-secret\n"), "{revealed}");
    // Nothing differs from the objects themselves.
    assert_eq!(diff("objects", &[]).stdout, "");
    // A file with a pod in it is the old pod, too.
    let objects =
        ["app", "keys"].map(|name| fs::read_to_string(fixture.path(&format!("objects/{name}.yaml"))).expect("text"));
    fixture.write("old-pod.yaml", &format!("{}\n---\n{}", pod("0444", "3000"), objects.join("\n---\n")));
    let changed = diff("old-pod.yaml", &[]).stdout;
    let expected = "--- keys/k\n+++ keys/k\n-[-r--r--r-- 0:3000]\n+[-r--r----- 0:2000]\n";
    assert!(changed.ends_with(expected), "{changed}");
    diff("none", &[]).says(2, &["/none: there is no such file or directory"]);
    // An object that is gone.
    fixture.remove("objects/app.yaml");
    let outcome = diff("old", &[]);
    outcome.says(1, &["configmap \"app\" not found"]);
    assert!(outcome.stdout.contains("+[waits: configmap \"app\" not found]\n"), "{}", outcome.stdout);
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
    for (arguments, told) in [
        (&["--output", &format!("dir:{file}")][..], "is not a directory"),
        (&["--output", &format!("dir:{missing}")], "cannot be used: No such file or directory"),
        (&["--output", &format!("dir:{}", path(""))], "is not empty; remove it, or give another directory"),
        (&["--output", &format!("tar:{file}")], "exists already; remove it, or give another file"),
        (&["--output", &format!("tar:{missing}")], "cannot be made: No such file or directory"),
        (&["--container", ""], "the pod has no container"),
    ] {
        fixture.render(arguments).says(2, &[told]);
    }
    let objects = fixture.objects();
    let two = finish(&mut render(&fixture.path("two.yaml"), &objects));
    two.says(2, &["two.yaml: expected one Pod, found 2", "document 1", "document 2"]);
    finish(&mut render(&objects.join("app.yaml"), &objects)).says(2, &["expected one Pod, found ConfigMap"]);
    finish(&mut render(&fixture.path("none.yaml"), &objects)).says(2, &["there is no such file or directory"]);
    // Arguments that the command line refuses by itself.
    for (arguments, told) in [
        (&["--output", "dir"][..], "give tree, json, dir:DIR, tar or tar:FILE"),
        (&["--output", "xml"], "give tree, json, dir:DIR, tar or tar:FILE"),
        (&["--output", "tar:"], "give tree, json, dir:DIR, tar or tar:FILE"),
        (&["--pod-name", "default/web"], "cannot be used with"),
        (&["--diff", "old", "--output", "json"], "cannot be used with"),
    ] {
        let outcome = fixture.render(arguments);
        assert_eq!(outcome.code, Some(2), "{arguments:?}");
        assert!(outcome.stderr.contains(told), "{arguments:?}: {}", outcome.stderr);
    }
    let mut unnamed = Command::new(PODFS);
    let outcome = finish(unnamed.args(["render", "--pod-name", "default/web"]).env("PODFS_CONFIG", "/dev/null"));
    outcome.says(2, &["--pod-name is a pod of the API server; give --kubeconfig or --in-cluster, too"]);
}

#[test]
fn an_archive_is_not_written_to_a_terminal() {
    let fixture = Fixture::new(&config_pod());
    let terminal = Terminal::new(24, 80);
    let mut command = render(&fixture.pod(), &fixture.objects());
    with_standard_output(command.args(["--output", "tar"]), &terminal);
    let status = command.stderr(Stdio::null()).status().expect("podfs");
    assert_eq!((status.code(), terminal.written().as_str()), (Some(2), ""));
}

#[test]
fn renderings_need_no_linux() {
    let allowed =
        ["crate::manifest", "crate::payload", "crate::types", "crate::volume", "super", "k8s_openapi", "serde"];
    let allowed_of_std =
        ["std::borrow", "std::collections", "std::fmt", "std::fs", "std::io", "std::os::unix", "std::path"];
    let mut seen = 0;
    for file in sources(&top().join("src/render")) {
        let text = fs::read_to_string(&file).expect("a source");
        for line in
            text.split("#[cfg(test)]").next().expect("code").lines().filter_map(|line| line.strip_prefix("use "))
        {
            seen += 1;
            let is_allowed = allowed
                .iter()
                .chain(&allowed_of_std)
                .any(|module| line.strip_prefix(module).is_some_and(|rest| rest.starts_with([':', ';'])));
            assert!(is_allowed, "{} imports {line}", file.display());
        }
        for word in ["libc::", "rustix::", " nix::", "podfs_fuse", "/proc"] {
            assert!(!text.contains(word), "{} has {word}", file.display());
        }
    }
    assert!(seen > 10, "these are not all: {seen}");
}
