//! The proxy: each of its faults has its effect, and no other effect.

use std::io::{ErrorKind, Read};
use std::net::{IpAddr, Ipv6Addr, TcpListener};
use std::time::Duration;

use crate::nfs_rig::caller::{Caller, Handle};
use crate::nfs_rig::libnfs::Libnfs;
use crate::nfs_rig::protocol::error::EXIST;
use crate::nfs_rig::protocol::procedure::MKDIR;
use crate::nfs_rig::proxy::{Direction, End, Proxy};
use crate::nfs_rig::rpc::{Call, results};
use crate::nfs_rig::{Ganesha, Scripted, eventually};
use crate::rig_itself::connect;

/// A server with a proxy, a client with and a client without the proxy, and the handle of the export's root.
struct Scene {
    server: Ganesha,
    proxy: Proxy,
    /// Connected to the server.
    near: Caller,
    /// Connected to the proxy.
    far: Caller,
    root: Handle,
}

impl Scene {
    fn new() -> Self {
        let server = Ganesha::start();
        let proxy = Proxy::start(server.address());
        let (near, root) = connect(&server);
        let far = Caller::connect(proxy.address()).expect("connected");
        Self { server, proxy, near, far, root }
    }

    /// Another client that is connected to the proxy.
    fn new_far(&self) -> Caller {
        Caller::connect(self.proxy.address()).expect("connected")
    }
}

/// A call of the procedure NULL.
fn null(xid: u32) -> Vec<u8> {
    Call { xid, program: 100_003, version: 3, procedure: 0, identity: None, arguments: Vec::new() }.write()
}

/// The xid of the next reply.
fn next_xid(caller: &mut Caller) -> u32 {
    results(&caller.receive().expect("a reply")).expect("results").0
}

#[test]
fn everything_is_carried_to_both_ports_and_back() {
    let Scene { server, proxy, mut far, root, .. } = Scene::new();
    let mount = Proxy::start(server.mount_address());
    assert_eq!(Caller::mount(mount.address(), "/export").expect("an answer").as_ref(), Ok(&root));
    let bytes: Vec<u8> = (0..1_000_000_u32).map(|index| (index % 251) as u8).collect();
    let file = far.create(&root, "file").expect("an answer").expect("created");
    far.write(&file, 0, &bytes).expect("an answer").expect("written");
    assert_eq!(far.read(&file, 0, 1 << 20).expect("an answer"), Ok(bytes.clone()));
    let libnfs = Libnfs { nfs: proxy.address(), mount: mount.address(), export: "/export".to_owned() };
    assert_eq!(libnfs.cat("file"), bytes);
}

#[test]
fn a_cut_ends_every_connection_and_new_ones_are_carried() {
    let mut scene = Scene::new();
    for (end, error) in [(End::Fin, ErrorKind::UnexpectedEof), (End::Rst, ErrorKind::ConnectionReset)] {
        let mut callers = [scene.new_far(), scene.new_far()];
        for caller in &mut callers {
            caller.getattr(&scene.root).expect("an answer").expect("attributes");
        }
        scene.proxy.cut(end);
        for mut caller in callers {
            assert_eq!(caller.receive().map_err(|error| error.kind()), Err(error), "{end:?}");
        }
        scene.new_far().getattr(&scene.root).expect("an answer").expect("attributes");
    }
    scene.near.getattr(&scene.root).expect("the server has lost nothing").expect("attributes");
}

#[test]
fn delayed_replies_come_late_and_whole() {
    let Scene { server: _server, proxy, mut near, mut far, root, .. } = Scene::new();
    proxy.delay(Duration::from_millis(1));
    far.getattr(&root).expect("an answer").expect("attributes");
    proxy.disturb(Direction::Replies, |replies| replies.delay = Duration::from_secs(3600));
    far.send(&null(1)).expect("sent");
    eventually("the server has answered", || proxy.traffic().replies == 2);
    near.getattr(&root).expect("an answer").expect("attributes");
    assert!(!far.has_reply());
}

