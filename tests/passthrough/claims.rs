//! persistentVolumeClaim and ephemeral volumes: podfs finds the PersistentVolume of a claim, and its directory.

use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use crate::common::*;
use nix::sys::signal::Signal;

const BOTH: &str = "[{name: data, persistentVolumeClaim: {claimName: data}}, {name: config, configMap: {name: app}}]";

/// A pod with this name and these volumes. podfs bind-mounts the claims, so that the tests do not depend on FUSE.
fn claiming(name: &str, volumes: &str) -> String {
    let annotations = "annotations: {podfs.io/host-path.data: bind}";
    pod(volumes).replace("name: web, labels: {app: web}", &format!("name: {name}, {annotations}"))
}

/// The manifest with an fsGroup and further fields of the security context.
fn with_group(manifest: &str, fields: &str) -> String {
    manifest.replace("spec:\n", &format!("spec:\n  securityContext: {{fsGroup: 4711{fields}}}\n"))
}

/// A fixture with the ConfigMap `app` and a claim `data` that is bound to the PersistentVolume `pv-1`; and the
/// directory of `pv-1`.
fn fixture(volumes: &str, kind: &str) -> (Fixture, PathBuf) {
    let fixture = Fixture::new(&claiming("web", volumes));
    let source = fixture.path("source");
    fs::create_dir(&source).expect("a directory");
    fs::write(source.join("file"), "1").expect("written");
    fixture.write("objects/app.json", &config_map("app", &[("a", "1")]));
    fixture.write("objects/claim.yaml", &claim("data", ""));
    fixture.write("objects/volume.yaml", &volume("data", &format!("{kind}: {{path: {}}}", source.display())));
    (fixture, source)
}

pub fn claim(name: &str, metadata: &str) -> String {
    format!(
        "{{apiVersion: v1, kind: PersistentVolumeClaim, metadata: {{name: {name}, uid: c-1{metadata}}}, \
         spec: {{volumeName: pv-1}}, status: {{phase: Bound}}}}"
    )
}

pub fn volume(claim: &str, spec: &str) -> String {
    format!(
        "{{apiVersion: v1, kind: PersistentVolume, metadata: {{name: pv-1}}, \
         spec: {{claimRef: {{namespace: default, name: {claim}, uid: c-1}}, {spec}}}}}"
    )
}

#[track_caller]
fn assert_stops_clean(mut running: Running, fixture: &Fixture) {
    assert_eq!(running.stop().code(), Some(0), "{}", running.log());
    fixture.assert_nothing_left();
}

#[test]
fn a_claim_is_shown_where_the_kubelet_shows_its_volume() {
    // FU-11
    for (kind, directory) in
        [("hostPath", "kubernetes.io~host-path/pv-1"), ("local", "kubernetes.io~local-volume/pv-1")]
    {
        let (fixture, source) = fixture(BOTH, kind);
        let running = fixture.run();
        let volume = running.volume("data");
        assert!(volume.ends_with(Path::new("volumes").join(directory)), "{}", volume.display());
        assert_eq!(running.json()["volumes"][0]["kind"], "persistentVolumeClaim");
        assert_eq!(fs::read_to_string(volume.join("file")).expect("shown"), "1");
        fs::write(volume.join("new"), "").expect("written");
        assert!(source.join("new").exists());
        assert_stops_clean(running, &fixture);
        assert!(source.join("new").exists(), "a PersistentVolume outlives its pods");
    }
}

#[test]
fn a_claim_is_served_through_fuse_unless_the_pod_says_otherwise() {
    let (fixture, source) = fixture(BOTH, "local");
    fixture.write("pod.yaml", &pod(BOTH));
    let running = fixture.run();
    let mode = &running.json()["volumes"][0]["mode"];
    assert!(mode == "passthrough" || mode == "read-write", "{mode}");
    fs::write(running.volume("data").join("new"), "").expect("written");
    assert!(source.join("new").exists());
    assert_stops_clean(running, &fixture);
}

