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
    claim_of("data", 1)
}

/// A claim of this name, bound to the PersistentVolume of this number.
pub fn claim_of(name: &str, number: u32) -> String {
    format!(
        "{{apiVersion: v1, kind: PersistentVolumeClaim, metadata: {{name: {name}, uid: c-{number}}}, \
         spec: {{volumeName: pv-{number}}}, status: {{phase: Bound}}}}"
    )
}

/// A PersistentVolume for an export whose server has unusual ports.
pub fn volume(nfs: SocketAddr, mountd: SocketAddr, options: &str) -> String {
    let ports = format!("port={},mountport={}", nfs.port(), mountd.port());
    volume_of(("data", 1), &nfs.ip().to_string(), &format!("{ports}{options}"))
}

/// A PersistentVolume for the claim of this name and number, with `/export` of a server.
pub fn volume_of((claim, number): (&str, u32), server: &str, options: &str) -> String {
    format!(
        "{{apiVersion: v1, kind: PersistentVolume, metadata: {{name: pv-{number}}}, \
         spec: {{claimRef: {{namespace: default, name: {claim}, uid: c-{number}}}, \
         nfs: {{server: {server}, path: /export}}, \
         mountOptions: [\"{options}\"]}}}}"
    )
}

/// A pod with claims of these names, each with a volume of its name. All of them lead to `/export` of a server.
pub fn write_claims(fixture: &Fixture, uid: &str, claims: &[(&str, &str)], server: &str) {
    let mut volumes = Vec::new();
    for (number, (name, options)) in (1..).zip(claims) {
        fixture.write(&format!("objects/claim-{number}.yaml"), &claim_of(name, number));
        fixture.write(&format!("objects/volume-{number}.yaml"), &volume_of((name, number), server, options));
        volumes.push(format!("{{name: {name}, persistentVolumeClaim: {{claimName: {name}}}}}"));
    }
    fixture.write("pod.yaml", &named(uid, &format!("[{}]", volumes.join(", "))));
}

/// The path of the volume with the export.
pub fn shown(running: &Running) -> PathBuf {
    let path = running.volume("data");
    assert!(path.ends_with("volumes/kubernetes.io~nfs/pv-1"), "{}", path.display());
    path
}
