//! The life of a pod on a node: a source describes it, it changes, it ends, and an agent releases it.

use std::fs;
use std::path::Path;

use nix::sys::signal::{Signal, kill};

use crate::common::node::Node;
use crate::common::{config_map, eventually, wait_content};

/// A pod whose container mounts the volumes named in `used`.
pub(super) fn pod(name: &str, volumes: &[&str], used: &[&str]) -> String {
    let volumes: String = volumes.iter().map(|volume| format!("  - {volume}\n")).collect();
    let mounts: String = used.iter().map(|name| format!("    - {{name: {name}, mountPath: /{name}}}\n")).collect();
    format!(
        "apiVersion: v1\nkind: Pod\nmetadata: {{name: {name}, uid: uid-{name}}}\nspec:\n  volumes:\n{volumes}  containers:\n  \
         - name: c\n    image: none\n    volumeMounts:\n{mounts}"
    )
}

const CONFIG: &str = "{name: config, configMap: {name: app}}";
const SCRATCH: &str = "{name: scratch, emptyDir: {}}";

#[test]
fn a_pod_appears_changes_and_goes() {
    let node = Node::new();
    node.put("app.yaml", &config_map("app", &[("key", "one")]));
    node.put("web.yaml", &pod("web", &[CONFIG, SCRATCH], &["config", "scratch"]));
    let _daemon = node.start();
    node.expect(&["wait", "default/web"]);
    let (config, scratch) = (node.path("web", "config"), node.path("web", "scratch"));
    wait_content(&config.join("key"), "one");
    fs::write(scratch.join("file"), "data").expect("an emptyDir is writable");
    node.put("app.yaml", &config_map("app", &[("key", "two")]));
    wait_content(&config.join("key"), "two");

    let refused = node.refused(&["release", "default/web"]);
    assert!(refused.contains("pod default/web is to run on this node"), "{refused}");
    node.remove("web.yaml");
    eventually("no source has the pod", || node.pod("web").is_some_and(|pod| pod["stage"].is_null()));
    assert_eq!(fs::read_to_string(config.join("key")).expect("VM-11: it is mounted still"), "two");
    node.expect(&["release", "default/web"]);
    eventually("nothing of the pod is left", || node.is_clean("uid-web") && node.pod("web").is_none());
    assert!(!node.log().contains("orphaned"), "{}", node.log());
}

#[test]
fn the_state_says_what_a_released_pod_waits_for() {
    let node = Node::new();
    node.put("web.yaml", &pod("web", &[SCRATCH], &["scratch"]));
    let _daemon = node.start();
    node.expect(&["wait", "default/web"]);
    let supervisor = node.supervisor("web");
    kill(supervisor, Signal::SIGSTOP).expect("stopped");
    node.remove("web.yaml");
    eventually("no source has the pod", || node.pod("web").is_some_and(|pod| pod["stage"].is_null()));
    node.expect(&["release", "default/web"]);
    let awaited = format!("for the end of the pod's supervisor (pid {supervisor}); podfs kills it at ");
    eventually("its state says it", || node.pod("web").is_some_and(|pod| pod["notes"].to_string().contains(&awaited)));
    let status = String::from_utf8(node.ask(&["status"]).stdout).expect("text");
    assert!(status.contains(&awaited), "{status}");
    let refused = node.refused(&["wait", "default/web", "--unmounted", "--timeout", "0"]);
    assert!(refused.contains(&awaited), "{refused}");
    kill(supervisor, Signal::SIGCONT).expect("it goes on");
    eventually("nothing of the pod is left", || node.is_clean("uid-web") && node.pod("web").is_none());
}

#[test]
fn vm_03_a_volume_that_no_container_uses_is_not_mounted() {
    let node = Node::new();
    node.put("web.yaml", &pod("web", &[CONFIG, SCRATCH], &["scratch"]));
    let _daemon = node.start();
    node.expect(&["wait", "default/web"]);
    assert!(node.volume("web", "config").is_none(), "no container uses it");
    assert!(!node.fixture.path("root/pods/uid-web/volumes/kubernetes.io~configmap").exists());
}