#[test]
fn a_claim_waits_for_missing_objects_and_comes_up_when_they_appear() {
    // PV-01, VM-10
    let (fixture, _) = fixture(BOTH, "local");
    let bound = fs::read_to_string(fixture.path("objects/volume.yaml")).expect("a manifest");
    fixture.remove("objects/claim.yaml");
    fixture.remove("objects/volume.yaml");
    let mut running = fixture.start();
    let prefix = "MountVolume.SetUp failed for volume \"data\" : error processing PVC default/data: ";
    let wait_error = |text: &str| running.wait_log(&format!("{prefix}{text}"));
    wait_error("failed to fetch PVC from API server: persistentvolumeclaims \"data\" not found");
    eventually("the other volume is up", || fixture.mounts().len() == 1);
    fixture.write("objects/claim.yaml", &claim("data", "").replace("Bound", "Pending"));
    wait_error("PVC is not bound");
    fixture.write("objects/claim.yaml", &claim("data", "").replace("volumeName: pv-1", ""));
    wait_error("PVC has empty pvc.Spec.VolumeName");
    fixture.write("objects/claim.yaml", &claim("data", ", deletionTimestamp: '2026-01-01T00:00:00Z'"));
    wait_error("PVC is being deleted");
    fixture.write("objects/claim.yaml", &claim("data", ""));
    wait_error("failed to fetch PV pv-1 from API server: persistentvolumes \"pv-1\" not found");
    fixture.write("objects/volume.yaml", &bound.replace("c-1", "c-0"));
    wait_error("found PV object pv-1 but its pv.Spec.ClaimRef.UID c-0 does not point to claim.UID c-1");
    assert!(!running.is_ready());
    fixture.write("objects/volume.yaml", &bound);
    running.wait_ready();
    assert_eq!(fs::read_to_string(running.volume("data").join("file")).expect("shown"), "1");
    assert_stops_clean(running, &fixture);
}

#[test]
fn a_volume_of_an_unsupported_kind_or_mode_is_reported_and_delays_no_other() {
    // PV-06
    for (from, to, text) in [
        (
            "local: {path: ",
            "iscsi: {targetPortal: ",
            "PersistentVolume \"pv-1\" is of kind iscsi; use a PersistentVolume of the CSI driver iscsi.csi.k8s.io",
        ),
        (
            "local:",
            "volumeMode: Block, local:",
            "volume data has volumeMode Block, and no container has it in volumeDevices",
        ),
    ] {
        let (fixture, _) = fixture(BOTH, "local");
        let manifest = fs::read_to_string(fixture.path("objects/volume.yaml")).expect("a manifest");
        fixture.write("objects/volume.yaml", &manifest.replace(from, to));
        let mut running = fixture.start();
        running.wait_log(text);
        eventually("the other volume is up", || fixture.mounts().len() == 1);
        assert!(!running.is_ready());
        assert_stops_clean(running, &fixture);
    }
}

#[test]
fn two_volumes_of_one_claim_are_one_mount() {
    // PV-03
    let volumes = "[{name: data, persistentVolumeClaim: {claimName: data}}, \
                   {name: again, persistentVolumeClaim: {claimName: data}}]";
    let (fixture, _) = fixture(volumes, "local");
    let running = fixture.run();
    assert_eq!(running.volume("data"), running.volume("again"));
    assert_eq!(fixture.mounts(), [running.volume("data")]);
    assert_stops_clean(running, &fixture);
}

#[test]
fn a_read_only_claim_is_read_only_in_the_kernel() {
    let volumes = "[{name: data, persistentVolumeClaim: {claimName: data, readOnly: true}}]";
    for kind in ["hostPath", "local"] {
        let (fixture, source) = fixture(volumes, kind);
        fixture.write("pod.yaml", &with_group(&claiming("web", volumes), ""));
        let running = fixture.run();
        let refused = fs::write(running.volume("data").join("file"), "2").expect_err("read-only");
        assert_eq!(refused.raw_os_error(), Some(libc::EROFS));
        assert_eq!(
            fs::metadata(source.join("file")).expect("there").gid(),
            0,
            "FG-02: podfs changes the group of writable volumes only"
        );
        assert_stops_clean(running, &fixture);
    }
}

#[test]
fn a_local_volume_is_given_to_the_pods_group_and_a_host_path_is_not() {
    // FG-01, FG-02, HP-07
    for (kind, is_changed) in [("local", true), ("hostPath", false)] {
        let (fixture, source) = fixture(BOTH, kind);
        fixture.write("pod.yaml", &with_group(&claiming("web", BOTH), ""));
        let running = fixture.run();
        let mode_and_group = |path: &Path| {
            let metadata = fs::metadata(path).expect("there");
            (metadata.mode() & 0o7777, metadata.gid())
        };
        if is_changed {
            assert_eq!(mode_and_group(&source.join("file")), (0o664, 4711));
            assert_eq!(mode_and_group(&source), (0o2775, 4711));
        } else {
            assert_eq!((mode_and_group(&source.join("file")).1, mode_and_group(&source).1), (0, 0));
        }
        assert_stops_clean(running, &fixture);
    }
}

