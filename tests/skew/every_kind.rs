//! A pod with a volume of every kind that needs no cluster. One version starts it, the other adopts it, and upgrades lead back and
//! forth, while callers use its files and processes are killed.

use std::fs::{self, File};
use std::io::{self, Write};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;

use nix::sys::signal::{Signal, kill};
use serde_json::Value;
use tempfile::TempDir;

use crate::common::builds::Builds;
use crate::common::loop_device::LoopDevice;
use crate::common::outcome::finish;
use crate::common::passthrough::disk_directory;
use crate::common::*;
use crate::csi_driver::{CsiDriver, DRIVER};
use crate::nfs_rig::Ganesha;
use crate::pods_with_claims::{claim_of, volume_of};
use crate::previous::First;

const UID: &str = "b61f0c35-7a0d-4d4e-8f51-0d6f8c1a9e42";

/// The volumes in which callers make files.
const WRITABLE: [&str; 8] = ["host", "scratch", "memory", "limited", "local", "nfs", "csi", "flex"];
/// The volumes that show the key `a` of the ConfigMap.
const PROJECTIONS: [&str; 2] = ["config", "all"];

const POD: &str = "
apiVersion: v1
kind: Pod
metadata: {name: web, uid: UID, labels: {app: web}, annotations: {podfs.io/sub-path.live: live}}
spec:
  nodeName: worker-1
  volumes:
  - {name: config, configMap: {name: app}}
  - {name: live, configMap: {name: app}}
  - {name: keys, secret: {secretName: keys, defaultMode: 0400, items: [{key: k, path: dir/k}]}}
  - {name: labels, downwardAPI: {items: [{path: labels, fieldRef: {fieldPath: metadata.labels}}]}}
  - name: all
    projected:
      sources:
      - configMap: {name: app}
      - secret: {name: keys}
      - downwardAPI: {items: [{path: name, fieldRef: {fieldPath: metadata.name}}]}
  - {name: host, hostPath: {path: SOURCES/host, type: Directory}}
  - {name: file, hostPath: {path: SOURCES/file, type: File}}
  - {name: scratch, emptyDir: {}}
  - {name: memory, emptyDir: {medium: Memory}}
  - {name: limited, emptyDir: {sizeLimit: 64Mi}}
  - {name: local, persistentVolumeClaim: {claimName: local}}
  - {name: raw, persistentVolumeClaim: {claimName: raw}}
  - {name: nfs, persistentVolumeClaim: {claimName: nfs}}
  - {name: csi, persistentVolumeClaim: {claimName: csi}}
  - {name: flex, flexVolume: {driver: acme/disk}}
  containers:
  - name: web
    image: web
    volumeDevices: [{name: raw, devicePath: /dev/xvda}]
    volumeMounts:
    - {name: live, mountPath: /app.conf, subPath: a}
    - {name: scratch, mountPath: /logs, subPath: logs}
    - {name: config, mountPath: /config}
    - {name: keys, mountPath: /keys}
    - {name: labels, mountPath: /labels}
    - {name: all, mountPath: /all}
    - {name: host, mountPath: /host}
    - {name: file, mountPath: /file}
    - {name: memory, mountPath: /memory}
    - {name: limited, mountPath: /limited}
    - {name: local, mountPath: /local}
    - {name: nfs, mountPath: /nfs}
    - {name: csi, mountPath: /csi}
    - {name: flex, mountPath: /flex}
";

/// A driver of flexVolumes that bind-mounts the directory SOURCE.
const FLEX_DRIVER: &str = r#"#!/bin/sh
case "$1" in
init) echo '{"status": "Success", "capabilities": {"attach": false}}' ;;
mount) mount --bind SOURCE "$2" && echo '{"status": "Success"}' ;;
unmount) umount "$2" && echo '{"status": "Success"}' ;;
*) echo '{"status": "Not supported"}'; exit 1 ;;
esac
"#;

/// The pod. Fields are dropped in this order.
struct Pod {
    running: Running,
    builds: Builds,
    /// Files that callers hold open, one in each volume of [`WRITABLE`].
    open: Vec<File>,
    /// The mounts and devices of the container, as the agent got them first.
    prepared: Value,
    /// The value of the key `a`, which is also the number of lines in each open file.
    number: u32,
    fixture: Fixture,
    _driver: CsiDriver,
    device: LoopDevice,
    _ganesha: Ganesha,
    sources: TempDir,
}