#[test]
fn vm_10_a_volume_that_cannot_be_mounted_keeps_no_other_one_back() {
    let node = Node::new();
    node.put("app.yaml", &config_map("app", &[("key", "one")]));
    let late = "{name: late, configMap: {name: missing}}";
    node.put("web.yaml", &pod("web", &[CONFIG, late], &["config", "late"]));
    let _daemon = node.start();
    eventually("the other volume is mounted", || {
        node.volume("web", "config").is_some_and(|volume| volume["mount"] == "mounted")
    });
    let text = node.refused(&["wait", "default/web", "--timeout", "1"]);
    assert!(text.contains("unmounted volumes=[late], unattached volumes=[]"), "VM-07: {text}");
    eventually("the reason is reported", || {
        node.volume("web", "late").is_some_and(|volume| {
            volume["reason"].as_str().is_some_and(|reason| reason.contains("configmap \"missing\" not found"))
        })
    });
    node.put("missing.yaml", &config_map("missing", &[("key", "here")]));
    node.expect(&["wait", "default/web"]);
    wait_content(&node.path("web", "late").join("key"), "here");
    eventually("ME-02: the failure is logged in the kubelet's words", || {
        node.log().contains("MountVolume.SetUp failed for volume \"late\" : ")
    });
}

#[test]
fn a_manifest_that_stops_parsing_leaves_its_pod_alone() {
    let node = Node::new();
    node.put("app.yaml", &config_map("app", &[("key", "one")]));
    node.put("web.yaml", &pod("web", &[CONFIG], &["config"]));
    let _daemon = node.start();
    node.expect(&["wait", "default/web"]);
    let config = node.path("web", "config");
    node.put("web.yaml", "kind: Pod\n  broken");
    eventually("the error is reported", || {
        let state: serde_json::Value =
            serde_json::from_str(&node.expect(&["state", "--output", "json"])).expect("JSON");
        state["trouble"]
            .as_array()
            .is_some_and(|trouble| trouble.iter().any(|sentence| sentence.to_string().contains("web.yaml")))
    });
    node.put("app.yaml", &config_map("app", &[("key", "two")]));
    wait_content(&config.join("key"), "two");
    assert_eq!(node.pod("web").expect("it stays")["stage"], "desired");
}

#[test]
fn a_bad_document_keeps_its_pod_as_it_is_and_the_others_of_its_file_go_on() {
    let node = Node::new();
    let file = |web: &str, value: &str| {
        let db = pod("db", &[CONFIG], &["config"]);
        node.put("all.yaml", &format!("{web}\n---\n{db}\n---\n{}", config_map("app", &[("key", value)])));
    };
    let web = pod("web", &[CONFIG, SCRATCH], &["config", "scratch"]);
    file(&web.replace("image: none", "image: ["), "one");
    let mut daemon = node.start();
    node.expect(&["wait", "default/db"]);
    assert!(node.pod("web").is_none(), "its document cannot be read");
    file(&web, "two");
    node.expect(&["wait", "default/web"]);
    let config = node.path("web", "config").join("key");
    wait_content(&config, "two");
    for (value, bad) in
        [("three", web.replace("name: config, mountPath", "name: [], mountPath")), ("four", "a: [".into())]
    {
        file(&bad, value);
        wait_content(&node.path("db", "config").join("key"), value);
        wait_content(&config, value);
        let status = String::from_utf8(node.ask(&["status"]).stdout).expect("text");
        assert!(
            status.contains("all.yaml") && status.contains("until then, podfs uses the earlier content"),
            "{status}"
        );
        assert!(node.pod("web").is_some_and(|pod| !pod["stage"].is_null()), "the daemon does not take it for gone");
    }
    daemon.signal(Signal::SIGTERM);
    daemon.wait();
    let _next = node.start();
    wait_content(&config, "four");
    file("a: [", "five");
    wait_content(&node.path("db", "config").join("key"), "five");
    assert!(node.path("web", "scratch").exists(), "after a restart, the daemon does not know whether the pod is gone");
    file("", "six");
    eventually("a pod that was removed is gone", || node.pod("web").is_none_or(|pod| pod["stage"].is_null()));
}

#[test]
fn without_an_agent_a_pod_that_is_gone_is_unmounted_at_once() {
    let node = Node::new();
    node.put("web.yaml", &pod("web", &[SCRATCH], &["scratch"]));
    let mut command = node.command();
    command.arg("--release-when-gone");
    let _daemon = node.start_command(command);
    node.expect(&["wait", "default/web"]);
    fs::write(node.path("web", "scratch").join("file"), "data").expect("written");
    node.remove("web.yaml");
    eventually("nothing of the pod is left", || node.is_clean("uid-web"));
}

