//! Events of a pod, and the metrics that change with them.

use std::fs;
use std::thread;
use std::time::SystemTime;

use nix::sys::signal::{Signal, kill};

use crate::common::stoppable::Stoppable;
use crate::common::*;
use crate::metrics::pods::{config, of_all_sorts, of_config, put, show, volume};

fn now() -> f64 {
    SystemTime::UNIX_EPOCH.elapsed().expect("after 1970").as_secs_f64()
}

#[test]
fn a_pod_that_is_well_says_so() {
    let fixture = of_all_sorts();
    let began = now();
    let _running = fixture.run();
    let scrape = fixture.scrape();
    scrape.strictly();
    let states = |name, states: [&str; 5]| states.map(|state| scrape.find(name, &[("state", state)]));
    let pod = states("podfs_pod_state", ["running", "degraded", "noSupervisor", "notAnswering", "dead"]);
    assert_eq!(scrape.find("podfs_pod_state", &[("state", "podDeleted")]), Some(0.0));
    assert_eq!(pod, [Some(1.0), Some(0.0), Some(0.0), Some(0.0), Some(0.0)]);
    let volumes = states("podfs_volumes", ["live", "waiting", "behind", "silent", "none"]);
    assert_eq!(volumes, [Some(4.0), Some(0.0), Some(0.0), Some(0.0), None]);
    assert_eq!((scrape.get("podfs_up", &[]), scrape.get("podfs_server_up", &[])), (1.0, 1.0));
    for process in ["supervisor", "server"] {
        let version = ("version", env!("CARGO_PKG_VERSION"));
        assert_eq!(scrape.get("podfs_build_info", &[("process", process), version]), 1.0);
        let memory = scrape.get("podfs_resident_memory_bytes", &[("process", process)]);
        assert!((1e6..1e9).contains(&memory), "{memory}");
    }
    assert!((began..now()).contains(&scrape.get("podfs_supervisor_start_time_seconds", &[])));
    for name in ["config", "data", "host", "scratch"] {
        assert_eq!(scrape.get("podfs_volume_current", &volume(name)), 1.0);
        assert_eq!(scrape.get("podfs_volume_refresh_errors_total", &volume(name)), 0.0);
        let answers = scrape.find("podfs_volume_source_answering", &volume(name));
        assert_eq!(answers, (name != "config").then_some(1.0), "{name}");
        let capacity = scrape.find("podfs_volume_stats_capacity_bytes", &volume(name));
        assert_eq!(capacity.is_some(), ["data", "scratch"].contains(&name), "{name}");
    }
    let plugins = ["configmap", "local-volume", "host-path", "empty-dir"];
    for plugin in plugins.map(|plugin| format!("kubernetes.io/{plugin}")) {
        let labels = [("volume_plugin", plugin.as_str()), ("operation_name", "volume_mount"), ("status", "success")];
        assert_eq!(scrape.get("storage_operation_duration_seconds_count", &labels), 1.0, "{plugin}");
    }
}

#[test]
fn a_change_is_another_generation_with_its_delay_in_the_metrics() {
    let fixture = of_config();
    let running = fixture.run();
    let labels = volume("config");
    let numbers = || {
        let scrape = fixture.scrape();
        let names = ["podfs_generation", "podfs_commit_duration_seconds_count", "podfs_propagation_seconds_count"];
        (names.map(|name| scrape.get(name, &labels)), scrape)
    };
    assert_eq!(numbers().0, [1.0, 1.0, 0.0], "the first content is no change");
    show(&fixture, &running, "2");
    // The new content appears a moment before the commit is complete.
    fixture.scrape_until("podfs_propagation_seconds_count", &labels, |count| count == 1.0);
    let (counts, scrape) = numbers();
    assert_eq!(counts, [2.0, 2.0, 1.0]);
    let (commits, delays) = ("podfs_commit_duration_seconds_sum", "podfs_propagation_seconds_sum");
    assert!(scrape.get(delays, &labels) > 0.0 && scrape.get(commits, &labels) > 0.0);
    let made_at = scrape.get("podfs_generation_timestamp_seconds", &labels);
    assert!((now() - 60.0..=now()).contains(&made_at), "{made_at}");
    put(&fixture, "2");
    show(&fixture, &running, "3");
    fixture.scrape_until("podfs_propagation_seconds_count", &labels, |count| count == 2.0);
    assert_eq!(numbers().0[..2], [3.0, 3.0], "the same content makes no new generation");
}

