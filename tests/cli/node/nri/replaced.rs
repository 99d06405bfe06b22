//! Mounts of new containers: podfs's volumes if they are mounted, and the kubelet's otherwise.

use std::fs;
use std::os::unix::fs::symlink;
use std::path::Path;

use podfs::node::nri::messages::nri::*;

use super::runtime::{Machine, Plugin, container, mount};
use crate::common::{Running, config_map, eventually, secret, wait_content};

/// A pod with a volume of each kind that podfs serves, and with others.
pub const WEB: &str = "\
apiVersion: v1
kind: Pod
metadata: {name: web, uid: uid-web, labels: {tier: front, podfs.io/volumes: \"true\"}}
spec:
  containers:
  - name: c
    image: none
    volumeMounts:
    - {name: config, mountPath: /config}
    - {name: scratch, mountPath: /scratch}
    - {name: login, mountPath: /login}
    - {name: info, mountPath: /info}
    - {name: all, mountPath: /all}
    - {name: config, mountPath: /etc/app.conf, subPath: a.conf}
    - {name: config, mountPath: /etc/expanded/, subPathExpr: $(WHICH).conf}
    - {name: scratch, mountPath: /part, subPath: part}
  volumes:
  - {name: config, configMap: {name: app}}
  - {name: scratch, emptyDir: {}}
  - {name: login, secret: {secretName: login}}
  - {name: info, downwardAPI: {items: [{path: labels, fieldRef: {fieldPath: metadata.labels}}]}}
  - {name: all, projected: {sources: [{configMap: {name: app}}, {secret: {name: login}}]}}
";

/// A machine whose node has the pod `web` and its objects.
pub fn machine() -> Machine {
    let machine = Machine::new();
    machine.node.put("app.yaml", &config_map("app", &[("a.conf", "first"), ("b", "other")]));
    machine.node.put("login.yaml", &secret("login", &[("password", "s3cr3t")]));
    machine.node.put("web.yaml", WEB);
    machine
}

pub fn start(machine: &Machine) -> Running {
    let mut command = machine.command();
    command.args(["--metrics-addr", "127.0.0.1:0"]);
    machine.node.start_command(command)
}

/// The source of the mount at a destination, if podfs has replaced that mount.
fn source(mounts: &[Mount], destination: &str) -> Option<String> {
    mounts.iter().find(|mount| mount.destination == destination).map(|mount| mount.source.clone())
}

fn read(directory: Option<String>, file: &str) -> String {
    fs::read_to_string(Path::new(&directory.expect("it is replaced")).join(file)).expect("a file")
}

/// Creates a container, again and again until podfs replaces this many mounts: podfs may not know the pod yet at the
/// first request.
pub fn create_with(plugin: &mut Plugin, pod: &PodSandbox, container: &Container, count: usize) -> Vec<Mount> {
    let mut mounts = Vec::new();
    eventually("podfs has the volumes", || {
        mounts = plugin.create(pod, container);
        mounts.len() == count
    });
    mounts
}

#[test]
fn the_four_kinds_and_their_parts_are_replaced_and_nothing_else() {
    let machine = machine();
    let runtime = machine.listen();
    let _daemon = start(&machine);
    let pod = machine.sandbox("web", Some("true"));
    let mut plugin = runtime.begin(Vec::new(), Vec::new());
    plugin.event(Event::RunPodSandbox, &pod, None);
    let mut one = container(
        &pod,
        "c",
        vec![
            mount(Path::new("/proc"), "/proc"),
            machine.mount("web", "volumes/kubernetes.io~configmap/config", "/config"),
            machine.mount("web", "volumes/kubernetes.io~empty-dir/scratch", "/scratch"),
            machine.mount("web", "volumes/kubernetes.io~secret/login", "/login"),
            machine.mount("web", "volumes/kubernetes.io~downward-api/info", "/info"),
            machine.mount("web", "volumes/kubernetes.io~projected/all", "/all"),
            machine.mount("web", "volume-subpaths/config/c/5", "/etc/app.conf"),
            machine.mount("web", "volume-subpaths/config/c/6", "/etc/expanded"),
            machine.mount("web", "volume-subpaths/scratch/c/7", "/part"),
            machine.mount("web", "etc-hosts", "/etc/hosts"),
            // A directory of another pod, which podfs must not replace.
            machine.mount("db", "volumes/kubernetes.io~configmap/config", "/stolen"),
        ],
    );
    one.env = vec!["WHICH=a".to_owned(), "OTHER".to_owned()];
    let mounts = create_with(&mut plugin, &pod, &one, 6);
    let at = |destination: &str| source(&mounts, destination);
    assert_eq!((read(at("/config"), "a.conf").as_str(), read(at("/login"), "password").as_str()), ("first", "s3cr3t"));
    assert!(read(at("/info"), "labels").contains("tier=\"front\""));
    assert_eq!(read(at("/all"), "b"), "other");
    for part in ["/etc/app.conf", "/etc/expanded"] {
        assert_eq!(fs::read_to_string(at(part).expect("it is replaced")).expect("a file"), "first", "{part}");
    }
    for replaced in &mounts {
        assert_eq!(replaced.r#type, "bind");
        assert_eq!(replaced.options, ["rbind", "rprivate", "ro", "nosuid", "nodev"].map(str::to_owned));
    }
    machine.node.put("app.yaml", &config_map("app", &[("a.conf", "second"), ("b", "other")]));
    wait_content(&Path::new(&at("/config").expect("replaced")).join("a.conf"), "second");
    // podfs makes no volumes of the other kinds.
    let volumes = machine.node.pod("web").expect("the pod")["volumes"].as_array().expect("volumes").len();
    assert_eq!(volumes, 4);
    let made = machine.node.fixture.path("root/pods/uid-web");
    assert!(!made.join("volumes/kubernetes.io~empty-dir").exists() && !made.join("etc-hosts").exists());
    assert_eq!(machine.metric("podfs_nri_containers{source=\"podfs\"}").as_deref(), Some("1"));
    plugin.event(Event::RemoveContainer, &pod, Some(&one));
    assert_eq!(machine.metric("podfs_nri_containers{source=\"podfs\"}").as_deref(), Some("0"));
}

#[test]
fn sources_are_known_by_the_kubelets_literal_and_its_real_directory() {
    let machine = machine();
    let runtime = machine.listen();
    let literal = machine.node.fixture.path("link");
    symlink(machine.root(), &literal).expect("a link");
    let mut command = machine.node.command();
    command.arg("--nri").arg(machine.socket()).arg("--kubelet-root").arg(&literal);
    let _daemon = machine.node.start_command(command);
    let pod = machine.sandbox("web", Some("true"));
    let mut plugin = runtime.begin(Vec::new(), Vec::new());
    let volume = "pods/uid-web/volumes/kubernetes.io~configmap/config";
    let mounts = vec![mount(&literal.join(volume), "/literal"), mount(&machine.root().join(volume), "/real")];
    create_with(&mut plugin, &pod, &container(&pod, "c", mounts), 2);
}

#[test]
fn a_long_answer_goes_in_frames_that_a_runtime_takes() {
    let machine = machine();
    let runtime = machine.listen();
    let _daemon = machine.start();
    let pod = machine.sandbox("web", Some("true"));
    let mut plugin = runtime.begin(Vec::new(), Vec::new());
    let at = |number: usize| {
        machine.mount("web", "volumes/kubernetes.io~configmap/config", &format!("/{number}/{}", "long/".repeat(40)))
    };
    let mounts: Vec<_> = (0..60).map(at).collect();
    create_with(&mut plugin, &pod, &container(&pod, "c", mounts), 60);
    assert!(plugin.frames.iter().filter(|length| **length == 4096).count() >= 3, "{:?}", plugin.frames);
}

#[test]
fn pods_that_are_not_chosen_keep_the_kubelets_volumes() {
    let machine = machine();
    let runtime = machine.listen();
    machine.node.put("plain.yaml", &WEB.replace("web", "plain").replace(", podfs.io/volumes: \"true\"", ""));
    machine.node.put("never.yaml", &WEB.replace("web", "never").replace("\"true\"", "\"false\""));
    let config = "volumes/kubernetes.io~configmap/config";
    let created = |plugin: &mut Plugin, name: &str, mark| {
        let pod = machine.sandbox(name, mark);
        plugin.create(&pod, &container(&pod, "c", vec![machine.mount(name, config, "/config")])).len()
    };
    {
        let mut daemon = start(&machine);
        let mut plugin = runtime.begin(Vec::new(), Vec::new());
        eventually("podfs knows the chosen pod", || machine.node.volume("web", "config").is_some());
        assert_eq!((created(&mut plugin, "plain", None), created(&mut plugin, "never", Some("false"))), (0, 0));
        assert!(machine.node.pod("plain").is_none() && machine.node.pod("never").is_none());
        assert_eq!(machine.metric("podfs_nri_mounts_total{source=\"kubelet\""), None, "nothing went wrong");
        daemon.stop();
    }
    let mut command = machine.command();
    command.args(["--nri-pods", "all"]);
    let _daemon = machine.node.start_command(command);
    let mut plugin = runtime.begin(Vec::new(), Vec::new());
    eventually("all pods are chosen", || created(&mut plugin, "plain", None) == 1);
    assert_eq!(created(&mut plugin, "never", Some("false")), 0);
}

#[test]
fn a_volume_that_is_late_is_the_kubelets_and_the_reason_is_counted_and_logged() {
    let machine = machine();
    let runtime = machine.listen();
    machine.node.remove("login.yaml");
    let daemon = start(&machine);
    let pod = machine.sandbox("web", Some("true"));
    let mut plugin = runtime.begin(Vec::new(), Vec::new());
    let mut propagated = machine.mount("web", "volumes/kubernetes.io~configmap/config", "/follows");
    propagated.options[1] = "rslave".to_owned();
    let mounts = vec![
        machine.mount("web", "volumes/kubernetes.io~configmap/config", "/config"),
        machine.mount("web", "volumes/kubernetes.io~secret/login", "/login"),
        propagated,
    ];
    let one = container(&pod, "c", mounts);
    let replaced = create_with(&mut plugin, &pod, &one, 1);
    assert!(source(&replaced, "/config").is_some(), "one late volume keeps no other one back");
    daemon.wait_log(
        "pod default/web, container c: /login is the kubelet's volume: podfs did not have it mounted in time",
    );
    let count = |reason: &str| {
        let line = format!("podfs_nri_mounts_total{{source=\"kubelet\",reason=\"{reason}\"}}");
        machine.metric(&line).and_then(|count| count.parse::<u64>().ok()).unwrap_or_default()
    };
    assert!(count("not_ready") > 0 && count("mount_options") > 0);
    let stranger = machine.sandbox("stranger", Some("true"));
    let config = machine.mount("stranger", "volumes/kubernetes.io~configmap/config", "/config");
    assert!(plugin.create(&stranger, &container(&stranger, "c", vec![config])).is_empty());
    assert_eq!(count("unknown_pod"), 1);
    // When the Secret exists, the next container has its volume.
    machine.node.put("login.yaml", &secret("login", &[("password", "s3cr3t")]));
    create_with(&mut plugin, &pod, &one, 2);
}

#[test]
fn a_runtime_never_gets_a_volume_that_another_process_has_unmounted() {
    let machine = machine();
    let runtime = machine.listen();
    let _daemon = machine.start();
    let pod = machine.sandbox("web", Some("true"));
    let mut plugin = runtime.begin(Vec::new(), Vec::new());
    let one = container(&pod, "c", vec![machine.mount("web", "volumes/kubernetes.io~configmap/config", "/config")]);
    let replaced = create_with(&mut plugin, &pod, &one, 1);
    let path = source(&replaced, "/config").expect("replaced");
    nix::mount::umount2(path.as_str(), nix::mount::MntFlags::MNT_DETACH).expect("unmounted");
    if let Some(source) = source(&plugin.create(&pod, &one), "/config") {
        assert_eq!(read(Some(source), "b"), "other", "the supervisor has mounted it again");
    }
}
