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

    // Nothing of the file is cached, so each turn is a request. Three callers leave the server no time between requests.
    let file = Arc::new(File::open(volume.join("file")).expect("opened"));
    let connection = minor(fs::metadata(&volume).expect("a volume").dev());
    let (tell, told) = channel();
    let enough = Arc::new(AtomicBool::new(false));
    for _ in 0..3 {
        let (file, tell, enough) = (Arc::clone(&file), tell.clone(), Arc::clone(&enough));
        thread::spawn(move || {
            while !enough.load(Ordering::Relaxed) {
                if let Err(error) = file.read_at(&mut [0], 0) {
                    return tell.send(error.raw_os_error().map(Errno::from_raw));
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
        let mine = Arc::clone(&file);
        within_timeout("its successor answers", move || mine.read_at(&mut [0], 0)).expect("read");
        // A server that had just answered had no request in hand; its successor is the next one to be killed.
        if let Ok(error) = told.try_recv() {
            break error;
        }
    };
    enough.store(true, Ordering::Relaxed);
    assert!(matches!(error, Some(Errno::EIO | Errno::ECONNABORTED)), "{error:?}");

    assert_eq!(fs::read_to_string(volume.join("file")).expect("read"), "x");
    assert_eq!(running.stop().code(), Some(0));
    fixture.assert_nothing_left();
}

/// Requests of a connection that have no answer yet.
fn waiting(connection: u64) -> u64 {
    let waiting = Path::new("/sys/fs/fuse/connections").join(connection.to_string()).join("waiting");
    fs::read_to_string(waiting).expect("a connection").trim().parse().expect("a number")
}