#[test]
fn requests_are_counted_by_operation() {
    let fixture = of_all_sorts();
    let running = fixture.run();
    let host = running.volume("host");
    let count = |op| fixture.scrape().find("podfs_fuse_requests_total", &[("volume", "host"), ("op", op)]);
    let before = ["MKDIR", "RENAME", "RMDIR"].map(count);
    assert_eq!(before, [None; 3], "an operation without requests has no metric");
    fs::create_dir(host.join("a")).expect("made");
    fs::rename(host.join("a"), host.join("b")).expect("renamed");
    fs::remove_dir(host.join("b")).expect("removed");
    assert_eq!(["MKDIR", "RENAME", "RMDIR"].map(count), [Some(1.0); 3]);
}

#[test]
fn a_warm_volume_of_files_counts_no_request() {
    let fixture = of_config();
    let running = fixture.run();
    let file = config(&running);
    let requests = || {
        let scrape = fixture.scrape();
        let counted = scrape.0.lines().filter(|line| line.starts_with("podfs_fuse_requests_total{"));
        counted.map(str::to_owned).collect::<Vec<_>>()
    };
    (0..3).for_each(|_| drop(fs::read(&file).expect("read")));
    let before = requests();
    assert!(!before.is_empty());
    (0..10).for_each(|_| drop(fs::read(&file).expect("read")));
    assert_eq!(requests(), before);
}

#[test]
fn a_waiting_volume_is_reported_with_its_failures_until_it_is_mounted() {
    let fixture = Fixture::new(&pod("[{name: config, configMap: {name: app}}, {name: late, configMap: {name: late}}]"));
    put(&fixture, "1");
    let began = now();
    let mut running = fixture.start();
    let (late, errors) = (volume("late"), "podfs_volume_refresh_errors_total");
    fixture.scrape_until(errors, &late, |errors| errors == 1.0);
    let scrape = fixture.scrape_until("podfs_volume_current", &volume("config"), |current| current == 1.0);
    assert_eq!(scrape.get("podfs_volume_current", &late), 0.0);
    assert_eq!(scrape.get("podfs_volumes", &[("state", "waiting")]), 1.0);
    assert_eq!(scrape.get("podfs_pod_state", &[("state", "degraded")]), 1.0);
    let last = "podfs_volume_last_refresh_error_timestamp_seconds";
    assert!((began..now()).contains(&scrape.get(last, &late)));
    assert_eq!(scrape.find(last, &volume("config")), None);
    let mounts = |status| [("operation_name", "volume_mount"), ("status", status)];
    let mounted = "storage_operation_duration_seconds_count";
    assert_eq!((scrape.get(mounted, &mounts("success")), scrape.get(mounted, &mounts("fail-unknown"))), (1.0, 1.0));
    fixture.write("objects/late.json", &config_map("late", &[("a", "1")]));
    running.wait_ready();
    let scrape = fixture.scrape();
    assert_eq!((scrape.get("podfs_volume_current", &late), scrape.get(errors, &late)), (1.0, 1.0));
    assert_eq!(scrape.get(mounted, &mounts("success")), 2.0);
    assert_eq!(scrape.get("podfs_propagation_seconds_count", &late), 1.0, "the volume waited for its first content");
}

#[test]
fn a_volume_that_is_behind_is_not_current() {
    let fixture = Fixture::new(&pod("[{name: config, configMap: {name: app, items: [{key: a, path: a}]}}]"));
    put(&fixture, "1");
    let running = fixture.run();
    fixture.write("objects/app.json", &config_map("app", &[("b", "2")]));
    let scrape = fixture.scrape_until("podfs_volumes", &[("state", "behind")], |count| count == 1.0);
    assert_eq!(scrape.get("podfs_volume_current", &volume("config")), 0.0);
    assert_eq!(scrape.get("podfs_volume_refresh_errors_total", &volume("config")), 1.0);
    show(&fixture, &running, "3");
    let scrape = fixture.scrape_until("podfs_propagation_seconds_count", &volume("config"), |count| count == 1.0);
    assert_eq!(scrape.get("podfs_volume_current", &volume("config")), 1.0);
}

