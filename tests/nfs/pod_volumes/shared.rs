//! Volumes of a pod with one server share a connection, whichever of their processes is killed.

use std::fs;
use std::net::SocketAddr;

use nix::sys::signal::{Signal, kill};

use crate::common::{Fixture, Running, eventually};
use crate::nfs_rig::Ganesha;
use crate::pod_volumes::pods::write_claims;

/// The ports from which clients on this machine are connected to `server`.
fn connections(server: SocketAddr) -> Vec<u16> {
    const ESTABLISHED: &str = "01";
    let port = |field: &str| u16::from_str_radix(field.rsplit_once(':').expect("a port").1, 16).expect("a number");
    let table = fs::read_to_string("/proc/net/tcp").expect("read");
    let fields = table.lines().skip(1).map(|line| line.split_whitespace().collect::<Vec<_>>());
    let theirs = fields.filter(|fields| fields[3] == ESTABLISHED && port(fields[2]) == server.port());
    theirs.map(|fields| port(fields[1])).collect()
}

/// The ports of the connections after each volume has sent the server a call.
#[track_caller]
fn used(running: &Running, ganesha: &Ganesha, volumes: &[&str]) -> Vec<u16> {
    for name in volumes {
        // For a file that was never looked up, the client has to ask the server.
        let new = tempfile::Builder::new().prefix("asked-").tempfile_in(ganesha.exported()).expect("made");
        let file = running.volume(name).join(new.path().file_name().expect("a name"));
        assert!(running.freed(|| fs::exists(file)).expect("asked"), "{}", running.log());
    }
    let mut ports = connections(ganesha.address());
    ports.sort_unstable();
    ports
}

fn options(ganesha: &Ganesha) -> String {
    let (nfs, mountd) = (ganesha.address().port(), ganesha.mount_address().port());
    // A name that is new at the server is new here at once.
    format!("port={nfs},mountport={mountd},lookupcache=positive,actimeo=0")
}

/// Names of volumes, and of their claims.
const NAMES: [&str; 6] = ["a", "b", "c", "d", "e", "f"];

/// The first of the claims, with these options.
fn claims(fixture: &Fixture, uid: &str, ganesha: &Ganesha, options: &[&str]) {
    let named: Vec<_> = NAMES.into_iter().zip(options.iter().copied()).collect();
    write_claims(fixture, uid, &named, &ganesha.address().ip().to_string());
}

#[test]
fn volumes_with_one_server_share_a_connection_and_its_port_over_kills() {
    let ganesha = Ganesha::start();
    let fixture = Fixture::new("");
    let options = options(&ganesha);
    claims(&fixture, "nfs-shared", &ganesha, &[&options, &options]);
    let mut running = fixture.run();
    let first = used(&running, &ganesha, &["a", "b"]);
    assert_eq!(first.len(), 1, "{first:?}");
    kill(running.server(), Signal::SIGKILL).expect("killed");
    assert_eq!(used(&running, &ganesha, &["a", "b"]), first);
    // Another supervisor finds the server, and another volume.
    running.signal(Signal::SIGKILL);
    running.wait();
    claims(&fixture, "nfs-shared", &ganesha, &[&options, &options, &options]);
    let mut running = fixture.run();
    running.wait_log("podfs takes them over");
    assert_eq!(used(&running, &ganesha, &["a", "b", "c"]), first);
    kill(running.server(), Signal::SIGKILL).expect("killed");
    assert_eq!(used(&running, &ganesha, &["a", "b", "c"]), first);
    assert_eq!(running.stop().code(), Some(0), "{}", running.log());
    fixture.assert_nothing_left();
    eventually("the connection goes with the last volume", || connections(ganesha.address()).is_empty());
}

/// Starts a pod with all claims, which find their server at the same moment.
fn start_at_once(fixture: &Fixture, uid: &str, ganesha: &Ganesha) -> Running {
    let options = options(ganesha);
    claims(fixture, uid, ganesha, &[options.as_str(); NAMES.len()]);
    ganesha.stop();
    let running = fixture.start();
    eventually("each volume asks for the export", || connections(ganesha.mount_address()).len() == NAMES.len());
    ganesha.cont();
    running
}

