//! Pods with a claim that is bound to an export.

use std::net::SocketAddr;
use std::path::PathBuf;

use crate::common::*;
use crate::nfs_rig::Ganesha;

/// The pod's volumes: the export as `data`, and a configMap as `config`.
pub const VOLUMES: &str = "[{name: data, persistentVolumeClaim: {claimName: data}}, \
                            {name: config, configMap: {name: app}}]";

/// A pod of its own uid, whose claim leads to `/export` of this server.
pub fn fixture(uid: &str, ganesha: &Ganesha, options: &str) -> Fixture {
    let fixture = Fixture::new(&named(uid, VOLUMES));
    fixture.write("objects/app.json", &config_map("app", &[("a", "1")]));
    fixture.write("objects/claim.yaml", &claim());
    fixture.write("objects/volume.yaml", &volume(ganesha.address(), ganesha.mount_address(), options));
    fixture
}

/// Pods do not share a cgroup, even when tests run side by side.
pub fn named(uid: &str, volumes: &str) -> String {
    pod(volumes).replace("name: web,", &format!("name: web, uid: {uid},"))
}

pub fn claim() -> String {
    "{apiVersion: v1, kind: PersistentVolumeClaim, metadata: {name: data, uid: c-1}, spec: {volumeName: pv-1}, \
     status: {phase: Bound}}"
        .to_owned()
}

/// A PersistentVolume for an export whose server has unusual ports.
pub fn volume(nfs: SocketAddr, mountd: SocketAddr, options: &str) -> String {
    let (server, port, mount_port) = (nfs.ip(), nfs.port(), mountd.port());
    format!(
        "{{apiVersion: v1, kind: PersistentVolume, metadata: {{name: pv-1}}, \
         spec: {{claimRef: {{namespace: default, name: data, uid: c-1}}, \
         nfs: {{server: {server}, path: /export}}, \
         mountOptions: [\"port={port},mountport={mount_port}{options}\"]}}}}"
    )
}

/// Where the export is to be seen.
pub fn shown(running: &Running) -> PathBuf {
    let path = running.volume("data");
    assert!(path.ends_with("volumes/kubernetes.io~nfs/pv-1"), "{}", path.display());
    path
}
