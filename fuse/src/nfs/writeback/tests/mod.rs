//! Writeback against a server in memory that loses uncommitted data when it restarts.

mod server;

use std::collections::HashMap;
use std::future::Future;
use std::rc::Rc;

use proptest::prelude::*;
use rustix::io::Errno;
use tokio::runtime::Builder;
use tokio::task::{LocalSet, spawn_local, yield_now};

use super::log::Log;
use super::{FileKey, Store, WriteParameters, Writeback};
use crate::session::{HandleId, NodeId};
use server::{TestClient, put};

const FILE: FileKey = FileKey { node: NodeId(7), open: HandleId(1) };
const PARAMETERS: WriteParameters = WriteParameters { wsize: 1 << 20, stable: false };

fn log() -> Log {
    Log::create(4).expect("a log")
}

fn start(client: &TestClient, log: Log, parameters: WriteParameters) -> Writeback<TestClient> {
    Writeback::new(log, Vec::new(), client.clone(), parameters)
}

/// Continues with the log of a server whose tasks have ended somewhere.
fn follow(client: &TestClient, log: std::os::fd::OwnedFd, parameters: WriteParameters) -> Writeback<TestClient> {
    let (log, inherited) = Log::adopt(log).expect("a log");
    Writeback::new(log, inherited, client.clone(), parameters)
}

fn file_of<S: Store>(writeback: &Writeback<S>) -> std::os::fd::OwnedFd {
    use std::os::fd::AsFd;
    writeback.as_fd().try_clone_to_owned().expect("a descriptor")
}

fn run<T>(future: impl Future<Output = T>) -> T {
    let runtime = Builder::new_current_thread().enable_time().build().expect("a runtime");
    LocalSet::new().block_on(&runtime, future)
}

async fn settle_down() {
    for _ in 0..200 {
        yield_now().await;
    }
}

#[test]
fn flushed_data_is_on_disk() {
    run(async {
        let client = TestClient::default();
        let writeback = start(&client, log(), PARAMETERS);
        writeback.write(FILE, 0, b"hello ").await.expect("accepted");
        writeback.write(FILE, 6, b"world").await.expect("accepted");
        assert!(client.0.on_disk(NodeId(7)).is_empty());
        writeback.flush(NodeId(7)).await.expect("flushed");
        assert_eq!(client.0.on_disk(NodeId(7)), b"hello world");
        assert!(!writeback.is_dirty(NodeId(7)));
    });
}

#[test]
fn a_write_is_accepted_while_the_server_does_not_answer() {
    run(async {
        let client = TestClient::default();
        client.0.stopped.set(true);
        let writeback = start(&client, log(), PARAMETERS);
        writeback.write(FILE, 0, b"data").await.expect("accepted");
        assert!(
            writeback.overlaps(NodeId(7), 3..4)
                && !writeback.overlaps(NodeId(7), 4..5)
                && !writeback.overlaps(NodeId(8), 0..4)
        );
        client.0.stopped.set(false);
        writeback.settle(NodeId(7)).await;
        assert!(!writeback.overlaps(NodeId(7), 0..4) && writeback.is_dirty(NodeId(7)));
    });
}

#[test]
fn small_writes_that_follow_each_other_become_large_ones() {
    run(async {
        let client = TestClient::default();
        let writeback = start(&client, log(), PARAMETERS);
        client.0.stopped.set(true);
        for number in 0..1000 {
            writeback.write(FILE, number * 100, &[number as u8; 100]).await.expect("accepted");
        }
        client.0.stopped.set(false);
        writeback.flush(NodeId(7)).await.expect("flushed");
        // Two WRITEs are in flight, and the third record grows.
        assert_eq!(client.0.writes.get(), 3);
        let expected: Vec<u8> = (0..1000).flat_map(|number| [number as u8; 100]).collect();
        assert_eq!(client.0.on_disk(NodeId(7)), expected);
    });
}

#[test]
fn a_server_that_lost_accepted_data_gets_it_again() {
    run(async {
        let client = TestClient::default();
        let writeback = start(&client, log(), PARAMETERS);
        writeback.write(FILE, 0, b"before").await.expect("accepted");
        writeback.settle(NodeId(7)).await;
        client.0.restart();
        writeback.write(FILE, 6, b" after").await.expect("accepted");
        writeback.flush(NodeId(7)).await.expect("flushed");
        assert_eq!(client.0.on_disk(NodeId(7)), b"before after");
    });
}

