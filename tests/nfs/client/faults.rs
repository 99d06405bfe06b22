//! NFS servers that are killed, stopped and restarted, and connections that break: callers get errors only with the
//! mount option `soft`.

use std::cell::Cell;
use std::fs;
use std::net::Ipv6Addr;
use std::rc::Rc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;
use std::time::Duration;

use podfs_nfs::rpc::{Persistence, Policy, Slice};
use podfs_nfs::server::Servers;
use podfs_nfs::v3::{AttributeChanges, CreateReply, Creation, NfsFileHandle, NfsStatus, Stability};
use podfs_nfs::{CallOptions, Error, Export};
use rustix::io::Errno;
use tokio::task::{JoinHandle, spawn_local};

use crate::client::{as_root, export, export_with, request, run};
use crate::nfs_rig::proxy::{Direction, End};
use crate::nfs_rig::{Ganesha, Proxy, TIMEOUT, eventually};

const MKDIR: u32 = 9;
const READ: u32 = 6;

/// The number of concurrent tasks.
const TASKS: u64 = 8;

/// Waits for all tasks.
async fn all<T: 'static>(tasks: impl IntoIterator<Item = JoinHandle<T>>) -> Vec<T> {
    let mut outcomes = Vec::new();
    for task in tasks {
        outcomes.push(task.await.expect("the task does not panic"));
    }
    outcomes
}

/// A policy under which the client soon sends a call again, and waits for its reply without limit.
fn impatient() -> Policy {
    Policy { timeo: Duration::from_millis(100), ..Policy::default() }
}

/// The export of `server`, mounted through `proxy`.
async fn through(proxy: &Proxy, server: &Ganesha, policy: Policy) -> Rc<Export> {
    let port = Some(proxy.address().port());
    export_with(server, |request| {
        request.port = port;
        request.policy = policy;
    })
    .await
    .expect("the export is mounted")
}

/// A new file that contains `data`.
async fn file_with(export: &Export, name: &str, data: &Slice) -> NfsFileHandle {
    let creation = Creation::Unchecked(AttributeChanges::default());
    let created = export.create(as_root(), &export.root(), name.as_bytes(), &creation).await.expect("created");
    let file = created.handle.expect("ganesha sends handles");
    export.write(as_root(), &file, 0, data, Stability::FileSync).await.expect("written");
    file
}

/// Data that differs at each offset and for each seed.
fn data(seed: u64, length: usize) -> Slice {
    (0..length as u64).map(|offset| ((offset / 7).wrapping_mul(seed | 1) >> 3) as u8).collect::<Vec<_>>().into()
}

#[test]
fn a_storm_of_calls_sees_no_error_when_the_server_is_killed_again_and_again() {
    let mut server = Ganesha::start();
    let call_count = AtomicUsize::new(0);
    let (request, exported) = (request(&server), server.exported());
    thread::scope(|scope| {
        let call_count = &call_count;
        let killer = scope.spawn(move || {
            let wait_for_calls = || {
                let before = call_count.load(Ordering::Relaxed);
                eventually("the storm goes on", || call_count.load(Ordering::Relaxed) > before + 400);
            };
            for _ in 0..5 {
                wait_for_calls();
                server.restart();
            }
            wait_for_calls();
            // The server has to run until the storm ends.
            server
        });
        run(async move {
            let servers = Servers::default();
            let mounted = podfs_nfs::mount::mount(&servers, &request).await;
            let export = Rc::new(mounted.expect("the export is mounted"));
            // The local tasks cannot borrow `call_count`, because a local task may outlive the scope. So they count
            // here.
            let count = Rc::new(Cell::new(0));
            let storm = (0..TASKS).map(|task| spawn_local(storm(Rc::clone(&export), task, Rc::clone(&count))));
            let storm: Vec<_> = storm.collect();
            while !killer.is_finished() {
                tokio::task::yield_now().await;
                call_count.store(count.get(), Ordering::Relaxed);
            }
            let _server = killer.join().expect("the storm went on each time");
            count.set(usize::MAX);
            let created: u64 = all(storm).await.into_iter().sum();
            assert_eq!(fs::read_dir(exported).expect("a directory").count() as u64, created);
            let health = export.server().health();
            assert!(health.reconnects >= 5, "{health:?}");
            assert_eq!(health.in_flight, 0);
        });
    });
}

