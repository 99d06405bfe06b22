//! `podfs node` writes the status of claims whose volumes have grown on the node.

use std::fs;
use std::process::Command;

use serde_json::{Value, json};

use crate::api_server::{Answer, ApiServer, Style};
use crate::common::node::Node;
use crate::common::{Running, eventually};
use crate::csi_driver::{CsiDriver, DRIVER, Fault};
use crate::rig::NODE;
use nix::sys::signal::Signal;
use podfs::csi::v1::node_service_capability::rpc::Type;
use tonic::Code;

/// A server with the PersistentVolume `pv-1` of a driver and its claim `data`, and a node of it.
struct Cluster {
    server: ApiServer,
    node: Node,
}

impl Cluster {
    /// A cluster whose claim has a status of `claim` MiB, and whose PersistentVolume has `volume` MiB.
    fn new(claim: u32, volume: u32) -> Cluster {
        let (server, node) = (ApiServer::start(), Node::new());
        server.put_value(json!({"apiVersion": "v1", "kind": "Node", "metadata": {"name": NODE}}));
        server.put_value(json!({
            "apiVersion": "storage.k8s.io/v1", "kind": "CSIDriver", "metadata": {"name": DRIVER},
            "spec": {"attachRequired": false},
        }));
        let conditions = json!([
            {"type": "FileSystemResizePending", "status": "True"}, {"type": "ModifyingVolume", "status": "True"},
        ]);
        server.put_value(json!({
            "apiVersion": "v1", "kind": "PersistentVolumeClaim",
            "metadata": {"name": "data", "namespace": "default", "uid": "c-1"}, "spec": {"volumeName": "pv-1"},
            "status": {
                "phase": "Bound", "capacity": {"storage": format!("{claim}Mi")}, "conditions": conditions,
                "allocatedResourceStatuses": {"storage": "NodeResizePending"},
            },
        }));
        let cluster = Cluster { server, node };
        cluster.put_volume(volume, &json!({"csi": {"driver": DRIVER, "volumeHandle": "h"}}));
        cluster
    }

    fn put_volume(&self, mib: u32, source: &Value) {
        let mut volume = json!({
            "apiVersion": "v1", "kind": "PersistentVolume", "metadata": {"name": "pv-1"},
            "spec": {
                "capacity": {"storage": format!("{mib}Mi")}, "accessModes": ["ReadWriteMany"],
                "claimRef": {"namespace": "default", "name": "data", "uid": "c-1"},
            },
        });
        volume["spec"].as_object_mut().expect("fields").extend(source.as_object().expect("fields").clone());
        self.server.put_value(volume);
    }

    fn put_pod(&self, name: &str) {
        self.put_pod_with(name, &json!({"claimName": "data"}));
    }

    fn put_pod_with(&self, name: &str, claim: &Value) {
        self.put_pod_with_context(name, claim, &json!({}));
    }

    fn put_pod_with_context(&self, name: &str, claim: &Value, context: &Value) {
        self.server.put_value(json!({
            "apiVersion": "v1", "kind": "Pod",
            "metadata": {"name": name, "namespace": "default", "uid": format!("uid-{name}")},
            "spec": {
                "nodeName": NODE, "securityContext": context,
                "containers": [{"name": "c", "image": "none", "volumeMounts": [{"name": "v", "mountPath": "/v"}]}],
                "volumes": [{"name": "v", "persistentVolumeClaim": claim}],
            },
        }));
    }

    fn driver(&self) -> CsiDriver {
        let source = self.node.fixture.path("source");
        fs::create_dir_all(&source).expect("a directory");
        CsiDriver::start(&self.node.fixture.path("root"), &source, &[Type::StageUnstageVolume, Type::ExpandVolume])
    }

    fn start(&self) -> Running {
        let mut command: Command = self.node.bare_command();
        command.arg("--kubeconfig").arg(self.server.kubeconfig(NODE, Style::Embedded)).arg("--node-name").arg(NODE);
        command.arg("--release-when-gone");
        self.node.start_command(command)
    }

    fn status(&self) -> Value {
        self.server.object("PersistentVolumeClaim", "default", "data").expect("the claim")["status"].clone()
    }

    fn has_event(&self, reason: &str, message: &str) -> bool {
        let events = self.server.objects("Event");
        events.iter().any(|event| {
            event["reason"] == reason && event["message"].as_str().is_some_and(|text| text.starts_with(message))
        })
    }

