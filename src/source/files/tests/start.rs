//! The files that podfs reads at the start, and errors that keep it from starting.

use std::os::unix::net::UnixListener;

use nix::sys::stat::Mode;
use nix::unistd::mkfifo;

use super::*;

#[test]
fn only_manifests_of_a_directory_are_read() {
    let home = ManifestHome::with_objects(&[("app", "1")]);
    home.write("objects/README.md", "{not a manifest");
    home.write("objects/.hidden.yaml", "{not a manifest");
    home.write("objects/app.yaml~", "{not a manifest");
    std::fs::create_dir(home.path("objects/directory.yaml")).expect("a directory");
    mkfifo(&home.path("objects/pipe.yaml"), Mode::S_IRWXU).expect("a pipe");
    let _socket = UnixListener::bind(home.path("objects/socket.yaml")).expect("a socket");
    home.link("/dev/zero", "objects/device.yaml");
    assert_eq!(home.watch().value("app"), Some("1"));
}

#[test]
fn a_file_reached_twice_is_read_once() {
    let home = ManifestHome::with_objects(&[("app", "1")]);
    let both = format!("{}---\n{}", pod("one"), config_map("db", "1"));
    home.write("objects/pod.yaml", &both);
    home.link("objects", "alias");
    home.link("app.yaml", "objects/again.yaml");
    std::fs::hard_link(home.path("objects/app.yaml"), home.path("hard.yaml")).expect("a link");
    let objects = ["objects", "objects/app.yaml", "alias", "alias/app.yaml", "hard.yaml"];
    let watched = home.open(Some("objects/pod.yaml"), &objects).expect("good manifests");
    assert_eq!((watched.value("app"), watched.value("db")), (Some("1"), Some("1")));
    assert_eq!(watched.label("version"), Some("one"));
}

#[tokio::test]
async fn a_file_reached_twice_changes_once() {
    let home = ManifestHome::with_objects(&[("app", "1")]);
    home.write("objects/pod.yaml", &pod("one"));
    let mut watched = home.open(Some("objects/pod.yaml"), &["objects", "objects"]).expect("good manifests");
    home.write("objects/pod.yaml", &pod("two"));
    watched.change().await;
    assert_eq!(watched.label("version"), Some("two"));
    home.write("objects/app.yaml", &config_map("app", "2"));
    watched.change().await;
    assert_eq!(watched.value("app"), Some("2"));
}

#[tokio::test]
async fn the_pod_may_come_from_standard_input() {
    let home = ManifestHome::with_objects(&[("app", "1")]);
    let input = format!("{}---\n{}", pod("one"), config_map("db", "1"));
    let objects = [home.path("objects")];
    let opened = FileSource::open(Some(PodInput::Stdin(input.into_bytes())), &objects);
    let (source, now) = opened.expect("good manifests");
    let mut watched = Watched { source, now };
    assert_eq!(watched.label("version"), Some("one"));
    home.write("objects/app.yaml", &config_map("app", "2"));
    watched.change().await;
    assert_eq!((watched.value("app"), watched.value("db")), (Some("2"), Some("1")));
    assert_eq!(watched.label("version"), Some("one"));

    let error = FileSource::open(Some(PodInput::Stdin(b"{a".to_vec())), &[]).err().expect("malformed");
    assert!(error.to_string().starts_with("standard input:1:"), "{error}");
}

#[test]
fn nothing_configured_is_an_empty_snapshot() {
    let (_source, snapshot) = FileSource::open(None, &[]).expect("nothing to fail");
    assert!(snapshot.pod.is_none());
}

#[test]
fn a_path_that_cannot_be_read_is_named() {
    let home = ManifestHome::with_objects(&[]);
    mkfifo(&home.path("pipe"), Mode::S_IRWXU).expect("a pipe");
    for (path, sentence) in [
        ("missing", "missing: there is no such file or directory"),
        ("missing/deep.yaml", "missing/deep.yaml: there is no such file or directory"),
    ] {
        assert_eq!(home.complaint(None, &[path]), sentence);
        assert_eq!(home.complaint(Some(path), &[]), sentence);
    }
    assert_eq!(home.complaint(None, &["pipe"]), "pipe: is a pipe; give a regular file");
    for (path, sentence) in [
        ("pipe", "pipe: is a pipe; give a regular file, or - for standard input"),
        ("objects", "objects: is a directory; give a regular file, or - for standard input"),
    ] {
        assert_eq!(home.complaint(Some(path), &[]), sentence);
    }
    home.link("nowhere", "objects/app.yaml");
    assert_eq!(home.complaint(None, &["objects"]), "objects/app.yaml: the symbolic link leads to nothing");
    home.link("loop", "loop");
    assert!(home.complaint(None, &["loop"]).starts_with("loop: cannot be read: "));
}