/// Creates directories and files until `count` has its greatest value, and adds the number of calls to `count`. Returns
/// the number of created directories and files.
async fn storm(export: Rc<Export>, task: u64, count: Rc<Cell<usize>>) -> u64 {
    let (root, creation) = (export.root(), Creation::Exclusive(task.to_be_bytes()));
    let mut rounds = 0;
    while count.get() < usize::MAX {
        let name = format!("{task}-{rounds}");
        let directory = format!("dir-{name}");
        assert_created(export.mkdir(as_root(), &root, directory.as_bytes(), &AttributeChanges::default()).await);
        let file = format!("file-{name}");
        assert_created(export.create(as_root(), &root, file.as_bytes(), &creation).await);
        let file = export.lookup(as_root(), &root, file.as_bytes()).await.expect("found").handle;
        let content = data(rounds, 3000);
        export.write(as_root(), &file, 0, &content, Stability::FileSync).await.expect("written");
        assert_eq!(*export.read(as_root(), &file, 0, 3000).await.expect("read").data, *content);
        rounds += 1;
        if count.get() < usize::MAX {
            count.set(count.get() + 5);
        }
    }
    2 * rounds
}

/// Panics unless the directory or file exists now. The outcome of a repeated call may be `EXIST`: a killed server has
/// forgotten that it has created a directory; and ganesha stores the verifier of an exclusive CREATE only after it has
/// created the file.
fn assert_created(outcome: Result<CreateReply, Error>) {
    if let Err(error) = outcome {
        assert!(error.status() == Some(NfsStatus::EXIST) && error.is_retransmitted(), "{error}");
    }
}

#[test]
fn a_call_waits_for_a_stopped_server_and_continues_with_it() {
    let server = Ganesha::start();
    run(async {
        let export = export_with(&server, |request| request.policy = impatient()).await.expect("the export is mounted");
        server.stop();
        let task = spawn_local({
            let export = Rc::clone(&export);
            async move { export.getattr(as_root(), &export.root()).await }
        });
        while !export.server().health().gone {
            tokio::task::yield_now().await;
        }
        let health = export.server().health();
        assert!(health.silent >= Duration::from_millis(100) && health.in_flight == 1, "{health:?}");
        server.cont();
        task.await.expect("no panic").expect("attributes");
        let health = export.server().health();
        assert!(!health.gone && health.silent.is_zero(), "{health:?}");
    });
}

#[test]
fn soft_calls_end_when_their_time_is_over() {
    let server = Ganesha::start();
    run(async {
        let soft = Policy { persistence: Persistence::Soft, timeo: Duration::from_millis(100), ..Policy::default() };
        let export = export_with(&server, |request| request.policy = soft).await.expect("the export is mounted");
        server.stop();
        let began = std::time::Instant::now();
        assert_eq!(export.getattr(as_root(), &export.root()).await.expect_err("no answer").errno(), Errno::IO);
        assert!(began.elapsed() >= soft.budget());
        let softerr = Policy { persistence: Persistence::SoftErr, ..soft };
        let softerr = CallOptions { policy: Some(softerr), ..as_root() };
        assert_eq!(export.getattr(softerr, &export.root()).await.expect_err("no answer").errno(), Errno::TIMEDOUT);
        server.cont();
        let hard = CallOptions { policy: Some(Policy::default()), ..as_root() };
        export.getattr(hard, &export.root()).await.expect("attributes");
    });
}

#[test]
fn a_call_that_is_dropped_is_forgotten() {
    let server = Ganesha::start();
    run(async {
        let export = export(&server).await;
        server.stop();
        let task = spawn_local({
            let export = Rc::clone(&export);
            async move { export.getattr(as_root(), &export.root()).await.map(|_| ()) }
        });
        while export.server().health().in_flight == 0 {
            tokio::task::yield_now().await;
        }
        task.abort();
        assert!(task.await.expect_err("the task was aborted").is_cancelled());
        assert_eq!(export.server().health().in_flight, 0);
        server.cont();
        export
            .getattr(as_root(), &export.root())
            .await
            .expect("attributes; the client ignores the reply to the dropped call");
    });
}

#[test]
fn an_idle_connection_that_is_closed_is_made_again_from_the_same_port() {
    let server = Ganesha::start();
    let proxy = Proxy::start(server.address());
    run(async {
        let export = through(&proxy, &server, Policy::default()).await;
        for end in [End::Fin, End::Rst] {
            export.getattr(as_root(), &export.root()).await.expect("attributes");
            proxy.cut(end);
            while export.server().health().connected > 0 {
                tokio::task::yield_now().await;
            }
            assert_eq!(proxy.connections(), 0, "without a call, the client makes no connection");
        }
        export.getattr(as_root(), &export.root()).await.expect("attributes");
        let traffic = proxy.traffic();
        assert_eq!(traffic.ports.len(), 3);
        assert!(traffic.ports.iter().all(|port| *port == traffic.ports[0] && *port < 1024), "{:?}", traffic.ports);
        assert_eq!((traffic.retransmissions(), export.server().health().reconnects), (0, 2));
    });
}