#[test]
fn after_repeated_losses_the_client_asks_for_stable_writes() {
    run(async {
        let client = TestClient::default();
        client.0.restless.set(true);
        let parameters = WriteParameters { wsize: 5, ..PARAMETERS };
        let writeback = start(&client, log(), parameters);
        writeback.write(FILE, 0, &[1; 100]).await.expect("accepted");
        writeback.write(FILE, 3, &[2; 50]).await.expect("accepted");
        writeback.flush(NodeId(7)).await.expect("flushed");
        let expected = [vec![1; 3], vec![2; 50], vec![1; 47]].concat();
        assert_eq!(client.0.on_disk(NodeId(7)), expected);
        assert!(!writeback.is_dirty(NodeId(7)) && writeback.uncommitted() == 0);
        // Now the server also takes at most 2 bytes of each WRITE.
        client.0.short.set(Some(2));
        writeback.write(FILE, 0, &[3; 100]).await.expect("accepted");
        writeback.flush(NodeId(7)).await.expect("flushed");
        assert_eq!(client.0.on_disk(NodeId(7)), [3; 100]);
    });
}

#[test]
fn a_write_in_parts_is_on_disk_only_if_each_part_is() {
    run(async {
        let client = TestClient::default();
        client.0.short.set(Some(3));
        client.0.stable_from.set(Some(2));
        let writeback = start(&client, log(), PARAMETERS);
        writeback.write(FILE, 0, b"012345").await.expect("accepted");
        writeback.flush(NodeId(7)).await.expect("flushed");
        assert_eq!(client.0.on_disk(NodeId(7)), b"012345");
    });
}

#[test]
fn the_rest_of_a_short_write_is_sent() {
    run(async {
        let client = TestClient::default();
        client.0.short.set(Some(3));
        let writeback = start(&client, log(), PARAMETERS);
        writeback.write(FILE, 0, b"0123456789").await.expect("accepted");
        writeback.flush(NodeId(7)).await.expect("flushed");
        assert_eq!(client.0.on_disk(NodeId(7)), b"0123456789");
        client.0.short.set(Some(0));
        writeback.write(FILE, 0, b"x").await.expect("accepted");
        assert_eq!(writeback.flush(NodeId(7)).await, Err(Errno::IO));
    });
}

#[test]
fn the_next_write_and_the_next_flush_each_return_an_error_once() {
    run(async {
        let client = TestClient::default();
        client.0.error.set(Some(Errno::NOSPC));
        let writeback = start(&client, log(), PARAMETERS);
        writeback.write(FILE, 0, b"lost").await.expect("accepted");
        settle_down().await;
        assert_eq!(writeback.write(FILE, 4, b"refused").await, Err(Errno::NOSPC));
        client.0.error.set(None);
        writeback.write(FILE, 4, b"kept").await.expect("there is room again");
        assert_eq!(client.0.on_disk(NodeId(7)), b"\0\0\0\0kept", "after an error a write waits for its outcome");
        assert_eq!(writeback.flush(NodeId(7)).await, Err(Errno::NOSPC));
        assert_eq!(writeback.flush(NodeId(7)).await, Ok(()));
        assert!(!writeback.is_dirty(NodeId(7)));
    });
}

#[test]
fn each_close_of_an_open_file_returns_the_error_of_its_data_until_an_fsync_has_returned_it() {
    run(async {
        let client = TestClient::default();
        let (other, later) = (FileKey { open: HandleId(2), ..FILE }, FileKey { open: HandleId(3), ..FILE });
        client.0.error.set(Some(Errno::NOSPC));
        let writeback = start(&client, log(), PARAMETERS);
        writeback.write(FILE, 0, b"lost").await.expect("accepted");
        settle_down().await;
        // No close has returned the error: it may be that of data that a process has stored through a mapping.
        assert_eq!(writeback.flush_for_close(other).await, Err(Errno::NOSPC));
        client.0.error.set(None);
        assert_eq!(writeback.flush_for_close(later).await, Ok(()));
        writeback.write(later, 0, b"kept").await.expect("another process");
        for _ in 0..2 {
            assert_eq!(writeback.flush_for_close(FILE).await, Err(Errno::NOSPC));
        }
        assert_eq!(writeback.flush(NodeId(7)).await, Err(Errno::NOSPC));
        assert_eq!(writeback.flush_for_close(FILE).await, Ok(()));
        assert!(!writeback.is_dirty(NodeId(7)));
    });
}

