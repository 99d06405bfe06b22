//! A containerd that a test starts, with runc: it has one image, of busybox, and its pods use the node's network. `tests/run`
//! fetches containerd 1.7 from Debian 13; Debian 12 has 1.6, whose NRI is incompatible.

use std::fs;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde_json::{Value, json};

use super::cri::*;
use super::runtime::Machine;
use crate::common::namespace::enter;
use crate::common::watch::Watcher;
use crate::common::{Running, TIMEOUT, eventually, unmount_below};

const IMAGE: &str = "podfs.test/busybox:1";
const BUSYBOX: &str = "/bin/busybox";
const PROGRAMS: [&str; 6] = ["cat", "echo", "ls", "readlink", "sh", "sleep"];
/// The paths of cgroup file systems, of both versions.
const CGROUPS: [&str; 2] = ["/sys/fs/cgroup", "/sys/fs/cgroup/unified"];

/// A containerd. Dropping this ends it and its containers.
pub struct Containerd<'a> {
    machine: &'a Machine,
    directory: PathBuf,
    daemon: Option<Running>,
    programs: PathBuf,
    cri: Cri,
    cgroup: String,
}

/// A container that runs.
pub struct Container {
    pub id: String,
}

/// A mount as a kubelet requests it: destination, and source below the directory of the pod.
pub type Wanted<'a> = (&'a str, &'a str);

