//! Requests to a real daemon: waiting, volumes, release, and errors on its socket.

use std::fs;
use std::io::{Read, Write};
use std::net::{Shutdown, TcpStream};
use std::os::unix::fs::{FileTypeExt, PermissionsExt};
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt;
use std::process::{Command, Stdio};
use std::thread;

use nix::sys::signal::Signal;
use serde_json::{Value, json};

use crate::common::caller::Caller;
use crate::common::node::Node;
use crate::common::outcome::finish;
use crate::common::{PODFS, config_map, eventually, secret, wait_content};

const WEB: &str = "\
apiVersion: v1
kind: Pod
metadata: {name: web, uid: uid-web}
spec:
  volumes:
  - {name: config, configMap: {name: app}}
  - {name: scratch, emptyDir: {}}
  - {name: credentials, secret: {secretName: late}}
  containers:
  - name: c
    image: none
    volumeMounts:
    - {name: config, mountPath: /config}
    - {name: scratch, mountPath: /scratch}
    - {name: credentials, mountPath: /credentials}
";

/// A node with a pod that waits for the Secret `late`.
fn waiting_node() -> Node {
    let node = Node::new();
    node.put("app.yaml", &config_map("app", &[("key", "value")]));
    node.put("web.yaml", WEB);
    node
}

/// A node whose pod has all of its objects.
fn ready_node() -> Node {
    let node = waiting_node();
    node.put("late.yaml", &secret("late", &[("password", "first")]));
    node
}

#[test]
fn the_status_says_a_problem_once_and_a_wait_for_a_missing_pod_names_the_file_that_podfs_cannot_read() {
    let node = Node::new();
    node.put("app.yaml", &config_map("app", &[("key", "value")]));
    node.put("web.yaml", "kind: [");
    let _daemon = node.start();
    let path = node.fixture.path("manifests/web.yaml").display().to_string();
    let status = || node.ask(&["status"]);
    eventually("the problem is known", || String::from_utf8_lossy(&status().stdout).contains(&path));
    let output = status();
    let text = [output.stdout, output.stderr].concat();
    let text = String::from_utf8(text).expect("text");
    assert_eq!((output.status.code(), text.matches(&path).count()), (Some(1), 1), "{text}");
    assert!(text.ends_with("podfs: podfs cannot read a source of pods; the output says why\n"), "{text}");
    let refused = node.refused(&["wait", "default/web", "--timeout", "0"]);
    let sentence = "pod default/web: this node does not have it; podfs node status lists its pods, by NAMESPACE/NAME and uid; \
                    podfs cannot read a source of pods: ";
    assert!(refused.contains(sentence) && refused.contains(&path), "{refused}");
    let refused = node.refused(&["wait", "default/web", "--timeout", "2"]);
    let report = refused.lines().next().unwrap_or_default();
    assert!(report.contains("this node does not have it yet (") && report.contains(&path), "{refused}");
}

#[test]
fn vm_07_an_agent_waits_for_volumes_and_reads_the_kubelets_text() {
    let node = waiting_node();
    let _daemon = node.start();
    eventually("two volumes are mounted", || {
        let volumes: Value =
            serde_json::from_str(&node.expect(&["volumes", "default/web", "--output", "json"])).expect("JSON");
        volumes["volumes"].as_array().is_some_and(|volumes| volumes.len() == 2)
    });
    let late = node.refused(&["wait", "default/web", "--timeout", "1"]);
    let text = "podfs: unmounted volumes=[credentials], unattached volumes=[], failed to process volumes=[]: context deadline \
                exceeded; credentials: ";
    assert!(late.starts_with(text) && late.contains("\"late\""), "{late}");
    assert!(node.refused(&["status"]).contains("1 of 1 pods lack volumes"));

    let arguments = ["wait", "uid-web", "--timeout", "60"];
    let outcome = thread::scope(|scope| {
        let waiting = scope.spawn(|| node.ask(&arguments));
        node.put("late.yaml", &secret("late", &[("password", "first")]));
        waiting.join().expect("no panic")
    });
    assert!(outcome.status.success(), "{}", String::from_utf8_lossy(&outcome.stderr));
    node.expect(&["status"]);
}

