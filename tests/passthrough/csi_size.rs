//! csi volumes that grow, and the statistics of their driver.

use std::fs;

use podfs::csi::v1::node_service_capability::rpc::Type;
use podfs::csi::v1::volume_capability::AccessType;
use podfs::csi::v1::volume_usage::Unit;
use podfs::csi::v1::{NodeGetVolumeStatsResponse, VolumeCondition, VolumeUsage};
use tonic::Code;

use crate::common::loop_device::LoopDevice;
use crate::common::*;
use crate::csi_driver::{CsiDriver, DRIVER, Fault};
use crate::csi_volume::{BOTH, Rig, assert_shown};

const GROWS: &[Type] = &[Type::StageUnstageVolume, Type::ExpandVolume];

/// Writes manifests in which the claim's status and the PersistentVolume have these capacities in MiB.
fn write_sizes(rig: &Rig, claim: Option<u64>, volume: u64) {
    rig.write_volume("volumeHandle: h, nodeExpandSecretRef: {name: key, namespace: default}");
    let manifest = fs::read_to_string(rig.fixture.path("objects/claim.yaml")).expect("a manifest");
    let status = claim.map(|mib| format!(", status: {{phase: Bound, capacity: {{storage: {mib}Mi}}}}"));
    let manifest = manifest
        .replace("volumeName: pv-1}}", &format!("volumeName: pv-1}}{}}}", status.unwrap_or_default()))
        .replace("claimRef:", &format!("capacity: {{storage: {volume}Mi}}, claimRef:"));
    rig.fixture.write("objects/claim.yaml", &manifest);
}

/// The size in the last expansion request to the driver, in MiB.
fn requested_size(driver: &CsiDriver) -> i64 {
    driver.expanded().capacity_range.expect("a range").required_bytes >> 20
}

#[test]
fn cs_13_a_volume_is_grown_by_its_driver_once_when_its_persistent_volume_has_grown() {
    let rig = Rig::new(BOTH);
    write_sizes(&rig, None, 8);
    let driver = rig.driver(GROWS);
    let mut running = rig.run();
    assert_eq!(driver.count("NodeExpandVolume"), 0, "the size has not changed");
    write_sizes(&rig, None, 16);
    running.wait_log("has grown volume \"data\" to 16777216 bytes");
    let (expanded, published) = (driver.expanded(), driver.published());
    assert_eq!(
        (expanded.volume_id.as_str(), expanded.volume_path, expanded.staging_target_path, requested_size(&driver)),
        ("h", published.target_path, published.staging_target_path, 16)
    );
    assert_eq!(expanded.secrets["password"], "hunter2");
    assert!(!running.log().contains("hunter2"), "{}", running.log());
    let access = expanded.volume_capability.and_then(|capability| capability.access_type);
    assert!(matches!(access, Some(AccessType::Mount(_))));
    // The next supervisor of the pod knows that the volume has grown.
    rig.fixture.kill_supervisor(&mut running);
    let running = rig.run();
    rig.fixture.write("objects/app.json", &config_map("app", &[("a", "2")]));
    wait_content(&running.volume("config").join("a"), "2");
    assert_eq!(driver.count("NodeExpandVolume"), 1);
    assert_shown(&running);
    rig.assert_stops_clean(running);
}

#[test]
fn cs_13_a_volume_is_mounted_without_the_secret_that_only_its_growth_needs() {
    let rig = Rig::new(BOTH);
    write_sizes(&rig, None, 8);
    let manifest = fs::read_to_string(rig.fixture.path("objects/claim.yaml")).expect("a manifest");
    let manifest = manifest.replace("nodeExpandSecretRef: {name: key", "nodeExpandSecretRef: {name: absent");
    rig.fixture.write("objects/claim.yaml", &manifest);
    let driver = rig.driver(GROWS);
    let running = rig.run();
    assert_eq!(driver.count("NodeExpandVolume"), 0);
    assert_shown(&running);
    rig.assert_stops_clean(running);
}

