//! A server that is killed during a request: before Linux 6.9 the kernel cannot send the request again. The request ends
//! with an error, and the successor answers all later ones.

use std::fs::{self, File};
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::channel;
use std::thread;

use nix::errno::Errno;
use nix::sys::signal::{Signal, kill};
use nix::sys::stat::minor;

use super::host;
use crate::common::passthrough::within_timeout;
use crate::common::stopped::all_stopped;
use crate::common::*;

#[test]
#[ignore = "runs in the guest"]
fn a_request_in_flight_ends_with_an_error_when_the_server_is_killed() {
    let fixture = Fixture::new("");
    let source = fixture.path("source");
    fs::create_dir(&source).expect("a directory");
    fs::write(source.join("file"), "x").expect("written");
    fixture.write("pod.yaml", &pod(&format!("[{}]", host("host", &source, "Directory"))));
    let mut running = fixture.run();
    let volume = running.volume("host");

    // The kernel caches nothing of the file, so each read is a request. With three callers, the server nearly always has a
    // request.
    let file = Arc::new(File::open(volume.join("file")).expect("opened"));
    let connection = minor(fs::metadata(&volume).expect("a volume").dev());
    let (error_sender, errors) = channel();
    let stop = Arc::new(AtomicBool::new(false));
    for _ in 0..3 {
        let (file, error_sender, stop) = (Arc::clone(&file), error_sender.clone(), Arc::clone(&stop));
        thread::spawn(move || {
            while !stop.load(Ordering::Relaxed) {
                if let Err(error) = file.read_at(&mut [0], 0) {
                    return error_sender.send(error.raw_os_error().map(Errno::from_raw));
                }
            }
            Ok(())
        });
    }
    let error = loop {
        let server = running.server();
        kill(server, Signal::SIGSTOP).expect("the server is there");
        eventually("a request waits", || all_stopped(server) && waiting(connection) > 0);
        kill(server, Signal::SIGKILL).expect("the server is there");
        let file = Arc::clone(&file);
        within_timeout("the successor of the server answers", move || file.read_at(&mut [0], 0)).expect("read");
        // The killed server may have had no request that it had read and not answered. Then the loop kills its successor.
        if let Ok(error) = errors.try_recv() {
            break error;
        }
    };
    stop.store(true, Ordering::Relaxed);
    assert!(matches!(error, Some(Errno::EIO | Errno::ECONNABORTED)), "{error:?}");

    assert_eq!(fs::read_to_string(volume.join("file")).expect("read"), "x");
    assert_eq!(running.stop().code(), Some(0));
    fixture.assert_nothing_left();
}

/// The number of requests of a FUSE connection that have no answer yet.
fn waiting(connection: u64) -> u64 {
    let waiting = Path::new("/sys/fs/fuse/connections").join(connection.to_string()).join("waiting");
    fs::read_to_string(waiting).expect("a connection").trim().parse().expect("a number")
}