#[test]
fn a_frozen_network_accepts_and_carries_nothing_until_it_thaws() {
    let mut scene = Scene::new();
    scene.far.getattr(&scene.root).expect("an answer").expect("attributes");
    scene.proxy.forget();
    scene.proxy.freeze();
    let mut new = scene.new_far();
    for caller in [&mut new, &mut scene.far] {
        caller.send(&null(1)).expect("sent");
    }
    scene.near.getattr(&scene.root).expect("an answer").expect("attributes");
    // Between two orders, the proxy's thread has looked at all sockets once.
    scene.proxy.traffic();
    let traffic = scene.proxy.traffic();
    assert_eq!((traffic.ports.len(), traffic.calls.len()), (0, 0));
    assert!(!new.has_reply() && !scene.far.has_reply());
    scene.proxy.thaw();
    assert_eq!((next_xid(&mut new), next_xid(&mut scene.far)), (1, 1));
}

#[test]
fn a_network_that_refuses_keeps_what_is_there() {
    let mut scene = Scene::new();
    scene.far.getattr(&scene.root).expect("an answer").expect("attributes");
    scene.proxy.refuse();
    let refused = Caller::connect(scene.proxy.address()).map(drop).map_err(|error| error.kind());
    assert_eq!(refused, Err(ErrorKind::ConnectionRefused));
    scene.far.getattr(&scene.root).expect("an answer").expect("attributes");
    scene.proxy.accept();
    scene.new_far().getattr(&scene.root).expect("an answer").expect("attributes");
}

#[test]
fn a_reply_is_truncated_or_lost_with_its_connection_and_the_effect_stays() {
    let scene = Scene::new();
    for (name, count, end) in [("half", 30, End::Fin), ("lost", 0, End::Rst)] {
        let mut far = scene.new_far();
        scene.proxy.disturb(Direction::Replies, move |replies| {
            (replies.only, replies.truncate) = (Some(MKDIR), Some((count, end)));
        });
        far.getattr(&scene.root).expect("another procedure").expect("attributes");
        far.mkdir(&scene.root, name).expect_err("the connection has ended");
        assert!(scene.server.exported().join(name).is_dir());
        assert_eq!(scene.new_far().mkdir(&scene.root, name).expect("an answer"), Err(EXIST));
    }
}

#[test]
fn a_call_that_is_lost_has_no_effect() {
    let Scene { server, proxy, mut far, root, .. } = Scene::new();
    proxy.disturb(Direction::Calls, |calls| calls.truncate = Some((60, End::Fin)));
    far.mkdir(&root, "lost").expect_err("the connection has ended");
    assert!(!server.exported().join("lost").exists());
}

#[test]
fn replies_come_in_the_opposite_order_and_none_is_held_for_ever() {
    // The scripted server answers the calls of a connection in their order; ganesha answers concurrent calls in any
    // order.
    let server = Scripted::start();
    let proxy = Proxy::start(server.address());
    let mut far = Caller::connect(proxy.address()).expect("connected");
    proxy.disturb(Direction::Replies, |replies| replies.reverse = 2);
    // Both calls are sent with one write, so that the proxy gets both replies before it releases the first.
    let both: Vec<u8> = [1, 2].into_iter().flat_map(|xid| crate::nfs_rig::rpc::framed(&null(xid))).collect();
    std::io::Write::write_all(&mut far.stream(), &both).expect("sent");
    let first = next_xid(&mut far);
    assert_eq!((first, next_xid(&mut far)), (2, 1));
    far.send(&null(3)).expect("sent");
    assert_eq!(next_xid(&mut far), 3);
}

