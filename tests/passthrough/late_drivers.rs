//! Drivers that still execute a call when podfs ends, or is killed.

use std::fs;
use std::path::Path;

use nix::sys::signal::Signal;
use tonic::Code;

use crate::common::*;
use crate::csi_driver::{DRIVER, Fault};
use crate::{csi_volume, flex_volume};

/// A script with which a command of the FlexVolume driver, and a child of it, wait for the file `go` before the command's work.
const WAIT: &str =
    r#"echo $$ > "$here/pid"; sh -c 'while [ -d "$0" ] && [ ! -e "$0/go" ]; do sleep 0.02; done' "$here""#;

fn wait_for_driver(rig: &flex_volume::Rig) -> String {
    let file = rig.driver().join("pid");
    let pid = || fs::read_to_string(&file).ok().filter(|pid| pid.ends_with('\n'));
    eventually("the driver waits", || pid().is_some());
    pid().expect("it waits").trim().to_owned()
}

/// Asserts that the driver with this process id, and all of its group, have ended.
#[track_caller]
fn assert_ended(pid: &str) {
    let group = |stat: &str| {
        let fields: Vec<_> = stat.rsplit_once(") ").map(|(_, fields)| fields.split(' ').collect()).unwrap_or_default();
        fields.get(2).is_some_and(|group| *group == pid) && fields[0] != "Z"
    };
    let entries = fs::read_dir("/proc").expect("processes").flatten();
    let alive: Vec<_> = entries
        .filter_map(|entry| fs::read_to_string(entry.path().join("stat")).ok())
        .filter(|stat| group(stat))
        .collect();
    assert_eq!(alive, Vec::<String>::new(), "the driver goes on");
}

