//! An API server with a pod on a node, and a podfs for that pod.
#![allow(dead_code, reason = "each test program uses its part")]

use std::path::PathBuf;
use std::process::Command;

use serde_json::Value;

use crate::api_server::{ApiServer, Style};
use crate::common::{Fixture, PODFS, Running, config_map, eventually, pod};

/// The node that podfs is on.
pub const NODE: &str = "n1";

/// A server, and a directory for podfs.
pub struct Rig {
    pub server: ApiServer,
    pub fixture: Fixture,
    pub kubeconfig: PathBuf,
    /// The uid of the pod. It differs in each test, because cgroups are named by it.
    pub uid: String,
}

impl Rig {
    /// A rig with the pod `default/web`, which has these volumes.
    pub fn new(volumes: &str) -> Rig {
        Rig::with_style(volumes, Style::Embedded)
    }

    pub fn with_style(volumes: &str, style: Style) -> Rig {
        let server = ApiServer::start();
        let kubeconfig = server.kubeconfig(NODE, style);
        let uid = format!("6f0c1f0e-0000-4000-8000-{:012x}", fastrand::u64(..1 << 48));
        let rig = Rig { server, fixture: Fixture::new(&pod(volumes)), kubeconfig, uid };
        rig.put_pod(volumes, "{app: web}");
        rig
    }

    /// A rig whose pod has one configMap volume `config` of the ConfigMap `app`. The ConfigMap has this value of `key`.
    pub fn of_config(value: &str) -> Rig {
        let rig = Rig::new("[{name: config, configMap: {name: app}}]");
        rig.put_config(value);
        rig
    }

    pub fn put_config(&self, value: &str) -> u64 {
        self.server.put(&config_map("app", &[("key", value)]))
    }

    /// Changes the entry of the server in the kubeconfig.
    pub fn edit_cluster(&mut self, edit: impl FnOnce(&mut Value)) {
        let text = std::fs::read_to_string(&self.kubeconfig).expect("a kubeconfig");
        let mut kubeconfig: Value = serde_json::from_str(&text).expect("JSON");
        edit(&mut kubeconfig["clusters"][0]["cluster"]);
        self.kubeconfig = self.server.write("edited.kubeconfig", &kubeconfig.to_string());
    }

    /// Creates or replaces the pod, with these volumes and labels.
    pub fn put_pod(&self, volumes: &str, labels: &str) {
        self.server.put(&format!(
            "{{apiVersion: v1, kind: Pod, metadata: {{name: web, namespace: default, uid: {}, labels: {labels}}}, \
             spec: {{nodeName: {NODE}, containers: [{{name: web, image: web}}], volumes: {volumes}}}}}",
            self.uid
        ));
    }

    /// `podfs run` of the pod of the server.
    pub fn command(&self) -> Command {
        self.command_of("default/web")
    }

    pub fn command_of(&self, pod: &str) -> Command {
        let mut command = self.bare_command();
        command.arg("--pod-name").arg(pod).arg("--kubeconfig").arg(&self.kubeconfig);
        command
    }

    /// `podfs run` without a pod and without a source of objects.
    pub fn bare_command(&self) -> Command {
        let mut command = Command::new(PODFS);
        command.arg("run").arg("--root-dir").arg(self.fixture.path("root"));
        command.arg("--run-dir").arg(self.fixture.path("run")).env("RUST_LOG", "podfs=debug");
        command
    }

    pub fn start(&self) -> Running {
        self.fixture.start_command(self.command())
    }

    pub fn run(&self) -> Running {
        let mut running = self.start();
        running.wait_ready();
        running
    }

    /// `podfs status` of the pod.
    #[track_caller]
    pub fn status(&self) -> Value {
        let mut pods = Vec::new();
        eventually("the pod has a status", || {
            pods = self.fixture.pods();
            !pods.is_empty()
        });
        pods.remove(0)
    }

    /// The entry of a requested object in the status.
    pub fn object(&self, name: &str) -> Option<Value> {
        let status = self.status();
        let objects = status["objects"].as_array()?;
        objects.iter().find(|object| object["object"] == name).cloned()
    }

    /// Waits until a watch reports an object.
    #[track_caller]
    pub fn wait_watched(&self, kind: &str, name: &str) {
        eventually(&format!("{kind} {name} is watched"), || self.server.watches(kind, name) == 1);
    }

    /// Why a volume is not live, if it is not.
    pub fn reason(&self, volume: &str) -> Option<String> {
        let status = self.status();
        let volumes = status["volumes"].as_array()?;
        let volume = volumes.iter().find(|entry| entry["name"] == volume)?;
        volume["reason"].as_str().map(str::to_owned)
    }
}

impl Drop for Rig {
    /// Checks in every test that a real server would accept each request.
    fn drop(&mut self) {
        if !std::thread::panicking() {
            self.server.assert_conventions();
        }
    }
}
