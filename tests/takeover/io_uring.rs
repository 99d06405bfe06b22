//! Kills of servers whose volumes are served over io_uring: these tests once more, by this program itself, with the setting.

use std::process::Command;

use crate::common::passthrough::disk_directory;
use crate::common::*;

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
