//! Counters that continue after processes are replaced, and pods without a supervisor.

use std::fs;

use nix::sys::signal::{Signal, kill};

use crate::common::builds::Builds;
use crate::common::*;
use crate::metrics::pods::{of_all_sorts, of_config, show, volume};
use crate::metrics::scrape::Scrape;

/// The counters of a pod. Fails the test if one is 0.
#[track_caller]
fn counts(scrape: &Scrape) -> Vec<f64> {
    let config = volume("config");
    let mkdir = [("volume", "host"), ("op", "MKDIR")];
    let mounts =
        [("operation_name", "volume_mount"), ("volume_plugin", "kubernetes.io/configmap"), ("status", "success")];
    let counts = vec![
        scrape.get("podfs_server_restarts_total", &[]),
        scrape.get("podfs_fuse_requests_total", &mkdir),
        scrape.get("podfs_generation", &config),
        scrape.get("podfs_commit_duration_seconds_count", &config),
        scrape.get("podfs_propagation_seconds_count", &config),
        scrape.get("podfs_volume_refresh_errors_total", &config),
        scrape.get("storage_operation_duration_seconds_count", &mounts),
    ];
    assert!(counts.iter().all(|count| *count > 0.0), "{counts:?}");
    counts
}

/// Causes events so that each of the counters is at least 1.
fn count_everything(fixture: &Fixture, running: &Running) {
    fs::create_dir(running.volume("host").join("made")).expect("made");
    fixture.remove("objects/app.json");
    fixture.scrape_until("podfs_volume_refresh_errors_total", &volume("config"), |errors| errors > 0.0);
    show(fixture, running, "2");
    fixture.scrape_until("podfs_propagation_seconds_count", &volume("config"), |count| count > 0.0);
    kill(running.server(), Signal::SIGKILL).expect("the server is there");
    fixture.scrape_until("podfs_server_restarts_total", &[], |restarts| restarts > 0.0);
}

#[test]
fn no_count_goes_back_when_another_supervisor_takes_the_pod_over() {
    let fixture = of_all_sorts();
    let mut running = fixture.run();
    count_everything(&fixture, &running);
    let (before, began) = (fixture.scrape(), "podfs_supervisor_start_time_seconds");
    let restarts = || {
        let pod = &fixture.pods()[0];
        [&pod["server"], &pod["volumes"][0]].map(|of| of["restarts"].as_f64())
    };
    let all = Some(before.get("podfs_server_restarts_total", &[]));
    assert_eq!(restarts(), [all, all], "the status counts what the metrics count");
    fixture.kill_supervisor(&mut running);
    assert_eq!(restarts(), [all, None]);
    let scrape = fixture.scrape();
    let gone = ("podfs_pod_state", [("state", "noSupervisor"), ("pod", "web"), ("namespace", "default")]);
    assert_eq!((scrape.get("podfs_up", &[]), scrape.get(gone.0, &gone.1)), (0.0, 1.0));
    assert_eq!(scrape.find(began, &[]), None, "no other metric is printed");
    let mut running = fixture.run();
    let after = fixture.scrape();
    assert_eq!(counts(&after), counts(&before));
    assert_eq!(restarts(), [all, all], "the volume was mounted before");
    assert!(after.get(began, &[]) > before.get(began, &[]));
    assert!(running.stop().success());
    fixture.assert_nothing_left();
}

#[test]
fn no_count_goes_back_when_the_pod_is_upgraded() {
    let fixture = of_all_sorts();
    let mut builds = Builds::new(&fixture);
    let mut running = builds.run(&fixture);
    count_everything(&fixture, &running);
    let (before, first) = (fixture.scrape(), env!("CARGO_PKG_VERSION"));
    builds.upgrade(&fixture);
    let after = fixture.scrape();
    assert_eq!(counts(&after), counts(&before), "an upgrade is no restart");
    for process in ["supervisor", "server"] {
        assert_eq!(after.find("podfs_build_info", &[("process", process), ("version", first)]), None);
    }
    assert!(running.stop().success());
    fixture.assert_nothing_left();
}

#[test]
fn a_supervisor_that_hangs_is_reported_and_affects_no_other() {
    let fixture = of_config();
    let first = fixture.run();
    fixture.write("pod.yaml", &config_pod().replace("name: web, labels", "name: db, labels"));
    let _second = fixture.run();
    first.signal(Signal::SIGSTOP);
    let outcome = fixture.metrics(&["--all"]);
    let alone = fixture.metrics(&["--pod", &first.uid()]);
    first.signal(Signal::SIGCONT);
    assert_eq!((outcome.code, alone.code), (Some(0), Some(0)));
    for outcome in [&outcome, &alone] {
        let sentence = format!("the supervisor (pid {}) does not answer", first.pid());
        outcome.says(0, &["there are no metrics of pod default/web", &sentence]);
    }
    let scrape = Scrape(outcome.stdout);
    scrape.strictly();
    let (web, db) = ([("pod", "web")], [("pod", "db")]);
    assert_eq!((scrape.get("podfs_up", &web), scrape.get("podfs_up", &db)), (0.0, 1.0));
    assert_eq!(scrape.get("podfs_pod_state", &[("pod", "web"), ("state", "notAnswering")]), 1.0);
    assert_eq!((scrape.find("podfs_generation", &web), scrape.get("podfs_generation", &db)), (None, 1.0));
    assert_eq!(Scrape(alone.stdout).find("podfs_up", &db), None);
}

#[test]
fn a_pod_of_which_both_processes_were_killed_is_dead() {
    let fixture = of_config();
    let mut running = fixture.run();
    fixture.kill_both(&mut running);
    let scrape = fixture.scrape();
    assert_eq!((scrape.get("podfs_up", &[]), scrape.get("podfs_pod_state", &[("state", "dead")])), (0.0, 1.0));
    let mut next = fixture.run();
    assert_eq!(fixture.scrape().get("podfs_up", &[]), 1.0);
    assert!(next.stop().success());
    fixture.assert_nothing_left();
}

#[test]
fn without_pods_there_are_no_metrics_and_a_missing_pod_is_named() {
    let fixture = of_config();
    assert_eq!(fixture.scrape().0, "# EOF\n");
    fixture.metrics(&["--pod", "nobody"]).says(1, &["pod nobody is not served here"]);
    fixture.metrics(&["--pod", "../other"]).says(2, &["not the uid of a pod"]);
}
