//! The pod that podfs serves in a machine, as a unit of systemd.

use crate::installed::machine::Machine;

/// The pod's uid.
pub const UID: &str = "6f0c1f0e-0000-4000-8000-000000000001";
/// The unit of the pod.
pub const UNIT: &str = "podfs@6f0c1f0e-0000-4000-8000-000000000001.service";
/// The path of the pod's configMap volume.
pub const CONFIG: &str =
    "/var/lib/podfs/pods/6f0c1f0e-0000-4000-8000-000000000001/volumes/kubernetes.io~configmap/config";
/// The path of the pod's hostPath volume, whose directory is `/srv/host`.
pub const HOST: &str = "/var/lib/podfs/pods/6f0c1f0e-0000-4000-8000-000000000001/volumes/kubernetes.io~host-path/host";

/// The path of the pod's emptyDir on disk.
pub const SCRATCH: &str =
    "/var/lib/podfs/pods/6f0c1f0e-0000-4000-8000-000000000001/volumes/kubernetes.io~empty-dir/scratch";

/// Writes the pod's manifests to the directory that its unit reads.
pub fn write_manifests(machine: &Machine) {
    let pod = format!(
        "apiVersion: v1\nkind: Pod\nmetadata: {{name: web, uid: {UID}}}\nspec:\n  containers: [{{name: web, image: web}}]\n  \
         volumes:\n  - {{name: config, configMap: {{name: app}}}}\n  - {{name: host, hostPath: {{path: /srv/host}}}}\n  \
         - {{name: scratch, emptyDir: {{}}}}\n  - {{name: memory, emptyDir: {{medium: Memory}}}}\n"
    );
    machine.write(&manifest("pod.yaml"), pod);
    write_config(machine, "1");
    machine.output_of("mkdir -p /srv/host");
}

/// Writes the manifests of two static pods to the directory that `podfs node` reads: the pod of this module, and a pod `other`
/// with just a configMap volume.
pub fn write_node_manifests(machine: &Machine) {
    let pod = |name: &str, uid: &str, volumes: &str, mounts: &str| {
        format!(
            "apiVersion: v1\nkind: Pod\nmetadata: {{name: {name}, uid: {uid}}}\nspec:\n  containers:\n  - name: c\n    \
             image: none\n    volumeMounts: [{mounts}]\n  volumes: [{volumes}]\n"
        )
    };
    let config = "{name: config, configMap: {name: app}}";
    let both = format!("{config}, {{name: host, hostPath: {{path: /srv/host}}}}, {{name: scratch, emptyDir: {{}}}}");
    let mounts = "{name: config, mountPath: /c}, {name: host, mountPath: /h}, {name: scratch, mountPath: /s}";
    machine.write("/etc/podfs/manifests/web.yaml", pod("web", UID, &both, mounts));
    let other = "6f1c0a54-2f0e-4c6e-9d4e-1b7a5f3c9e01";
    machine.write("/etc/podfs/manifests/other.yaml", pod("other", other, config, "{name: config, mountPath: /c}"));
    machine.write("/etc/podfs/manifests/app.json", crate::common::config_map("app", &[("a", "1\n")]));
    machine.output_of("mkdir -p /srv/host");
}

/// Writes the pod's ConfigMap.
pub fn write_config(machine: &Machine, content: &str) {
    let object = crate::common::config_map("app", &[("a", &format!("{content}\n"))]);
    machine.write(&manifest("objects/app.json"), object);
}

/// The path of a file of the pod's manifests.
pub fn manifest(name: &str) -> String {
    format!("/etc/podfs/pods/{UID}/{name}")
}

/// Starts the pod's unit, which returns when the pod is ready.
#[track_caller]
pub fn start(machine: &Machine) {
    write_manifests(machine);
    machine.output_of(&format!("systemctl start {UNIT}"));
}

/// The pids of the pod's supervisor and server.
#[track_caller]
pub fn processes(machine: &Machine) -> (u32, u32) {
    let status = machine.run("podfs status --output json");
    let status: serde_json::Value = serde_json::from_str(&status.out).unwrap_or_else(|_| panic!("no JSON: {status:?}"));
    let pid = |process: &str| status["pods"][0][process]["pid"].as_u64().and_then(|pid| u32::try_from(pid).ok());
    let main = machine.output_of(&format!("systemctl show --property MainPID --value {UNIT}"));
    let supervisor = pid("supervisor").unwrap_or_else(|| panic!("no supervisor: {status}"));
    assert_eq!(main, supervisor.to_string(), "systemd knows the supervisor");
    (supervisor, pid("server").unwrap_or_else(|| panic!("no server: {status}")))
}

/// Asserts that nothing of a pod is mounted, that no process of podfs is left, and that its directories are empty.
#[track_caller]
pub fn assert_nothing_served(machine: &Machine) {
    assert_eq!(
        machine.run("grep -e fuse.podfs -e /var/lib/podfs /proc/self/mountinfo").out,
        "",
        "something is mounted"
    );
    assert_eq!(machine.run("grep -l '^podfs' /proc/[0-9]*/comm").out, "", "a process is left");
    for directory in ["/run/podfs", "/var/lib/podfs"] {
        assert_eq!(machine.run(&format!("ls -A {directory}")).out, "", "{directory} is not empty");
    }
}