impl Pod {
    fn start(first: First) -> Pod {
        let (sources, ganesha, device) = (disk_directory(), Ganesha::start(), LoopDevice::new(8));
        for name in ["host", "local", "csi", "flex"] {
            fs::create_dir(sources.path().join(name)).expect("a directory");
        }
        fs::write(sources.path().join("file"), "a file of the host").expect("written");
        let fixture = Fixture::new(&POD.replace("UID", UID).replace("SOURCES", &text(sources.path())));
        write_objects(&fixture, sources.path(), &ganesha, &device);
        install_flex_driver(&fixture, &sources.path().join("flex"));
        let driver = CsiDriver::start(&fixture.path("root"), &sources.path().join("csi"), &[]);
        let builds = first.builds(&fixture);
        change(&fixture, 0);
        let running = run(&fixture, &builds);
        let mut pod = Pod {
            running,
            builds,
            open: Vec::new(),
            prepared: Value::Null,
            number: 0,
            fixture,
            _driver: driver,
            device,
            _ganesha: ganesha,
            sources,
        };
        pod.open = WRITABLE.map(|name| File::create(pod.running.volume(name).join("open")).expect("a file")).into();
        pod.prepared = pod.prepare(&pod.builds.program());
        pod
    }

    /// The mounts and devices of the container, as the podfs at this path prepares them, without the file that each start of the
    /// container gets anew.
    #[track_caller]
    fn prepare(&self, podfs: &Path) -> Value {
        let mut command = Command::new(podfs);
        command.arg("mounts").arg("--run-dir").arg(self.fixture.path("run"));
        let outcome = finish(command.args(["--pod", UID, "prepare", "--container", "web"]));
        assert_eq!(outcome.code, Some(0), "{}", outcome.stderr);
        let mut prepared: Value = serde_json::from_str(&outcome.stdout).expect("JSON");
        let mounts = prepared["mounts"].as_array_mut().expect("mounts");
        mounts.retain(|mount| mount["destination"] != "/dev/termination-log");
        prepared
    }

    /// The path of the node that the container has at `destination`.
    fn source(&self, destination: &str) -> PathBuf {
        let mounts = self.prepared["mounts"].as_array().expect("mounts");
        let mount = mounts.iter().find(|mount| mount["destination"] == destination).expect("a mount");
        mount["source"].as_str().expect("a path").into()
    }

    /// Checks that every volume is as its callers have left it, and that it follows a change of its objects.
    #[track_caller]
    fn check(&mut self) {
        let volume = |name: &str| self.running.volume(name);
        self.number += 1;
        change(&self.fixture, self.number);
        for name in PROJECTIONS {
            wait_content(&volume(name).join("a"), &self.number.to_string());
        }
        wait_content(&self.source("/app.conf"), &self.number.to_string());
        let read = |path: PathBuf| fs::read_to_string(&path).unwrap_or_else(|error| panic!("{path:?}: {error}"));
        assert_eq!(read(volume("keys").join("dir/k")), "secret");
        assert_eq!(read(volume("labels").join("labels")), "app=\"web\"");
        assert_eq!(read(volume("file")), "a file of the host");
        for (name, file) in WRITABLE.iter().zip(&mut self.open) {
            file.write_all(b"line\n").unwrap_or_else(|error| panic!("a write in {name}: {error}"));
            let lines = read(volume(name).join("open")).lines().count();
            assert_eq!(lines, self.number as usize, "lines in {name}");
            fs::write(volume(name).join(format!("kept {}", self.number)), "kept").expect("written");
            for number in 1..=self.number {
                assert_eq!(read(volume(name).join(format!("kept {number}"))), "kept", "{name}");
            }
        }
        fs::write(self.source("/logs").join("log"), "written").expect("the subPath is a directory");
        assert_eq!(read(volume("scratch").join("logs/log")), "written");
        let plugin = "kubernetes.io~local-volume";
        let link = self.fixture.path(&format!("root/pods/{UID}/volumeDevices/{plugin}/pv-2"));
        assert_eq!(fs::read_link(link).expect("a link to the device"), self.device.path());
        for podfs in [self.builds.program(), self.builds.other_program()] {
            assert_eq!(self.prepare(&podfs), self.prepared, "the container's mounts stay");
            self.assert_status(&podfs);
        }
    }

