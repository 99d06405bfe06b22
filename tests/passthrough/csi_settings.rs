//! Settings of a CSIDriver object.

use std::fs::{self, File};
use std::os::unix::fs::MetadataExt;
use std::path::PathBuf;

use crate::common::*;
use crate::csi_driver::{DRIVER, Fault};
use crate::csi_volume::{BOTH, Rig, STAGES, assert_shown};
use podfs::csi::v1::node_service_capability::rpc::Type;
use podfs::csi::v1::volume_capability::access_mode::Mode;
use rustix::fs::{FlockOperation, flock};
use tonic::Code;

#[test]
fn cs_02_a_volume_waits_while_its_driver_does_not_serve_its_life_cycle() {
    let inline = format!("[{{name: data, csi: {{driver: {DRIVER}}}}}]");
    for (volumes, mode, other) in [(inline.as_str(), "Ephemeral", "Persistent"), (BOTH, "Persistent", "Ephemeral")] {
        let rig = Rig::new(volumes);
        let write_modes = |modes: &str| rig.write_driver(&format!("attachRequired: false{modes}"));
        write_modes(&format!(", volumeLifecycleModes: [{other}]"));
        let driver = rig.driver(STAGES);
        let mut running = rig.fixture.start();
        let refused = format!("volume mode \"{mode}\" not supported by driver {DRIVER} ");
        running.wait_log(&format!("{refused}(only supports [\"{other}\"])"));
        if mode == "Ephemeral" {
            rig.fixture.remove("objects/driver.yaml");
            running.wait_log(&format!("{refused}(no CSIDriver object)"));
            // The API's default is Persistent.
            let before = running.log().matches("only supports").count();
            write_modes("");
            eventually("it is refused again", || running.log().matches("only supports").count() > before);
        }
        assert!(!running.is_ready());
        assert_eq!(driver.calls(), Vec::<String>::new());
        write_modes(", volumeLifecycleModes: [Persistent, Ephemeral]");
        running.wait_ready();
        assert_shown(&running);
        rig.assert_stops_clean(running);
    }
}

#[test]
fn cs_10_files_are_given_to_the_pods_group_as_the_driver_says() {
    for (policy, capabilities, is_changed) in [
        ("ReadWriteOnceWithFSType", STAGES, true),
        ("File", STAGES, true),
        ("None", STAGES, false),
        ("File", &[Type::StageUnstageVolume, Type::VolumeMountGroup][..], false),
    ] {
        let rig = Rig::new(BOTH);
        rig.write_driver(&format!("attachRequired: false, fsGroupPolicy: {policy}"));
        rig.set_group();
        let driver = rig.driver(capabilities);
        let running = rig.run();
        let group = fs::metadata(running.volume("data").join("file")).expect("shown").gid();
        assert_eq!(group == 4711, is_changed, "{policy} {capabilities:?}");
        let access = driver.published().volume_capability.and_then(|capability| capability.access_type);
        let by_driver = capabilities.contains(&Type::VolumeMountGroup);
        let podfs::csi::v1::volume_capability::AccessType::Mount(mount) = access.expect("a mount") else {
            panic!("a mount")
        };
        assert_eq!(mount.volume_mount_group, if by_driver { "4711" } else { "" });
        assert_eq!(mount.mount_flags, ["noatime"]);
        rig.assert_stops_clean(running);
    }
}

#[test]
fn cs_10_the_files_of_an_inline_volume_with_a_file_system_type_are_given_to_the_pods_group() {
    for (fields, is_changed) in
        [("fsType: ext4", true), ("fsType: ext4, readOnly: true", false), ("readOnly: false", false)]
    {
        let rig = Rig::new(&format!("[{{name: data, csi: {{driver: {DRIVER}, {fields}}}}}]"));
        rig.write_driver("attachRequired: false, volumeLifecycleModes: [Ephemeral]");
        rig.set_group();
        let driver = rig.driver(STAGES);
        let running = rig.run();
        let group = fs::metadata(running.volume("data").join("file")).expect("shown").gid();
        assert_eq!(group == 4711, is_changed, "{fields}");
        let mode = driver.published().volume_capability.and_then(|capability| capability.access_mode);
        assert_eq!(mode.expect("a mode").mode(), Mode::SingleNodeWriter);
        rig.assert_stops_clean(running);
    }
}

