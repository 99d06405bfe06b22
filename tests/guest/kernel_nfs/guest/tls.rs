//! TLS: the kernel encrypts the traffic, and podfs does not mount an export without TLS when the options demand TLS.

use std::fs;
use std::process::{Child, Command, Stdio};

use super::refused::{wait_long, wait_ready_long};
use super::{DIRECTORY, Emptied, assert_stops_clean, backend, exported, fixture_at, version_3, volume_path};
use crate::machine::kerberos::{PRIVATE, PRIVATE_PORT};
use crate::machine::tls::{SERVER, TLSHD};

/// A running tlshd. Dropping it kills tlshd.
struct Tlshd(Child);

impl Tlshd {
    fn start() -> Self {
        let [program, arguments @ ..] = TLSHD;
        let mut tlshd = Command::new(program);
        Self(tlshd.args(arguments).stderr(Stdio::null()).spawn().expect("tlshd"))
    }
}

impl Drop for Tlshd {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// A counter of the kernel in `/proc/net/tls_stat`.
fn counter(name: &str) -> u64 {
    let all = fs::read_to_string("/proc/net/tls_stat").expect("the kernel has TLS");
    let line = all.lines().find_map(|line| line.strip_prefix(name)).expect("the kernel has this counter");
    line.trim().parse().expect("a number")
}

#[test]
#[ignore = "runs in the guest"]
fn a_claim_is_served_through_tls() {
    let _tlshd = Tlshd::start();
    for (path, options) in [
        ("/", "nfsvers=4.1,xprtsec=tls".to_owned()),
        ("/", "xprtsec=mtls".to_owned()),
        ("/export", format!("{},xprtsec=tls", version_3())),
    ] {
        let _emptied = Emptied(DIRECTORY);
        fs::write(exported("there"), &options).expect("written");
        let before = counter("TlsTxSw");
        let fixture = fixture_at(SERVER, path, &options);
        let mut running = fixture.start();
        wait_ready_long(&mut running);
        assert_eq!(backend(&fixture), "kernel", "{options}");
        let volume = volume_path(&running);
        assert_eq!(fs::read_to_string(volume.join("there")).expect("read"), options);
        fs::write(volume.join("new"), &options).expect("written");
        assert_eq!(fs::read_to_string(exported("new")).expect("there"), options);
        // Both ends of the connection encrypt: the client's and the server's.
        assert!(counter("TlsTxSw") >= before + 2, "{options}");
        assert_stops_clean(running, &fixture);
    }
}

#[test]
#[ignore = "runs in the guest"]
fn without_tlshd_nothing_is_mounted_until_it_is_there() {
    let fixture = fixture_at(SERVER, "/", "nfsvers=4.1,xprtsec=tls");
    let mut running = fixture.start();
    wait_long(&running, "127.0.0.1:/: TLS needs tlshd on this node; ");
    let _tlshd = Tlshd::start();
    wait_ready_long(&mut running);
    assert_stops_clean(running, &fixture);
}

#[test]
#[ignore = "runs in the guest"]
fn a_server_that_is_another_or_has_no_tls_is_not_mounted() {
    let _tlshd = Tlshd::start();
    for (server, path, options) in [
        ("localhost", "/", "nfsvers=4.1,xprtsec=tls".to_owned()),
        (SERVER, PRIVATE, format!("nfsvers=4.1,xprtsec=tls,port={PRIVATE_PORT}")),
    ] {
        let fixture = fixture_at(server, path, &options);
        let mut running = fixture.start();
        let sentence =
            format!("{server}:{path}: NFS server {server} has no TLS, is not the one that its certificate names, or ");
        wait_long(&running, &sentence);
        assert_eq!(running.stop().code(), Some(0), "{}", running.log());
        fixture.assert_nothing_left();
    }
}
