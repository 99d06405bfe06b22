//! Servers die, stop and come back, and connections break: callers get errors only if they mounted `soft`.

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

use crate::client::{export, export_with, how, request, run};
use crate::nfs_rig::proxy::{Direction, End};
use crate::nfs_rig::{Ganesha, Proxy, TIMEOUT, eventually};

const MKDIR: u32 = 9;
const READ: u32 = 6;

/// The number of concurrent tasks.
const TASKS: u64 = 8;

/// Waits for all.
async fn all<T: 'static>(tasks: impl IntoIterator<Item = JoinHandle<T>>) -> Vec<T> {
    let mut outcomes = Vec::new();
    for task in tasks {
        outcomes.push(task.await.expect("the task does not panic"));
    }
    outcomes
}

/// A policy under which a call is sent again soon, and waits for ever.
fn impatient() -> Policy {
    Policy { timeo: Duration::from_millis(100), ..Policy::default() }
}

/// The export as it is seen through `proxy`.
async fn through(proxy: &Proxy, server: &Ganesha, policy: Policy) -> Rc<Export> {
    let port = Some(proxy.address().port());
    export_with(server, |request| {
        request.port = port;
        request.policy = policy;
    })
    .await
    .expect("it is mounted")
}

/// A new file with `data` in it.
async fn file_with(export: &Export, name: &str, data: &Slice) -> NfsFileHandle {
    let creation = Creation::Unchecked(AttributeChanges::default());
    let created = export.create(how(), &export.root(), name.as_bytes(), &creation).await.expect("made");
    let file = created.handle.expect("ganesha gives handles");
    export.write(how(), &file, 0, data, Stability::FileSync).await.expect("written");
    file
}

/// Data that differs from place to place.
fn data(seed: u64, length: usize) -> Slice {
    (0..length as u64).map(|at| ((at / 7).wrapping_mul(seed | 1) >> 3) as u8).collect::<Vec<_>>().into()
}

#[test]
fn a_storm_of_calls_sees_no_error_when_the_server_is_killed_again_and_again() {
    let mut server = Ganesha::start();
    let done = AtomicUsize::new(0);
    let (request, exported) = (request(&server), server.exported());
    thread::scope(|scope| {
        let done = &done;
        let killer = scope.spawn(move || {
            let goes_on = || {
                let before = done.load(Ordering::Relaxed);
                eventually("the storm goes on", || done.load(Ordering::Relaxed) > before + 400);
            };
            for _ in 0..5 {
                goes_on();
                server.restart();
            }
            goes_on();
            // It has to be there until the storm ends.
            server
        });
        run(async move {
            let servers = Servers::default();
            let export = Rc::new(podfs_nfs::mount::mount(&servers, &request).await.expect("it is mounted"));
            // A reference cannot outlive the scope, which a local task could.
            let count = Rc::new(Cell::new(0));
            let storm = (0..TASKS).map(|task| spawn_local(storm(Rc::clone(&export), task, Rc::clone(&count))));
            let storm: Vec<_> = storm.collect();
            while !killer.is_finished() {
                tokio::task::yield_now().await;
                done.store(count.get(), Ordering::Relaxed);
            }
            let _server = killer.join().expect("the storm went on each time");
            count.set(usize::MAX);
            let made: u64 = all(storm).await.into_iter().sum();
            assert_eq!(fs::read_dir(exported).expect("a directory").count() as u64, made);
            let health = export.server().health();
            assert!(health.reconnects >= 5, "{health:?}");
            assert_eq!(health.in_flight, 0);
        });
    });
}

/// Makes directories and files until `count` says that it is enough. Answers how many there are.
async fn storm(export: Rc<Export>, task: u64, count: Rc<Cell<usize>>) -> u64 {
    let (root, creation) = (export.root(), Creation::Exclusive(task.to_be_bytes()));
    let mut made = 0;
    while count.get() < usize::MAX {
        let name = format!("{task}-{made}");
        let directory = format!("dir-{name}");
        is_made(export.mkdir(how(), &root, directory.as_bytes(), &AttributeChanges::default()).await);
        let file = format!("file-{name}");
        is_made(export.create(how(), &root, file.as_bytes(), &creation).await);
        let file = export.lookup(how(), &root, file.as_bytes()).await.expect("found").handle;
        let content = data(made, 3000);
        export.write(how(), &file, 0, &content, Stability::FileSync).await.expect("written");
        assert_eq!(*export.read(how(), &file, 0, 3000).await.expect("read").data, *content);
        made += 1;
        if count.get() < usize::MAX {
            count.set(count.get() + 5);
        }
    }
    2 * made
}

/// It is there now. A server that was killed has forgotten that it has made a directory; and ganesha writes the number
/// down by which it knows the maker of a file after it has made the file.
fn is_made(outcome: Result<CreateReply, Error>) {
    if let Err(error) = outcome {
        assert!(error.status() == Some(NfsStatus::EXIST) && error.is_retransmitted(), "{error}");
    }
}

#[test]
fn a_call_waits_for_a_stopped_server_and_continues_with_it() {
    let server = Ganesha::start();
    run(async {
        let export = export_with(&server, |request| request.policy = impatient()).await.expect("it is mounted");
        server.stop();
        let task = spawn_local({
            let export = Rc::clone(&export);
            async move { export.getattr(how(), &export.root()).await }
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
        let export = export_with(&server, |request| request.policy = soft).await.expect("it is mounted");
        server.stop();
        let began = std::time::Instant::now();
        assert_eq!(export.getattr(how(), &export.root()).await.expect_err("no answer").errno(), Errno::IO);
        assert!(began.elapsed() >= soft.budget());
        let softerr = Policy { persistence: Persistence::SoftErr, ..soft };
        let softerr = CallOptions { policy: Some(softerr), ..how() };
        assert_eq!(export.getattr(softerr, &export.root()).await.expect_err("no answer").errno(), Errno::TIMEDOUT);
        server.cont();
        let hard = CallOptions { policy: Some(Policy::default()), ..how() };
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
            async move { export.getattr(how(), &export.root()).await.map(|_| ()) }
        });
        while export.server().health().in_flight == 0 {
            tokio::task::yield_now().await;
        }
        task.abort();
        assert!(task.await.expect_err("it was taken back").is_cancelled());
        assert_eq!(export.server().health().in_flight, 0);
        server.cont();
        export.getattr(how(), &export.root()).await.expect("attributes; the answer to the other is ignored");
    });
}

