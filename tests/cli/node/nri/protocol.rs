//! Messages between a runtime and podfs, also invalid ones.

use podfs::node::nri::messages::nri::*;
use prost::Message;

use super::runtime::{Machine, container};
use crate::common::{PODFS, eventually};

/// The events of NRI 0.6 (containerd 1.7), of 0.8 (2.0, 2.1) and of 0.10 and later: a bit for each.
const KNOWN: [(&str, &str, i32); 5] = [
    ("containerd", "1.7.24", 0x7ff),
    ("containerd", "v2.1.9", 0x7ff),
    ("containerd", "v2.3.4", 0x3fff),
    ("cri-o", "1.31.0", 0x7ff),
    ("something", "", 0x7ff),
];

#[test]
fn podfs_registers_itself_before_all_else_with_its_name_and_index() {
    let machine = Machine::new();
    let runtime = machine.listen();
    let mut command = machine.command();
    command.args(["--nri-index", "07"]);
    let _daemon = machine.node.start_command(command);
    let mut plugin = runtime.accept();
    plugin.take_registration();
    assert_eq!((plugin.registered.plugin_name.as_str(), plugin.registered.plugin_idx.as_str()), ("podfs", "07"));
    // A runtime may send Configure before it answers RegisterPlugin.
    plugin.configure("containerd", "1.7.24", 0);
    plugin.confirm_registration();
    plugin.synchronize(SynchronizeRequest::default());
    eventually("the log names the runtime", || {
        machine.node.log().contains("containerd 1.7.24 knows podfs as a plugin")
    });
}

#[test]
fn podfs_asks_no_version_of_a_runtime_for_events_that_it_does_not_know() {
    let machine = Machine::new();
    let runtime = machine.listen();
    let _daemon = machine.start();
    for (name, version, known) in KNOWN {
        let mut plugin = runtime.accept();
        plugin.take_registration();
        plugin.confirm_registration();
        let events = plugin.configure(name, version, 2000);
        assert_eq!(events & !known, 0, "{name} {version} would end the connection");
        assert_eq!(events & 0xf, 0xf, "podfs subscribes to sandboxes and new containers");
    }
}

#[test]
fn a_list_in_parts_is_taken_whole_however_its_frames_are_cut() {
    let machine = Machine::new();
    let runtime = machine.listen();
    let mut command = machine.command();
    command.args(["--metrics-addr", "127.0.0.1:0"]);
    let _daemon = machine.node.start_command(command);
    let mut plugin = runtime.accept();
    plugin.take_registration();
    plugin.confirm_registration();
    plugin.configure("containerd", "2.1.9", 2000);
    plugin.cut = 7;
    let pods: Vec<_> = ["a", "b"].map(|pod| machine.sandbox(pod, Some("true"))).to_vec();
    let with = |pod: &PodSandbox| {
        let mount = machine.mount(&pod.name, "volumes/kubernetes.io~secret/s", "/s");
        container(pod, "c", vec![mount])
    };
    let containers = pods.iter().map(with).collect();
    assert!(plugin.synchronize(SynchronizeRequest { pods, containers: Vec::new(), more: true }).more);
    assert!(!plugin.synchronize(SynchronizeRequest { pods: Vec::new(), containers, more: false }).more);
    eventually("both containers are counted", || {
        machine.metric("podfs_nri_containers{source=\"kubelet\"}").as_deref() == Some("2")
    });
    assert_eq!(machine.metric("podfs_nri_connected").as_deref(), Some("1"));
}

