//! Takeovers, with servers that the tests play.

use std::collections::BTreeSet;
use std::io::Write;
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::sync::mpsc::channel;
use std::sync::{Arc, Mutex};
use std::thread::{self, JoinHandle};
use std::time::{Duration, SystemTime};

use serde_json::Value;

use super::held::HeldProjection;
use super::*;
use crate::mount::private::{MountOptions, PrivateMount, open_device};
use crate::projection::tree::Root;
use crate::protocol::{Greeting, MAX_REPLY, Reporting, ServerReply, ServerRequest, VolumeNumber, receive, send};

/// Longer than any answer takes.
const LIMIT: Duration = Duration::from_secs(10);

fn greeting() -> Greeting {
    Greeting::new("1.2.3", "pod")
}

/// Plays a server, which answers as `answer` says, until the connection ends. Returns its thread and the supervisor's end of the
/// connection.
fn play(mut answer: impl FnMut(&ServerRequest) -> ServerReply + Send + 'static) -> (JoinHandle<()>, UnixStream) {
    let (ours, theirs) = UnixStream::pair().expect("a socket pair");
    let server = thread::spawn(move || {
        while let Ok(Some((request, _))) = receive::<ServerRequest>(&theirs) {
            let reply = match &request {
                ServerRequest::Hello(_) => {
                    ServerReply::Hello { greeting: greeting(), keeper: 0, keeper_starts_successor: false }
                }
                request => answer(request),
            };
            if send(&theirs, &reply, &[]).is_err() {
                return;
            }
        }
    });
    (server, ours)
}

/// A supervisor with one projection, whose server is dead.
fn client_of_killed_server() -> (Arc<ServerClient>, MountedVolume, LastFdKeeper) {
    let (server, socket) = play(|_| ServerReply::Done);
    let client = Arc::new(ServerClient::new(socket, greeting()).expect("a server"));
    let root = Root { mode: 0o755, gid: 0, directories: BTreeSet::new() };
    let device = open_device().expect("/dev/fuse");
    let mount = PrivateMount::new(device.as_fd(), &MountOptions::default()).expect("a mount");
    let kind = HeldProjection::new(root.clone(), Reporting::default());
    let request = |volume, about| ServerRequest::Serve { volume, about, root, reporting: Reporting::default() };
    let (mounted, _) = MountedVolume::begin(&client, device, mount, Value::Null, kind, request).expect("a volume");
    let keeper = client.mark_dead();
    server.join().expect("no panic");
    (client, mounted, keeper)
}

#[test]
fn a_longer_answer_than_a_server_gives_takes_no_memory() {
    let (ours, theirs) = UnixStream::pair().expect("a socket pair");
    let server = thread::spawn(move || {
        receive::<ServerRequest>(&theirs).expect("a request").expect("a greeting");
        let length = u32::try_from(MAX_REPLY + 1).expect("a length").to_ne_bytes();
        (&theirs).write_all(&length).expect("sent");
    });
    let error = ServerClient::new(ours, greeting()).err().expect("refused");
    server.join().expect("no panic");
    assert!(error.to_string().contains("a control message is too long"), "{error}");
}

#[test]
fn a_server_that_owes_an_answer_can_be_replaced() {
    let (give, client) = channel::<Arc<ServerClient>>();
    let (_server, socket) = play(move |_| {
        // A takeover begins with this lock.
        drop(client.recv().expect("a supervisor").facts());
        ServerReply::Volumes(Vec::new())
    });
    let client = Arc::new(ServerClient::new(socket, greeting()).expect("a server"));
    give.send(Arc::clone(&client)).expect("the server runs");
    assert!(client.is_responsive(LIMIT));
}

#[test]
fn a_volume_that_is_removed_during_a_takeover_is_removed_from_the_successor() {
    let (client, mounted, mut keeper) = client_of_killed_server();
    let (number, mut mounted) = (mounted.volume, Some(mounted));
    let removed = Arc::new(Mutex::new(Vec::new()));
    let seen = Arc::clone(&removed);
    let (server, socket) = play(move |request| {
        match request {
            ServerRequest::Resume(_) => drop(mounted.take()),
            ServerRequest::Remove { volume } => seen.lock().expect("no panic").push(*volume),
            _ => {}
        }
        ServerReply::Done
    });
    let successor = client.greet(socket).expect("a server");
    let outcome = client.succeed(successor, &mut keeper, UnloadableVolume::GivenUp).expect("a successor");
    assert!(outcome.given_up.is_empty());
    client.end();
    server.join().expect("no panic");
    assert_eq!(*removed.lock().expect("no panic"), [number]);
}

#[test]
fn a_volume_that_a_successor_cannot_serve_is_given_up() {
    let (client, mounted, mut keeper) = client_of_killed_server();
    let number = mounted.volume;
    let (_server, socket) = play(move |request| match request {
        ServerRequest::Start => ServerReply::Started { failed: vec![(number, "no rings".to_owned())] },
        _ => ServerReply::Done,
    });
    let successor = client.greet(socket).expect("a server");
    let outcome = client.succeed(successor, &mut keeper, UnloadableVolume::GivenUp).expect("a successor");
    assert_eq!(outcome.given_up, [(number, "no rings".to_owned())]);
    assert!(mounted.is_given_up());
}

#[test]
fn a_volume_that_a_server_of_another_version_cannot_load_stays_for_the_server_of_the_old_version() {
    let (client, mounted, mut keeper) = client_of_killed_server();
    let newer = "its region has layout 9, which this version does not know";
    let (_server, socket) = play(move |request| match request {
        ServerRequest::Resume(_) => ServerReply::Failed(newer.to_owned()),
        _ => ServerReply::Done,
    });
    let successor = client.greet(socket).expect("a server");
    let outcome = client.succeed(successor, &mut keeper, UnloadableVolume::EndsTakeover);
    assert!(outcome.expect_err("it cannot load the volume").to_string().ends_with(newer));
    assert!(!mounted.is_given_up());
    let (_server, socket) = play(|_| ServerReply::Done);
    let successor = client.greet(socket).expect("a server");
    let outcome = client.succeed(successor, &mut keeper, UnloadableVolume::GivenUp).expect("a successor");
    assert!(outcome.given_up.is_empty() && !mounted.is_given_up());
}

#[test]
fn a_commit_after_a_takeover_does_not_touch_processes_with_the_numbers_of_dead_threads() {
    use rustix::thread::{Pid, gettid, sched_getaffinity};
    let (give, number) = channel::<Pid>();
    let (end, ended) = channel::<()>();
    // It has got the number of a dead thread.
    let other = thread::spawn(move || {
        give.send(gettid()).expect("the test runs");
        let _ = ended.recv();
    });
    let other_number = number.recv().expect("it runs");
    let (server, socket) =
        play(move |_| ServerReply::Announced { session: None, control: other_number.as_raw_nonzero().get() });
    let client = ServerClient::new(socket, greeting()).expect("a server");
    let answering = client.announce(VolumeNumber(0), &[], None, SystemTime::now()).expect("announced");
    let before = sched_getaffinity(Some(other_number)).expect("its CPUs");
    let mut keeper = client.mark_dead();
    server.join().expect("no panic");
    let (_server, socket) = play(|_| ServerReply::Done);
    let successor = client.greet(socket).expect("a server");
    client.succeed(successor, &mut keeper, UnloadableVolume::GivenUp).expect("a successor");
    let together = client.together(answering);
    assert_eq!(sched_getaffinity(Some(other_number)).expect("its CPUs"), before);
    drop((together, end));
    other.join().expect("no panic");
}