#[test]
fn a_volume_that_looks_given_is_not_walked_again_if_the_pod_says_so() {
    // FG-03
    let (fixture, source) = fixture(BOTH, "local");
    fixture.write("pod.yaml", &with_group(&claiming("web", BOTH), ", fsGroupChangePolicy: OnRootMismatch"));
    assert_stops_clean(fixture.run(), &fixture);
    let file = source.join("file");
    std::os::unix::fs::chown(&file, None, Some(0)).expect("owned");
    assert_stops_clean(fixture.run(), &fixture);
    assert_eq!(fs::metadata(&file).expect("there").gid(), 0);
    fixture.write("pod.yaml", &with_group(&claiming("web", BOTH), ", fsGroupChangePolicy: Always"));
    assert_stops_clean(fixture.run(), &fixture);
    assert_eq!(fs::metadata(&file).expect("there").gid(), 4711);
}

#[test]
fn a_local_volume_is_given_by_its_first_pod_only() {
    // LP-03
    let (fixture, source) = fixture(BOTH, "local");
    let mut first = fixture.run();
    fixture.write("pod.yaml", &with_group(&claiming("db", BOTH), ""));
    let mut second = fixture.run();
    let text = "The requested fsGroup is 4711, but the volume pv-1 has GID 0. The volume may not be shareable.";
    assert!(second.log().contains(text), "{}", second.log());
    let pods = fixture.pods();
    let notices: Vec<_> = pods.iter().map(|pod| &pod["volumes"][0]["ownership"]).collect();
    let notice = serde_json::json!({"reason": "AlreadyMountedVolume", "message": text});
    assert_eq!(notices.iter().filter(|found| ***found == notice).count(), 1, "{notices:?}");
    assert_eq!(fs::metadata(source.join("file")).expect("there").gid(), 0);
    assert_eq!((first.stop().code(), second.stop().code()), (Some(0), Some(0)));
    assert_eq!((fixture.mounts(), fixture.processes()), (vec![], vec![]));
}

#[test]
fn a_volume_for_one_pod_waits_until_the_other_pod_is_gone() {
    // PV-05
    let (fixture, _) = fixture(BOTH, "local");
    let manifest = fs::read_to_string(fixture.path("objects/volume.yaml")).expect("a manifest");
    fixture.write("objects/volume.yaml", &manifest.replace("local:", "accessModes: [ReadWriteOncePod], local:"));
    let mut first = fixture.run();
    fixture.write("pod.yaml", &claiming("db", BOTH));
    let mut second = fixture.start();
    second.wait_log("volume uses the ReadWriteOncePod access mode and is already in use by another pod");
    assert!(!second.is_ready());
    assert_eq!(first.stop().code(), Some(0));
    second.wait_ready();
    assert_eq!(second.stop().code(), Some(0));
    assert_eq!((fixture.mounts(), fixture.processes()), (vec![], vec![]));
}

#[test]
fn a_volume_of_another_node_is_refused() {
    // LP-04
    let (fixture, _) = fixture(BOTH, "local");
    let affinity = "nodeAffinity: {required: {nodeSelectorTerms: [{matchExpressions: \
                    [{key: kubernetes.io/hostname, operator: In, values: [n-1]}]}]}}";
    let manifest = fs::read_to_string(fixture.path("objects/volume.yaml")).expect("a manifest");
    fixture.write("objects/volume.yaml", &manifest.replace("local:", &format!("{affinity}, local:")));
    let node = |name: &str| {
        let metadata = format!("{{name: worker, labels: {{kubernetes.io/hostname: {name}}}}}");
        fixture.write("objects/node.yaml", &format!("{{apiVersion: v1, kind: Node, metadata: {metadata}}}"));
    };
    node("n-2");
    let mut running = fixture.start();
    running.wait_log("MountVolume.NodeAffinity check failed for volume \"pv-1\" : no matching NodeSelectorTerms");
    assert!(!running.is_ready());
    node("n-1");
    running.wait_ready();
    assert_stops_clean(running, &fixture);
}