#[test]
fn servers_are_reached_by_the_sixth_version_of_ip() {
    let server = Ganesha::start();
    let (nfs, mountd) =
        [server.address(), server.mount_address()].map(|to| Proxy::start_at(Ipv6Addr::LOCALHOST.into(), to)).into();
    run(async {
        let export = export_with(&server, |request| {
            request.address = Ipv6Addr::LOCALHOST.into();
            (request.port, request.mount_port) = (Some(nfs.address().port()), Some(mountd.address().port()));
        })
        .await
        .expect("the export is mounted");
        export.getattr(as_root(), &export.root()).await.expect("attributes");
        nfs.cut(End::Rst);
        export.getattr(as_root(), &export.root()).await.expect("attributes");
        let ports = nfs.traffic().ports;
        assert!(ports.len() == 2 && ports[0] == ports[1] && ports[0] < 1024, "{ports:?}");
    });
}

#[test]
fn calls_that_are_cut_off_are_sent_again_as_they_were() {
    let server = Ganesha::start();
    let proxy = Proxy::start(server.address());
    run(async {
        let export = through(&proxy, &server, Policy::default()).await;
        let content = data(3, 1 << 20);
        let file = file_with(&export, "file", &content).await;
        for round in 0..20 {
            let tasks: Vec<_> = (0..TASKS)
                .map(|task| {
                    let (export, content) = (Rc::clone(&export), content.clone());
                    spawn_local(async move {
                        let read = export.read(as_root(), &file, task * 1000, 1 << 20).await.expect("read");
                        assert!(*read.data == content[task as usize * 1000..]);
                        export.write(as_root(), &file, 0, &content, Stability::Unstable).await.expect("written").count
                    })
                })
                .collect();
            while export.server().health().in_flight == 0 {
                tokio::task::yield_now().await;
            }
            match round % 4 {
                0 => proxy.cut(End::Fin),
                1 => proxy.cut(End::Rst),
                2 => proxy.disturb(Direction::Replies, |replies| replies.truncate = Some((500_000, End::Fin))),
                _ => proxy.disturb(Direction::Calls, |calls| calls.truncate = Some((500_000, End::Rst))),
            }
            assert!(all(tasks).await.iter().all(|count| *count == 1 << 20));
        }
        let traffic = proxy.traffic();
        assert!(traffic.retransmissions() > 0 && traffic.altered().is_empty());
        assert!(traffic.ports.iter().all(|port| *port == traffic.ports[0]), "{:?}", traffic.ports);
    });
}

#[test]
fn replies_come_in_any_order_and_in_any_pieces() {
    let server = Ganesha::start();
    let proxy = Proxy::start(server.address());
    run(async {
        let export = through(&proxy, &server, Policy::default()).await;
        let content = data(5, 200_000);
        let file = file_with(&export, "file", &content).await;
        let read_all = async || {
            let tasks = (0..TASKS).map(|task| {
                let (export, content) = (Rc::clone(&export), content.clone());
                spawn_local(async move {
                    let (offset, count) = (task as usize * 10_000, 100_000);
                    let read = export.read(as_root(), &file, offset as u64, count as u32).await.expect("read");
                    assert!(*read.data == content[offset..offset + count]);
                })
            });
            all(tasks.collect::<Vec<_>>()).await;
        };
        proxy.disturb(Direction::Replies, |replies| replies.reverse = 4);
        read_all().await;
        proxy.disturb(Direction::Replies, |replies| (replies.reverse, replies.fragments) = (0, Some(1000)));
        read_all().await;
        proxy.disturb(Direction::Replies, |replies| (replies.fragments, replies.pieces) = (Some(3000), Some(1111)));
        read_all().await;
        proxy.disturb(Direction::Replies, |replies| {
            (replies.fragments, replies.pieces, replies.only, replies.repeat) = (None, None, Some(READ), 5);
        });
        read_all().await;
        let health = export.server().health();
        assert_eq!((health.reconnects, health.retransmissions), (0, 0));
    });
}

#[test]
fn a_directory_whose_reply_is_lost_is_made_once() {
    let server = Ganesha::start();
    let proxy = Proxy::start(server.address());
    run(async {
        let export = through(&proxy, &server, impatient()).await;
        proxy.disturb(Direction::Replies, |replies| (replies.only, replies.lose) = (Some(MKDIR), 1));
        export
            .mkdir(as_root(), &export.root(), b"dir", &AttributeChanges::default())
            .await
            .expect("the server remembers");
        let traffic = proxy.traffic();
        assert!(traffic.retransmissions() >= 1 && traffic.altered().is_empty());
        assert!(export.server().health().retransmissions >= 1);
    });
}