#[test]
fn a_write_gets_the_room_of_errors_if_the_log_has_nothing_else() {
    run(async {
        let client = TestClient::default();
        let writeback = start(&client, Log::create(2).expect("a log"), PARAMETERS);
        let file = |node| FileKey { node: NodeId(node), ..FILE };
        client.0.error.set(Some(Errno::NOSPC));
        for node in 0..2 {
            writeback.write(file(node), 0, &vec![1; 1 << 20]).await.expect("accepted");
        }
        settle_down().await;
        client.0.error.set(None);
        writeback.write(file(2), 0, b"data").await.expect("accepted");
        writeback.flush(NodeId(2)).await.expect("flushed");
        assert_eq!(client.0.on_disk(NodeId(2)), b"data");
        for node in 0..2 {
            assert_eq!(writeback.flush(NodeId(node)).await, Err(Errno::NOSPC), "in memory");
        }
    });
}

#[test]
fn an_unreported_error_survives_the_server() {
    let client = TestClient::default();
    client.0.error.set(Some(Errno::DQUOT));
    let log = run(async {
        let writeback = start(&client, log(), PARAMETERS);
        writeback.write(FILE, 0, b"lost").await.expect("accepted");
        settle_down().await;
        file_of(&writeback)
    });
    client.0.error.set(None);
    run(async {
        let writeback = follow(&client, log, PARAMETERS);
        assert_eq!(writeback.flush(NodeId(7)).await, Err(Errno::DQUOT));
        assert_eq!(writeback.flush(NodeId(7)).await, Ok(()));
    });
}

#[test]
fn a_successor_sends_the_data_that_a_dead_server_had_accepted() {
    let client = TestClient::default();
    client.0.stopped.set(true);
    let log = run(async {
        let writeback = start(&client, log(), PARAMETERS);
        writeback.write(FILE, 0, b"first").await.expect("accepted");
        writeback.write(FileKey { node: NodeId(8), open: HandleId(2) }, 0, b"other").await.expect("accepted");
        file_of(&writeback)
    });
    client.0.stopped.set(false);
    run(async {
        let writeback = follow(&client, log, PARAMETERS);
        writeback.write(FILE, 0, b"first").await.expect("accepted before");
        writeback.flush(NodeId(7)).await.expect("flushed");
        writeback.flush(NodeId(8)).await.expect("flushed");
        assert_eq!((client.0.on_disk(NodeId(7)), client.0.on_disk(NodeId(8))), (b"first".to_vec(), b"other".to_vec()));
    });
}

#[test]
fn a_flush_does_not_wait_for_a_write_to_grow() {
    run(async {
        let client = TestClient::default();
        let writeback = start(&client, log(), PARAMETERS);
        client.0.stopped.set(true);
        for number in 0..3 {
            writeback.write(FILE, number, b"x").await.expect("accepted");
        }
        let flush = spawn_local(async move { writeback.flush(NodeId(7)).await });
        settle_down().await;
        assert_eq!(client.0.received.get(), 3);
        client.0.stopped.set(false);
        flush.await.expect("no panic").expect("flushed");
        assert_eq!(client.0.on_disk(NodeId(7)), b"xxx");
    });
}

#[test]
fn the_log_gives_memory_back_a_while_after_the_last_write() {
    run(async {
        let client = TestClient::default();
        let log = Log::create(20).expect("a log");
        let writeback = start(&client, log, PARAMETERS);
        let file = file_of(&writeback);
        let blocks = || rustix::fs::fstat(&file).expect("a file").st_blocks;
        client.0.stopped.set(true);
        for number in 0..20 {
            writeback.write(FILE, number << 20, &vec![1; 1 << 20]).await.expect("accepted");
        }
        let full = blocks();
        client.0.stopped.set(false);
        writeback.flush(NodeId(7)).await.expect("flushed");
        while blocks() > full / 2 {
            tokio::time::sleep(std::time::Duration::from_millis(20)).await;
        }
        writeback.write(FILE, 0, b"more").await.expect("accepted");
        writeback.flush(NodeId(7)).await.expect("flushed");
    });
}

#[test]
fn a_full_log_is_committed_and_the_writer_waits() {
    run(async {
        let client = TestClient::default();
        let writeback = start(&client, Log::create(2).expect("a log"), PARAMETERS);
        let part = vec![5; 1 << 20];
        for number in 0..20 {
            writeback.write(FILE, number << 20, &part).await.expect("accepted");
            assert!(writeback.uncommitted() <= 2 << 20);
        }
        writeback.flush(NodeId(7)).await.expect("flushed");
        assert_eq!(client.0.on_disk(NodeId(7)).len(), 20 << 20);
    });
}

#[test]
fn a_file_with_much_data_is_committed_before_a_flush() {
    run(async {
        let client = TestClient::default();
        let writeback = start(&client, log(), PARAMETERS);
        writeback.write(FILE, 0, &vec![5; (1 << 20) + 1]).await.expect("accepted");
        settle_down().await;
        assert_eq!((client.0.commits.get(), writeback.uncommitted()), (1, 0));
    });
}