#[test]
fn two_pods_of_one_name_and_other_uids_are_two_pods() {
    let node = Node::new();
    node.put("web.yaml", &pod("web", &[SCRATCH], &["scratch"]));
    let _daemon = node.start();
    node.expect(&["wait", "default/web"]);
    let first = node.path("web", "scratch");
    let other = pod("web", &[SCRATCH], &["scratch"]).replace("uid-web", "uid-other");
    node.put("web.yaml", &other);
    node.expect(&["wait", "uid-other"]);
    assert!(first.exists(), "the first one was not released");
    node.expect(&["release", "uid-web"]);
    eventually("nothing of the first pod is left", || node.is_clean("uid-web"));
    node.expect(&["wait", "uid-other", "--timeout", "0"]);
}

#[test]
fn a_volume_that_another_process_unmounts_is_mounted_again() {
    let node = Node::new();
    node.put("app.yaml", &config_map("app", &[("key", "one")]));
    node.put("web.yaml", &pod("web", &[CONFIG, SCRATCH], &["config", "scratch"]));
    let _daemon = node.start();
    node.expect(&["wait", "default/web"]);
    let (config, scratch) = (node.path("web", "config"), node.path("web", "scratch"));
    fs::write(scratch.join("file"), "data").expect("written");
    for path in [&config, &scratch] {
        nix::mount::umount2(path, nix::mount::MntFlags::MNT_DETACH).expect("unmounted");
    }
    wait_content(&config.join("key"), "one");
    wait_content(&scratch.join("file"), "data");
}

/// The bytes that a file system has.
fn size(path: &Path) -> u64 {
    let usage = rustix::fs::statvfs(path).expect("a file system");
    usage.f_blocks * usage.f_frsize
}

#[test]
fn ed_02_ed_07_a_size_limit_that_changes_in_the_manifest_holds_for_the_running_pod() {
    let node = Node::new();
    let pod = |disk: &str, memory: &str| {
        let disk = format!("{{name: disk, emptyDir: {{sizeLimit: {disk}}}}}");
        let memory = format!("{{name: memory, emptyDir: {{medium: Memory, sizeLimit: {memory}}}}}");
        pod("web", &[&disk, &memory, SCRATCH], &["disk", "memory", "scratch"])
    };
    node.put("web.yaml", &pod("1Mi", "2Mi"));
    let daemon = node.start();
    node.expect(&["wait", "default/web"]);
    let (disk, memory) = (node.path("web", "disk"), node.path("web", "memory"));
    assert_eq!((size(&disk), size(&memory)), (1 << 20, 2 << 20));
    fs::write(disk.join("file"), vec![7; 512 << 10]).expect("written");
    fs::write(memory.join("file"), vec![7; 1 << 20]).expect("written");
    assert!(fs::write(disk.join("large"), vec![7; 1 << 20]).is_err(), "it does not fit");
    let supervisor = node.supervisor("web");

    node.put("web.yaml", &pod("4Mi", "8Mi"));
    eventually("both have grown", || (size(&disk), size(&memory)) == (4 << 20, 8 << 20));
    fs::write(disk.join("large"), vec![7; 1 << 20]).expect("it fits now");
    fs::write(memory.join("large"), vec![7; 4 << 20]).expect("it fits now");
    assert_eq!(node.volume("web", "disk").expect("the volume")["size"], 4 << 20);
    assert_eq!(node.supervisor("web"), supervisor, "it is the same supervisor");

    // With a limit below the used size, the content stays. A tmpfs gets its new size as soon as the content fits.
    node.put("web.yaml", &pod("1Mi", "1Mi"));
    eventually("the disk has its new limit", || size(&disk) == 1 << 20);
    assert!(fs::write(disk.join("more"), [7; 8192]).is_err(), "more is taken than the limit");
    assert_eq!(fs::read(disk.join("large")).expect("it is there").len(), 1 << 20);
    eventually("podfs says why the tmpfs keeps its size", || {
        let reason =
            node.volume("web", "memory").expect("the volume")["reason"].as_str().unwrap_or_default().to_owned();
        reason.contains("more than the new size of 1048576")
    });
    fs::remove_file(memory.join("large")).expect("removed");
    fs::remove_file(memory.join("file")).expect("removed");
    eventually("the tmpfs has its new size", || size(&memory) == 1 << 20);

    // The limit is removed. The next supervisor and server keep that.
    node.put("web.yaml", &pod("0", "4Mi"));
    eventually("the disk has no limit", || size(&disk) > 16 << 20);
    nix::sys::signal::kill(supervisor, nix::sys::signal::Signal::SIGKILL).expect("killed");
    eventually("there is another supervisor", || {
        node.pod("web")
            .is_some_and(|pod| pod["supervisor"].as_i64().is_some_and(|pid| pid != i64::from(supervisor.as_raw())))
    });
    fs::write(disk.join("more"), vec![7; 8 << 20]).expect("it fits");
    assert_eq!(size(&memory), 4 << 20);
    drop(daemon);
}

