//! Metrics and status of a pod while the disk of its run directory takes no write.

use std::fs;

use nix::sys::signal::{Signal, kill};
use serde_json::Value;

use crate::common::frozen::FreezableDisk;
use crate::common::loop_device::LoopDevice;
use crate::common::*;
use crate::metrics::pods::{config, of_config, volume};
use crate::metrics::scrape::Scrape;

/// The counters on disk, with which the next supervisor of the pod begins.
fn kept(disk: &FreezableDisk) -> Value {
    let pods = fs::read_dir(disk.at()).expect("the run directory").flatten();
    let files = pods.filter_map(|pod| fs::read(pod.path().join("counts.json")).ok());
    files.map(|text| serde_json::from_slice(&text).expect("JSON")).next().unwrap_or_default()
}

#[test]
fn a_scrape_and_a_status_are_answered_while_the_disk_of_the_counters_does_not_answer() {
    let device = LoopDevice::new(16);
    let fixture = of_config();
    let disk = FreezableDisk::mount(&device, &fixture.path("run"));
    let mut running = fixture.run();
    let (errors, restarts) = ("podfs_volume_refresh_errors_total", "podfs_server_restarts_total");
    let before = fixture.scrape();
    eventually("the counters are written", || kept(&disk).is_object());
    let written = kept(&disk);

    let frozen = disk.freeze();
    fixture.remove("objects/app.json");
    let counted = fixture.scrape_until(errors, &volume("config"), |errors| errors > 0.0);
    assert_eq!(counted.get("podfs_up", &[]), 1.0);
    kill(running.server(), Signal::SIGKILL).expect("the server is there");
    assert_eq!(running.freed(|| fs::read_to_string(config(&running))).expect("a server answers"), "1");
    let counted = fixture.scrape_until(restarts, &[], |restarts| restarts > 0.0);
    assert_eq!(fixture.pods()[0]["server"]["restarts"].as_f64(), Some(counted.get(restarts, &[])));
    assert_eq!(kept(&disk), written, "the disk takes no write");

    drop(frozen);
    let mounts = "storage_operation_duration_seconds_count";
    let all = |scrape: &Scrape| {
        let mounts = scrape.get(mounts, &[("operation_name", "volume_mount"), ("status", "success")]);
        [scrape.get(restarts, &[]), scrape.get(errors, &volume("config")), mounts]
    };
    eventually("the counts of the frozen time are written", || kept(&disk)["serverRestarts"] == 1);
    let counted = fixture.scrape();
    assert_eq!(all(&counted)[2], all(&before)[2]);
    fixture.kill_supervisor(&mut running);
    fixture.write("objects/app.json", &config_map("app", &[("a", "2")]));
    let mut running = fixture.run();
    wait_content(&config(&running), "2");
    let next = all(&fixture.scrape());
    assert!(next[0] == 1.0 && next[1] >= all(&counted)[1] && next[2] == all(&counted)[2], "{next:?}");
    assert!(running.stop().success());
    assert_eq!(fs::read_dir(disk.at()).expect("the run directory").count(), 0);
    drop(disk);
    fs::remove_dir(fixture.path("run")).expect("the mount point");
    fixture.assert_nothing_left();
}