    /// Checks that `podfs status` of the podfs at this path shows all volumes mounted.
    #[track_caller]
    fn assert_status(&self, podfs: &Path) {
        let mut command = Command::new(podfs);
        let outcome =
            finish(command.arg("status").arg("--run-dir").arg(self.fixture.path("run")).args(["--output", "json"]));
        let status: Value = serde_json::from_str(&outcome.stdout).expect(&outcome.stderr);
        let volumes = status["pods"][0]["volumes"].as_array().expect("volumes");
        assert_eq!(volumes.len(), 15);
        for volume in volumes {
            assert_eq!(volume["state"], "live", "{volume}");
        }
    }

    /// Kills the supervisor, and lets the podfs that is installed adopt the server.
    #[track_caller]
    fn adopt(&mut self) {
        let server = self.fixture.kill_supervisor(&mut self.running);
        self.running = run(&self.fixture, &self.builds);
        assert_eq!(self.running.server(), server, "the server was adopted");
    }

    #[track_caller]
    fn kill_server(&self) {
        let server = self.running.server();
        kill(server, Signal::SIGKILL).expect("the server exists");
        eventually("one server serves, with one keeper", || {
            let servers = self.running.servers();
            servers.len() == 1 && servers != [server] && self.running.keepers().len() == 1
        });
        // Only the server answers a look for a name that was never asked for. So the takeover has ended.
        let absent = self.running.volume(WRITABLE[0]).join(format!("absent {}", self.running.server()));
        assert!(!absent.exists());
    }

    /// Stops the pod, and checks that nothing of it stays behind, and that everything is still in sources that outlive pods.
    #[track_caller]
    fn stop(mut self) {
        self.open.clear();
        assert_eq!(self.running.stop().code(), Some(0), "{}", self.running.log());
        for name in ["host", "local", "csi", "flex"] {
            let kept = self.sources.path().join(name).join(format!("kept {}", self.number));
            assert_eq!(fs::read_to_string(kept).expect("the source keeps its files"), "kept");
        }
        // A driver keeps its directories.
        let _ = fs::remove_dir_all(self.fixture.path("root/plugins_registry"));
        let _ = fs::remove_dir_all(self.fixture.path("root/plugins"));
        let _ = fs::remove_dir(self.fixture.path("root"));
        self.fixture.assert_nothing_left();
    }
}

fn text(path: &Path) -> String {
    path.to_str().expect("text").to_owned()
}

fn change(fixture: &Fixture, number: u32) {
    fixture.write("objects/app.json", &config_map("app", &[("a", &number.to_string())]));
}

fn write_objects(fixture: &Fixture, sources: &Path, ganesha: &Ganesha, device: &LoopDevice) {
    let volume = |name: &str, number: u32, spec: &str| {
        let volume = format!(
            "{{apiVersion: v1, kind: PersistentVolume, metadata: {{name: pv-{number}}}, \
             spec: {{claimRef: {{namespace: default, name: {name}, uid: c-{number}}}, accessModes: [ReadWriteOnce], {spec}}}}}"
        );
        fixture.write(&format!("objects/{name}.yaml"), &format!("{}\n---\n{volume}", claim_of(name, number)));
    };
    let path = |name: &str| text(&sources.join(name));
    volume("local", 1, &format!("local: {{path: {}}}", path("local")));
    volume("raw", 2, &format!("volumeMode: Block, local: {{path: {}}}", device.text()));
    volume("csi", 4, &format!("csi: {{driver: {DRIVER}, volumeHandle: disk-4}}"));
    let options = format!("port={},mountport={}", ganesha.address().port(), ganesha.mount_address().port());
    let export = volume_of(("nfs", 3), &ganesha.address().ip().to_string(), &options);
    fixture.write("objects/nfs.yaml", &format!("{}\n---\n{export}", claim_of("nfs", 3)));
    fixture.write("objects/keys.json", &secret("keys", &[("k", "secret")]));
    let driver = format!(
        "{{apiVersion: storage.k8s.io/v1, kind: CSIDriver, metadata: {{name: {DRIVER}}}, spec: {{attachRequired: false}}}}"
    );
    fixture.write("objects/driver.yaml", &driver);
}

