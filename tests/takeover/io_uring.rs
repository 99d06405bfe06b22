//! Kills of servers whose volumes are served over io_uring: these tests once more, by this program itself, with the setting.

use std::fs;
use std::process::Command;

use crate::common::passthrough::disk_directory;
use crate::common::*;
use nix::sys::signal::{Signal, kill};

/// What runs over both transports.
const SUITES: &[&str] = &["held::", "isolation::so_many_callers", "soak::whatever_is_killed"];

#[test]
fn no_caller_notices_kills_over_io_uring_either() {
    if io_uring::is_chosen() || !io_uring::is_offered() {
        return;
    }
    let mut again = Command::new(std::env::current_exe().expect("this program"));
    again.args(SUITES).env(io_uring::VARIABLE, "on");
    assert!(again.status().expect("this program starts").success());
}

#[test]
fn the_status_tells_the_transport_of_each_volume() {
    if !io_uring::is_offered() {
        return;
    }
    let source = disk_directory();
    let host = format!("{{name: host, hostPath: {{path: {}, type: Directory}}}}", source.path().display());
    let fixture = Fixture::new(&pod(&format!("[{host}, {{name: config, configMap: {{name: app}}}}]")));
    fixture.write("objects/app.json", &config_map("app", &[("a", "1")]));
    for (setting, expected) in [("on", "io_uring"), ("off", "/dev/fuse"), ("auto", "/dev/fuse")] {
        let mut command = fixture.command();
        command.env(io_uring::VARIABLE, setting);
        let mut running = fixture.start_command(command);
        running.wait_ready();
        let pods = fixture.pods();
        let volumes = pods[0]["volumes"].as_array().expect("volumes");
        let transports: Vec<_> = volumes.iter().map(|volume| volume["transport"].as_str()).collect();
        assert_eq!(transports, [Some(expected), Some("/dev/fuse")], "{setting}");
        assert_eq!(running.stop().code(), Some(0));
    }
    let mut bad = fixture.command();
    bad.env(io_uring::VARIABLE, "sometimes");
    let refused = outcome::finish(&mut bad);
    refused.says(2, &["PODFS_IO_URING", "sometimes", "auto, on, off"]);
}

#[test]
fn a_volume_keeps_its_transport_when_the_next_podfs_has_another_setting() {
    if !io_uring::is_offered() {
        return;
    }
    let source = disk_directory();
    let host = format!("[{{name: host, hostPath: {{path: {}, type: Directory}}}}]", source.path().display());
    let fixture = Fixture::new(&pod(&host));
    let with = |setting: &str| {
        let mut command = fixture.command();
        command.env(io_uring::VARIABLE, setting);
        let mut running = fixture.start_command(command);
        running.wait_ready();
        running
    };
    let transport = || fixture.pods()[0]["volumes"][0]["transport"].clone();
    let mut first = with("on");
    let file = first.volume("host").join("file");
    fs::write(&file, "1").expect("written");
    fixture.kill_supervisor(&mut first);
    let mut next = with("off");
    assert_eq!(transport(), "io_uring");
    for _ in 0..3 {
        kill(next.server(), Signal::SIGKILL).expect("the server is there");
        assert_eq!(next.freed(|| fs::read_to_string(&file)).expect("a server answers"), "1");
    }
    assert_eq!(transport(), "io_uring");
    assert_eq!(next.stop().code(), Some(0));
}
