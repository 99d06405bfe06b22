//! A node with a kubelet that publishes volumes, and `podfs node --csi` on it.

use std::ops::Deref;
use std::process::Command;

use crate::common::kubelet::KubeletCalls;
pub use crate::common::kubelet::Volume;
use crate::common::node::Node;
use crate::common::{Running, eventually};

/// A node with a kubelet.
pub struct Kubelet {
    pub node: Node,
    calls: KubeletCalls,
}

impl Deref for Kubelet {
    type Target = KubeletCalls;

    fn deref(&self) -> &KubeletCalls {
        &self.calls
    }
}

impl Kubelet {
    pub fn new() -> Kubelet {
        let node = Node::new();
        let root = node.fixture.path("kubelet");
        Kubelet { node, calls: KubeletCalls::new(&root, &root) }
    }

    /// `podfs node --csi` for this kubelet.
    pub fn command(&self) -> Command {
        let mut command = self.node.command();
        command.arg("--csi").arg(self.socket()).arg("--kubelet-root").arg(self.root()).args(["--node-name", "n1"]);
        command
    }

    pub fn start(&self) -> Running {
        self.node.start_command(self.command())
    }

    /// Publishes a volume. Fails the test if that fails.
    #[track_caller]
    pub fn published(&self, volume: &Volume) {
        if let Err(status) = self.publish(volume) {
            panic!("{status:?}\n{}", self.node.log());
        }
    }

    /// Ends a pod, and waits until podfs has removed everything of it.
    #[track_caller]
    pub fn end_pod(&self, pod: &str, volumes: &[Volume]) {
        self.calls.end_pod(pod, volumes);
        eventually("nothing of the pod is left", || self.node.is_clean(&format!("uid-{pod}")));
    }
}