#[test]
fn cs_11_a_driver_with_requires_republish_is_called_again_after_a_change() {
    let rig = Rig::new(BOTH);
    rig.write_driver("attachRequired: false, requiresRepublish: true");
    let driver = rig.driver(STAGES);
    let running = rig.run();
    let before = driver.count("NodePublishVolume");
    driver.fail("NodePublishVolume", Fault::Fails(Code::Internal));
    rig.fixture.write("objects/app.json", &config_map("app", &[("a", "2")]));
    eventually("the driver is called again", || driver.count("NodePublishVolume") >= before + 2);
    assert_shown(&running);
    assert_eq!(driver.count("NodeUnpublishVolume"), 0, "a failed call leaves the volume as it is");
    rig.assert_stops_clean(running);
}

#[test]
fn cs_11_a_call_that_waited_for_another_one_follows_the_record_that_the_other_one_left() {
    let rig = Rig::new(BOTH);
    rig.write_driver("attachRequired: false, requiresRepublish: true");
    let driver = rig.driver(STAGES);
    let running = rig.run();
    let home = PathBuf::from(driver.published().target_path).parent().expect("a home").to_owned();
    let (record, number) = (home.join("vol_data.json"), fs::metadata(&home).expect("a home").ino());
    let written = fs::read_to_string(&record).expect("a record");
    let locked = || {
        let directory = File::open(&home).expect("a home");
        flock(&directory, FlockOperation::LockExclusive).map(|()| directory).expect("locked")
    };
    // proc_locks(5)
    let is_waited_for = || {
        let locks = fs::read_to_string("/proc/locks").expect("the locks of the node");
        locks.lines().any(|lock| lock.contains("-> FLOCK") && lock.contains(&format!(":{number} ")))
    };
    // Lets the supervisor call the driver again, and changes the record while it waits for the lock.
    let call_again = |version: &str, from: &str, to: &str| {
        let lock = locked();
        rig.fixture.write("objects/app.json", &config_map("app", &[("a", version)]));
        eventually("the supervisor waits for the lock", is_waited_for);
        fs::write(&record, written.replace(from, to)).expect("written");
        drop(lock);
        eventually("the supervisor has the lock", || !is_waited_for());
        // It has ended when the lock is free.
        drop(locked());
        fs::write(&record, &written).expect("written");
    };
    let before = driver.count("NodePublishVolume");
    call_again("2", r#""published":true"#, r#""published":false"#);
    assert_eq!(driver.count("NodePublishVolume"), before, "the volume is unpublished by now");
    call_again("3", r#""publishedReadOnly":false"#, r#""publishedReadOnly":true"#);
    assert_eq!(driver.count("NodePublishVolume"), before + 1);
    assert!(driver.published().readonly);
    rig.assert_stops_clean(running);
}

#[test]
fn cs_11_files_that_a_driver_has_written_since_are_given_to_the_pods_group_after_the_next_call() {
    for (capabilities, is_changed) in [(STAGES, true), (&[Type::StageUnstageVolume, Type::VolumeMountGroup][..], false)]
    {
        let rig = Rig::new(BOTH);
        rig.write_driver("attachRequired: false, requiresRepublish: true");
        rig.set_group();
        let driver = rig.driver(capabilities);
        let running = rig.run();
        // A file that is written in the directory itself has the directory's group.
        rig.fixture.write("token", "");
        fs::rename(rig.fixture.path("token"), rig.source.join("token")).expect("renamed");
        for version in ["2", "3"] {
            let before = driver.count("NodePublishVolume");
            rig.fixture.write("objects/app.json", &config_map("app", &[("a", version)]));
            eventually("the driver is called again", || driver.count("NodePublishVolume") > before);
        }
        // The second call began after the end of the first one.
        let group = fs::metadata(running.volume("data").join("token")).expect("shown").gid();
        assert_eq!(group == 4711, is_changed, "{capabilities:?}");
        rig.assert_stops_clean(running);
    }
}

#[test]
fn pv_07_a_driver_gets_a_volume_read_only_if_the_claim_says_so() {
    for is_read_only in [true, false] {
        let rig = Rig::new(&BOTH.replace("claimName: data", &format!("claimName: data, readOnly: {is_read_only}")));
        rig.write_volume("volumeHandle: h, readOnly: true");
        let driver = rig.driver(STAGES);
        let running = rig.run();
        assert_shown(&running);
        assert_eq!(driver.published().readonly, is_read_only);
        let written = fs::write(running.volume("data").join("file"), "2").map_err(|refused| refused.raw_os_error());
        assert_eq!(written, if is_read_only { Err(Some(libc::EROFS)) } else { Ok(()) });
        rig.assert_stops_clean(running);
    }
}