#[test]
fn volumes_that_begin_at_once_share_a_connection() {
    let ganesha = Ganesha::start();
    let fixture = Fixture::new("");
    let mut running = start_at_once(&fixture, "nfs-at-once", &ganesha);
    running.wait_ready();
    let ports = used(&running, &ganesha, &NAMES);
    assert_eq!(ports.len(), 1, "{ports:?}");
    assert_eq!(running.stop().code(), Some(0), "{}", running.log());
    fixture.assert_nothing_left();
}

#[test]
fn volumes_that_begin_while_servers_are_killed_share_a_connection() {
    let ganesha = Ganesha::start();
    // A server is killed when so many volumes are there.
    for moments in [&[0][..], &[1, 2], &[0, 1, 3, 5], &[6]] {
        let fixture = Fixture::new("");
        let mut running = start_at_once(&fixture, "nfs-at-once-killed", &ganesha);
        let mut killed = Vec::new();
        for there in moments {
            eventually("so many volumes are there", || fixture.mounts().len() >= *there);
            eventually("there is a server that was not killed yet", || {
                let server = running.servers().pop().filter(|server| !killed.contains(server));
                killed.extend(server);
                server.is_some()
            });
            kill(killed[killed.len() - 1], Signal::SIGKILL).expect("killed");
        }
        running.wait_ready();
        let ports = used(&running, &ganesha, &NAMES);
        assert_eq!(ports.len(), 1, "{ports:?} with {moments:?}");
        kill(running.server(), Signal::SIGKILL).expect("killed");
        assert_eq!(used(&running, &ganesha, &NAMES), ports, "with {moments:?}");
        assert_eq!(running.stop().code(), Some(0), "{}", running.log());
        fixture.assert_nothing_left();
        eventually("no connection is left", || connections(ganesha.address()).is_empty());
    }
}

#[test]
fn a_connection_outlives_the_volume_that_made_it() {
    let ganesha = Ganesha::start();
    let fixture = Fixture::new("");
    let options = options(&ganesha);
    claims(&fixture, "nfs-outlived", &ganesha, &[&options, &options]);
    let mut running = fixture.run();
    let first = used(&running, &ganesha, &["a", "b"]);
    running.signal(Signal::SIGKILL);
    running.wait();
    let manifest = fs::read_to_string(fixture.pod()).expect("a manifest");
    let without = manifest.replace("{name: a, persistentVolumeClaim: {claimName: a}}, ", "");
    assert_ne!(manifest, without);
    fixture.write("pod.yaml", &without);
    let mut running = fixture.run();
    running.wait_log("the pod no longer has volume \"a\" of the podfs before");
    assert_eq!(used(&running, &ganesha, &["b"]), first);
    assert_eq!(running.stop().code(), Some(0), "{}", running.log());
    fixture.assert_nothing_left();
}

#[test]
fn a_volume_that_asks_for_more_connections_adds_to_them() {
    let ganesha = Ganesha::start();
    for number in 0..64 {
        fs::write(ganesha.exported().join(number.to_string()), "content").expect("written");
    }
    let fixture = Fixture::new("");
    let options = options(&ganesha);
    claims(&fixture, "nfs-nconnect", &ganesha, &[&options, &format!("{options},nconnect=3")]);
    let mut running = fixture.run();
    let read = |running: &Running| {
        for volume in ["a", "b"] {
            for number in 0..64 {
                let file = running.volume(volume).join(number.to_string());
                assert_eq!(running.freed(|| fs::read_to_string(file)).expect("read"), "content");
            }
        }
        let mut ports = connections(ganesha.address());
        ports.sort_unstable();
        ports
    };
    let first = read(&running);
    assert_eq!(first.len(), 3, "{first:?}");
    kill(running.server(), Signal::SIGKILL).expect("killed");
    assert_eq!(read(&running), first);
    assert_eq!(running.stop().code(), Some(0), "{}", running.log());
    fixture.assert_nothing_left();
}
