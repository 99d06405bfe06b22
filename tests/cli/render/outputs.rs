//! The outputs: text, JSON and files, without secrets.

use std::fs;
use std::io::Read;
use std::os::unix::fs::{MetadataExt, chown};
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::{Path, PathBuf};
use std::process::Stdio;

use nix::sys::resource::{Resource, setrlimit};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde_json::{Value, json};
use tempfile::TempDir;

use super::{NOBODY, SECRET, examples, render};
use crate::common::*;

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
    chown(home.path(), Some(NOBODY), Some(NOBODY)).expect("another owner");
    let output = format!("dir:{}", home.path().join("out").display());
    let outcome = examples(&["--reveal", "--output", &output]);
    assert_eq!((outcome.code, outcome.stderr.as_str(), outcome.stdout.as_str()), (Some(0), "", ""));
    let out = home.path().join("out");
    let mode = |path: &str| fs::metadata(out.join(path)).expect(path).mode() & 0o7777;
    assert_eq!(mode(""), 0o700, "only the owner may enter");
    assert_eq!((mode("config"), mode("credentials"), mode("config/..data")), (0o2777, 0o3777, 0o2755));
    assert_eq!((mode("config/motd"), mode("credentials/password")), (0o644, 0o440));
    assert_eq!(fs::read_link(out.join("config/motd")).expect("a link"), Path::new("..data/motd"));
    assert_eq!(fs::read_to_string(out.join("credentials/password")).expect("a file"), SECRET);
    assert_eq!(fs::read_to_string(out.join("everything/conf/web.conf")).expect("a file"), "listen 8080\nlog info\n");
    // podfs does not write to a directory that has files.
    examples(&["--output", &output]).says(2, &["is not empty; remove it, or give another directory"]);
}

#[test]
fn no_secret_is_shown_without_reveal() {
    let home = TempDir::with_prefix("podfs-test-").expect("a directory");
    chown(home.path(), Some(NOBODY), Some(NOBODY)).expect("another owner");
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
                let line = "podfs: 2 secret files are empty here; --reveal writes their contents\n";
                assert!(outcome.stderr.ends_with(line), "{}", outcome.stderr);
            }
            if let Ok(archive) = fs::read(&archive) {
                all += &String::from_utf8_lossy(&archive);
            }
            if out.exists() {
                all.extend(files(&out).into_iter().map(|path| fs::read_to_string(path).expect("text")));
            }
            // The second text is the secret in Base64.
            for secret in [SECRET, "Y29ycmVjdCBob3JzZSBiYXR0ZXJ5IHN0YXBsZQ"] {
                assert!(!all.contains(secret), "{output}: {all}");
            }
        }
    }
}

#[test]
fn no_secret_is_in_the_core_or_the_arguments_of_a_process_that_renders() {
    let fixture =
        Fixture::new(&pod("[{name: config, configMap: {name: app}}, {name: keys, secret: {secretName: keys}}]"));
    // The output is larger than a pipe, so podfs waits for its reader with all objects in memory.
    fixture.write("objects/app.yaml", &config_map("app", &[("large", &"x".repeat(500_000))]));
    fixture.write("objects/keys.yaml", &secret("keys", &[("k", SECRET)]));
    let mut command = render(&fixture.pod(), &fixture.objects());
    command.args(["--output", "json", "--log", "trace"]).current_dir(fixture.path(""));
    command.stdout(Stdio::piped()).stderr(Stdio::piped());
    let unlimited = libc::RLIM_INFINITY;
    // SAFETY: setrlimit is async-signal-safe.
    unsafe {
        command.pre_exec(move || Ok(setrlimit(Resource::RLIMIT_CORE, unlimited, unlimited)?));
    }
    let mut rendering = fixture.mark(&mut command).spawn().expect("podfs starts");
    let mut first = [0];
    rendering.stdout.as_mut().expect("a pipe").read_exact(&mut first).expect("podfs writes");
    let of_process = |name: &str| fs::read(format!("/proc/{}/{name}", rendering.id())).expect(name);
    let shown = [of_process("cmdline"), of_process("environ")].concat();
    kill(Pid::from_raw(rendering.id().cast_signed()), Signal::SIGABRT).expect("it lives");
    let outcome = rendering.wait_with_output().expect("it ends");
    assert!(outcome.status.signal() == Some(libc::SIGABRT) && !outcome.status.core_dumped(), "{:?}", outcome.status);
    let all = [shown, first.to_vec(), outcome.stdout, outcome.stderr].concat();
    assert!(!String::from_utf8_lossy(&all).contains(SECRET));
    assert!(files(&fixture.path("")).iter().all(|file| !file.ends_with("core")));
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
fn volumes_of_the_node_are_one_line_each() {
    let volumes = "[{name: logs, hostPath: {path: /var/log}}, {name: work, emptyDir: {sizeLimit: 1Mi}},
        {name: fast, emptyDir: {medium: Memory}}, {name: share, nfs: {server: files, path: /srv, readOnly: true}},
        {name: data, persistentVolumeClaim: {claimName: data}}, {name: own, ephemeral: {volumeClaimTemplate: {spec: {}}}},
        {name: odd, iscsi: {targetPortal: a, iqn: b, lun: 0}}, {name: model, image: {reference: \"registry.example/model:1\"}}]";
    let fixture = Fixture::new(&pod(volumes));
    let outcome = fixture.render(&[]);
    assert_eq!((outcome.code, outcome.stderr.as_str()), (Some(0), ""));
    for line in [
        "logs  hostPath: /var/log of the node",
        "work  emptyDir: an empty directory on the node's disk, at most 1048576 bytes",
        "fast  emptyDir: an empty directory in memory",
        "model  image: the image registry.example/model:1, which the container runtime mounts",
        "share  nfs: files:/srv of an NFS server, read-only",
        "data  persistentVolumeClaim: the volume of claim data",
        "own  ephemeral: the volume of claim web-own",
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
