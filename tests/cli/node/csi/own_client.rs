//! podfs's own driver under podfs's own client: `podfs run` mounts a csi volume that `podfs node --csi` publishes.

use std::fs;
use std::os::unix::fs::symlink;

use nix::sys::signal::Signal;

use super::kubelet::Kubelet;
use crate::common::{Fixture, Running, config_map, eventually, pod, wait_content};

const VOLUMES: &str = "[{name: config, csi: {driver: podfs.io, volumeAttributes: {kind: configMap, name: app}}}]";

/// A pod whose volume is the driver's, below the root directory that the driver knows.
fn client(kubelet: &Kubelet) -> Fixture {
    let client = Fixture::new(&pod(VOLUMES));
    let spec =
        "{attachRequired: false, podInfoOnMount: true, requiresRepublish: true, volumeLifecycleModes: [Ephemeral]}";
    let driver =
        format!("{{apiVersion: storage.k8s.io/v1, kind: CSIDriver, metadata: {{name: podfs.io}}, spec: {spec}}}");
    client.write("objects/driver.yaml", &driver);
    symlink(kubelet.root(), client.path("root")).expect("a link");
    client
}

#[test]
fn podfs_is_a_driver_that_podfs_can_call() {
    let kubelet = Kubelet::new();
    kubelet.node.put("app.yaml", &config_map("app", &[("a", "1")]));
    let mut daemon = kubelet.start();
    let client = client(&kubelet);
    let mut running = client.run();
    let shown = |running: &Running| running.volume("config").join("a");
    assert_eq!(fs::read_to_string(shown(&running)).expect("shown"), "1");
    kubelet.node.put("app.yaml", &config_map("app", &[("a", "2")]));
    wait_content(&shown(&running), "2");
    // Neither the driver nor its client needs the other process to show the content.
    daemon.signal(Signal::SIGKILL);
    daemon.wait();
    client.kill_supervisor(&mut running);
    let mut running = client.run();
    assert_eq!(fs::read_to_string(shown(&running)).expect("shown"), "2");
    let _daemon = kubelet.start();
    kubelet.node.put("app.yaml", &config_map("app", &[("a", "3")]));
    wait_content(&shown(&running), "3");
    let uid = running.uid();
    assert_eq!(running.stop().code(), Some(0), "{}", running.log());
    eventually("nothing of the pod is left", || kubelet.node.is_clean(&uid));
    assert!(!kubelet.root().join("pods").join(&uid).exists(), "something of the pod is left");
}
