//! An unreachable server blocks only the processes that access it.

use std::fs;
use std::io::Write;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use nix::sys::signal::{Signal, kill};
use rustix::fs::statfs;

use crate::common::*;
use crate::nfs_rig::Ganesha;
use crate::pod_volumes::pods::{fixture, volume_path};

/// The documentation promises one second. The tests allow more for a busy machine; an operation that waits for the NFS
/// server would never end.
const SOON: Duration = Duration::from_secs(10);

/// Panics if an operation takes longer than [`SOON`].
#[track_caller]
fn soon<T>(operation: &str, act: impl FnOnce() -> T) -> T {
    let start = Instant::now();
    let outcome = act();
    assert!(start.elapsed() < SOON, "{operation} took {:?}", start.elapsed());
    outcome
}

#[test]
fn nf_06_a_silent_server_delays_neither_the_root_nor_other_volumes_nor_the_end() {
    let ganesha = Ganesha::start();
    fs::write(ganesha.exported().join("there"), vec![1; 1 << 20]).expect("written");
    let fixture = fixture("nfs-silent", &ganesha, "");
    let mut running = fixture.run();
    let (volume, config) = (volume_path(&running), running.volume("config"));
    ganesha.stop();
    let mut reader = Command::new("cat").arg(volume.join("there")).stdout(Stdio::null()).spawn().expect("cat");
    soon("stat of the root", || fs::metadata(&volume).expect("attributes"));
    soon("statfs", || statfs(&volume).expect("statistics"));
    soon("another volume", || assert_eq!(fs::read_to_string(config.join("a")).expect("read"), "1"));
    soon("podfs status", || fixture.status(&[]));
    soon("the end of a killed reader", || {
        reader.kill().expect("killed");
        reader.wait().expect("the reader ends")
    });
    soon("the end of the pod", || assert_eq!(running.stop().code(), Some(0), "{}", running.log()));
    fixture.assert_nothing_left();
    ganesha.cont();
}

#[test]
fn a_program_started_with_an_open_file_delays_only_itself() {
    // Before its exec, the child closes its copy of the open file. This close waits for the NFS server, and holds locks
    // of the kernel meanwhile.
    let ganesha = Ganesha::start();
    let fixture = fixture("nfs-exec", &ganesha, "");
    let mut running = fixture.run();
    let volume = volume_path(&running);
    let mut file = fs::File::create(volume.join("open")).expect("created");
    ganesha.stop();
    file.write_all(b"content").expect("accepted");
    let child = std::thread::spawn(|| Command::new("true").status());
    // Between the requests, the server of the pod has time to look at the callers that wait.
    for _ in 0..20 {
        soon("stat of the root", || fs::metadata(&volume).expect("attributes"));
        std::thread::sleep(Duration::from_millis(100));
    }
    ganesha.cont();
    assert!(child.join().expect("no panic").expect("started").success());
    drop(file);
    assert_eq!(fs::read_to_string(ganesha.exported().join("open")).expect("on the server"), "content");
    assert_eq!(running.stop().code(), Some(0), "{}", running.log());
}

#[test]
fn nf_06_reading_continues_when_the_server_is_back() {
    let mut ganesha = Ganesha::start();
    fs::write(ganesha.exported().join("there"), "content").expect("written");
    let fixture = fixture("nfs-back", &ganesha, ",timeo=5,retrans=1");
    let running = fixture.run();
    let path = volume_path(&running).join("there");
    ganesha.kill();
    let reader = std::thread::spawn(move || fs::read_to_string(path));
    running.wait_log("does not answer");
    ganesha.restart();
    assert_eq!(reader.join().expect("no panic").expect("read"), "content");
    running.wait_log("answers again");
}

