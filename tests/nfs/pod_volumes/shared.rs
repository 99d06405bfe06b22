//! Volumes of a pod with one NFS server share a connection, also after the server of the pod or the supervisor is
//! killed.

use std::fs;
use std::net::SocketAddr;

use nix::sys::signal::{Signal, kill};
use serde_json::json;

use crate::common::control::ask;
use crate::common::{Fixture, Running, eventually};
use crate::nfs_rig::Ganesha;
use crate::pod_volumes::pods::write_claims;

/// The local ports of the connections to `server` in this network namespace.
fn connections(server: SocketAddr) -> Vec<u16> {
    const ESTABLISHED: &str = "01";
    let port = |field: &str| u16::from_str_radix(field.rsplit_once(':').expect("a port").1, 16).expect("a number");
    let table = fs::read_to_string("/proc/net/tcp").expect("read");
    let fields = table.lines().skip(1).map(|line| line.split_whitespace().collect::<Vec<_>>());
    let to_server = fields.filter(|fields| fields[3] == ESTABLISHED && port(fields[2]) == server.port());
    to_server.map(|fields| port(fields[1])).collect()
}

/// The sorted ports of the connections after each volume has sent a call to the server.
#[track_caller]
fn used_ports(running: &Running, ganesha: &Ganesha, volumes: &[&str]) -> Vec<u16> {
    for name in volumes {
        // The client does not know the new file, so it sends a LOOKUP.
        let new = tempfile::Builder::new().prefix("new-").tempfile_in(ganesha.exported()).expect("created");
        let file = running.volume(name).join(new.path().file_name().expect("a name"));
        assert!(running.freed(|| fs::exists(file)).expect("looked up"), "{}", running.log());
    }
    let mut ports = connections(ganesha.address());
    ports.sort_unstable();
    ports
}

fn options(ganesha: &Ganesha) -> String {
    let (nfs, mountd) = (ganesha.address().port(), ganesha.mount_address().port());
    // The client does not cache that a name is absent, so it finds new files of the server at once.
    format!("port={nfs},mountport={mountd},lookupcache=positive,actimeo=0")
}

/// The names of volumes, and of their claims.
const NAMES: [&str; 6] = ["a", "b", "c", "d", "e", "f"];

/// Writes the manifests of a pod that has a claim for each element of `options`, with these mount options.
fn write_pod(fixture: &Fixture, uid: &str, ganesha: &Ganesha, options: &[&str]) {
    let claims: Vec<_> = NAMES.into_iter().zip(options.iter().copied()).collect();
    write_claims(fixture, uid, &claims, &ganesha.address().ip().to_string());
}

#[test]
fn volumes_with_one_server_share_a_connection_and_its_port_over_kills() {
    let ganesha = Ganesha::start();
    let fixture = Fixture::new("");
    let options = options(&ganesha);
    write_pod(&fixture, "nfs-shared", &ganesha, &[&options, &options]);
    let mut running = fixture.run();
    let first = used_ports(&running, &ganesha, &["a", "b"]);
    assert_eq!(first.len(), 1, "{first:?}");
    kill(running.server(), Signal::SIGKILL).expect("killed");
    assert_eq!(used_ports(&running, &ganesha, &["a", "b"]), first);
    // The next supervisor finds the server of the pod, and one more volume in the manifest.
    running.signal(Signal::SIGKILL);
    running.wait();
    write_pod(&fixture, "nfs-shared", &ganesha, &[&options, &options, &options]);
    let mut running = fixture.run();
    running.wait_log("podfs takes them over");
    assert_eq!(used_ports(&running, &ganesha, &["a", "b", "c"]), first);
    kill(running.server(), Signal::SIGKILL).expect("killed");
    assert_eq!(used_ports(&running, &ganesha, &["a", "b", "c"]), first);
    assert_eq!(running.stop().code(), Some(0), "{}", running.log());
    fixture.assert_nothing_left();
    eventually("the connection ends with the last volume", || connections(ganesha.address()).is_empty());
}

/// Starts a pod with all claims. The NFS server is stopped until each volume has connected to its MOUNT service, so
/// that all volumes are mounted at the same time.
fn start_at_once(fixture: &Fixture, uid: &str, ganesha: &Ganesha) -> Running {
    let options = options(ganesha);
    write_pod(fixture, uid, ganesha, &[options.as_str(); NAMES.len()]);
    ganesha.stop();
    let running = fixture.start();
    eventually("each volume requests the export", || connections(ganesha.mount_address()).len() == NAMES.len());
    ganesha.cont();
    running
}

#[test]
fn volumes_that_begin_at_once_share_a_connection() {
    let ganesha = Ganesha::start();
    let fixture = Fixture::new("");
    let mut running = start_at_once(&fixture, "nfs-at-once", &ganesha);
    running.wait_ready();
    let ports = used_ports(&running, &ganesha, &NAMES);
    assert_eq!(ports.len(), 1, "{ports:?}");
    assert_eq!(running.stop().code(), Some(0), "{}", running.log());
    fixture.assert_nothing_left();
}

#[test]
fn volumes_that_begin_while_servers_are_killed_share_a_connection() {
    let ganesha = Ganesha::start();
    // The test kills a server of the pod each time when this number of volumes is mounted.
    for mounted_volumes in [&[0][..], &[1, 2], &[0, 1, 3, 5], &[6]] {
        let fixture = Fixture::new("");
        let mut running = start_at_once(&fixture, "nfs-at-once-killed", &ganesha);
        let mut killed = Vec::new();
        for count in mounted_volumes {
            eventually("enough volumes are mounted", || fixture.mounts().len() >= *count);
            eventually("there is a server that was not killed yet", || {
                let server = running.servers().pop().filter(|server| !killed.contains(server));
                killed.extend(server);
                server.is_some()
            });
            kill(killed[killed.len() - 1], Signal::SIGKILL).expect("killed");
        }
        running.wait_ready();
        let ports = used_ports(&running, &ganesha, &NAMES);
        assert_eq!(ports.len(), 1, "{ports:?} with {mounted_volumes:?}");
        kill(running.server(), Signal::SIGKILL).expect("killed");
        assert_eq!(used_ports(&running, &ganesha, &NAMES), ports, "with {mounted_volumes:?}");
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
    write_pod(&fixture, "nfs-outlived", &ganesha, &[&options, &options]);
    let mut running = fixture.run();
    let first = used_ports(&running, &ganesha, &["a", "b"]);
    let unpublished = json!({"volumes": ["a"]});
    assert_eq!(ask(&fixture.run_files(), &json!({"unpublish": unpublished})), json!({"unpublished": unpublished}));
    assert_eq!(used_ports(&running, &ganesha, &["b"]), first);
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
    write_pod(&fixture, "nfs-nconnect", &ganesha, &[&options, &format!("{options},nconnect=3")]);
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