#[test]
fn unknown_methods_and_events_and_requests_that_cannot_be_read_change_nothing() {
    let machine = Machine::new();
    let runtime = machine.listen();
    let _daemon = machine.start();
    let mut plugin = runtime.begin(Vec::new(), Vec::new());
    let refused = plugin.call_bytes("RunPodSandbox", Vec::new()).expect_err("newer runtimes try this first");
    assert_eq!(refused.code, 12, "UNIMPLEMENTED: they send StateChange then");
    let sandbox = machine.sandbox("web", Some("true"));
    let mut unknown = StateChangeEvent { event: 77, pod: Some(sandbox), container: None };
    let _: Empty = plugin.call("StateChange", &unknown).expect("an answer");
    unknown.pod = None;
    unknown.event = Event::RunPodSandbox.into();
    let _: Empty = plugin.call("StateChange", &unknown).expect("an answer");
    for method in ["CreateContainer", "StateChange", "Synchronize"] {
        let answer = plugin.call_bytes(method, vec![0xff; 9]).expect("never an error");
        assert!(answer.is_empty() || method == "Synchronize", "{method}");
    }
    let empty = plugin.call_bytes("CreateContainer", CreateContainerRequest::default().encode_to_vec());
    assert_eq!(empty.expect("an answer"), Vec::<u8>::new());
}

#[test]
fn garbage_and_a_lost_runtime_end_the_connection_and_podfs_connects_again() {
    let machine = Machine::new();
    let runtime = machine.listen();
    let daemon = machine.start();
    let mut plugin = runtime.begin(Vec::new(), Vec::new());
    plugin.send_raw(b"HTTP/1.1 400 Bad Request\r\n\r\n");
    assert!(plugin.is_closed());
    daemon.wait_log("the runtime does not speak NRI");
    let mut plugin = runtime.accept();
    plugin.take_registration();
    plugin.refuse_registration("too many plugins");
    assert!(plugin.is_closed());
    daemon.wait_log("refuses podfs as a plugin: too many plugins");
    drop(runtime.begin(Vec::new(), Vec::new()));
    daemon.wait_log("the runtime has closed the connection");
    drop(runtime);
    std::fs::remove_file(machine.socket()).expect("removed");
    daemon.wait_log("or has no NRI");
    let trouble = machine.node.expect(&["state"]);
    assert!(trouble.contains("enable NRI in the runtime's settings"), "{trouble}");
    let again = machine.listen();
    let _plugin = again.begin(Vec::new(), Vec::new());
    daemon.wait_log("is connected again");
    assert_eq!(machine.node.log().matches("or has no NRI").count(), 1, "podfs logs it once");
    eventually("nothing is wrong any more", || !machine.node.expect(&["state"]).contains("NRI"));
}

#[test]
fn options_that_cannot_be_meant_are_refused() {
    let machine = Machine::new();
    let refused = |arguments: &[&str]| {
        let output = machine.command_with(arguments).output().expect("it ends");
        (output.status.code(), String::from_utf8(output.stderr).expect("text"))
    };
    for index in ["7", "100", "ab"] {
        let (status, sentence) = refused(&["--nri-index", index]);
        assert!(status == Some(2) && sentence.contains("two digits"), "{sentence}");
    }
    let elsewhere = machine.node.fixture.path("elsewhere");
    let (status, sentence) = refused(&["--kubelet-root", elsewhere.to_str().expect("text")]);
    // The kubelet may make its directory later, so a restart helps.
    assert!(status == Some(1) && sentence.contains("--kubelet-root"), "{sentence}");
    let root = machine.node.fixture.path("root");
    let (status, sentence) = refused(&["--kubelet-root", root.to_str().expect("text")]);
    assert!(status == Some(2) && sentence.contains("another one for itself"), "{sentence}");
}

#[test]
fn a_second_podfs_node_at_the_same_runtime_is_refused() {
    let machine = Machine::new();
    let runtime = machine.listen();
    let _daemon = machine.start();
    let _plugin = runtime.begin(Vec::new(), Vec::new());
    let mut other = std::process::Command::new(PODFS);
    other.arg("node");
    for (option, name) in [("--run-dir", "other"), ("--root-dir", "root-of-other"), ("--kubelet-root", "kubelet")] {
        other.arg(option).arg(machine.node.fixture.path(name));
    }
    other.arg("--manifests").arg(machine.node.fixture.path("manifests")).arg("--nri").arg(machine.socket());
    let output = machine.node.fixture.mark(&mut other).output().expect("it ends");
    let sentence = String::from_utf8(output.stderr).expect("text");
    assert!(output.status.code() == Some(1) && sentence.contains("another podfs node is the plugin"), "{sentence}");
}