#[test]
fn a_wait_reports_a_missing_daemon_or_pod_and_continues() {
    let node = Node::new();
    let wait = || {
        let mut command = Command::new(PODFS);
        command.args(["node", "wait", "default/web", "--timeout", "60"]).arg("--run-dir").arg(node.fixture.path("run"));
        node.fixture.spawn(&mut command)
    };
    let mut first = wait();
    first.wait_log("podfs: podfs node does not run here: ");
    first.wait_log("start podfs-node; waiting for it, up to 60 s\n");
    let _daemon = node.start();
    let mut second = wait();
    second.wait_log("podfs: pod default/web: this node does not have it yet; waiting for it, up to 60 s\n");
    node.put("app.yaml", &config_map("app", &[("key", "value")]));
    node.put("late.yaml", &secret("late", &[("password", "first")]));
    node.put("web.yaml", WEB);
    assert_eq!((first.wait().code(), second.wait().code()), (Some(0), Some(0)));
}

#[test]
fn an_agent_learns_where_volumes_are_and_what_they_need() {
    let node = ready_node();
    let _daemon = node.start();
    node.expect(&["wait", "default/web"]);
    let volumes: Value =
        serde_json::from_str(&node.expect(&["volumes", "default/web", "--output", "json"])).expect("JSON");
    let at = |place: &str| node.fixture.path("root/pods/uid-web/volumes").join(place).display().to_string();
    let expected = json!({"volumes": [
        {"name": "config", "kind": "configMap", "path": at("kubernetes.io~configmap/config"), "readOnly": true},
        {"name": "scratch", "kind": "emptyDir", "path": at("kubernetes.io~empty-dir/scratch"), "readOnly": false},
        {"name": "credentials", "kind": "secret", "path": at("kubernetes.io~secret/credentials"), "readOnly": true},
    ]});
    assert_eq!(volumes, expected);
    let table = node.expect(&["volumes", "uid-web"]);
    assert!(table.contains("scratch") && table.contains("read-write"), "{table}");
    assert!(
        node.expect(&["status"]).contains("default/web  mounted      3/3  uid-web"),
        "{}",
        node.expect(&["status"])
    );
    assert!(node.expect(&["state"]).contains("kubernetes.io/configmap/uid-web-config"), "{}", node.expect(&["state"]));
}

#[test]
fn vm_11_a_pod_keeps_its_volumes_until_it_is_over_and_released() {
    let node = ready_node();
    let _daemon = node.start();
    node.expect(&["wait", "default/web"]);
    let config = node.path("web", "config");
    let refused = node.refused(&["release", "default/web"]);
    assert!(refused.starts_with("podfs: pod default/web is to run on this node: delete it first"), "{refused}");
    node.remove("web.yaml");
    eventually("the daemon notices the deletion", || node.pod("web").is_some_and(|pod| pod["stage"].is_null()));
    assert_eq!(fs::read_to_string(config.join("key")).expect("it is mounted"), "value");
    let still = node.refused(&["wait", "default/web", "--unmounted", "--timeout", "0"]);
    let text = "podfs: mounted volumes=[config credentials scratch]: context deadline exceeded";
    assert!(still.starts_with(text), "{still}");
    let over = node.refused(&["wait", "default/web", "--timeout", "0"]);
    assert!(over.contains("pod default/web: it was deleted"), "{over}");
    node.expect(&["release", "default/web"]);
    node.expect(&["wait", "default/web", "--unmounted"]);
    eventually("nothing of the pod is left", || node.is_clean("uid-web"));
    let unknown = node.refused(&["release", "default/web"]);
    assert!(unknown.contains("pod default/web: this node does not have it"), "{unknown}");
}

#[test]
fn a_second_daemon_is_refused_and_the_first_continues() {
    let node = ready_node();
    let daemon = node.start();
    let refused = finish(node.fixture.mark(&mut node.command()).stdin(Stdio::null()));
    let pid = format!("as process {} ", daemon.pid());
    refused.says(1, &["podfs node runs already here, ", &pid, "node.lock", "--run-dir"]);
    let root = node.fixture.path("root");
    let mut other = Command::new(PODFS);
    other.arg("node").arg("--manifests").arg(node.fixture.path("manifests"));
    other.arg("--root-dir").arg(&root).arg("--run-dir").arg(node.fixture.path("run2"));
    let refused = finish(node.fixture.mark(&mut other).stdin(Stdio::null()));
    refused.says(1, &["a podfs node with another --run-dir uses ", root.to_str().expect("text"), "--root-dir"]);
    node.expect(&["wait", "default/web"]);
}