#[test]
fn ed_07_an_empty_dir_that_had_no_limit_when_it_was_mounted_gets_none_and_the_pod_says_so() {
    let node = Node::new();
    node.put("web.yaml", &pod("web", &[SCRATCH], &["scratch"]));
    let _daemon = node.start();
    node.expect(&["wait", "default/web"]);
    node.put("web.yaml", &pod("web", &["{name: scratch, emptyDir: {sizeLimit: 1Mi}}"], &["scratch"]));
    eventually("the pod says that the volume stays as it is", || {
        let notes = node.pod("web").expect("the pod")["notes"].to_string();
        notes.contains("is described otherwise than when it was mounted, and stays as it is")
    });
    // No volume is missing, so this succeeds.
    node.expect(&["status"]);
    fs::write(node.path("web", "scratch").join("file"), vec![7; 2 << 20]).expect("it has no limit");
}

#[test]
fn a_redefined_volume_follows_the_object_of_its_mount() {
    let node = Node::new();
    node.put("app.yaml", &config_map("app", &[("key", "one")]));
    node.put("web.yaml", &pod("web", &[CONFIG], &["config"]));
    let _daemon = node.start();
    node.expect(&["wait", "default/web"]);
    let config = node.path("web", "config");
    node.put("web.yaml", &pod("web", &["{name: config, configMap: {name: other}}"], &["config"]));
    eventually("the pod says that the volume stays as it is", || {
        node.pod("web").expect("the pod")["notes"].to_string().contains("is described otherwise")
    });
    node.put("app.yaml", &config_map("app", &[("key", "two")]));
    wait_content(&config.join("key"), "two");
    // The next supervisor gets the same objects.
    let supervisor = node.supervisor("web");
    nix::sys::signal::kill(supervisor, nix::sys::signal::Signal::SIGKILL).expect("killed");
    eventually("there is another supervisor", || {
        node.pod("web")
            .is_some_and(|pod| pod["supervisor"].as_i64().is_some_and(|pid| pid != i64::from(supervisor.as_raw())))
    });
    node.put("app.yaml", &config_map("app", &[("key", "three")]));
    wait_content(&config.join("key"), "three");
}

#[test]
fn a_pod_that_is_renamed_under_its_uid_follows_its_objects_under_its_earlier_name() {
    let node = Node::new();
    node.put("app.yaml", &config_map("app", &[("key", "one")]));
    let name = "{name: name, downwardAPI: {items: [{path: name, fieldRef: {fieldPath: metadata.name}}]}}";
    let web = pod("web", &[CONFIG, name], &["config", "name"]);
    node.put("web.yaml", &web);
    let _daemon = node.start();
    node.expect(&["wait", "default/web"]);
    let (config, name) = (node.path("web", "config"), node.path("web", "name"));
    node.put("web.yaml", &web.replace("name: web, uid", "name: new, uid"));
    eventually("the pod says that it keeps its name", || {
        let notes = node.pod("web").expect("the pod")["notes"].to_string();
        notes.contains("the pod is described as default/new now, and stays default/web")
    });
    node.put("app.yaml", &config_map("app", &[("key", "two")]));
    wait_content(&config.join("key"), "two");
    assert_eq!(fs::read_to_string(name.join("name")).expect("the name"), "web");
}

#[test]
fn a_pod_says_why_its_supervisor_does_not_take_objects() {
    let node = Node::new();
    let app = config_map("app", &[("key", "one")]);
    let annotated = format!(r#""metadata":{{"annotations":{{"a":"{}"}},"#, "x".repeat(17 << 20));
    let too_long = app.replacen(r#""metadata":{"#, &annotated, 1);
    assert!(too_long.len() > app.len());
    node.put("app.yaml", &too_long);
    node.put("web.yaml", &pod("web", &[CONFIG], &["config"]));
    let _daemon = node.start();
    let says_why = || {
        let web = node.pod("web").unwrap_or_default();
        web["notes"].to_string().contains("bytes long, and a supervisor takes at most")
    };
    eventually("the pod says why", says_why);
    node.put("app.yaml", &app);
    node.expect(&["wait", "default/web"]);
    eventually("it says so no more", || !says_why());
}
