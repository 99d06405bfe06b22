//! Pods with a claim that is bound to an export.

use std::net::SocketAddr;
use std::path::PathBuf;

use crate::common::*;
use crate::nfs_rig::Ganesha;

/// The pod's volumes: the claim `data` for the export, and the configMap `config`.
pub const VOLUMES: &str = "[{name: data, persistentVolumeClaim: {claimName: data}}, \
                            {name: config, configMap: {name: app}}]";

/// A pod with this uid, and with a claim for `/export` of this server.
pub fn fixture(uid: &str, ganesha: &Ganesha, options: &str) -> Fixture {
    let fixture = Fixture::new(&named(uid, VOLUMES));
    fixture.write("objects/app.json", &config_map("app", &[("a", "1")]));
    fixture.write("objects/claim.yaml", &claim());
    fixture.write("objects/volume.yaml", &volume(ganesha.address(), ganesha.mount_address(), options));
    fixture
}

/// The manifest of a pod with this uid. Each test needs another uid: the name of the server's cgroup contains it, and
/// tests run at the same time.
pub fn named(uid: &str, volumes: &str) -> String {
    pod(volumes).replace("name: web,", &format!("name: web, uid: {uid},"))
}

pub fn claim() -> String {
    claim_of("data", 1)
}

/// A claim with this name, bound to the PersistentVolume with this number.
pub fn claim_of(name: &str, number: u32) -> String {
    format!(
        "{{apiVersion: v1, kind: PersistentVolumeClaim, metadata: {{name: {name}, uid: c-{number}}}, \
         spec: {{volumeName: pv-{number}}}, status: {{phase: Bound}}}}"
    )
}

/// A PersistentVolume for `/export` of a server with these addresses.
pub fn volume(nfs: SocketAddr, mountd: SocketAddr, options: &str) -> String {
    let ports = format!("port={},mountport={}", nfs.port(), mountd.port());
    volume_of(("data", 1), &nfs.ip().to_string(), &format!("{ports}{options}"))
}

/// A PersistentVolume for the claim with this name and number, for `/export` of a server.
pub fn volume_of((claim, number): (&str, u32), server: &str, options: &str) -> String {
    format!(
        "{{apiVersion: v1, kind: PersistentVolume, metadata: {{name: pv-{number}}}, \
         spec: {{claimRef: {{namespace: default, name: {claim}, uid: c-{number}}}, \
         nfs: {{server: {server}, path: /export}}, \
         mountOptions: [\"{options}\"]}}}}"
    )
}

/// Writes the manifests of a pod with a volume for each claim. A claim has a name and mount options; the volume has the
/// name of its claim. All claims are for `/export` of one server.
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
pub fn volume_path(running: &Running) -> PathBuf {
    let path = running.volume("data");
    assert!(path.ends_with("volumes/kubernetes.io~nfs/pv-1"), "{}", path.display());
    path
}
