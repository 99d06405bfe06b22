//! An NFS server that does not answer: podfs answers every request for which it does not need the NFS server.

use std::fs::{self, File};
use std::io::{Read, Write};
use std::os::unix::process::ExitStatusExt;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use crate::mounted::{Mounted, Shown};
use crate::nfs_rig::{Ganesha, eventually};
use podfs_fuse::nfs::options::RetryPolicy;

/// The longest time of a stat(2) of a volume's root.
const SOON: Duration = Duration::from_secs(1);

/// A volume with a file whose attributes were requested, and whose NFS server was stopped afterwards.
fn stopped() -> (Ganesha, Shown) {
    let server = Ganesha::start();
    fs::write(server.exported().join("file"), "content").expect("written");
    let mounted = Mounted::with(&server, |options| {
        // Without cached attributes, the kernel sends a request each time.
        (options.caching.acdirmin, options.caching.acdirmax) = (0, 0);
        (options.caching.acregmin, options.caching.acregmax) = (0, 0);
    });
    let shown = mounted.shown();
    fs::metadata(shown.path().join("file")).expect("attributes");
    nix::sys::statvfs::statvfs(shown.path()).expect("statistics");
    server.stop();
    (server, shown)
}

#[test]
fn root_and_free_space_are_answered_while_the_server_is_silent() {
    let (server, shown) = stopped();
    for _ in 0..3 {
        let begin = Instant::now();
        assert!(fs::metadata(shown.path()).expect("the root").is_dir());
        let status = nix::sys::statvfs::statvfs(shown.path()).expect("free space");
        assert!(status.blocks() > 0);
        assert!(begin.elapsed() < 2 * SOON, "{:?}", begin.elapsed());
    }
    server.cont();
    assert_eq!(fs::read_to_string(shown.path().join("file")).expect("read"), "content");
}

#[test]
fn a_server_that_falls_silent_after_podfs_has_reached_it_delays_no_start() {
    let server = Ganesha::start();
    fs::write(server.exported().join("file"), "content").expect("written");
    // podfs has reached the server before this changes the options. It serves the volume afterwards.
    let shown = Mounted::with(&server, |_| server.stop()).shown();
    assert!(fs::metadata(shown.path()).expect("the root").is_dir());
    server.cont();
    assert_eq!(fs::read_to_string(shown.path().join("file")).expect("read"), "content");
}

#[test]
fn the_root_is_answered_when_the_server_is_gone() {
    let (mut server, shown) = stopped();
    server.cont();
    server.kill();
    assert!(fs::metadata(shown.path()).expect("the root").is_dir());
    nix::sys::statvfs::statvfs(shown.path()).expect("free space");
    server.restart();
    assert_eq!(fs::read_to_string(shown.path().join("file")).expect("read"), "content");
}

#[test]
fn a_process_that_waits_for_a_silent_server_can_be_killed() {
    let (server, shown) = stopped();
    for signal in [libc::SIGKILL, libc::SIGTERM] {
        let mut reader = cat(&shown.path().join("file"));
        wait_for_request(&shown);
        let begin = Instant::now();
        // SAFETY: this process started the child, and has not reaped it yet.
        unsafe { libc::kill(reader.id().cast_signed(), signal) };
        assert_eq!(reader.wait().expect("the reader ends").signal(), Some(signal));
        assert!(begin.elapsed() < 2 * SOON, "{:?}", begin.elapsed());
    }
    server.cont();
}

#[test]
fn a_writer_to_a_silent_server_can_be_killed_and_its_data_arrives() {
    let server = Ganesha::start();
    let shown = Mounted::new(&server).shown();
    let file = File::create(shown.path().join("new")).expect("created");
    // tee writes to its standard output first. So when the data comes to its standard error, tee has written to the
    // file.
    let mut writer = Command::new("tee");
    writer.arg("/dev/stderr").stdin(Stdio::piped()).stdout(file).stderr(Stdio::piped());
    let mut writer = writer.spawn().expect("tee");
    server.stop();
    writer.stdin.as_ref().expect("a pipe").write_all(b"data").expect("sent");
    writer.stderr.as_mut().expect("a pipe").read_exact(&mut [0; 4]).expect("tee has written");
    let begin = Instant::now();
    writer.kill().expect("killed");
    writer.wait().expect("tee ends");
    assert!(begin.elapsed() < 2 * SOON, "{:?}", begin.elapsed());
    server.cont();
    eventually("the data has arrived", || {
        fs::read(server.exported().join("new")).is_ok_and(|content| content == b"data")
    });
}

#[test]
fn a_signal_that_is_handled_interrupts_nothing() {
    let (server, shown) = stopped();
    let path = shown.path().join("file");
    let mut reader = Command::new("sh");
    reader.args(["-c", "trap : USR1; read line < \"$1\"; echo \"$line\"", "sh"]).arg(&path).stdout(Stdio::piped());
    let mut reader = reader.spawn().expect("a shell");
    wait_for_request(&shown);
    // SAFETY: this process started the child, and has not reaped it yet.
    unsafe { libc::kill(reader.id().cast_signed(), libc::SIGUSR1) };
    thread::sleep(Duration::from_millis(600));
    assert!(reader.try_wait().expect("a child").is_none(), "the shell still waits");
    server.cont();
    let mut output = String::new();
    reader.stdout.take().expect("a pipe").read_to_string(&mut output).expect("read");
    assert_eq!(output, "content\n");
    reader.wait().expect("the shell ends");
}

#[test]
fn a_soft_mount_gives_up_when_its_time_is_over() {
    for (policy, errno) in [(RetryPolicy::Soft, libc::EIO), (RetryPolicy::SoftErr, libc::ETIMEDOUT)] {
        let server = Ganesha::start();
        fs::write(server.exported().join("file"), "content").expect("written");
        let mounted = Mounted::with(&server, |options| {
            (options.retry_policy, options.timeo, options.retrans) = (policy, 2, 2);
        });
        server.stop();
        let error = File::open(mounted.at("file")).expect_err("the server is silent");
        assert_eq!(error.raw_os_error(), Some(errno));
        server.cont();
        assert_eq!(fs::read_to_string(mounted.at("file")).expect("read"), "content");
    }
}

#[test]
fn a_volume_is_unmounted_while_its_server_is_silent() {
    let (server, shown) = stopped();
    let begin = Instant::now();
    drop(shown);
    assert!(begin.elapsed() < SOON, "{:?}", begin.elapsed());
    server.cont();
}

/// A process that reads a file.
fn cat(path: &Path) -> Child {
    Command::new("cat").arg(path).stdout(Stdio::null()).stderr(Stdio::null()).spawn().expect("cat")
}

/// Waits until this process has read a request and not answered it.
fn wait_for_request(shown: &Shown) {
    eventually("a request waits", || shown.mounted.unanswered_requests() > 0);
}
