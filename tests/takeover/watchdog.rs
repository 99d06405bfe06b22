//! Servers that hang or end again and again, and sources that do not answer. The tests check the results of the callers, the
//! other volumes and `podfs status`.

use std::fs::{self, File};
use std::io::Write;
use std::sync::mpsc::channel;
use std::thread;

use crate::common::passthrough::within_timeout;
use crate::common::stoppable::Stoppable;
use crate::common::watch::Watcher;
use crate::common::*;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde_json::Value;

/// A pod with a volume of the ConfigMap `app`, an emptyDir, and a hostPath volume of the directory `source`.
fn fixture() -> Fixture {
    let fixture = Fixture::new("");
    fs::create_dir(fixture.path("source")).expect("a directory");
    let volumes = format!(
        "[{{name: config, configMap: {{name: app}}}}, {{name: scratch, emptyDir: {{}}}}, {{name: host, hostPath: {{path: {}}}}}]",
        fixture.path("source").display()
    );
    fixture.write("pod.yaml", &pod(&volumes));
    fixture.write("objects/app.json", &config_map("app", &[("a", "1")]));
    fixture
}

fn pod_status(fixture: &Fixture) -> Value {
    fixture.pods().swap_remove(0)
}

#[test]
fn a_stopped_server_is_replaced_and_no_call_fails() {
    // RC-06
    let fixture = fixture();
    let mut running = fixture.run();
    let (config, host, server) = (running.volume("config"), running.volume("host"), running.server());
    kill(server, Signal::SIGSTOP).expect("the server exists");
    within_timeout("the write ends", move || fs::write(host.join("file"), "1")).expect("another server answers");
    running.wait_log("hangs: it is stopped");
    // A thread of the server may have answered the write before the signal reached it.
    eventually("another server serves", || running.server() != server);
    assert_eq!(fs::read_to_string(config.join("a")).expect("read"), "1");
    assert_eq!(fs::read_to_string(fixture.path("source/file")).expect("read"), "1");
    let pod = pod_status(&fixture);
    assert_eq!((pod["state"].as_str(), pod["server"]["restarts"].as_u64()), (Some("running"), Some(1)), "{pod}");
    assert!(running.stop().success());
    fixture.assert_nothing_left();
}

#[test]
fn servers_that_die_again_and_again_are_followed_after_pauses_and_no_mount_is_given_up() {
    const KILLS: usize = 6;
    let fixture = fixture();
    let mut running = fixture.run();
    let config = running.volume("config");
    let mut last = None;
    for _ in 0..KILLS {
        eventually("another server serves", || {
            pod_status(&fixture)["server"]["pid"].as_i64().is_some_and(|pid| Some(pid) != last)
        });
        last = pod_status(&fixture)["server"]["pid"].as_i64();
        kill(Pid::from_raw(last.expect("a server") as i32), Signal::SIGKILL).expect("the server exists");
    }
    eventually("the status of the pod is degraded", || pod_status(&fixture)["state"] == "degraded");
    let pod = pod_status(&fixture);
    let reason = pod["reason"].as_str().expect("a reason");
    assert!(reason.contains("SIGKILL") && reason.contains("had answered nothing"), "{reason}");
    eventually("the status counts all restarts", || pod_status(&fixture)["server"]["restarts"] == KILLS);
    assert_eq!(fs::read_to_string(config.join("a")).expect("read"), "1");
    fixture.write("objects/app.json", &config_map("app", &[("a", "2")]));
    wait_content(&config.join("a"), "2");
    assert!(running.stop().success());
    fixture.assert_nothing_left();
}

#[test]
fn a_server_and_its_keeper_that_are_killed_at_once_are_replaced_and_no_call_fails() {
    // RC-06
    const KILLS: usize = 5;
    let fixture = fixture();
    let mut running = fixture.run();
    let (config, host) = (running.volume("config"), running.volume("host"));
    fs::write(host.join("file"), "1").expect("written");
    let watcher = Watcher::on("root", &config);
    for kill in 1..=KILLS {
        running.kill_server_and_keeper(|| {
            assert_eq!(fs::read_to_string(config.join("a")).expect("read"), kill.to_string());
            rustix::fs::statvfs(&config).expect("a server answers");
            assert_eq!(fs::read_to_string(host.join("file")).expect("read"), "1");
        });
        let next = (kill + 1).to_string();
        fixture.write("objects/app.json", &config_map("app", &[("a", &next)]));
        wait_content(&config.join("a"), &next);
    }
    eventually("the watcher gets the events of each commit", || watcher.switches() == KILLS);
    eventually("the status counts all restarts", || pod_status(&fixture)["server"]["restarts"] == KILLS);
    eventually("podfs waits for its children", || running.zombies().is_empty());
    eventually("one server serves, with one keeper", || (running.servers().len(), running.keepers().len()) == (1, 1));
    assert!(!running.log().contains("cannot start a server for the volumes"), "no attempt fails: {}", running.log());
    assert!(running.stop().success());
    fixture.assert_nothing_left();
}