/// Creates a directory, and creates it again as a successor of the client, with the same xid, and if `same_port` from
/// the same port. Returns the outcome of the second call.
fn create_twice(server: &Ganesha, name: &str, same_port: bool) -> Result<(), Error> {
    let xid = Cell::new(None);
    let (ports, root, limits) = run(async {
        let export = export(server).await;
        let announce = |number| xid.set(Some(number));
        let options = CallOptions { announce: Some(&announce), ..as_root() };
        export.mkdir(options, &export.root(), name.as_bytes(), &AttributeChanges::default()).await.expect("created");
        (export.server().local_ports(), export.root(), export.limits())
    });
    let (xid, address) = (xid.get(), server.address());
    run(async move {
        // Another port is a port above 1023: the first client's port is below.
        let server = Servers::default().server("the-server", address, same_port);
        if same_port {
            server.inherit_ports(&ports);
        }
        let export = Export::new(server, root, limits, Policy::default(), 1);
        let again = CallOptions { earlier_xid: xid, ..as_root() };
        let outcome = export.mkdir(again, &root, name.as_bytes(), &AttributeChanges::default()).await;
        assert_eq!(export.server().local_ports() == ports, same_port);
        outcome.map(|_| ())
    })
}

#[test]
fn a_successor_is_answered_from_the_servers_memory() {
    let server = Ganesha::start();
    let error = create_twice(&server, "elsewhere", false).expect_err("the server takes it for another client");
    assert!(error.status() == Some(NfsStatus::EXIST) && error.is_retransmitted(), "{error}");
    let outcomes: Vec<_> = (0..10).map(|round| create_twice(&server, &format!("dir-{round}"), true)).collect();
    assert!(outcomes.iter().all(Result::is_ok), "{outcomes:?}");
}

#[test]
fn a_port_from_which_the_server_is_reached_already_is_left_alone() {
    let server = Ganesha::start();
    run(async {
        let first = export(&server).await;
        let ports = first.server().local_ports();
        let other = Servers::default().server("the-server", server.address(), true);
        other.inherit_ports(&ports);
        let second = Export::new(Rc::clone(&other), first.root(), first.limits(), Policy::default(), 1);
        second.getattr(as_root(), &second.root()).await.expect("attributes");
        assert_ne!(other.local_ports(), ports);
        first.getattr(as_root(), &first.root()).await.expect("attributes");
        assert_eq!(first.server().health().reconnects, 0);
    });
}

#[test]
fn a_server_that_has_moved_is_found_where_it_is_now() {
    let (first, second) = (Ganesha::start(), Ganesha::start());
    fs::write(second.exported().join("here"), "").expect("written");
    let proxy = Proxy::start(first.address());
    run(async {
        let export = through(&proxy, &first, Policy::default()).await;
        export.server().move_to(second.address());
        proxy.cut(End::Rst);
        proxy.refuse();
        while export.server().health().connected > 0 {
            tokio::task::yield_now().await;
        }
        // The second server's root has another handle: ganesha makes handles of the numbers of the export and of the
        // file.
        let on_second = export_with(&second, |_| {}).await.expect("the export is mounted");
        export.lookup(as_root(), &on_second.root(), b"here").await.expect("found");
    });
}

#[test]
fn a_waiting_call_continues_at_once_at_the_servers_new_address() {
    let (mut first, second) = (Ganesha::start(), Ganesha::start());
    run(async {
        let export = export(&first).await;
        let ports = export.server().local_ports();
        // First a connection on which no reply comes, then a connection that fails.
        for killed in [false, true] {
            if killed {
                first.kill()
            } else {
                first.stop()
            }
            export.server().move_to(first.address());
            let waiting_call = spawn_local({
                let export = Rc::clone(&export);
                async move { export.null(as_root()).await }
            });
            while export.server().health().in_flight == 0 || killed && export.server().health().failed_attempts < 4 {
                tokio::task::yield_now().await;
            }
            export.server().move_to(second.address());
            waiting_call.await.expect("no panic").expect("answered");
        }
        assert_eq!(export.server().local_ports(), ports, "the client uses the same port");
    });
}

#[test]
fn a_call_waits_for_an_unreachable_server() {
    let mut server = Ganesha::start();
    run(async {
        let export = export(&server).await;
        server.kill();
        let task = spawn_local({
            let export = Rc::clone(&export);
            async move { export.getattr(as_root(), &export.root()).await.map(|_| ()) }
        });
        let began = std::time::Instant::now();
        while export.server().health().failed_attempts < 2 {
            assert!(began.elapsed() < TIMEOUT);
            tokio::task::yield_now().await;
        }
        server.restart();
        task.await.expect("no panic").expect("attributes");
    });
}
