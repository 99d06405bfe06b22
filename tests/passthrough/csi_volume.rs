//! csi volumes, with a driver that a test controls.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;

use crate::common::*;
use crate::csi_driver::{CsiDriver, DRIVER, Fault};
use nix::sys::signal::Signal;
use podfs::csi::v1::node_service_capability::rpc::Type;
use tonic::Code;

pub const BOTH: &str =
    "[{name: data, persistentVolumeClaim: {claimName: data}}, {name: config, configMap: {name: app}}]";
pub const STAGES: &[Type] = &[Type::StageUnstageVolume];

/// A pod and its objects, and the directory that a CSI driver publishes.
pub struct Rig {
    pub fixture: Fixture,
    /// The directory or device that the driver mounts.
    pub source: PathBuf,
}

impl Rig {
    /// A pod on node worker-1, a driver that needs no attachment, and a claim that is bound to the driver's volume
    /// `pv-1`.
    pub fn new(volumes: &str) -> Rig {
        let rig = Rig { fixture: Fixture::new(""), source: PathBuf::new() };
        let rig = Rig { source: rig.fixture.path("source"), ..rig };
        rig.write_pod("pod.yaml", "web", volumes);
        rig.fixture.write("objects/app.json", &config_map("app", &[("a", "1")]));
        rig.fixture.write("objects/key.json", &secret("key", &[("password", "hunter2")]));
        rig.write_driver("attachRequired: false");
        rig.write_volume("volumeHandle: a/../b");
        fs::create_dir(&rig.source).expect("a directory");
        fs::write(rig.source.join("file"), "1").expect("written");
        rig
    }

    pub fn write_pod(&self, file: &str, name: &str, volumes: &str) {
        let manifest = pod(volumes).replace("name: web,", &format!("name: {name},"));
        self.fixture.write(file, &manifest.replace("spec:\n", "spec:\n  nodeName: worker-1\n"));
    }

    /// Gives the pod the fsGroup 4711.
    pub fn set_group(&self) {
        let manifest = fs::read_to_string(self.fixture.pod()).expect("a manifest");
        self.fixture.write("pod.yaml", &manifest.replace("spec:\n", "spec:\n  securityContext: {fsGroup: 4711}\n"));
    }

    pub fn write_driver(&self, spec: &str) {
        let driver = format!(
            "{{apiVersion: storage.k8s.io/v1, kind: CSIDriver, metadata: {{name: {DRIVER}}}, spec: {{{spec}}}}}"
        );
        self.fixture.write("objects/driver.yaml", &driver);
    }

    pub fn write_volume(&self, fields: &str) {
        let claim = "{apiVersion: v1, kind: PersistentVolumeClaim, metadata: {name: data}, spec: {volumeName: pv-1}}";
        let volume = format!(
            "{{apiVersion: v1, kind: PersistentVolume, metadata: {{name: pv-1}}, spec: {{claimRef: {{namespace: default, \
             name: data}}, accessModes: [ReadWriteOnce], mountOptions: [noatime], csi: {{driver: {DRIVER}, fsType: ext4, \
             {fields}}}}}}}"
        );
        self.fixture.write("objects/claim.yaml", &format!("{claim}\n---\n{volume}"));
    }

    pub fn root(&self) -> PathBuf {
        self.fixture.path("root")
    }

    pub fn driver(&self, capabilities: &[Type]) -> CsiDriver {
        CsiDriver::start(&self.root(), &self.source, capabilities)
    }

    pub fn run(&self) -> Running {
        self.fixture.run()
    }

    /// Asserts that nothing of the pod is left. The directories of the driver may stay.
    #[track_caller]
    pub fn assert_nothing_left(&self) {
        let root = self.root();
        assert!(!root.join("pods").exists(), "something of the pod is left");
        let staged = root.join("plugins/kubernetes.io/csi").join(DRIVER);
        assert_eq!(staged.read_dir().into_iter().flatten().count(), 0, "something is staged");
        assert_eq!(self.fixture.mounts(), Vec::<PathBuf>::new());
        for directory in ["plugins", "plugins_registry"] {
            fs::remove_dir_all(root.join(directory)).expect("nothing is mounted in the directory");
        }
        let _ = fs::remove_dir(root);
        self.fixture.assert_nothing_left();
    }

    #[track_caller]
    pub fn assert_stops_clean(&self, mut running: Running) {
        assert_eq!(running.stop().code(), Some(0), "{}", running.log());
        self.assert_nothing_left();
    }
}