#[test]
fn status_says_that_a_server_is_silent_until_it_answers() {
    let ganesha = Ganesha::start();
    fs::write(ganesha.exported().join("there"), "content").expect("written");
    let fixture = fixture("nfs-status-away", &ganesha, "");
    let mut running = fixture.run();
    let path = volume_path(&running).join("there");
    let the_pod = || fixture.pods().swap_remove(0);
    let is_silent = || the_pod()["volumes"][0]["state"] == "silent";
    let server = running.server();
    ganesha.stop();
    let reader = std::thread::spawn(move || fs::read_to_string(path));
    eventually("status names the volume", is_silent);
    let pod = the_pod();
    assert_eq!(pod["reason"], r#"volume "data" waits for its NFS server: its source does not answer"#, "{pod}");
    assert_eq!(pod["volumes"][1]["state"], "live", "{pod}");
    assert_eq!(
        running.server(),
        server,
        "podfs does not replace the server: a successor would wait for the NFS server, too"
    );
    // podfs ignores the silence that the killed server has recorded, and reports the silence that its successor
    // records.
    kill(server, Signal::SIGKILL).expect("the server runs");
    eventually("the successor reports the silence", || the_pod()["server"]["restarts"] == 1 && is_silent());
    assert!(!reader.is_finished(), "a process that uses the volume waits");
    ganesha.cont();
    assert_eq!(reader.join().expect("no panic").expect("read"), "content");
    eventually("status says that the pod runs", || the_pod()["state"] == "running");
    let pod = the_pod();
    assert_eq!((&pod["volumes"][0]["state"], &pod["server"]["restarts"]), (&"live".into(), &1.into()), "{pod}");
    assert!(running.stop().success(), "{}", running.log());
    fixture.assert_nothing_left();
}

#[test]
fn status_says_so_too_when_no_call_waits_for_long() {
    let ganesha = Ganesha::start();
    fs::write(ganesha.exported().join("there"), "content").expect("written");
    let fixture = fixture("nfs-status-soft", &ganesha, ",soft,timeo=5,retrans=1");
    let mut running = fixture.run();
    let path = volume_path(&running).join("there");
    let the_pod = || fixture.pods().swap_remove(0);
    let state = || the_pod()["volumes"][0]["state"].clone();
    let read = || running.freed(|| fs::read_to_string(&path));
    eventually("the file is read", || read().is_ok_and(|content| content == "content"));
    ganesha.stop();
    assert_eq!(read().expect_err("no answer").raw_os_error(), Some(libc::EIO));
    // No process uses the volume any more.
    eventually("status names the volume", || state() == "silent");
    assert_eq!(read().expect_err("no answer").raw_os_error(), Some(libc::EIO));
    assert_eq!(state(), "silent", "{}", the_pod());
    ganesha.cont();
    eventually("the file is read", || read().is_ok_and(|content| content == "content"));
    eventually("status says that the volume is live", || state() == "live");
    assert_eq!(running.stop().code(), Some(0), "{}", running.log());
    fixture.assert_nothing_left();
}

#[test]
fn status_reports_a_silent_server_also_when_only_free_space_is_requested() {
    let mut ganesha = Ganesha::start();
    let fixture = fixture("nfs-status-space", &ganesha, "");
    let mut running = fixture.run();
    let volume = volume_path(&running);
    let state = || fixture.pods().swap_remove(0)["volumes"][0]["state"].clone();
    ganesha.kill();
    // The server of the pod answers from its cache, and cancels its call to the NFS server.
    soon("statfs", || statfs(&volume).expect("statistics"));
    eventually("status names the volume", || state() == "silent");
    ganesha.restart();
    // The client does not send a cancelled call again, but the next statfs(2) causes a new call.
    eventually("status says that the volume is live", || {
        soon("statfs", || statfs(&volume).expect("statistics"));
        state() == "live"
    });
    assert_eq!(running.stop().code(), Some(0), "{}", running.log());
    fixture.assert_nothing_left();
}

#[test]
fn a_missing_server_is_reported_and_tried_again() {
    let mut ganesha = Ganesha::start();
    fs::write(ganesha.exported().join("there"), "content").expect("written");
    let fixture = fixture("nfs-absent", &ganesha, "");
    ganesha.kill();
    let mut running = fixture.start();
    running.wait_log("MountVolume.SetUp failed for volume \"data\"");
    let config = fixture.path("root/pods/nfs-absent/volumes/kubernetes.io~configmap/config/a");
    wait_content(&config, "1");
    ganesha.restart();
    running.wait_ready();
    assert_eq!(fs::read_to_string(volume_path(&running).join("there")).expect("read"), "content");
    assert_eq!(running.stop().code(), Some(0), "{}", running.log());
}
