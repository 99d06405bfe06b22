//! Kills of servers whose volumes are served over io_uring: this test program starts itself again with the setting, and repeats
//! some of its tests. And volumes with the setting, on a kernel that does not offer io_uring.

use std::fs;
use std::os::unix::process::CommandExt;
use std::path::Path;

use crate::common::passthrough::disk_directory;
use crate::common::*;
use crate::isolation;
use nix::mount::{MsFlags, mount};
use nix::sched::{CloneFlags, unshare};
use nix::sys::signal::{Signal, kill};

/// The filters of the tests that run over both transports.
const FILTERS: &[&str] =
    &["held::", "isolation::so_many_callers", "soak::no_call_fails_when_processes_are_killed_at_random"];

#[test]
fn no_caller_notices_kills_over_io_uring_either() {
    if io_uring::is_chosen() || !io_uring::is_offered() {
        return;
    }
    io_uring::repeat(FILTERS);
}

#[test]
fn the_status_names_the_transport_of_each_volume() {
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
fn the_cgroup_of_a_killed_server_goes_with_its_pod() {
    let Some(top) = isolation::cgroups() else { return };
    let settings: &[&str] = if io_uring::is_offered() { &["on", "off"] } else { &["off"] };
    for (setting, round) in settings.iter().flat_map(|setting| (0..6).map(move |round| (setting, round))) {
        let fixture = isolation::fixture(isolation::HOST);
        fs::write(fixture.path("source/file"), "1").expect("written");
        let start = || {
            let mut command = fixture.command();
            command.env(io_uring::VARIABLE, setting);
            let mut running = fixture.start_command(command);
            running.wait_ready();
            running
        };
        let mut running = start();
        let cgroup = isolation::cgroup_of(&top, running.server());
        let file = running.volume("host").join("file");
        kill(running.server(), Signal::SIGKILL).expect("the server exists");
        if round % 2 == 1 {
            running.signal(Signal::SIGKILL);
            running.wait();
            running = start();
        }
        assert_eq!(running.freed(|| fs::read_to_string(&file)).expect("a server answers"), "1");
        assert_eq!(running.stop().code(), Some(0));
        assert!(!cgroup.exists(), "{setting}, round {round}");
    }
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
        kill(next.server(), Signal::SIGKILL).expect("the server exists");
        assert_eq!(next.freed(|| fs::read_to_string(&file)).expect("a server answers"), "1");
    }
    assert_eq!(transport(), "io_uring");
    assert_eq!(next.stop().code(), Some(0));
}

#[test]
fn where_the_kernel_offers_no_io_uring_requests_come_through_the_device_with_one_warning() {
    if !Path::new(io_uring::PARAMETER).exists() {
        return;
    }
    let source = disk_directory();
    fs::write(source.path().join("file"), "1").expect("written");
    let host = format!("{{name: host, hostPath: {{path: {}, type: Directory}}}}", source.path().display());
    let fixture = Fixture::new(&pod(&format!("[{host}, {{name: empty, emptyDir: {{}}}}]")));
    let refusal = tempfile::NamedTempFile::new().expect("a file");
    fs::write(&refusal, "N\n").expect("written");
    let mut command = fixture.command();
    command.env(io_uring::VARIABLE, "on");
    // Other tests need the real value of the parameter. So the test hides the parameter with a bind mount in the mount
    // namespace of this podfs.
    let hide_parameter = move || {
        unshare(CloneFlags::CLONE_NEWNS)?;
        mount(None::<&str>, "/", None::<&str>, MsFlags::MS_REC | MsFlags::MS_PRIVATE, None::<&str>)?;
        Ok(mount(Some(refusal.path()), io_uring::PARAMETER, None::<&str>, MsFlags::MS_BIND, None::<&str>)?)
    };
    // SAFETY: the closure only makes system calls.
    unsafe { command.pre_exec(hide_parameter) };
    let mut running = fixture.start_command(command);
    running.wait_ready();
    let pods = fixture.pods();
    let volumes = pods[0]["volumes"].as_array().expect("volumes");
    let transports: Vec<_> = volumes.iter().map(|volume| volume["transport"].as_str()).collect();
    assert_eq!(transports, [Some("/dev/fuse"); 2]);
    assert_eq!(running.log().matches("the kernel offers no io_uring").count(), 1, "{}", running.log());
    // The mounts of this podfs are not in the mount namespace of the test.
    let path_of = |volume| {
        Path::new("/proc")
            .join(running.pid().to_string())
            .join("root")
            .join(running.volume(volume).strip_prefix("/").expect("an absolute path"))
    };
    assert_eq!(fs::read_to_string(path_of("host").join("file")).expect("a file"), "1");
    fs::write(path_of("empty").join("new"), "2").expect("written");
    kill(running.server(), Signal::SIGKILL).expect("the server exists");
    assert_eq!(running.freed(|| fs::read_to_string(path_of("empty").join("new"))).expect("a server answers"), "2");
    assert_eq!(fixture.pods()[0]["volumes"][0]["transport"], "/dev/fuse");
    assert_eq!(running.stop().code(), Some(0));
}