#[track_caller]
pub fn assert_shown(running: &Running) {
    assert_eq!(fs::read_to_string(running.volume("data").join("file")).expect("shown"), "1");
}

#[test]
fn cs_01_a_volume_is_staged_published_and_served() {
    let rig = Rig::new(BOTH);
    rig.write_volume(
        "volumeHandle: a/../b, volumeAttributes: {tier: gold}, nodeStageSecretRef: {name: key, namespace: default}, \
                      nodePublishSecretRef: {name: key, namespace: default}",
    );
    let driver = rig.driver(STAGES);
    let running = rig.run();
    let volume = running.volume("data");
    assert!(volume.ends_with(Path::new("volumes/kubernetes.io~csi/pv-1/mount")), "{}", volume.display());
    assert_shown(&running);
    fs::write(volume.join("new"), "").expect("written");
    assert!(rig.source.join("new").exists());
    let mode = &running.json()["volumes"][0]["mode"];
    assert!(mode == "passthrough" || mode == "read-write", "{mode}");
    assert_eq!(driver.calls(), ["NodeStageVolume", "NodePublishVolume"]);
    let (staged, published) = (driver.staged(), driver.published());
    let staging = PathBuf::from(&staged.staging_target_path);
    let directory = staging.parent().expect("a directory");
    let of_driver = Path::new("plugins/kubernetes.io/csi").join(DRIVER);
    assert!(directory.parent().is_some_and(|parent| parent.ends_with(of_driver)));
    assert_eq!(directory.file_name().expect("a name").len(), 64, "a handle with slashes is no path");
    assert!(staging.ends_with("globalmount"));
    let data = fs::read_to_string(directory.join("vol_data.json")).expect("written");
    assert!(data.contains(r#""volumeHandle":"a/../b""#), "{data}");
    assert_eq!(published.staging_target_path, staged.staging_target_path);
    assert!(published.target_path.ends_with("/plugins/kubernetes.io~csi/pv-1/mount"), "{}", published.target_path);
    for (id, secrets, context) in [
        (&staged.volume_id, &staged.secrets, &staged.volume_context),
        (&published.volume_id, &published.secrets, &published.volume_context),
    ] {
        assert_eq!(
            (id.as_str(), secrets["password"].as_str(), context["tier"].as_str()),
            ("a/../b", "hunter2", "gold")
        );
    }
    let capability = format!("{:?}", published.volume_capability);
    assert!(capability.contains("ext4"), "{capability}");
    assert!(!running.log().contains("hunter2"), "{}", running.log());
    rig.assert_stops_clean(running);
    assert_eq!(driver.calls()[2..], ["NodeUnpublishVolume", "NodeUnstageVolume"]);
}

#[test]
fn cs_01_a_staging_directory_that_is_a_mount_already_is_the_drivers_to_judge() {
    let rig = Rig::new(BOTH);
    let driver = rig.driver(STAGES);
    // A kubelet has staged the volume before.
    let handle = podfs::volume::csi::sha256(&["a/../b"]);
    let staging = rig.root().join("plugins/kubernetes.io/csi").join(DRIVER).join(handle).join("globalmount");
    fs::create_dir_all(&staging).expect("a directory");
    let (none, flags) = (None::<&str>, nix::mount::MsFlags::MS_BIND);
    nix::mount::mount(Some(&rig.source), &staging, none, flags, none).expect("staged");
    let running = rig.run();
    assert_shown(&running);
    assert_eq!(Path::new(&driver.staged().staging_target_path), staging);
    rig.assert_stops_clean(running);
    assert_eq!(driver.count("NodeUnstageVolume"), 1);
    assert!(rig.source.join("file").exists());
}

#[test]
fn cs_02_an_inline_volume_is_published_alone_with_its_pod_info() {
    let volumes = format!(
        "[{{name: data, csi: {{driver: {DRIVER}, readOnly: true, volumeAttributes: {{tier: gold}}, \
         nodePublishSecretRef: {{name: key}}}}}}]"
    );
    let rig = Rig::new(&volumes);
    rig.write_driver("attachRequired: false, podInfoOnMount: true, volumeLifecycleModes: [Ephemeral]");
    let driver = rig.driver(STAGES);
    let running = rig.run();
    assert_shown(&running);
    assert!(running.volume("data").ends_with("volumes/kubernetes.io~csi/data/mount"));
    assert_eq!(driver.calls(), ["NodePublishVolume"]);
    let published = driver.published();
    assert!(published.volume_id.starts_with("csi-") && published.volume_id.len() == 68, "{}", published.volume_id);
    assert!(published.readonly && published.staging_target_path.is_empty());
    for (key, value) in [
        ("pod.name", "web"),
        ("pod.namespace", "default"),
        ("pod.uid", &running.uid()),
        ("serviceAccount.name", "default"),
        ("ephemeral", "true"),
    ] {
        assert_eq!(published.volume_context[&format!("csi.storage.k8s.io/{key}")], value);
    }
    assert_eq!(
        (published.volume_context["tier"].as_str(), published.secrets["password"].as_str()),
        ("gold", "hunter2")
    );
    rig.assert_stops_clean(running);
}

#[test]
fn cs_03_a_driver_may_register_later_and_the_volume_waits_by_its_name() {
    let rig = Rig::new(BOTH);
    let mut running = rig.fixture.start();
    running.wait_log(&format!("CSI driver {DRIVER} is not registered on this node"));
    eventually("the other volume is up", || rig.fixture.mounts().len() == 1);
    assert!(!running.is_ready());
    let _driver = rig.driver(STAGES);
    running.wait_ready();
    assert_shown(&running);
    rig.assert_stops_clean(running);
}

#[test]
fn cs_04_a_volume_waits_until_it_is_attached_and_the_driver_gets_the_attachment() {
    let rig = Rig::new(BOTH);
    rig.write_driver("podInfoOnMount: false");
    let driver = rig.driver(STAGES);
    let mut running = rig.fixture.start();
    running.wait_log("is not attached to node \"worker-1\" yet: there is no VolumeAttachment csi-");
    let log = running.log();
    let name = log.split("VolumeAttachment ").nth(1).and_then(|text| text.split([';', ' ']).next()).expect("a name");
    let attachment = |status: &str| {
        let object = format!(
            "{{apiVersion: storage.k8s.io/v1, kind: VolumeAttachment, metadata: {{name: {name}}}, status: {{{status}}}}}"
        );
        rig.fixture.write("objects/attachment.yaml", &object);
    };
    attachment("attached: false, attachError: {message: no such disk}");
    running.wait_log("no such disk");
    assert_eq!(driver.calls(), Vec::<String>::new());
    attachment("attached: true, attachmentMetadata: {device: /dev/sdx}");
    running.wait_ready();
    assert_eq!(driver.staged().publish_context["device"], "/dev/sdx");
    assert_eq!(driver.published().publish_context["device"], "/dev/sdx");
    rig.assert_stops_clean(running);
}

#[test]
fn cs_05_two_pods_share_a_staged_volume_and_the_last_one_unstages_it() {
    let rig = Rig::new(BOTH);
    let driver = rig.driver(STAGES);
    let first = rig.run();
    rig.write_pod("pod.yaml", "other", BOTH);
    let mut second = rig.run();
    assert_shown(&second);
    assert_eq!((driver.count("NodeStageVolume"), driver.count("NodePublishVolume")), (1, 2));
    assert_eq!(second.stop().code(), Some(0), "{}", second.log());
    assert_eq!((driver.count("NodeUnpublishVolume"), driver.count("NodeUnstageVolume")), (1, 0));
    assert_shown(&first);
    rig.assert_stops_clean(first);
    assert_eq!((driver.count("NodeUnpublishVolume"), driver.count("NodeUnstageVolume")), (2, 1));
}

#[test]
fn vm_04_only_uncertain_calls_are_undone() {
    for (method, code, is_undone) in [
        ("NodeStageVolume", Code::Internal, false),
        ("NodeStageVolume", Code::DeadlineExceeded, true),
        ("NodePublishVolume", Code::InvalidArgument, false),
        ("NodePublishVolume", Code::Aborted, true),
    ] {
        let rig = Rig::new(BOTH);
        let driver = rig.driver(STAGES);
        driver.fail_always(method, Some(Fault::Fails(code)));
        let mut running = rig.fixture.start();
        running.wait_log(&format!("CSI driver {DRIVER}: {method} failed ({code:?}): as the test says"));
        eventually("the other volume is up", || running.log().contains("volume is current"));
        assert!(!running.is_ready());
        assert_eq!(running.stop().code(), Some(0), "{}", running.log());
        let undo = if method == "NodeStageVolume" { "NodeUnstageVolume" } else { "NodeUnpublishVolume" };
        assert_eq!(driver.count(undo) > 0, is_undone, "{method} {code:?}: {:?}", driver.calls());
        rig.assert_nothing_left();
    }
}

#[test]
fn cs_06_a_driver_that_fails_after_the_work_is_called_again() {
    let rig = Rig::new(BOTH);
    let driver = rig.driver(STAGES);
    for method in ["NodeStageVolume", "NodePublishVolume", "NodeUnpublishVolume", "NodeUnstageVolume"] {
        driver.fail(method, Fault::FailsAfterTheWork(Code::Unavailable));
        driver.fail(method, Fault::FailsAfterTheWork(Code::Internal));
    }
    let running = rig.run();
    assert_shown(&running);
    rig.assert_stops_clean(running);
}

#[test]
fn cs_06_a_driver_that_crashes_after_the_work_is_called_again_when_it_is_back() {
    for (method, undo) in [("NodeStageVolume", "NodeUnstageVolume"), ("NodePublishVolume", "NodeUnpublishVolume")] {
        let rig = Rig::new(BOTH);
        let mut driver = rig.driver(STAGES);
        driver.fail(method, Fault::HangsAfterTheWork);
        let mut running = rig.fixture.start();
        eventually("the driver has done its work", || driver.count(method) == 1);
        driver.crash();
        running.wait_log(&format!("CSI driver {DRIVER}: {method} failed ("));
        driver.listen(&rig.root());
        running.wait_ready();
        assert_shown(&running);
        assert_eq!((driver.count(method), driver.count(undo)), (2, 0));
        rig.assert_stops_clean(running);
        assert_eq!(driver.count(undo), 1);
    }
}

#[test]
fn cs_06_podfs_waits_for_a_driver_that_answers_late() {
    let rig = Rig::new(BOTH);
    let driver = rig.driver(STAGES);
    for method in ["NodeStageVolume", "NodePublishVolume", "NodeUnpublishVolume", "NodeUnstageVolume"] {
        driver.fail(method, Fault::Late(Duration::from_millis(700)));
    }
    let running = rig.run();
    assert_shown(&running);
    rig.assert_stops_clean(running);
    assert_eq!(driver.calls(), ["NodeStageVolume", "NodePublishVolume", "NodeUnpublishVolume", "NodeUnstageVolume"]);
}

#[test]
fn cs_03_a_registration_without_a_socket_is_reported() {
    let rig = Rig::new(BOTH);
    let mut driver = rig.driver(STAGES);
    let endpoint = rig.root().join("plugins").join(DRIVER).join("own.sock");
    fs::remove_file(&endpoint).expect("the driver's socket");
    let mut running = rig.fixture.start();
    running.wait_log(&format!("CSI driver {DRIVER} does not listen at {}", endpoint.display()));
    assert!(!running.is_ready());
    driver.crash();
    driver.listen(&rig.root());
    running.wait_ready();
    assert_shown(&running);
    rig.assert_stops_clean(running);
}

#[test]
fn cs_07_a_podfs_that_is_killed_during_a_call_leaves_nothing_and_unstages_nothing_that_is_used() {
    for method in ["NodeStageVolume", "NodePublishVolume"] {
        let rig = Rig::new(BOTH);
        let driver = rig.driver(STAGES);
        driver.fail_always(method, Some(Fault::Fails(Code::Unavailable)));
        let mut running = rig.fixture.start();
        eventually("the driver is called", || driver.count(method) > 0);
        driver.fail_always(method, Some(Fault::Kills(running.pid().as_raw())));
        running.wait();
        driver.fail_always(method, None);
        let running = rig.run();
        assert_shown(&running);
        assert_eq!((driver.count("NodeUnpublishVolume"), driver.count("NodeUnstageVolume")), (0, 0));
        rig.assert_stops_clean(running);
    }
}

#[test]
fn cs_07_a_podfs_that_is_killed_while_it_ends_is_finished_by_the_next_one_or_by_cleanup() {
    let methods = ["NodeUnpublishVolume", "NodeUnstageVolume"];
    for (method, is_cleaned_up) in methods.into_iter().flat_map(|method| [(method, false), (method, true)]) {
        let rig = Rig::new(BOTH);
        let driver = rig.driver(STAGES);
        let mut running = rig.run();
        driver.fail(method, Fault::Kills(running.pid().as_raw()));
        running.signal(Signal::SIGTERM);
        running.wait();
        eventually("the pod's processes have ended", || rig.fixture.processes().is_empty());
        if !is_cleaned_up {
            let next = rig.run();
            assert_shown(&next);
            rig.assert_stops_clean(next);
            continue;
        }
        let outcome = rig.fixture.cleanup(&[]);
        assert_eq!(outcome.code, Some(0), "{} {}", outcome.stdout, outcome.stderr);
        rig.assert_nothing_left();
    }
}

#[test]
fn cs_07_volumes_outlive_a_killed_podfs_and_its_driver() {
    let rig = Rig::new(BOTH);
    let mut driver = rig.driver(STAGES);
    let mut running = rig.run();
    rig.fixture.kill_supervisor(&mut running);
    let running = rig.run();
    assert_shown(&running);
    assert_eq!((driver.count("NodeStageVolume"), driver.count("NodePublishVolume")), (1, 1));
    // The driver restarts.
    driver.listen(&rig.root());
    assert_shown(&running);
    rig.assert_stops_clean(running);
}

#[test]
fn cs_08_a_driver_that_hangs_delays_no_other_volume_and_no_other_pod() {
    let rig = Rig::new(BOTH);
    let driver = rig.driver(STAGES);
    driver.fail("NodeStageVolume", Fault::Hangs);
    let mut running = rig.fixture.start();
    eventually("the driver is called", || driver.count("NodeStageVolume") == 1);
    let volumes = &rig.fixture.pods()[0]["volumes"];
    let data = volumes.as_array().and_then(|volumes| volumes.iter().find(|volume| volume["name"] == "data"));
    let reason = data.expect("the volume")["reason"].as_str().expect("it waits");
    let expected =
        format!("CSI driver {DRIVER} has not answered NodeStageVolume yet; podfs waits at most 120 s for each call");
    assert_eq!(reason, expected);
    eventually("the other volume is up", || rig.fixture.mounts().len() == 1);
    rig.fixture.write("objects/app.json", &config_map("app", &[("a", "2")]));
    let config = rig.fixture.mounts().remove(0);
    wait_content(&config.join("a"), "2");
    rig.fixture.kill_both(&mut running);
    age_call(&driver.staged().staging_target_path);
    let outcome = rig.fixture.cleanup(&[]);
    assert_eq!(outcome.code, Some(0), "{} {}", outcome.stdout, outcome.stderr);
    rig.assert_nothing_left();
}

/// Changes the record of the unfinished call that mounts at `path`, as if the call had begun when the machine started.
pub fn age_call(path: &str) {
    let record = Path::new(path).parent().expect("a directory").join("call");
    let text = fs::read_to_string(&record).expect("a call is unfinished");
    let (call, _) = text.split_once("\"began\":").expect("it has a time");
    fs::write(&record, format!("{call}\"began\":0}}\n")).expect("written");
}

#[test]
fn cs_09_a_driver_that_answers_ok_without_a_mount_is_reported() {
    let rig = Rig::new(BOTH);
    let driver = rig.driver(STAGES);
    driver.fail_always("NodePublishVolume", Some(Fault::Lies));
    let mut running = rig.fixture.start();
    running.wait_log("/plugins/kubernetes.io~csi/pv-1/mount cannot be used: it does not exist");
    assert!(!running.is_ready());
    driver.fail_always("NodePublishVolume", None);
    running.wait_ready();
    assert_shown(&running);
    rig.assert_stops_clean(running);
}

#[test]
fn the_next_supervisor_keeps_the_mount_of_a_claim_by_whichever_volume_the_pod_has() {
    let rig = Rig::new(&BOTH.replace("[", "[{name: lead, persistentVolumeClaim: {claimName: data}}, "));
    let driver = rig.driver(STAGES);
    let mut running = rig.run();
    let volume = running.volume("data");
    rig.write_pod("pod.yaml", "web", BOTH);
    running.signal(Signal::SIGKILL);
    running.wait();
    let mut running = rig.run();
    assert_eq!(fs::read_to_string(volume.join("file")).expect("shown"), "1");
    assert!(running.stop().success(), "{}", running.log());
    assert!(!running.log().contains("the pod goes on without it"), "{}", running.log());
    assert_eq!((driver.count("NodePublishVolume"), driver.count("NodeUnpublishVolume")), (1, 1));
    rig.assert_nothing_left();
}