#[test]
fn the_socket_of_a_daemon_that_was_killed_is_replaced() {
    let node = ready_node();
    let mut daemon = node.start();
    node.expect(&["wait", "default/web"]);
    let supervisor = node.supervisor("web");
    let socket = node.fixture.path("run/node.sock");
    let metadata = fs::metadata(&socket).expect("the socket");
    assert!(metadata.file_type().is_socket() && metadata.permissions().mode() & 0o777 == 0o600, "only root connects");
    daemon.signal(Signal::SIGKILL);
    daemon.wait();
    assert!(socket.exists(), "a daemon that is killed takes nothing away");
    let absent = node.refused(&["status"]);
    assert!(absent.starts_with("podfs: podfs node does not run here: ") && absent.contains("node.sock"), "{absent}");
    let absent = node.refused(&["wait", "default/web", "--timeout", "0"]);
    assert!(absent.starts_with("podfs: podfs node does not run here: "), "{absent}");

    // An agent that waits meanwhile does not notice.
    let arguments = ["wait", "default/web", "--timeout", "60"];
    let (outcome, mut next) = thread::scope(|scope| {
        let waiting = scope.spawn(|| node.ask(&arguments));
        let next = node.start();
        (waiting.join().expect("no panic"), next)
    });
    assert!(outcome.status.success(), "{}", String::from_utf8_lossy(&outcome.stderr));
    eventually("the supervisor is known", || node.pod("web").is_some_and(|pod| pod["supervisor"].is_i64()));
    assert_eq!(node.supervisor("web"), supervisor, "it was adopted");

    // SIGTERM leaves the pod alone, too, and takes the socket away.
    next.signal(Signal::SIGTERM);
    assert_eq!(next.wait().code(), Some(0));
    assert!(!socket.exists());
    wait_content(&node.fixture.path("root/pods/uid-web/volumes/kubernetes.io~configmap/config/key"), "value");
}

#[test]
fn garbage_on_the_socket_ends_that_connection_alone() {
    let node = ready_node();
    let _daemon = node.start();
    let socket = node.fixture.path("run/node.sock");
    let preface = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n".to_vec();
    let garbage = [&preface[..], b"\0\0\x7fgarbage that is no frame"].concat();
    for bytes in [b"GET / HTTP/1.1\r\n\r\n".to_vec(), vec![0; 100], vec![255; 100_000], preface, garbage] {
        let mut stream = UnixStream::connect(&socket).expect("it listens");
        // The daemon may hang up before it has read everything.
        let _cut = stream.write_all(&bytes).and_then(|()| stream.shutdown(Shutdown::Write));
        let _cut = stream.read_to_end(&mut Vec::new());
    }
    // A connection without a message does not delay others.
    let _silent = UnixStream::connect(&socket).expect("it listens");
    node.expect(&["wait", "default/web"]);
}