    /// Deletes the pods, and waits until podfs has unmounted their volumes.
    fn end(&self, pods: &[&str]) {
        for pod in pods {
            self.server.delete("Pod", "default", pod);
        }
        for pod in pods {
            eventually("nothing of the pod is left", || self.node.is_clean(&format!("uid-{pod}")));
        }
        self.server.assert_conventions();
    }
}

#[test]
fn cs_13_the_claim_of_a_volume_that_its_driver_has_grown_has_the_new_capacity() {
    let cluster = Cluster::new(8, 16);
    let driver = cluster.driver();
    cluster.put_pod("web");
    let _daemon = cluster.start();
    cluster.node.expect(&["wait", "default/web"]);
    eventually("the claim has the new size", || cluster.status()["capacity"]["storage"] == "16Mi");
    let status = cluster.status();
    assert_eq!(status["conditions"], json!([{"type": "ModifyingVolume", "status": "True"}]));
    assert_eq!(status["allocatedResourceStatuses"], json!({}));
    assert_eq!(driver.count("NodeExpandVolume"), 1);
    let message = "MountVolume.NodeExpandVolume succeeded for volume \"v\"";
    for kind in ["Pod", "PersistentVolumeClaim"] {
        eventually("an event says so", || {
            let events = cluster.server.objects("Event");
            let event = events.iter().find(|event| {
                event["involvedObject"]["kind"] == kind && event["reason"] == "FileSystemResizeSuccessful"
            });
            event.is_some_and(|event| event["message"] == message)
        });
    }

    // The volume grows again while it is mounted: podfs reads the PersistentVolume again for the next pod.
    cluster.put_volume(32, &json!({"csi": {"driver": DRIVER, "volumeHandle": "h"}}));
    cluster.put_pod("other");
    cluster.node.expect(&["wait", "default/other"]);
    eventually("the claim has the newer size", || cluster.status()["capacity"]["storage"] == "32Mi");
    eventually("it was grown for both pods", || driver.count("NodeExpandVolume") >= 2);
    cluster.end(&["web", "other"]);
}

#[test]
fn cs_13_a_volume_that_its_pod_has_read_only_does_not_grow_and_events_say_so() {
    let cluster = Cluster::new(8, 16);
    let driver = cluster.driver();
    cluster.put_pod_with("web", &json!({"claimName": "data", "readOnly": true}));
    let _daemon = cluster.start();
    cluster.node.expect(&["wait", "default/web"]);
    let message = "MountVolume.NodeExpandVolume failed for volume \"v\" requested read-only file system";
    for (kind, name) in [("Pod", "web"), ("PersistentVolumeClaim", "data")] {
        eventually("an event says so", || {
            cluster.server.objects("Event").iter().any(|event| {
                event["involvedObject"]["kind"] == kind
                    && event["involvedObject"]["name"] == name
                    && event["reason"] == "FileSystemResizeFailed"
                    && event["message"] == message
            })
        });
    }
    assert_eq!(driver.count("NodeExpandVolume"), 0);
    assert_eq!(cluster.status()["allocatedResourceStatuses"]["storage"], "NodeResizePending");
    cluster.end(&["web"]);
}

#[test]
fn cs_13_the_claim_says_that_the_node_grows_its_volume_from_before_the_driver_is_called_until_it_has_grown() {
    let cluster = Cluster::new(8, 16);
    let driver = cluster.driver();
    driver.fail_always("NodeExpandVolume", Some(Fault::Fails(Code::Internal)));
    cluster.put_pod("web");
    let _daemon = cluster.start();
    eventually("the driver is called", || driver.count("NodeExpandVolume") > 0);
    assert_eq!(cluster.status()["allocatedResourceStatuses"]["storage"], "NodeResizeInProgress");
    driver.fail_always("NodeExpandVolume", None);
    eventually("the claim has the new size", || cluster.status()["capacity"]["storage"] == "16Mi");
    assert_eq!(cluster.status()["allocatedResourceStatuses"], json!({}));
    cluster.end(&["web"]);
}