#[test]
fn a_keeper_that_is_killed_while_podfs_waits_before_it_starts_another_server_is_not_needed() {
    let fixture = fixture();
    let mut running = fixture.run();
    let (config, host) = (running.volume("config"), running.volume("host"));
    let mut file = File::create(host.join("file")).expect("made");
    let kill_all = |processes: Vec<Pid>| {
        for process in processes {
            // The process may have ended.
            let _ = kill(process, Signal::SIGKILL);
        }
    };
    // The test kills each successor before it has answered a request, so podfs waits longer and longer before it starts another
    // one.
    let reason = || pod_status(&fixture)["reason"].as_str().unwrap_or_default().to_owned();
    while !reason().contains("had answered nothing") {
        kill_all(running.servers());
    }
    kill_all(running.servers());
    kill_all(running.keepers());
    running.freed(|| {
        rustix::fs::statvfs(&config).expect("a server answers");
        file.write_all(b"1").expect("the file is still open");
        fs::metadata(host.join("none")).expect_err("a server answers");
    });
    assert_eq!(fs::read_to_string(fixture.path("source/file")).expect("read"), "1");
    eventually("podfs waits for its children", || running.zombies().is_empty());
    drop(file);
    assert!(running.stop().success());
    fixture.assert_nothing_left();
}

#[test]
fn a_source_that_does_not_answer_delays_only_its_own_volume_when_server_and_keeper_are_killed() {
    let fixture = fixture();
    fs::write(fixture.path("source/file"), "1").expect("written");
    let source = Stoppable::over(&fixture.path("source"));
    let mut running = fixture.run();
    let (config, scratch, host) = (running.volume("config"), running.volume("scratch"), running.volume("host"));
    let mut file = File::options().write(true).open(host.join("file")).expect("open");
    source.signal(Signal::SIGSTOP);
    running.kill_server_and_keeper(|| {
        rustix::fs::statvfs(&config).expect("a server answers");
        fs::write(scratch.join("file"), "2").expect("another volume answers");
    });
    source.signal(Signal::SIGCONT);
    running.freed(|| file.write_all(b"3").expect("the file is still open"));
    drop(file);
    assert_eq!(fs::read_to_string(fixture.path("source/file")).expect("read"), "3");
    assert!(running.stop().success());
    unmount_below(&fixture.path("source"));
    drop(source);
    fixture.assert_nothing_left();
}

#[test]
fn a_source_that_does_not_answer_delays_only_its_own_volume() {
    let fixture = fixture();
    fs::write(fixture.path("source/file"), "1").expect("written");
    let source = Stoppable::over(&fixture.path("source"));
    let mut running = fixture.run();
    let (config, scratch, host) = (running.volume("config"), running.volume("scratch"), running.volume("host"));
    let server = running.server();
    assert_eq!(fs::read_to_string(host.join("file")).expect("read"), "1");

    source.signal(Signal::SIGSTOP);
    let (result, results) = channel();
    for name in ["file", "none"] {
        let (file, result) = (host.join(name), result.clone());
        thread::spawn(move || result.send(fs::read_to_string(file).ok()));
    }
    eventually("status names the volume", || pod_status(&fixture)["volumes"][2]["state"] == "silent");
    let pod = pod_status(&fixture);
    assert_eq!(pod["state"], "degraded");
    assert_eq!(pod["reason"], r#"volume "host" waits for the host: its source does not answer"#);
    fs::write(scratch.join("file"), "2").expect("another volume answers");
    fixture.write("objects/app.json", &config_map("app", &[("a", "2")]));
    wait_content(&config.join("a"), "2");
    assert_eq!(
        running.server(),
        server,
        "podfs does not replace the server: another one would wait for the source, too"
    );
    assert!(results.try_recv().is_err(), "a process that uses the volume waits");

    source.signal(Signal::SIGCONT);
    let both = within_timeout("the calls end", move || {
        [results.recv(), results.recv()].map(|result| result.expect("a result"))
    });
    assert!(both.contains(&Some("1".to_owned())) && both.contains(&None), "{both:?}");
    eventually("the status of the pod is running", || pod_status(&fixture)["state"] == "running");
    assert!(running.stop().success());
    unmount_below(&fixture.path("source"));
    drop(source);
    fixture.assert_nothing_left();
}