impl<'a> Containerd<'a> {
    /// Starts containerd. If `tests/run` could not fetch it, prints that the test is skipped, and returns `None`.
    pub fn start_or_skip(machine: &'a Machine, test: &str) -> Option<Containerd<'a>> {
        let target = Path::new(env!("CARGO_TARGET_TMPDIR")).parent().expect("it is in the target directory");
        let programs = target.join("containerd/usr/bin");
        if !programs.join("containerd").exists() {
            use std::io::Write;
            let _ = writeln!(std::io::stderr(), "skipped: {test}: there is no containerd; tests/run fetches it");
            return None;
        }
        let directory = machine.node.fixture.path("containerd");
        for name in ["root", "state", "plugins", "conf"] {
            fs::create_dir_all(directory.join(name)).expect("a directory");
        }
        fs::write(directory.join("config.toml"), settings(&directory, &machine.socket())).expect("written");
        let cri = Cri::new(&directory.join("c.sock"));
        let name = machine
            .root()
            .parent()
            .and_then(Path::file_name)
            .and_then(|name| name.to_str())
            .expect("a name")
            .to_owned();
        let cgroup = format!("/{}", name.replace('.', "-"));
        let mut containerd = Containerd { machine, directory, daemon: None, programs, cri, cgroup };
        containerd.boot();
        containerd.import();
        Some(containerd)
    }

    /// Starts the daemon, for the first time or after a kill.
    pub fn boot(&mut self) {
        let mut command = Command::new(self.programs.join("containerd"));
        let path = format!("{}:/usr/sbin:/usr/bin:/sbin:/bin", self.programs.display());
        command.arg("--config").arg(self.directory.join("config.toml")).env("PATH", path);
        self.daemon = Some(self.machine.node.fixture.spawn(&mut command));
        eventually("containerd answers", || self.cri.call::<_, Nothing>("Version", Nothing {}).is_ok());
    }

    /// Kills the daemon; its containers go on.
    pub fn kill(&mut self) {
        let mut daemon = self.daemon.take().expect("it runs");
        daemon.signal(Signal::SIGKILL);
        daemon.wait();
    }

    /// Starts a sandbox of a pod.
    #[track_caller]
    pub fn run_pod(&self, pod: &str, labels: &[(&str, &str)]) -> String {
        let request = RunPodSandboxRequest { config: Some(self.config(pod, labels)) };
        self.cri.call::<_, Id>("RunPodSandbox", request).unwrap_or_else(|error| self.failed(&error)).id
    }

    /// Creates and starts a container.
    #[track_caller]
    pub fn run(&self, pod: &str, sandbox: &str, name: &str, mounts: &[Wanted<'_>]) -> Container {
        let container = self.create(pod, sandbox, name, mounts);
        self.launch(&container);
        container
    }

    /// Starts a container that was created.
    #[track_caller]
    pub fn launch(&self, container: &Container) {
        let started = self.cri.call::<_, Nothing>("StartContainer", Id { id: container.id.clone() });
        started.unwrap_or_else(|error| self.failed(&error));
    }

    /// Creates a container with these mounts, all of them read-only.
    #[track_caller]
    pub fn create(&self, pod: &str, sandbox: &str, name: &str, mounts: &[Wanted<'_>]) -> Container {
        let of_kubelet = |(destination, source): &Wanted<'_>| Mount {
            container_path: (*destination).to_owned(),
            host_path: self.machine.root().join(format!("pods/uid-{pod}/{source}")).to_str().expect("text").to_owned(),
            readonly: true,
            propagation: 0,
        };
        self.create_with(pod, sandbox, name, mounts.iter().map(of_kubelet).collect())
    }

    /// Creates a container with the mounts of an answer of `podfs mounts prepare --output cri`, and starts it.
    #[track_caller]
    pub fn run_prepared(&self, pod: &str, sandbox: &str, name: &str, mounts: &[Value]) -> Container {
        let text = |value: &Value| value.as_str().expect("text").to_owned();
        let mount = |mount: &Value| Mount {
            container_path: text(&mount["container_path"]),
            host_path: text(&mount["host_path"]),
            readonly: mount["readonly"].as_bool().unwrap_or_default(),
            propagation: mount["propagation"].as_i64().map_or(0, |number| i32::try_from(number).expect("a number")),
        };
        let container = self.create_with(pod, sandbox, name, mounts.iter().map(mount).collect());
        self.launch(&container);
        container
    }

    #[track_caller]
    fn create_with(&self, pod: &str, sandbox: &str, name: &str, mounts: Vec<Mount>) -> Container {
        let named = |name: &str| Some(Named { name: name.to_owned() });
        let namespaces = ContainerSecurityContext { namespace_options: Some(NamespaceOption { network: NODE }) };
        let config = ContainerConfig {
            metadata: named(name),
            image: named(IMAGE),
            command: ["/bin/sh", "-c", "sleep 100000"].map(str::to_owned).to_vec(),
            envs: vec![KeyValue { key: "WHICH".to_owned(), value: "a".to_owned() }],
            mounts,
            log_path: format!("{name}.log"),
            linux: Some(LinuxContainerConfig { security_context: Some(namespaces) }),
        };
        let sandbox_config = Some(self.config(pod, &[]));
        let request =
            CreateContainerRequest { pod_sandbox_id: sandbox.to_owned(), config: Some(config), sandbox_config };
        let created = self.cri.call::<_, Id>("CreateContainer", request).unwrap_or_else(|error| self.failed(&error));
        Container { id: created.id }
    }

    /// The output of a command in a container.
    #[track_caller]
    pub fn says(&self, container: &Container, command: &str) -> String {
        let cmd = ["/bin/sh", "-c", command].map(str::to_owned).to_vec();
        let request = ExecSyncRequest { container_id: container.id.clone(), cmd, timeout: 30 };
        let response: ExecSyncResponse = self.cri.call("ExecSync", request).unwrap_or_else(|error| self.failed(&error));
        let text = [response.stdout, response.stderr].concat();
        String::from_utf8_lossy(&text).trim_end().to_owned()
    }

    /// An inotify watch of a directory, with the path as a process in the container sees it.
    #[track_caller]
    pub fn watch(&self, container: &Container, label: &'static str, directory: &'static str) -> Watcher {
        let process = self.process(container);
        let watcher = thread::spawn(move || {
            enter(process);
            Watcher::on(label, Path::new(directory))
        });
        watcher.join().expect("a watch")
    }

    /// A process of the container.
    #[track_caller]
    fn process(&self, container: &Container) -> u32 {
        let cgroup = format!("{}/{}", self.cgroup, container.id);
        let is_inside = |process: &u32| {
            let cgroups = fs::read_to_string(format!("/proc/{process}/cgroup")).unwrap_or_default();
            cgroups.lines().any(|line| line.ends_with(&cgroup))
        };
        processes().find(is_inside).expect("the container runs")
    }

    /// Removes a container, which may run.
    #[track_caller]
    pub fn remove(&self, container: Container) {
        let removed = self.cri.call::<_, Nothing>("RemoveContainer", Id { id: container.id });
        removed.unwrap_or_else(|error| self.failed(&error));
    }

    /// Stops a sandbox and its containers.
    #[track_caller]
    pub fn stop_pod(&self, sandbox: &str) {
        let stopped = self.cri.call::<_, Nothing>("StopPodSandbox", Id { id: sandbox.to_owned() });
        stopped.unwrap_or_else(|error| self.failed(&error));
    }

    #[track_caller]
    pub fn remove_pod(&self, sandbox: &str) {
        let removed = self.cri.call::<_, Nothing>("RemovePodSandbox", Id { id: sandbox.to_owned() });
        removed.unwrap_or_else(|error| self.failed(&error));
    }

    fn config(&self, pod: &str, labels: &[(&str, &str)]) -> PodSandboxConfig {
        let own = |text: &str| text.to_owned();
        let metadata = PodSandboxMetadata { name: own(pod), uid: format!("uid-{pod}"), namespace: own("default") };
        let namespaces = SecurityContext { namespace_options: Some(NamespaceOption { network: NODE }) };
        PodSandboxConfig {
            metadata: Some(metadata),
            log_directory: self.directory.join("logs").to_str().expect("text").to_owned(),
            labels: labels.iter().map(|(name, value)| (own(name), own(value))).collect(),
            linux: Some(LinuxPodSandboxConfig {
                cgroup_parent: self.cgroup.clone(),
                security_context: Some(namespaces),
            }),
        }
    }

    #[track_caller]
    fn failed(&self, error: &tonic::Status) -> ! {
        panic!("{error}\n{}", self.machine.node.log())
    }

    /// Imports the image, which has only busybox, from an archive in the layout of OCI.
    fn import(&self) {
        let archive = self.directory.join("image");
        let root = archive.join("root");
        for directory in ["bin", "dev", "etc", "proc", "sys", "tmp"] {
            fs::create_dir_all(root.join(directory)).expect("a directory");
        }
        fs::copy(BUSYBOX, root.join("bin/busybox")).expect("busybox-static is installed");
        for program in PROGRAMS {
            symlink("busybox", root.join("bin").join(program)).expect("a link");
        }
        let layout = archive.join("layout");
        fs::create_dir_all(layout.join("blobs/sha256")).expect("a directory");
        let layer = archive.join("layer.tar");
        tar(&root, &layer);
        let layer = blob(&layout, &fs::read(&layer).expect("a file"), "application/vnd.oci.image.layer.v1.tar");
        let config = json!({
            "architecture": "amd64", "os": "linux",
            "config": {"Env": ["PATH=/bin"], "Cmd": ["/bin/sh", "-c", "sleep 100000"]},
            "rootfs": {"type": "layers", "diff_ids": [layer["digest"]]},
        });
        let config = blob(&layout, config.to_string().as_bytes(), "application/vnd.oci.image.config.v1+json");
        let manifest_type = "application/vnd.oci.image.manifest.v1+json";
        let manifest = json!({"schemaVersion": 2, "mediaType": manifest_type, "config": config, "layers": [layer]});
        let mut manifest = blob(&layout, manifest.to_string().as_bytes(), manifest_type);
        manifest["annotations"] = json!({"io.containerd.image.name": IMAGE});
        let index = json!({"schemaVersion": 2, "manifests": [manifest]});
        fs::write(layout.join("index.json"), index.to_string()).expect("written");
        fs::write(layout.join("oci-layout"), r#"{"imageLayoutVersion": "1.0.0"}"#).expect("written");
        let image = archive.join("image.tar");
        tar(&layout, &image);
        let mut import = Command::new(self.programs.join("ctr"));
        import.arg("--address").arg(self.directory.join("c.sock")).args(["--namespace", "k8s.io", "images", "import"]);
        let output = import.args(["--snapshotter", "native"]).arg(&image).output().expect("ctr runs");
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    }

    /// Kills the processes of the pods, which are in the pods' cgroup, and the shims, whose command lines name the socket.
    fn kill_containers(&self) {
        let socket = self.directory.to_str().expect("text").to_owned();
        for pid in processes() {
            let of = |file: &str| fs::read_to_string(format!("/proc/{pid}/{file}")).unwrap_or_default();
            let is_shim = of("comm").starts_with("containerd-shim") && of("cmdline").contains(&socket);
            let in_cgroup = of("cgroup").lines().any(|line| line.contains(&format!(":{}/", self.cgroup)));
            if is_shim || in_cgroup {
                let _ = kill(Pid::from_raw(pid.cast_signed()), Signal::SIGKILL);
            }
        }
    }

    /// Removes the cgroups. That fails until the kernel has ended the killed processes.
    fn remove_cgroups(&self) {
        let deadline = Instant::now() + TIMEOUT;
        while !self.try_to_remove_cgroups() && Instant::now() < deadline {
            thread::sleep(Duration::from_millis(5));
        }
    }

    /// Tries to remove the cgroups. Returns whether all are removed.
    fn try_to_remove_cgroups(&self) -> bool {
        let versions = CGROUPS.iter().flat_map(|top| fs::read_dir(top).into_iter().flatten().flatten());
        let tops = versions.map(|entry| entry.path()).chain(CGROUPS.map(PathBuf::from));
        let mut is_clean = true;
        for top in tops.map(|top| top.join(&self.cgroup[1..])).filter(|top| top.exists()) {
            for child in fs::read_dir(&top).into_iter().flatten().flatten().filter(|child| child.path().is_dir()) {
                let _ = fs::remove_dir(child.path());
            }
            is_clean &= fs::remove_dir(top).is_ok();
        }
        is_clean
    }
}

impl Drop for Containerd<'_> {
    fn drop(&mut self) {
        if let Some(daemon) = &mut self.daemon {
            daemon.signal(Signal::SIGKILL);
            daemon.wait();
        }
        self.kill_containers();
        unmount_below(&self.directory);
        self.remove_cgroups();
    }
}

fn settings(directory: &Path, nri: &Path) -> String {
    let directory = directory.display();
    format!(
        r#"
version = 2
root = "{directory}/root"
state = "{directory}/state"
disabled_plugins = [
  "io.containerd.internal.v1.opt", "io.containerd.internal.v1.tracing", "io.containerd.tracing.processor.v1.otlp",
  "io.containerd.snapshotter.v1.blockfile", "io.containerd.snapshotter.v1.btrfs", "io.containerd.snapshotter.v1.zfs",
]
[grpc]
address = "{directory}/c.sock"
[plugins."io.containerd.grpc.v1.cri"]
sandbox_image = "{IMAGE}"
restrict_oom_score_adj = true
[plugins."io.containerd.grpc.v1.cri".cni]
conf_dir = "{directory}/conf"
[plugins."io.containerd.grpc.v1.cri".containerd]
snapshotter = "native"
[plugins."io.containerd.nri.v1.nri"]
disable = false
socket_path = "{}"
plugin_path = "{directory}/plugins"
plugin_config_path = "{directory}/conf"
"#,
        nri.display()
    )
}

/// The processes of the machine.
fn processes() -> impl Iterator<Item = u32> {
    let entries = fs::read_dir("/proc").expect("proc").flatten();
    entries.filter_map(|entry| entry.file_name().to_str()?.parse().ok())
}

fn tar(directory: &Path, archive: &Path) {
    let mut tar = Command::new("tar");
    tar.arg("-C").arg(directory).arg("-cf").arg(archive).arg(".").stdout(Stdio::null());
    assert!(tar.status().expect("tar runs").success());
}

/// Adds a blob to a layout. Returns its descriptor.
fn blob(layout: &Path, bytes: &[u8], media_type: &str) -> Value {
    let digest = ring::digest::digest(&ring::digest::SHA256, bytes);
    let digest: String = digest.as_ref().iter().map(|byte| format!("{byte:02x}")).collect();
    fs::write(layout.join("blobs/sha256").join(&digest), bytes).expect("written");
    json!({"mediaType": media_type, "digest": format!("sha256:{digest}"), "size": bytes.len()})
}
