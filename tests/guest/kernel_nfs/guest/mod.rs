//! The tests in the guest, where the kernel's NFS server exports `/export`. Each test restores the state of the server.

mod away;
mod identity;
mod kerberos;
mod killed;
mod refused;
mod served;
mod tls;
mod user_namespace;

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::common::outcome::finish;
use crate::common::{Fixture, Running, config_map, pod};
use crate::machine::nfs::MOUNT_PORT;

/// A pod with a claim for `path` of the guest's NFS server, mounted with these options, and with a configMap.
fn fixture(path: &str, options: &str) -> Fixture {
    fixture_at("127.0.0.1", path, options)
}

/// A pod as that of [`fixture`], with another name or address of the server.
fn fixture_at(server: &str, path: &str, options: &str) -> Fixture {
    let volumes = "[{name: data, persistentVolumeClaim: {claimName: data}}, {name: config, configMap: {name: app}}]";
    let fixture = Fixture::new(&pod(volumes));
    fixture.write("objects/app.json", &config_map("app", &[("a", "1")]));
    fixture.write(
        "objects/claim.yaml",
        "{apiVersion: v1, kind: PersistentVolumeClaim, metadata: {name: data, uid: c-1}, spec: {volumeName: pv-1}, \
         status: {phase: Bound}}",
    );
    fixture.write(
        "objects/volume.yaml",
        &format!(
            "{{apiVersion: v1, kind: PersistentVolume, metadata: {{name: pv-1}}, \
             spec: {{claimRef: {{namespace: default, name: data, uid: c-1}}, \
             nfs: {{server: {server}, path: {path}}}, mountOptions: [\"{options}\"]}}}}"
        ),
    );
    fixture
}

/// The mount options for version 3, which needs the port of the server's MOUNT service.
fn version_3() -> String {
    format!("nfsvers=3,nolock,mountport={MOUNT_PORT},podfs.backend=kernel")
}

/// The path of the volume with the export.
#[track_caller]
fn volume_path(running: &Running) -> PathBuf {
    let path = running.volume("data");
    assert!(path.ends_with("volumes/kubernetes.io~nfs/pv-1"), "{}", path.display());
    path
}

/// The NFS client that serves the volume, from the status.
#[track_caller]
fn backend(fixture: &Fixture) -> String {
    let pods = fixture.pods();
    let volumes = pods[0]["volumes"].as_array().expect("volumes");
    let volume = volumes.iter().find(|volume| volume["name"] == "data").expect("the volume");
    volume["backend"].as_str().expect("a backend").to_owned()
}

/// Stops podfs, and asserts that it leaves nothing behind.
#[track_caller]
fn assert_stops_clean(mut running: Running, fixture: &Fixture) {
    assert_eq!(running.stop().code(), Some(0), "{}", running.log());
    fixture.assert_nothing_left();
}

/// The way in which the NFS server is unreachable.
#[derive(Clone, Copy, Debug)]
enum OutageKind {
    /// The server does not run, and the kernel of its machine refuses connections.
    Refusing,
    /// No packet reaches the server, and no packet comes back.
    Silent,
}

/// An outage of the NFS server, which ends when this is dropped.
struct Outage(OutageKind);

impl Outage {
    fn begin(kind: OutageKind) -> Self {
        match kind {
            OutageKind::Refusing => server_threads("0"),
            OutageKind::Silent => loopback("down"),
        }
        Self(kind)
    }
}

impl Drop for Outage {
    fn drop(&mut self) {
        match self.0 {
            OutageKind::Refusing => {
                server_threads("2");
                // The server need not wait for clients: they have nothing to reclaim.
                let _ = fs::write("/proc/fs/nfsd/v4_end_grace", "Y");
            }
            OutageKind::Silent => loopback("up"),
        }
    }
}

/// An exported directory. Dropping this removes the entries of the directory, so that the next test does not see them.
struct Emptied(&'static str);

impl Drop for Emptied {
    fn drop(&mut self) {
        for entry in fs::read_dir(self.0).into_iter().flatten().flatten() {
            let path = entry.path();
            let _ = if path.is_dir() { fs::remove_dir_all(path) } else { fs::remove_file(path) };
        }
    }
}

/// The export of `/export` with other options, until this is dropped.
struct ExportedWith;

impl ExportedWith {
    /// Adds these options to those that every test uses.
    #[track_caller]
    fn options(options: &str) -> Self {
        let guard = Self;
        exportfs(&["-o", &format!("rw,no_subtree_check,insecure,fsid=0,{options}"), EXPORT]);
        guard
    }
}

impl Drop for ExportedWith {
    fn drop(&mut self) {
        for arguments in [&["-u", EXPORT][..], &["-ra"]] {
            let _ = Command::new(EXPORTFS).args(arguments).status();
        }
    }
}

/// The export, as exportfs calls it.
const EXPORT: &str = "*:/export";
const EXPORTFS: &str = "/usr/sbin/exportfs";

#[track_caller]
fn exportfs(arguments: &[&str]) {
    let outcome = finish(Command::new(EXPORTFS).args(arguments));
    assert_eq!(outcome.code, Some(0), "{}", outcome.stderr);
}

fn loopback(state: &str) {
    let outcome = finish(Command::new("ip").args(["link", "set", "lo", state]));
    assert_eq!(outcome.code, Some(0), "{}", outcome.stderr);
}

fn server_threads(count: &str) {
    let outcome = finish(Command::new("/usr/sbin/rpc.nfsd").args(["--grace-time", "10", "--lease-time", "10", count]));
    assert_eq!(outcome.code, Some(0), "{}", outcome.stderr);
}

/// The path of an entry of the export on the machine of the NFS server.
fn exported(name: &str) -> PathBuf {
    Path::new(DIRECTORY).join(name)
}

/// The directory that the kernel's NFS server exports.
const DIRECTORY: &str = "/export";
