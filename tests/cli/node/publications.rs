//! Publications of volumes to a running supervisor, through a relay that holds or loses messages.

use std::fs;
use std::io;
use std::net::Shutdown;
use std::os::fd::AsRawFd;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::PathBuf;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread;

use podfs::node::supervisors::{FailureKind, SupervisorReport};
use podfs::supervisor::status::VolumeState;

use super::daemon::{Daemon, Node, node_pod};
use crate::common::*;

const VOLUMES: &str = "[{name: scratch, emptyDir: {}}, {name: host, hostPath: {path: /usr}}]";

/// The treatment of the first question. The relay passes on all other questions, and their answers.
enum First {
    /// The relay passes the answer on when it is released.
    AnswerIsHeld,
    /// The relay hangs up, and the supervisor does not get the question.
    IsLost,
}

/// A relay in the place of a supervisor's control socket, until it is dropped.
struct Relay {
    socket: PathBuf,
    aside: PathBuf,
    listener: UnixListener,
    release: Sender<()>,
}

impl Relay {
    fn new(node: &Node, first: First) -> Relay {
        let socket = node.run().join(node.uid()).join("control.sock");
        let aside = node.fixture.path("control.sock");
        fs::rename(&socket, &aside).expect("it is there");
        let listener = UnixListener::bind(&socket).expect("a socket");
        let (release, released) = channel();
        let (accepting, real) = (listener.try_clone().expect("the same socket"), aside.clone());
        thread::spawn(move || {
            let mut first = Some((first, released));
            while let Ok((client, _)) = accepting.accept() {
                let held = match first.take() {
                    Some((First::IsLost, _)) => continue,
                    Some((First::AnswerIsHeld, released)) => Some(released),
                    None => None,
                };
                relay(client, UnixStream::connect(&real).expect("the supervisor listens"), held);
            }
        });
        Relay { socket, aside, listener, release }
    }

    /// Passes on the answer that the relay holds.
    fn release(&self) {
        self.release.send(()).expect("it is held");
    }
}

impl Drop for Relay {
    fn drop(&mut self) {
        // The supervisor's socket may have been removed together with the pod.
        let _ = fs::rename(&self.aside, &self.socket);
        let _ = nix::sys::socket::shutdown(self.listener.as_raw_fd(), nix::sys::socket::Shutdown::Both);
    }
}

/// Passes on the bytes of both sides. If there is a receiver `held`, passes on the supervisor's answer only after a
/// message.
fn relay(client: UnixStream, supervisor: UnixStream, held: Option<Receiver<()>>) {
    let both = |stream: &UnixStream| stream.try_clone().expect("the same socket");
    let (mut questions, mut answers) = ((both(&client), both(&supervisor)), (supervisor, client));
    thread::spawn(move || {
        let _ = io::copy(&mut questions.0, &mut questions.1);
        let _ = questions.1.shutdown(Shutdown::Both);
    });
    thread::spawn(move || {
        let _ = held.map(|held| held.recv());
        let _ = io::copy(&mut answers.0, &mut answers.1);
        let _ = answers.1.shutdown(Shutdown::Both);
    });
}

/// A pod whose supervisor serves the volume `host`.
fn serves_host(node: &Node) -> Daemon {
    let mut daemon = node.daemon();
    assert_eq!(daemon.mount(&node_pod(&node.uid(), VOLUMES), &["host"]), [Ok(())]);
    daemon.wait_up();
    daemon
}

#[test]
fn a_volume_that_is_mounted_before_its_publication_is_answered_is_there() {
    let node = Node::new();
    let mut daemon = serves_host(&node);
    let relay = Relay::new(&node, First::AnswerIsHeld);
    let (supervisors, pod) = (daemon.supervisors.clone(), node_pod(&node.uid(), VOLUMES));
    let mount = daemon.spawn(async move { supervisors.mount(&pod, "scratch", TIMEOUT / 2).await });
    let is_live = |report: &SupervisorReport| match report {
        SupervisorReport::Status(status) => {
            status.volumes.iter().any(|volume| volume.name == "scratch" && volume.state == VolumeState::Live)
        }
        _ => false,
    };
    daemon.wait_report("the volume is mounted", is_live);
    relay.release();
    assert_eq!(daemon.block_on(mount).expect("no panic"), Ok(()));
    drop(relay);
    assert_eq!(daemon.unmount(&["scratch", "host"]), [Ok(()), Ok(())]);
    node.assert_nothing_left();
}