#[test]
fn cs_13_a_volume_whose_claim_says_that_it_is_smaller_is_grown_when_it_is_mounted() {
    let device = LoopDevice::new(8);
    for is_block in [false, true] {
        let mut rig = Rig::new(BOTH);
        write_sizes(&rig, Some(8), 16);
        if is_block {
            rig.source = device.path().to_owned();
            for (file, from, to) in [
                ("pod.yaml", "image: web}", "image: web, volumeDevices: [{name: data, devicePath: /dev/xvda}]}"),
                ("objects/claim.yaml", "claimRef:", "volumeMode: Block, claimRef:"),
            ] {
                let manifest = fs::read_to_string(rig.fixture.path(file)).expect("a manifest");
                rig.fixture.write(file, &manifest.replace(from, to));
            }
        }
        let driver = rig.driver(GROWS);
        let running = rig.run();
        assert_eq!((driver.count("NodeExpandVolume"), requested_size(&driver)), (1, 16));
        let access = driver.expanded().volume_capability.and_then(|capability| capability.access_type);
        assert_eq!(matches!(access, Some(AccessType::Block(_))), is_block);
        let mut running = running;
        assert_eq!(running.stop().code(), Some(0), "{}", running.log());
        rig.assert_nothing_left();
    }
}

#[test]
fn cs_13_a_volume_that_its_driver_cannot_grow_is_served_on_and_tried_again() {
    let rig = Rig::new(BOTH);
    write_sizes(&rig, Some(8), 8);
    let driver = rig.driver(GROWS);
    let running = rig.run();
    driver.fail_always("NodeExpandVolume", Some(Fault::Fails(Code::OutOfRange)));
    write_sizes(&rig, Some(8), 16);
    running.wait_log(&format!("CSI driver {DRIVER}: NodeExpandVolume failed (OutOfRange): as the test says"));
    assert_shown(&running);
    eventually("the status of the volume is behind", || rig.fixture.pods()[0]["volumes"][0]["state"] == "behind");
    driver.fail_always("NodeExpandVolume", None);
    running.wait_log("has grown volume \"data\" to 16777216 bytes");
    rig.assert_stops_clean(running);
}

#[test]
fn cs_14_the_metrics_have_the_numbers_of_the_driver() {
    let rig = Rig::new(BOTH);
    let driver = rig.driver(&[Type::StageUnstageVolume, Type::GetVolumeStats, Type::VolumeCondition]);
    let usage = |unit: Unit, total| VolumeUsage { unit: unit.into(), total, used: 3, available: total - 3 };
    let answer = |abnormal: bool, message: &str| NodeGetVolumeStatsResponse {
        usage: vec![usage(Unit::Bytes, 4711), usage(Unit::Inodes, 815)],
        volume_condition: Some(VolumeCondition { abnormal, message: message.to_owned() }),
    };
    driver.answer_stats(answer(false, "fine"));
    let running = rig.run();
    let metrics = || {
        let output = rig.fixture.operator("metrics").arg("--all").output().expect("podfs runs");
        String::from_utf8(output.stdout).expect("text")
    };
    let value = |metrics: &str, family: &str| {
        let is_of_volume = |line: &&str| line.starts_with(family) && line.contains("volume=\"data\"");
        metrics.lines().find(is_of_volume).and_then(|line| line.rsplit(' ').next()).map(str::to_owned)
    };
    let text = metrics();
    for (family, expected) in [
        ("podfs_volume_stats_capacity_bytes", "4711"),
        ("podfs_volume_stats_used_bytes", "3"),
        ("podfs_volume_stats_available_bytes", "4708"),
        ("podfs_volume_stats_inodes{", "815"),
        ("podfs_volume_stats_inodes_free", "812"),
        ("podfs_volume_stats_health_status_abnormal", "0"),
    ] {
        let actual = value(&text, family).unwrap_or_else(|| panic!("{family}: {text}"));
        assert_eq!(actual.parse::<f64>().expect("a number"), expected.parse::<f64>().expect("a number"), "{family}");
    }
    let (request, published) = (driver.stats_request().expect("podfs has requested statistics"), driver.published());
    assert_eq!(
        (request.volume_id, request.volume_path, request.staging_target_path),
        (published.volume_id, published.target_path, published.staging_target_path)
    );
    driver.answer_stats(answer(true, "the disk is failing"));
    assert_eq!(value(&metrics(), "podfs_volume_stats_health_status_abnormal").as_deref(), Some("1"));
    running.wait_log("its CSI driver reports it as abnormal: the disk is failing");
    rig.assert_stops_clean(running);
}