#[test]
fn fx_04_podfs_ends_a_driver_that_still_mounts_before_it_unmounts_the_volume() {
    for (capabilities, command) in [(r#"{"attach": false}"#, "mount"), ("{}", "attach"), ("{}", "mountdevice")] {
        let rig = flex_volume::Rig::new(capabilities);
        rig.put(&format!("{command}.do"), WAIT);
        let mut running = rig.start();
        let pid = wait_for_driver(&rig);
        running.signal(Signal::SIGTERM);
        assert_eq!(running.wait().code(), Some(0), "{}", running.log());
        assert_ended(&pid);
        rig.put("go", "");
        rig.assert_only_the_drivers_directory_is_left();
    }
}

#[test]
fn fx_04_a_driver_that_outlives_a_killed_podfs_is_ended_before_it_is_called_again() {
    for (capabilities, command) in [(r#"{"attach": false}"#, "mount"), ("{}", "attach"), ("{}", "mountdevice")] {
        for is_cleaned_up in [true, false] {
            let rig = flex_volume::Rig::new(capabilities);
            rig.put(&format!("{command}.do"), WAIT);
            let mut running = rig.start();
            let pid = wait_for_driver(&rig);
            rig.fixture.kill_both(&mut running);
            assert!(Path::new("/proc").join(&pid).exists(), "the kill does not end it");
            fs::remove_file(rig.driver().join(format!("{command}.do"))).expect("removed");
            if is_cleaned_up {
                let outcome = rig.fixture.cleanup(&[]);
                assert_eq!(outcome.code, Some(0), "{command}: {} {}", outcome.stdout, outcome.stderr);
                assert_ended(&pid);
                rig.put("go", "");
                rig.assert_only_the_drivers_directory_is_left();
            } else {
                let running = rig.run();
                assert_ended(&pid);
                rig.put("go", "");
                rig.assert_stops_clean(running);
            }
        }
    }
}

#[test]
fn fx_04_a_pod_ends_the_driver_that_a_killed_podfs_of_another_pod_has_called_for_the_node() {
    let rig = flex_volume::Rig::new("{}");
    rig.put("mountdevice.do", WAIT);
    let mut running = rig.start();
    let pid = wait_for_driver(&rig);
    rig.fixture.kill_both(&mut running);
    fs::remove_file(rig.driver().join("mountdevice.do")).expect("removed");
    let manifest = fs::read_to_string(rig.fixture.pod()).expect("a manifest");
    rig.fixture.write("pod.yaml", &manifest.replacen("name: web", "name: other", 1));
    let mut other = rig.run();
    assert_ended(&pid);
    assert_eq!(fs::read_to_string(other.volume("data").join("file")).expect("shown"), "1");
    assert_eq!(other.stop().code(), Some(0), "{}", other.log());
    rig.fixture.write("pod.yaml", &manifest);
    let running = rig.run();
    rig.assert_stops_clean(running);
}

#[test]
fn cs_07_podfs_waits_for_the_answer_of_a_driver_before_it_unpublishes_the_volume() {
    for method in ["NodeStageVolume", "NodePublishVolume"] {
        let rig = csi_volume::Rig::new(csi_volume::BOTH);
        let driver = rig.driver(csi_volume::STAGES);
        driver.fail(method, Fault::WaitsForRelease);
        let mut running = rig.fixture.start();
        eventually("the driver is called", || driver.count(method) == 1);
        running.signal(Signal::SIGTERM);
        running.wait_log("podfs ends without waiting for");
        assert_eq!(driver.calls().last().map(String::as_str), Some(method));
        driver.release();
        assert_eq!(running.wait().code(), Some(0), "{}", running.log());
        let (published, unpublished) = (driver.count("NodePublishVolume"), driver.count("NodeUnpublishVolume"));
        assert_eq!((unpublished, driver.count("NodeUnstageVolume")), (published, 1), "{:?}", driver.calls());
        rig.assert_nothing_left();
    }
}

#[test]
fn cs_07_a_repeat_that_fails_does_not_end_the_call_that_outlives_a_killed_podfs() {
    for method in ["NodeStageVolume", "NodePublishVolume"] {
        let rig = csi_volume::Rig::new(csi_volume::BOTH);
        let driver = rig.driver(csi_volume::STAGES);
        driver.fail(method, Fault::WaitsForRelease);
        let mut running = rig.fixture.start();
        eventually("the driver is called", || driver.count(method) == 1);
        rig.fixture.kill_both(&mut running);
        driver.fail_always(method, Some(Fault::Fails(Code::Internal)));
        let mut running = rig.fixture.start();
        eventually("the next podfs repeats the call", || driver.count(method) >= 2);
        running.wait_log("MountVolume.");
        rig.fixture.kill_both(&mut running);
        let outcome = rig.fixture.cleanup(&[]);
        let sentence = format!("CSI driver {DRIVER} may still execute {method}");
        assert!(outcome.stdout.contains(&sentence), "{} {}", outcome.stdout, outcome.stderr);
        let target = match method {
            "NodeStageVolume" => driver.staged().staging_target_path,
            _ => driver.published().target_path,
        };
        driver.release();
        csi_volume::age_call(&target);
        let outcome = rig.fixture.cleanup(&[]);
        assert_eq!(outcome.code, Some(0), "{} {}", outcome.stdout, outcome.stderr);
        rig.assert_nothing_left();
    }
}

#[test]
fn cs_07_a_call_that_outlives_a_killed_podfs_keeps_the_record_of_the_volume() {
    for method in ["NodeStageVolume", "NodePublishVolume"] {
        let rig = csi_volume::Rig::new(csi_volume::BOTH);
        let driver = rig.driver(csi_volume::STAGES);
        driver.fail(method, Fault::WaitsForRelease);
        let mut running = rig.fixture.start();
        eventually("the driver is called", || driver.count(method) == 1);
        rig.fixture.kill_both(&mut running);
        let sentence =
            format!("CSI driver {DRIVER} may still execute {method}, which a podfs that was killed has called");
        let outcome = rig.fixture.cleanup(&[]);
        assert!(outcome.stdout.contains(&sentence), "{} {}", outcome.stdout, outcome.stderr);
        let target = match method {
            "NodeStageVolume" => driver.staged().staging_target_path,
            _ => driver.published().target_path,
        };
        let is_mounted = || fs::read_to_string("/proc/self/mounts").expect("a table").contains(&format!(" {target} "));
        assert!(!is_mounted());
        driver.release();
        eventually("the driver has mounted", is_mounted);
        let outcome = rig.fixture.cleanup(&[]);
        assert!(outcome.stdout.contains(&sentence) && !is_mounted(), "{} {}", outcome.stdout, outcome.stderr);
        csi_volume::age_call(&target);
        let outcome = rig.fixture.cleanup(&[]);
        assert_eq!(outcome.code, Some(0), "{} {}", outcome.stdout, outcome.stderr);
        rig.assert_nothing_left();
    }
}