#[test]
fn space_is_reported_as_by_df_in_the_volume() {
    let fixture = of_all_sorts();
    let running = fixture.run();
    let labels = volume("scratch");
    let used = || fixture.scrape().get("podfs_volume_stats_used_bytes", &labels);
    assert_eq!(used(), 0.0);
    fs::write(running.volume("scratch").join("file"), vec![1; 1 << 20]).expect("written");
    assert_eq!(used(), f64::from(1 << 20));
    for (name, labels) in
        [("scratch", labels.to_vec()), ("data", vec![("volume", "data"), ("persistentvolumeclaim", "claim")])]
    {
        let (scrape, df) = (fixture.scrape(), rustix::fs::statvfs(running.volume(name)).expect("the volume answers"));
        let stat = |name: &str| scrape.get(&format!("podfs_volume_stats_{name}"), &labels);
        assert_eq!(stat("capacity_bytes"), (df.f_blocks * df.f_frsize) as f64, "{name}");
        assert_eq!(stat("inodes"), df.f_files as f64, "{name}");
        // Other processes use the disk, too, so these numbers change.
        let near = |a: f64, b: f64| (a - b).abs() <= 0.1 * b.max(1e6);
        assert!(near(stat("available_bytes"), (df.f_bavail * df.f_frsize) as f64), "{name}");
        assert!(near(stat("inodes_free"), df.f_ffree as f64), "{name}");
        assert!(near(stat("inodes_used"), (df.f_files - df.f_ffree) as f64), "{name}");
    }
}

#[test]
fn a_source_that_hangs_has_no_numbers_and_delays_no_other() {
    let fixture = of_all_sorts();
    let source = Stoppable::over(&fixture.path("disk"));
    let mut running = fixture.run();
    let (answers, capacity) = ("podfs_volume_source_answering", "podfs_volume_stats_capacity_bytes");
    let scrape = fixture.scrape();
    assert_eq!(scrape.get(answers, &volume("data")), 1.0);
    assert!(scrape.get(capacity, &volume("data")) > 0.0);
    source.signal(Signal::SIGSTOP);
    // At the second scrape, the statfs of the first one still waits.
    for _ in 0..2 {
        let scrape = fixture.scrape();
        assert_eq!((scrape.get(answers, &volume("data")), scrape.find(capacity, &volume("data"))), (0.0, None));
        assert_eq!(scrape.get(answers, &volume("scratch")), 1.0);
        assert!(scrape.get(capacity, &volume("scratch")) > 0.0);
        assert_eq!(scrape.get("podfs_up", &[]), 1.0);
    }
    let user = {
        let file = running.volume("data").join("none");
        thread::spawn(move || fs::metadata(file))
    };
    let scrape = fixture.scrape_until("podfs_volumes", &[("state", "silent")], |count| count == 1.0);
    assert_eq!(scrape.get("podfs_volume_current", &volume("data")), 0.0);
    source.signal(Signal::SIGCONT);
    user.join().expect("it comes back").expect_err("there is no such file");
    let scrape = fixture.scrape_until(answers, &volume("data"), |answers| answers == 1.0);
    assert!(scrape.get(capacity, &volume("data")) > 0.0);
    assert!(running.stop().success());
    unmount_below(&fixture.path("disk"));
}

#[test]
fn a_replaced_server_is_counted_and_a_missing_one_is_reported() {
    let fixture = of_config();
    let running = fixture.run();
    kill(running.server(), Signal::SIGKILL).expect("the server is there");
    fixture.scrape_until("podfs_server_restarts_total", &[], |restarts| restarts == 1.0);
    // podfs replaces a server that ended before its first answer only after a pause.
    eventually("there is no server", || {
        for server in running.servers() {
            let _gone_already = kill(server, Signal::SIGKILL);
        }
        let scrape = fixture.scrape();
        let has_info = scrape.find("podfs_build_info", &[("process", "server")]).is_some();
        let is_up = scrape.get("podfs_server_up", &[]) == 1.0;
        assert_eq!(has_info, is_up, "{}", scrape.0);
        !is_up
    });
    fixture.scrape_until("podfs_server_up", &[], |up| up == 1.0);
}
