//! PersistentVolumes of CSI drivers that containers get as block devices (`volumeMode: Block`).

use std::fs;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};

use podfs::csi::v1::VolumeCapability;
use podfs::csi::v1::volume_capability::AccessType;
use tonic::Code;

use crate::common::loop_device::LoopDevice;
use crate::common::*;
use crate::csi_driver::{DRIVER, Fault};
use crate::csi_volume::{BOTH, Rig, STAGES};

/// A pod whose container has the volume as a device, and a CSI driver that publishes `device`.
fn rig(device: &LoopDevice) -> Rig {
    let mut rig = Rig::new(BOTH);
    rig.source = device.path().to_owned();
    let manifest = fs::read_to_string(rig.fixture.pod()).expect("a manifest");
    let devices = "image: web, volumeDevices: [{name: data, devicePath: /dev/xvda}]}";
    rig.fixture.write("pod.yaml", &manifest.replace("image: web}", devices));
    let volume = fs::read_to_string(rig.fixture.path("objects/claim.yaml")).expect("a manifest");
    rig.fixture.write("objects/claim.yaml", &volume.replace("claimRef:", "volumeMode: Block, claimRef:"));
    rig
}

/// The path of the link to the volume's device.
fn link(rig: &Rig, running: &Running) -> PathBuf {
    rig.root().join("pods").join(running.uid()).join("volumeDevices/kubernetes.io~csi/pv-1")
}

#[track_caller]
fn assert_block(capability: Option<VolumeCapability>) {
    let access = capability.and_then(|capability| capability.access_type);
    assert!(matches!(access, Some(AccessType::Block(_))), "podfs has requested a file system");
}

#[test]
fn cs_12_a_volume_of_mode_block_is_staged_published_and_handed_over_as_a_device() {
    for capabilities in [STAGES, &[]] {
        let device = LoopDevice::new(8);
        let rig = rig(&device);
        let driver = rig.driver(capabilities);
        let running = rig.run();
        let link = link(&rig, &running);
        let metadata = fs::metadata(&link).expect("the device");
        assert!(metadata.file_type().is_block_device());
        assert_eq!(metadata.rdev(), fs::metadata(device.path()).expect("the device").rdev());
        let volume = &running.json()["volumes"][0];
        assert_eq!((&volume["mode"], &volume["path"]), (&"device".into(), &link.display().to_string().into()));
        let published = driver.published();
        assert!(published.target_path.ends_with("/plugins/kubernetes.io~csi/pv-1/mount"), "{}", published.target_path);
        assert_block(published.volume_capability);
        if capabilities == STAGES {
            assert_block(driver.staged().volume_capability);
            let staging = Path::new("plugins/kubernetes.io/csi/volumeDevices/pv-1/globalmount");
            assert!(Path::new(&published.staging_target_path).ends_with(staging));
        }
        let mut command = rig.fixture.operator("mounts");
        command.args(["prepare", "--container", "web", "--output", "podman", "--pod", &running.uid()]);
        let output = String::from_utf8(command.output().expect("podfs runs").stdout).expect("text");
        assert!(output.contains(&format!("--device={}:/dev/xvda:rwm", link.display())), "{output}");
        stop(&rig, running);
        assert_eq!(driver.count("NodeUnpublishVolume"), 1);
        assert_eq!(driver.count("NodeUnstageVolume"), capabilities.len());
    }
}

#[test]
fn cs_12_a_device_outlives_a_killed_podfs_and_goes_with_its_pod() {
    let device = LoopDevice::new(8);
    let rig = rig(&device);
    let driver = rig.driver(STAGES);
    for is_cleaned_up in [false, true] {
        let mut killed = rig.run();
        let link = link(&rig, &killed);
        rig.fixture.kill_both(&mut killed);
        assert!(link.exists());
        if is_cleaned_up {
            let outcome = rig.fixture.cleanup(&[]);
            assert_eq!(outcome.code, Some(0), "{} {}", outcome.stdout, outcome.stderr);
        } else {
            let next = rig.run();
            assert!(link.exists());
            let mut next = next;
            assert_eq!(next.stop().code(), Some(0), "{}", next.log());
        }
        assert!(!link.exists());
    }
    assert_eq!((driver.count("NodeStageVolume"), driver.count("NodeUnstageVolume")), (2, 2));
    assert_nothing_left(&rig);
}

#[test]
fn cs_12_a_volume_waits_for_a_missing_device_and_refuses_other_files() {
    let device = LoopDevice::new(8);
    let mut rig = rig(&device);
    let file = rig.fixture.path("file");
    fs::write(&file, "no device").expect("written");
    let device_path = std::mem::replace(&mut rig.source, file);
    let mut driver = rig.driver(&[]);
    driver.fail("NodePublishVolume", Fault::Fails(Code::Unavailable));
    let mut running = rig.fixture.start();
    running.wait_log(&format!("CSI driver {DRIVER}: NodePublishVolume failed (Unavailable)"));
    running.wait_log("/plugins/kubernetes.io~csi/pv-1/mount cannot be used: it is no block device");
    assert!(!running.is_ready());
    rig.source = device_path;
    driver = {
        drop(driver);
        // The earlier driver has left its mount, which the next driver would have to replace: unmount it.
        let pods = rig.root().join("pods").read_dir().expect("a directory");
        let pod = pods.flatten().next().expect("the pod").path();
        let target = pod.join("plugins/kubernetes.io~csi/pv-1/mount");
        nix::mount::umount2(&target, nix::mount::MntFlags::MNT_DETACH).expect("unmounted");
        rig.driver(&[])
    };
    running.wait_ready();
    assert!(fs::metadata(link(&rig, &running)).expect("the device").file_type().is_block_device());
    stop(&rig, running);
    assert_eq!(driver.count("NodeUnpublishVolume"), 1);
}

#[track_caller]
fn stop(rig: &Rig, mut running: Running) {
    assert_eq!(running.stop().code(), Some(0), "{}", running.log());
    assert_nothing_left(rig);
}

/// Asserts that nothing of the volume is left. The directory for the devices of all drivers may stay.
#[track_caller]
fn assert_nothing_left(rig: &Rig) {
    let staged = rig.root().join("plugins/kubernetes.io/csi/volumeDevices");
    assert_eq!(staged.read_dir().into_iter().flatten().count(), 0, "something is staged");
    assert!(!rig.root().join("plugins/kubernetes.io~csi").exists(), "links of the node are left");
    rig.assert_nothing_left();
}