#[test]
fn cs_13_why_a_volume_does_not_grow_is_a_condition_of_its_claim() {
    let cluster = Cluster::new(8, 16);
    let driver = cluster.driver();
    driver.fail_always("NodeExpandVolume", Some(Fault::Fails(Code::OutOfRange)));
    cluster.put_pod("web");
    let _daemon = cluster.start();
    let failed = || {
        let conditions = cluster.status()["conditions"].as_array().cloned().unwrap_or_default();
        conditions.into_iter().find(|condition| condition["type"] == "NodeResizeError")
    };
    eventually("the claim says why", || failed().is_some());
    let message = failed().expect("it is there")["message"].as_str().expect("text").to_owned();
    let expected = format!(
        "failed to expand pvc with CSI driver {DRIVER}: NodeExpandVolume failed (OutOfRange): as the test says"
    );
    assert_eq!(message, expected);
    assert_eq!(cluster.status()["allocatedResourceStatuses"]["storage"], "NodeResizeInfeasible");
    let event = "NodeExpandVolume.NodeExpandVolume failed for volume \"v\" : ";
    eventually("an event says so", || cluster.has_event("VolumeResizeFailed", event));
    driver.fail_always("NodeExpandVolume", None);
    eventually("the claim has the new size", || cluster.status()["capacity"]["storage"] == "16Mi");
    assert!(failed().is_none());
    cluster.end(&["web"]);
}

#[test]
fn cs_13_a_daemon_that_is_killed_before_the_claim_is_written_writes_it_when_it_comes_back() {
    let cluster = Cluster::new(8, 16);
    let driver = cluster.driver();
    cluster.server.fail_always("patch", "persistentvolumeclaims/status", Answer::Error(403));
    cluster.put_pod("web");
    let mut daemon = cluster.start();
    cluster.node.expect(&["wait", "default/web"]);
    eventually("podfs has tried to write the status", || {
        cluster.server.count("patch", "persistentvolumeclaims/status") > 0
    });
    daemon.signal(Signal::SIGKILL);
    daemon.wait();
    cluster.server.heal();
    // Kills the supervisor, too: the record of the volume says that the driver has grown it.
    nix::sys::signal::kill(cluster_supervisor(&cluster), Signal::SIGKILL).expect("it is there");
    let _daemon = cluster.start();
    eventually("the claim has the new size", || cluster.status()["capacity"]["storage"] == "16Mi");
    assert_eq!(driver.count("NodeExpandVolume"), 1);
    cluster.end(&["web"]);
}

/// The process id of the pod's supervisor, without a daemon.
fn cluster_supervisor(cluster: &Cluster) -> nix::unistd::Pid {
    let pid = cluster.node.fixture.pods()[0]["supervisor"]["pid"].as_i64().expect("it has a supervisor");
    nix::unistd::Pid::from_raw(i32::try_from(pid).expect("a pid"))
}

#[test]
fn the_claim_of_a_directory_has_the_new_capacity_at_once_and_that_of_a_shared_directory_never() {
    for (source, is_written) in [("local", true), ("hostPath", false)] {
        let cluster = Cluster::new(8, 16);
        let directory = cluster.node.fixture.path("source");
        fs::create_dir_all(&directory).expect("a directory");
        let affinity = json!({"required": {"nodeSelectorTerms": [
            {"matchFields": [{"key": "metadata.name", "operator": "In", "values": [NODE]}]},
        ]}});
        let mut volume = json!({source: {"path": directory}});
        if is_written {
            volume["nodeAffinity"] = affinity;
        }
        cluster.put_volume(16, &volume);
        cluster.put_pod("web");
        let _daemon = cluster.start();
        cluster.node.expect(&["wait", "default/web"]);
        match is_written {
            true => eventually("the claim has the new size", || cluster.status()["capacity"]["storage"] == "16Mi"),
            false => assert_eq!(cluster.status()["capacity"]["storage"], "8Mi"),
        }
        cluster.end(&["web"]);
    }
}

#[test]
fn lp_03_a_pod_that_shares_a_volume_with_files_of_another_group_gets_an_event() {
    let cluster = Cluster::new(8, 8);
    let source = cluster.node.fixture.path("disk");
    fs::create_dir_all(&source).expect("a directory");
    cluster.put_volume(8, &json!({"local": {"path": source}}));
    cluster.put_pod("first");
    let _daemon = cluster.start();
    cluster.node.expect(&["wait", "default/first"]);
    cluster.put_pod_with_context("second", &json!({"claimName": "data"}), &json!({"fsGroup": 4711}));
    cluster.node.expect(&["wait", "default/second"]);
    let message = "The requested fsGroup is 4711, but the volume pv-1 has GID 0. The volume may not be shareable.";
    eventually("an event says so", || cluster.has_event("AlreadyMountedVolume", message));
    cluster.end(&["first", "second"]);
}
