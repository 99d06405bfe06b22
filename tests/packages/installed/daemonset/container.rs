//! The container of the DaemonSet, as a container runtime starts it on a node: from the image that `packaging/image/build`
//! makes, with the namespaces, mounts, arguments and environment of the manifest. The tests use the real runc; this module
//! replaces the kubelet and containerd, which make runc's configuration. It adds a directory of manifests to the arguments: the
//! machine has its own network, in which the API server of the container's service account does not answer.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use k8s_openapi::api::apps::v1::DaemonSet;
use podfs::manifest::parse_documents;
use serde_json::{Value, json};

use super::image::Image;
use crate::common::packages::{stdout_of, top};
use crate::installed::machine::{Machine, ScriptOutcome};

const RUNC: &str = "/usr/sbin/runc";
/// The directory of the service account in a pod.
const ACCOUNT: &str = "/var/run/secrets/kubernetes.io/serviceaccount";
/// The capabilities of a privileged container.
const CAPABILITIES: [&str; 22] = [
    "CAP_AUDIT_WRITE",
    "CAP_CHOWN",
    "CAP_DAC_OVERRIDE",
    "CAP_DAC_READ_SEARCH",
    "CAP_FOWNER",
    "CAP_FSETID",
    "CAP_IPC_LOCK",
    "CAP_KILL",
    "CAP_LINUX_IMMUTABLE",
    "CAP_MKNOD",
    "CAP_NET_ADMIN",
    "CAP_NET_BIND_SERVICE",
    "CAP_NET_RAW",
    "CAP_SETFCAP",
    "CAP_SETGID",
    "CAP_SETPCAP",
    "CAP_SETUID",
    "CAP_SYS_ADMIN",
    "CAP_SYS_CHROOT",
    "CAP_SYS_NICE",
    "CAP_SYS_PTRACE",
    "CAP_SYSLOG",
];

/// A running container. It ends with its machine at the latest.
pub struct DaemonContainer<'a> {
    machine: &'a Machine,
    name: String,
}

/// Adds runc and the directories of a node with a kubelet to a machine.
pub fn prepare(machine: &Machine) {
    machine.copy(Path::new(RUNC), RUNC);
    for library in ["/lib/x86_64-linux-gnu/libseccomp.so.2", "/lib/aarch64-linux-gnu/libseccomp.so.2"] {
        if Path::new(library).exists() && machine.run(&format!("[ -e {library} ]")).code != Some(0) {
            machine.copy(Path::new(library), library);
        }
    }
    machine.output_of("mkdir -p -m 0700 /etc/podfs/manifests && mkdir -p -m 0755 /run/podfs /var/lib/podfs /account");
    machine.write("/account/token", "the-token-of-podfs");
    let authority = rcgen::generate_simple_self_signed(["kubernetes".to_owned()]).expect("a certificate");
    machine.write("/account/ca.crt", authority.cert.pem());
}

/// The DaemonSet of the manifest.
pub fn daemon_set() -> DaemonSet {
    let path = top().join("packaging/kubernetes/podfs.yaml");
    let documents = parse_documents(&path, &fs::read(&path).expect("the manifest")).expect("YAML");
    let document = documents.into_iter().find(|document| document.kind == "DaemonSet").expect("a DaemonSet");
    document.into_typed().expect("typed")
}