#[test]
fn only_root_asks_and_only_root_serves() {
    const NOBODY: u32 = 65534;
    let node = ready_node();
    let _daemon = node.start();
    let nobody = |arguments: &[&str]| {
        let mut command = Command::new(PODFS);
        command.arg("node").args(arguments).env("PODFS_CONFIG", "/dev/null").stdin(Stdio::null());
        finish(command.uid(NOBODY).gid(NOBODY).current_dir("/"))
    };
    let run = node.fixture.path("run").display().to_string();
    nobody(&["status", "--run-dir", &run]).says(3, &["podfs node answers only root; run this as root"]);
    nobody(&["--manifests", "/nowhere"])
        .says(3, &["podfs mounts file systems, so it must run as root; without root, podfs render"]);
    // The daemon checks the user of a connection, besides the socket's mode.
    let socket = node.fixture.path("run/node.sock");
    let open =
        |path: &std::path::Path, mode| fs::set_permissions(path, fs::Permissions::from_mode(mode)).expect("its mode");
    open(&socket, 0o666);
    open(&node.fixture.path("run"), 0o755);
    open(&node.fixture.path(""), 0o755);
    let caller = Caller::new(NOBODY);
    let answer = caller.run(&node.fixture.path(""), || {
        let mut stream = UnixStream::connect(&socket).expect("its mode lets everybody in");
        let mut answer = Vec::new();
        let _cut = stream.write_all(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\x04\0\0\0\0\0");
        let _cut = stream.read_to_end(&mut answer);
        answer
    });
    assert_eq!(answer, b"", "the daemon hangs up without a word");
}

#[test]
fn a_daemon_that_cannot_know_pods_does_not_start() {
    let node = Node::new();
    let start = |arguments: &[&str]| {
        let mut command = Command::new(PODFS);
        command.arg("node").args(arguments).env("PODFS_CONFIG", "/dev/null");
        finish(node.fixture.mark(&mut command).stdin(Stdio::null()))
    };
    start(&[]).says(2, &["podfs node knows no pods without a source", "--manifests", "--kubeconfig"]);
    start(&["--kubeconfig", "/nowhere"]).says(2, &["--node-name"]);
    start(&["--manifests", "/nowhere", "--report-volumes-in-use"])
        .says(2, &["--report-volumes-in-use", "--kubeconfig"]);
    start(&["--manifests", "/nowhere", "--register-csi-drivers"]).says(2, &["--register-csi-drivers", "--kubeconfig"]);
    for (option, sentence) in [
        ("--register-csi-drivers", "the kubelet registers CSI drivers itself; leave out --register-csi-drivers"),
        ("--report-volumes-in-use", "the kubelet reports its volumes in use itself; leave out --report-volumes-in-use"),
    ] {
        for beside in [&["--csi", "/nowhere"][..], &["--nri"]] {
            let server = ["--kubeconfig", "/nowhere", "--node-name", "n1", option];
            start(&[&server[..], beside].concat()).says(2, &[sentence]);
        }
    }
    for name in ["a b", "/web", "default/"] {
        let _daemon = node.start();
        let outcome = node.ask(&["release", name]);
        assert_eq!(outcome.status.code(), Some(2), "{name}");
        let text = String::from_utf8_lossy(&outcome.stderr).into_owned();
        assert!(text.contains(&format!("pod {name:?}: neither a uid nor NAMESPACE/NAME")), "{text}");
    }
}

#[test]
fn me_01_one_port_has_the_metrics_of_the_node_and_of_all_pods() {
    let node = ready_node();
    let mut command = node.command();
    command.args(["--metrics-addr", "127.0.0.1:0"]);
    let daemon = node.start_command(command);
    node.expect(&["wait", "default/web"]);
    daemon.wait_log("metrics are served at http://");
    let log = node.log();
    let address =
        log.split("metrics are served at http://").nth(1).and_then(|url| url.split('/').next()).expect("an address");
    let mut stream = TcpStream::connect(address).expect("it listens");
    stream.write_all(b"GET /metrics HTTP/1.0\r\n\r\n").expect("asked");
    let mut text = String::new();
    stream.read_to_string(&mut text).expect("an answer");
    let secret = "kubernetes.io/secret";
    for line in [
        format!("volume_manager_total_volumes{{plugin_name=\"{secret}\",state=\"desired_state_of_world\"}} 1"),
        format!("volume_manager_total_volumes{{plugin_name=\"{secret}\",state=\"actual_state_of_world\"}} 1"),
        format!(
            "storage_operation_duration_seconds_count{{operation_name=\"volume_mount\",volume_plugin=\"{secret}\",status=\"success\",migrated=\"false\"}} 1"
        ),
        format!(
            "volume_operation_total_seconds_count{{plugin_name=\"{secret}\",operation_name=\"overall_volume_mount\"}} 1"
        ),
        "reconstruct_volume_operations_total 0".to_owned(),
        "podfs_up{namespace=\"default\",pod=\"web\",uid=\"uid-web\"} 1".to_owned(),
    ] {
        assert!(text.lines().any(|metric| metric == line), "{line} is not in:\n{text}");
    }
    assert!(
        text.contains(
            "podfs_volume_stats_capacity_bytes{namespace=\"default\",pod=\"web\",uid=\"uid-web\",volume=\"scratch\"}"
        ),
        "{text}"
    );
    assert!(
        !text.contains("storage_operation_duration_seconds_count{namespace"),
        "an operation is counted once:\n{text}"
    );
}