#[test]
fn replies_disappear_and_come_twice() {
    let Scene { server: _server, proxy, mut far, .. } = Scene::new();
    proxy.disturb(Direction::Replies, |replies| (replies.lose, replies.repeat) = (1, 1));
    for xid in 1..=3 {
        far.send(&null(xid)).expect("sent");
        eventually("the server has answered", || proxy.traffic().replies == xid as usize);
    }
    assert_eq!([next_xid(&mut far), next_xid(&mut far), next_xid(&mut far)], [2, 2, 3]);
}

#[test]
fn replies_come_in_fragments_and_in_pieces() {
    let Scene { server: _server, proxy, mut far, root, .. } = Scene::new();
    let whole = far.getattr(&root).expect("an answer").expect("attributes");
    proxy.disturb(Direction::Replies, |replies| replies.fragments = Some(10));
    assert_eq!(far.getattr(&root).expect("an answer"), Ok(whole.clone()));
    far.send(&null(1)).expect("sent");
    let mut reply = [0; 4 + 10 + 4 + 10 + 4 + 4];
    far.stream().read_exact(&mut reply).expect("a reply");
    assert_eq!([&reply[..4], &reply[14..18], &reply[28..32]], [[0, 0, 0, 10], [0, 0, 0, 10], [0x80, 0, 0, 4]]);

    proxy.disturb(Direction::Replies, |replies| (replies.fragments, replies.pieces) = (None, Some(1)));
    assert_eq!(far.getattr(&root).expect("an answer"), Ok(whole));
    eventually("a reply comes in more than one piece", || {
        far.send(&null(2)).expect("sent");
        let mut reply = [0; 28];
        let first = far.stream().read(&mut reply).expect("a piece");
        far.stream().read_exact(&mut reply[first..]).expect("the other pieces");
        first < reply.len()
    });
}

#[test]
fn the_network_records_repeated_calls_and_their_ports() {
    let scene = Scene::new();
    let mut callers = [scene.new_far(), scene.new_far()];
    let ports: Vec<_> = callers.iter().map(Caller::local_port).collect();
    for caller in &mut callers {
        caller.send(&null(7)).expect("sent");
        assert_eq!(next_xid(caller), 7);
    }
    let traffic = scene.proxy.traffic();
    assert_eq!((&traffic.ports[traffic.ports.len() - 2..], traffic.calls.len(), traffic.replies), (&*ports, 2, 2));
    assert_eq!((traffic.retransmissions(), traffic.altered()), (1, Vec::new()));
    let altered = Call { procedure: 1, ..Call::read(&null(7)).expect("a call") };
    callers[0].send(&altered.write()).expect("sent");
    eventually("the proxy has the third call", || scene.proxy.traffic().calls.len() == 3);
    let altered = scene.proxy.traffic().altered();
    assert_eq!(altered.iter().map(|call| (call.procedure, call.port)).collect::<Vec<_>>(), [(1, ports[0])]);
}

#[test]
fn a_network_leads_to_another_server() {
    let mut scene = Scene::new();
    scene.far.mkdir(&scene.root, "on-the-first").expect("an answer").expect("made");
    let second = Ganesha::start();
    let (_, root) = connect(&second);
    scene.proxy.redirect(second.address());
    scene.server.kill();
    scene.far.getattr(&root).expect_err("the connection has ended");
    scene.new_far().mkdir(&root, "on-the-second").expect("an answer").expect("made");
    let has = |server: &Ganesha, name| server.exported().join(name).exists();
    assert!(has(&scene.server, "on-the-first") && !has(&scene.server, "on-the-second"));
    assert!(!has(&second, "on-the-first") && has(&second, "on-the-second"));
}

#[test]
fn a_server_is_reached_by_another_version_of_the_internet_protocol() {
    let loopback = IpAddr::from(Ipv6Addr::LOCALHOST);
    if TcpListener::bind((loopback, 0)).is_err() {
        return;
    }
    let server = Ganesha::start();
    let proxy = Proxy::start_at(loopback, server.address());
    let (_, root) = connect(&server);
    let mut far = Caller::connect(proxy.address()).expect("connected");
    far.getattr(&root).expect("an answer").expect("attributes");
}