impl<'a> DaemonContainer<'a> {
    /// Starts a container of the image, and waits until its readiness probe succeeds.
    #[track_caller]
    pub fn start(machine: &'a Machine, name: &str, image: &Image) -> DaemonContainer<'a> {
        let bundle = format!("/images/{name}");
        machine.output_of(&format!("mkdir -p {bundle}/rootfs"));
        unpack(image, &machine.path(&format!("{bundle}/rootfs")));
        let parent = machine.output_of("sed -n 's,^0::,,p' /proc/1/cgroup").replace("/init.scope", "/");
        let cgroup = format!("{}/kubepods/burstable/pod-podfs/{name}", parent.trim_end_matches('/'));
        machine.write(&format!("{bundle}/config.json"), config(image, &cgroup).to_string());
        machine.output_of(&format!(
            "runc run --detach --bundle {bundle} {name} >{bundle}/log 2>&1 || {{ cat {bundle}/log; exit 1; }}"
        ));
        let container = DaemonContainer { machine, name: name.to_owned() };
        crate::common::eventually("the daemon is ready", || {
            let probe = container.exec("podfs node state --run-dir=/run/podfs");
            assert!(container.is_running(), "the container has ended: {}", container.log());
            probe.code == Some(0)
        });
        container
    }

    /// Runs a command in the container, as `kubectl exec` does.
    pub fn exec(&self, command: &str) -> ScriptOutcome {
        self.machine.run(&format!("runc exec {} {command}", self.name))
    }

    fn is_running(&self) -> bool {
        self.machine.run(&format!("runc state {} | grep -q '\"status\": \"running\"'", self.name)).code == Some(0)
    }

    pub fn log(&self) -> String {
        self.machine.output_of(&format!("cat /images/{}/log", self.name))
    }

    /// Ends the container as a runtime does when a pod is deleted: sends SIGTERM, waits for the end of the container, and
    /// removes it with all processes in its cgroup.
    pub fn delete(self) {
        self.machine.output_of(&format!(
            "runc kill {0} TERM; for i in $(seq 200); do runc state {0} | grep -q stopped && break; sleep 0.02; done; \
             runc state {0} | grep -q stopped; runc delete {0}",
            self.name
        ));
    }

    /// Kills all processes in the container's cgroup, and removes the container.
    pub fn kill(self) {
        self.machine.output_of(&format!("runc kill --all {0} KILL; runc delete --force {0}", self.name));
    }
}

fn unpack(image: &Image, root: &Path) {
    for layer in image.layers() {
        let mut unpack = Command::new("tar");
        unpack.args(["--extract", "--gzip", "--numeric-owner", "--file"]).arg(layer).arg("--directory").arg(root);
        stdout_of(&mut unpack);
    }
}

/// The configuration of the runtime for the DaemonSet's container.
fn config(image: &Image, cgroup: &str) -> Value {
    let pod = daemon_set().spec.template.spec.expect("a pod");
    let [container] = &pod.containers[..] else { panic!("one container") };
    assert_eq!(pod.host_pid, Some(true));
    assert_eq!(container.security_context.as_ref().and_then(|context| context.privileged), Some(true));
    let words = container.args.iter().flatten().map(|word| word.replace("$(NODE_NAME)", "n1"));
    let added = ["--manifests=/etc/podfs/manifests".to_owned()];
    let args: Vec<String> = image.entry_point().into_iter().chain(words).chain(added).collect();
    let from_kubelet = ["NODE_NAME=n1", "KUBERNETES_SERVICE_HOST=127.0.0.1", "KUBERNETES_SERVICE_PORT=6443"];
    let env: Vec<String> = image.environment().into_iter().chain(from_kubelet.map(str::to_owned)).collect();
    let mut mounts = vec![
        json!({"destination": "/proc", "type": "proc", "source": "proc"}),
        json!({"destination": "/dev", "type": "tmpfs", "source": "tmpfs", "options": ["nosuid", "mode=755"]}),
        json!({"destination": "/sys", "type": "sysfs", "source": "sysfs", "options": ["rw"]}),
        json!({"destination": ACCOUNT, "type": "bind", "source": "/account", "options": ["rbind", "ro"]}),
    ];
    for mount in container.volume_mounts.iter().flatten() {
        let volume = pod.volumes.iter().flatten().find(|volume| volume.name == mount.name).expect("a volume");
        let source = volume.host_path.as_ref().expect("a directory of the node");
        let propagation = match mount.mount_propagation.as_deref() {
            Some("Bidirectional") => "rshared",
            Some("HostToContainer") => "rslave",
            _ => "rprivate",
        };
        mounts.push(json!({
            "destination": mount.mount_path, "type": "bind", "source": source.path, "options": ["rbind", "rw", propagation],
        }));
    }
    let namespaces = ["ipc", "uts", "mount", "network", "cgroup"].map(|kind| json!({"type": kind}));
    json!({
        "ociVersion": "1.0.2",
        "process": {
            "user": {"uid": 0, "gid": 0},
            "args": args, "env": env, "cwd": "/",
            "capabilities": {"bounding": CAPABILITIES, "effective": CAPABILITIES, "permitted": CAPABILITIES},
        },
        "root": {"path": "rootfs"},
        "mounts": mounts,
        "linux": {
            "rootfsPropagation": "rslave",
            "cgroupsPath": cgroup,
            "resources": {"devices": [{"allow": true, "access": "rwm"}]},
            // The pod has `hostPID`, so it has no PID namespace.
            "namespaces": namespaces,
        },
    })
}

/// The path of a blob in an unpacked image.
pub fn blob_path(layout: &Path, digest: &str) -> PathBuf {
    layout.join("blobs").join(digest.replacen(':', "/", 1))
}