#[test]
fn an_idle_connection_that_is_closed_is_made_again_from_the_same_port() {
    let server = Ganesha::start();
    let proxy = Proxy::start(server.address());
    run(async {
        let export = through(&proxy, &server, Policy::default()).await;
        for end in [End::Fin, End::Rst] {
            export.getattr(how(), &export.root()).await.expect("attributes");
            proxy.cut(end);
            while export.server().health().connected > 0 {
                tokio::task::yield_now().await;
            }
            assert_eq!(proxy.connections(), 0, "there is nothing to ask");
        }
        export.getattr(how(), &export.root()).await.expect("attributes");
        let seen = proxy.seen();
        assert_eq!(seen.ports.len(), 3);
        assert!(seen.ports.iter().all(|port| *port == seen.ports[0] && *port < 1024), "{:?}", seen.ports);
        assert_eq!((seen.retransmissions(), export.server().health().reconnects), (0, 2));
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
        .expect("it is mounted");
        export.getattr(how(), &export.root()).await.expect("attributes");
        nfs.cut(End::Rst);
        export.getattr(how(), &export.root()).await.expect("attributes");
        let ports = nfs.seen().ports;
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
                        let read = export.read(how(), &file, task * 1000, 1 << 20).await.expect("read");
                        assert!(*read.data == content[task as usize * 1000..]);
                        export.write(how(), &file, 0, &content, Stability::Unstable).await.expect("written").count
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
        let seen = proxy.seen();
        assert!(seen.retransmissions() > 0 && seen.altered().is_empty());
        assert!(seen.ports.iter().all(|port| *port == seen.ports[0]), "{:?}", seen.ports);
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
                    let read = export.read(how(), &file, offset as u64, count as u32).await.expect("read");
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
        export.mkdir(how(), &export.root(), b"dir", &AttributeChanges::default()).await.expect("the server remembers");
        let seen = proxy.seen();
        assert!(seen.retransmissions() >= 1 && seen.altered().is_empty());
        assert!(export.server().health().retransmissions >= 1);
    });
}

/// A directory is made, and made again by a successor with the same xid, from the same port if `same`.
fn made_twice(server: &Ganesha, name: &str, same: bool) -> Result<(), Error> {
    let xid = Cell::new(None);
    let (ports, root, limits) = run(async {
        let export = export(server).await;
        let announce = |number| xid.set(Some(number));
        let how = CallOptions { announce: Some(&announce), ..how() };
        export.mkdir(how, &export.root(), name.as_bytes(), &AttributeChanges::default()).await.expect("made");
        (export.server().local_ports(), export.root(), export.limits())
    });
    let (xid, address) = (xid.get(), server.address());
    run(async move {
        // Another port is one above 1023, which the first was not.
        let server = Servers::default().server("the-server", address, same);
        if same {
            server.inherit_ports(&ports);
        }
        let export = Export::new(server, root, limits, Policy::default(), 1);
        let again = CallOptions { again: xid, ..how() };
        let outcome = export.mkdir(again, &root, name.as_bytes(), &AttributeChanges::default()).await;
        assert_eq!(export.server().local_ports() == ports, same);
        outcome.map(|_| ())
    })
}

#[test]
fn a_successor_is_answered_from_the_servers_memory() {
    let server = Ganesha::start();
    let elsewhere = made_twice(&server, "elsewhere", false).expect_err("the server takes it for another client");
    assert!(elsewhere.status() == Some(NfsStatus::EXIST) && elsewhere.is_retransmitted(), "{elsewhere}");
    let outcomes: Vec<_> = (0..10).map(|round| made_twice(&server, &format!("dir-{round}"), true)).collect();
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
        second.getattr(how(), &second.root()).await.expect("attributes");
        assert_ne!(other.local_ports(), ports);
        first.getattr(how(), &first.root()).await.expect("attributes");
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
        // Handles of ganesha are made of the export's number and the file's; the root's is another one there.
        let elsewhere = export_with(&second, |_| {}).await.expect("it is mounted");
        export.lookup(how(), &elsewhere.root(), b"here").await.expect("found");
    });
}

#[test]
fn a_waiting_call_continues_at_once_at_the_servers_new_address() {
    let (mut first, second) = (Ganesha::start(), Ganesha::start());
    run(async {
        let export = export(&first).await;
        let ports = export.server().local_ports();
        // A connection on which nothing comes, and one that is not made.
        for gone in [false, true] {
            if gone {
                first.kill()
            } else {
                first.stop()
            }
            export.server().move_to(first.address());
            let waits = spawn_local({
                let export = Rc::clone(&export);
                async move { export.null(how()).await }
            });
            while export.server().health().in_flight == 0 || gone && export.server().health().failed_attempts < 4 {
                tokio::task::yield_now().await;
            }
            export.server().move_to(second.address());
            waits.await.expect("no panic").expect("answered");
        }
        assert_eq!(export.server().local_ports(), ports, "it comes from the same port");
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
            async move { export.getattr(how(), &export.root()).await.map(|_| ()) }
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