#[test]
fn stable_writes_are_on_disk_when_they_are_answered() {
    run(async {
        let client = TestClient::default();
        let writeback = start(&client, log(), WriteParameters { stable: true, ..PARAMETERS });
        writeback.write(FILE, 0, b"data").await.expect("written");
        assert_eq!((client.0.on_disk(NodeId(7)), client.0.commits.get()), (b"data".to_vec(), 0));
        client.0.error.set(Some(Errno::NOSPC));
        assert_eq!(writeback.write(FILE, 4, b"more").await, Err(Errno::NOSPC));
    });
}

#[test]
fn data_that_is_accepted_before_the_error_of_a_closed_file_is_forgotten_reaches_the_disk() {
    run(async {
        let client = TestClient::default();
        client.0.stopped.set(true);
        let writeback = start(&client, log(), PARAMETERS);
        writeback.write(FILE, 0, b"data").await.expect("accepted");
        settle_down().await;
        writeback.forget_failure(NodeId(7));
        client.0.stopped.set(false);
        writeback.flush(NodeId(7)).await.expect("flushed");
        assert!(!writeback.is_dirty(NodeId(7)));
        assert_eq!(client.0.on_disk(NodeId(7)), b"data");
    });
}

#[test]
fn a_waiting_caller_may_be_cancelled() {
    run(async {
        let client = TestClient::default();
        client.0.stopped.set(true);
        let writeback = Rc::new(start(&client, log(), PARAMETERS));
        writeback.write(FILE, 0, b"data").await.expect("accepted");
        let waiting = Rc::clone(&writeback);
        let task = tokio::task::spawn_local(async move { waiting.flush(NodeId(7)).await });
        settle_down().await;
        task.abort();
        client.0.stopped.set(false);
        writeback.flush(NodeId(7)).await.expect("flushed");
        assert_eq!(client.0.on_disk(NodeId(7)), b"data");
    });
}

/// An event of the property test.
#[derive(Clone, Debug)]
enum Event {
    Write {
        node: NodeId,
        offset: u64,
        length: usize,
    },
    Flush(NodeId),
    /// Time goes by.
    Time(usize),
    /// The server is killed and restarted.
    Restart,
    /// The process is killed, and another one continues.
    Takeover,
}

fn events() -> impl Strategy<Value = Vec<Event>> {
    let event = prop_oneof![
        8 => (7..9u64, 0..2000u64, 1..900usize)
            .prop_map(|(node, offset, length)| Event::Write { node: NodeId(node), offset, length }),
        2 => (7..9u64).prop_map(|node| Event::Flush(NodeId(node))),
        3 => (1..30usize).prop_map(Event::Time),
        1 => Just(Event::Restart),
        1 => Just(Event::Takeover),
    ];
    prop::collection::vec(event, 1..60)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(400))]

    #[test]
    fn the_disk_has_the_last_written_data_after_any_faults(events in events(), chance: u64, wsize in 50..1500usize) {
        let client = TestClient::default();
        client.0.chance.set(chance);
        let parameters = WriteParameters { wsize, stable: false };
        let mut model: HashMap<NodeId, Vec<u8>> = HashMap::new();
        let mut events = events.into_iter().enumerate();
        let mut log = None;
        loop {
            // Until a takeover, which drops calls in flight.
            let (done, file) = run(async {
                let writeback = match log.take() {
                    None => start(&client, self::log(), parameters),
                    Some(file) => follow(&client, file, parameters),
                };
                for (number, event) in events.by_ref() {
                    match event {
                        Event::Write { node, offset, length } => {
                            let data = vec![number as u8 + 1; length];
                            let file = FileKey { node, open: HandleId(1) };
                            writeback.write(file, offset, &data).await.expect("accepted");
                            put(&mut model, node, offset as usize, &data);
                        }
                        Event::Flush(node) => {
                            writeback.flush(node).await.expect("flushed");
                            assert_eq!(client.0.on_disk(node), model.get(&node).cloned().unwrap_or_default());
                        }
                        Event::Time(turns) => for _ in 0..turns { yield_now().await },
                        Event::Restart => client.0.restart(),
                        Event::Takeover => return (false, file_of(&writeback)),
                    }
                }
                for node in [NodeId(7), NodeId(8)] {
                    writeback.flush(node).await.expect("flushed");
                    assert_eq!(client.0.on_disk(node), model.get(&node).cloned().unwrap_or_default());
                    assert!(!writeback.is_dirty(node));
                }
                (true, file_of(&writeback))
            });
            if done { break }
            log = Some(file);
        }
    }
}