#[test]
fn a_local_volume_has_to_be_a_directory() {
    // LP-01
    let (fixture, source) = fixture(BOTH, "local");
    let path = |path: &str| fixture.write("objects/volume.yaml", &volume("data", &format!("local: {{path: {path}}}")));
    path("''");
    let running = fixture.start();
    running.wait_log("local volume source is nil or local path is not set");
    path(&source.join("file").display().to_string());
    running.wait_log("only directory and block device are supported");
    path("/srv/../etc");
    running.wait_log("invalid path: /srv/../etc must not contain '..'");
    path("/nowhere/at/all");
    running.wait_log("local volume /nowhere/at/all cannot be used: it does not exist");
    assert_stops_clean(running, &fixture);
}

#[test]
fn an_ephemeral_volume_has_a_claim_of_its_own() {
    // PV-02
    let volumes = "[{name: data, ephemeral: {volumeClaimTemplate: {spec: {}}}}]";
    let (fixture, _) = fixture(volumes, "local");
    let manifest = fs::read_to_string(fixture.path("objects/volume.yaml")).expect("a manifest");
    fixture.write("objects/volume.yaml", &manifest.replace("name: data", "name: web-data"));
    fixture.write("objects/claim.yaml", &claim("web-data", ""));
    let mut running = fixture.start();
    running.wait_log("PVC default/web-data was not created for pod default/web (pod is not owner)");
    let owner = ", ownerReferences: [{kind: Pod, name: web, controller: true}]";
    fixture.write("objects/claim.yaml", &claim("web-data", owner));
    running.wait_ready();
    assert_stops_clean(running, &fixture);
}

#[test]
fn readiness_has_the_supplemental_group_of_a_volume() {
    // PV-04
    let (fixture, _) = fixture(BOTH, "local");
    let manifest = fs::read_to_string(fixture.path("objects/volume.yaml")).expect("a manifest");
    let annotated = manifest.replace("name: pv-1", "name: pv-1, annotations: {pv.beta.kubernetes.io/gid: '1234'}");
    fixture.write("objects/volume.yaml", &annotated);
    let running = fixture.run();
    assert_eq!(running.json()["volumes"][0]["supplementalGroup"], 1234);
    assert!(running.json()["volumes"][1].get("supplementalGroup").is_none());
    assert_stops_clean(running, &fixture);
}

#[test]
fn a_claim_of_a_killed_podfs_is_taken_up_by_the_next_one() {
    // RC-05
    let (fixture, _) = fixture(BOTH, "local");
    let mut killed = fixture.run();
    fixture.kill_all();
    killed.wait();
    let running = fixture.run();
    let mut mounts = fixture.mounts();
    mounts.sort();
    mounts.dedup();
    assert_eq!(mounts.len(), 2, "each volume is mounted over its dead mount");
    assert_stops_clean(running, &fixture);
}

#[test]
fn podfs_mount_shows_a_claim_and_names_the_objects_that_it_needs() {
    let (fixture, _) = fixture(BOTH, "local");
    let command = |volume: &str| {
        fixture.write("volume.yaml", volume);
        let mut command = Command::new(PODFS);
        command.arg("mount").arg("--volume").arg(fixture.path("volume.yaml")).arg(fixture.path("at"));
        command.stdin(Stdio::null());
        command
    };
    let with_claim = "{name: data, persistentVolumeClaim: {claimName: data}}";
    let sentence = "the volume needs PersistentVolumeClaim data of namespace default and its PersistentVolume";
    fixture.refused(&mut command(with_claim)).says(2, &[sentence, "--objects"]);
    let ephemeral = "{name: data, ephemeral: {volumeClaimTemplate: {spec: {}}}}";
    fixture.refused(&mut command(ephemeral)).says(2, &["give the pod's manifest with --pod"]);
    // The pod's annotation applies to the pod's volume with the same name.
    let mut command = command(with_claim);
    let mut running = fixture.spawn(command.arg("--pod").arg(fixture.pod()).arg("--objects").arg(fixture.objects()));
    running.wait_log("is ready");
    assert_eq!(fs::read_to_string(fixture.path("at/file")).expect("shown"), "1");
    running.signal(Signal::SIGINT);
    assert_eq!(running.wait().code(), Some(0), "{}", running.log());
    assert!(!fixture.path("at").exists());
}