#[test]
fn a_bad_manifest_is_named() {
    let home = ManifestHome::with_objects(&[("app", "1")]);
    home.write("objects/bad.yaml", "a: [hunter2\n");
    assert_eq!(home.complaint(None, &["objects"]), "objects/bad.yaml:1:4: unclosed bracket '['");
    home.write("objects/bad.yaml", &config_map("app", "2"));
    assert_eq!(
        home.complaint(None, &["objects"]),
        "ConfigMap default/app is described twice, in objects/app.yaml and in objects/bad.yaml; remove one of them"
    );
}

/// The manifest of a pod with a volume of a ConfigMap.
fn pod_of(config_map: &str, optional: bool) -> String {
    let volume = format!("{{name: v, configMap: {{name: {config_map}, optional: {optional}}}}}");
    format!(
        "apiVersion: v1\nkind: Pod\nmetadata: {{name: web}}\nspec: {{containers: [{{name: c}}], volumes: [{volume}]}}\n"
    )
}

#[test]
fn a_bad_document_that_the_pod_does_not_need_is_left_out() {
    let home = ManifestHome::with_objects(&[("app", "1")]);
    home.write("pod.yaml", &pod_of("app", false));
    let other = config_map("other", "1");
    for bad in [
        other.replace("\"1\"", "[1]"),
        "a: [hunter2\n".to_owned(),
        other.replace("name: other", "name: Not_A_Name"),
        other.replace("ConfigMap", "Secret"),
        format!("{other}---\n{other}"),
        "- 1\n".to_owned(),
        "apiVersion: apps/v1\nkind: Deployment\nmetadata: {name: app, label: {}}\nspec: {selector: {}, selector: {}}\n"
            .to_owned(),
    ] {
        home.write("objects/bad.yaml", &bad);
        let watched = home.open(Some("pod.yaml"), &["objects"]).map_err(|error| error.to_string());
        assert_eq!(watched.expect(&bad).value("app"), Some("1"), "{bad}");
        home.write("objects/bad.yaml", &format!("{bad}---\n{}", config_map("last", "1")));
        let watched = home.open(Some("pod.yaml"), &["objects"]).expect(&bad);
        assert_eq!((watched.value("app"), watched.value("last")), (Some("1"), Some("1")), "{bad}");
    }
    // So is one in the file of the pod.
    home.write("pod.yaml", &format!("a: [\n---\n{}", pod_of("app", false)));
    assert_eq!(home.open(Some("pod.yaml"), &["objects"]).expect("the pod").value("app"), Some("1"));
}

#[test]
fn a_bad_document_that_the_pod_may_need_keeps_podfs_from_starting() {
    let home = ManifestHome::with_objects(&[("other", "1")]);
    home.write("pod.yaml", &pod_of("app", false));
    let refused = |text: &str| {
        home.write("objects/bad.yaml", text);
        home.complaint(Some("pod.yaml"), &["objects"])
    };
    let app = config_map("app", "1");
    let needed = refused(&app.replace("\"1\"", "[1]"));
    assert_eq!(needed, "objects/bad.yaml: data.key: must be a string");
    assert_eq!(refused("a: [hunter2\n"), "objects/bad.yaml:1:4: unclosed bracket '['");
    assert_eq!(
        refused(&format!("{app}---\n{app}")),
        "ConfigMap default/app is described twice, in objects/bad.yaml, document 1 and in objects/bad.yaml, document 2; \
         remove one of them"
    );
    home.write("pod.yaml", &pod_of("app", true));
    home.write("objects/bad.yaml", "a: [hunter2\n");
    home.open(Some("pod.yaml"), &["objects"]).expect("the object is optional");
    home.write("objects/bad.yaml", &app.replace("\"1\"", "[1]"));
    assert_eq!(home.complaint(Some("pod.yaml"), &["objects"]), needed, "its document is there, but bad");
    home.write("objects/bad.yaml", &app);
    home.write(
        "pod.yaml",
        &format!("{}---\nkind: Pod\napiVersion: v1\nmetadata: {{name: [1]}}\n", pod_of("app", false)),
    );
    let two = home.complaint(Some("pod.yaml"), &["objects"]);
    assert!(two.starts_with("pod.yaml"), "which of the two is the pod?: {two}");
}

#[test]
fn the_pod_file_has_exactly_one_pod() {
    let home = ManifestHome::new();
    home.write("pod.yaml", &config_map("app", "1"));
    assert!(home.complaint(Some("pod.yaml"), &[]).starts_with("pod.yaml: "));
    home.write("pod.yaml", &format!("{}---\n{}", pod("one"), pod("two")));
    assert!(home.complaint(Some("pod.yaml"), &[]).starts_with("pod.yaml"));
}

#[test]
fn a_limit_of_the_kernel_names_its_sysctl() {
    let watches = SourceError::WatchLimit("objects".into()).to_string();
    assert!(watches.contains("fs.inotify.max_user_watches"), "{watches}");
    let instances = SourceError::InstanceLimit.to_string();
    assert!(instances.contains("fs.inotify.max_user_instances"), "{instances}");
}