fn install_flex_driver(fixture: &Fixture, source: &Path) {
    let directory = fixture.path("drivers/acme~disk");
    fs::create_dir_all(&directory).expect("a directory");
    let driver = directory.join("disk");
    fs::write(&driver, FLEX_DRIVER.replace("SOURCE", &text(source))).expect("written");
    fs::set_permissions(driver, fs::Permissions::from_mode(0o755)).expect("executable");
}

/// Starts the installed podfs, and waits until it is ready.
#[track_caller]
fn run(fixture: &Fixture, builds: &Builds) -> Running {
    let mut command = fixture.command_of(&builds.program());
    command.arg("--flexvolume-dir").arg(fixture.path("drivers"));
    let mut running = fixture.start_command(command);
    running.wait_ready();
    running
}

/// Runs `act` while a thread for each writable volume makes, renames, reads and removes files in it. None of its calls may fail.
fn under_load(pod: &mut Pod, act: impl FnOnce(&mut Pod)) {
    let directories = WRITABLE.map(|name| pod.running.volume(name));
    let (is_over, failures) = (AtomicBool::new(false), Mutex::new(Vec::new()));
    let directory = pod.fixture.path("");
    thread::scope(|scope| {
        for directory in &directories {
            let (is_over, failures) = (&is_over, &failures);
            scope.spawn(move || {
                let mut round = 0;
                while !is_over.load(Ordering::Relaxed) {
                    if let Err(error) = use_files(directory, round) {
                        failures.lock().expect("no panic").push(format!("{}: {error}", directory.display()));
                        return;
                    }
                    round += 1;
                }
            });
        }
        let end = EndOfLoad { is_over: &is_over, directory };
        act(pod);
        drop(end);
    });
    let failures = failures.into_inner().expect("no panic");
    assert!(failures.is_empty(), "{failures:#?}\n{}", pod.running.log());
}

/// Ends the load when it is dropped. After a panic it also ends the pod, so that no caller hangs.
struct EndOfLoad<'a> {
    is_over: &'a AtomicBool,
    directory: PathBuf,
}

impl Drop for EndOfLoad<'_> {
    fn drop(&mut self) {
        self.is_over.store(true, Ordering::Relaxed);
        if thread::panicking() {
            kill_all_of(&self.directory);
        }
    }
}

fn use_files(directory: &Path, round: u64) -> io::Result<()> {
    let (made, renamed) = (directory.join("made"), directory.join("renamed"));
    let content = format!("round {round} ").repeat(300);
    fs::write(&made, &content)?;
    fs::rename(&made, &renamed)?;
    let read = fs::read_to_string(&renamed)?;
    fs::remove_file(&renamed)?;
    if read == content { Ok(()) } else { Err(io::Error::other(format!("{} bytes of {}", read.len(), content.len()))) }
}

#[test]
fn every_kind_of_volume_goes_from_version_to_version() {
    for first in First::BOTH {
        let mut pod = Pod::start(first);
        under_load(&mut pod, |pod| {
            pod.check();
            pod.builds.put_other();
            pod.adopt();
            pod.check();
            pod.kill_server();
            pod.check();
            pod.builds.upgrade(&pod.fixture);
            pod.check();
            pod.kill_server();
            pod.adopt();
            pod.check();
            pod.builds.upgrade(&pod.fixture);
            pod.check();
        });
        pod.stop();
    }
}

#[test]
fn every_kind_of_volume_comes_back_after_a_crash_in_which_the_version_changes() {
    for first in First::BOTH {
        let mut pod = Pod::start(first);
        pod.check();
        pod.open.iter().for_each(|file| file.sync_all().expect("synced"));
        pod.open.clear();
        pod.fixture.kill_both(&mut pod.running);
        pod.builds.put_other();
        pod.running = run(&pod.fixture, &pod.builds);
        pod.prepared = pod.prepare(&pod.builds.program());
        let append = |name| File::options().append(true).open(pod.running.volume(name).join("open")).expect("kept");
        pod.open = WRITABLE.map(append).into();
        pod.check();
        pod.stop();
    }
}