#[test]
fn a_volume_is_published_again_after_its_publication_was_lost() {
    let node = Node::new();
    let daemon = serves_host(&node);
    let pod = node_pod(&node.uid(), VOLUMES);
    let relay = Relay::new(&node, First::IsLost);
    let failure = daemon.mount(&pod, &["scratch"])[0].clone().expect_err("the supervisor does not answer");
    assert!(failure.kind == FailureKind::Uncertain && failure.reason.contains("does not answer"), "{failure}");
    assert_eq!(daemon.mount_within(&pod, &["scratch"], TIMEOUT / 2), [Ok(())]);
    fs::write(node.volume("empty-dir", "scratch").join("file"), "1").expect("it is mounted");
    drop(relay);
    assert_eq!(daemon.unmount(&["scratch", "host"]), [Ok(()), Ok(())]);
    node.assert_nothing_left();
}

#[test]
fn a_change_of_a_pod_is_published_again_after_its_publication_was_lost() {
    const LIMITED: &str = "[{name: scratch, emptyDir: {sizeLimit: 1Mi}}]";
    let node = Node::new();
    let mut daemon = node.daemon();
    assert_eq!(daemon.mount(&node_pod(&node.uid(), LIMITED), &["scratch"]), [Ok(())]);
    daemon.wait_up();
    let volume = node.volume("empty-dir", "scratch");
    let size = || {
        let usage = rustix::fs::statvfs(&volume).expect("it is mounted");
        usage.f_blocks * usage.f_frsize
    };
    assert_eq!(size(), 1 << 20);
    let relay = Relay::new(&node, First::IsLost);
    daemon.update(&node_pod(&node.uid(), &LIMITED.replace("1Mi", "4Mi")));
    eventually("the volume has the new limit", || size() == 4 << 20);
    drop(relay);
    assert_eq!(daemon.unmount(&["scratch"]), [Ok(())]);
    node.assert_nothing_left();
}

#[test]
fn rc_01_the_next_daemon_publishes_a_volume_that_is_only_in_the_checkpoint() {
    let node = Node::new();
    let daemon = serves_host(&node);
    let pod = node_pod(&node.uid(), VOLUMES);
    let relay = Relay::new(&node, First::IsLost);
    daemon.mount(&pod, &["scratch"])[0].clone().expect_err("the supervisor does not answer");
    drop((daemon, relay));
    let found = node.reconstructed();
    let checkpoint = found[0].checkpoint.clone().expect("it is written down");
    assert_eq!(checkpoint.volumes.iter().collect::<Vec<_>>(), ["host", "scratch"]);
    let daemon = node.daemon();
    daemon.adopt(&found);
    assert_eq!(daemon.mount_within(&pod, &["scratch"], TIMEOUT / 2), [Ok(())]);
    assert_eq!(daemon.unmount(&["scratch", "host"]), [Ok(()), Ok(())]);
    node.assert_nothing_left();
}

#[test]
fn a_volume_that_is_mounted_again_at_once_is_there() {
    let node = Node::new();
    let daemon = serves_host(&node);
    let pod = node_pod(&node.uid(), VOLUMES);
    assert_eq!(daemon.mount(&pod, &["scratch"]), [Ok(())]);
    // The daemon may miss the status between the unmount and the mount, and the statuses before and after it may be
    // equal.
    for _ in 0..5 {
        assert_eq!(daemon.unmount(&["host"]), [Ok(())]);
        assert_eq!(daemon.mount_within(&pod, &["host"], TIMEOUT / 2), [Ok(())]);
        assert!(node.volume("host-path", "host").join("bin").exists());
    }
    assert_eq!(daemon.unmount(&["scratch", "host"]), [Ok(()), Ok(())]);
    node.assert_nothing_left();
}
