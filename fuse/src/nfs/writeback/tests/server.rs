//! The server in memory, and a store that calls it.

use std::cell::{Cell, RefCell};
use std::collections::HashMap;
use std::future::Future;
use std::rc::Rc;

use rustix::io::Errno;
use tokio::task::yield_now;

use super::super::log::Piece;
use super::super::{FileKey, Store, Verifier, WriteResult};
use crate::session::NodeId;

/// A server. Written data is in memory until it is committed.
#[derive(Default)]
pub(super) struct TestServer {
    pub(super) memory: RefCell<HashMap<NodeId, Vec<u8>>>,
    pub(super) disk: RefCell<HashMap<NodeId, Vec<u8>>>,
    pub(super) starts: Cell<u64>,
    /// The error of each WRITE; none if they succeed.
    pub(super) error: Cell<Option<Errno>>,
    /// The server restarts before it answers a call.
    pub(super) restless: Cell<bool>,
    /// The number of the first WRITE whose data is on disk when it is answered, as that of all later ones is.
    pub(super) stable_from: Cell<Option<usize>>,
    /// Most bytes that it takes at once.
    pub(super) short: Cell<Option<usize>>,
    /// Whether calls get no answers.
    pub(super) stopped: Cell<bool>,
    /// Decides how long each call takes.
    pub(super) chance: Cell<u64>,
    /// The number of WRITEs that the server has got.
    pub(super) received: Cell<usize>,
    /// The number of WRITEs that the server has executed.
    pub(super) writes: Cell<usize>,
    pub(super) commits: Cell<usize>,
}

#[derive(Clone, Default)]
pub(super) struct TestClient(pub(super) Rc<TestServer>);

impl TestServer {
    pub(super) fn restart(&self) {
        *self.memory.borrow_mut() = self.disk.borrow().clone();
        self.starts.set(self.starts.get() + 1);
    }

    pub(super) fn restart_if_restless(&self) {
        if self.restless.get() {
            self.restart();
        }
    }

    pub(super) fn verifier(&self) -> Verifier {
        Verifier(self.starts.get().to_ne_bytes())
    }

    pub(super) fn on_disk(&self, node: NodeId) -> Vec<u8> {
        self.disk.borrow().get(&node).cloned().unwrap_or_default()
    }

    pub(super) async fn take_time(&self) {
        let chance = self.chance.get().wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        self.chance.set(chance);
        for _ in 0..(chance >> 60) {
            yield_now().await;
        }
        while self.stopped.get() {
            yield_now().await;
        }
    }
}

impl Store for TestClient {
    fn write(
        &self,
        file: FileKey,
        offset: u64,
        data: Piece,
        stable: bool,
    ) -> impl Future<Output = Result<WriteResult, Errno>> + 'static {
        let server = Rc::clone(&self.0);
        async move {
            server.received.set(server.received.get() + 1);
            server.take_time().await;
            if let Some(error) = server.error.get() {
                return Err(error);
            }
            server.writes.set(server.writes.get() + 1);
            server.restart_if_restless();
            let stable = stable || server.stable_from.get().is_some_and(|first| server.writes.get() >= first);
            let data = data.as_ref();
            let data = &data[..data.len().min(server.short.get().unwrap_or(usize::MAX))];
            put(&mut server.memory.borrow_mut(), file.node, offset as usize, data);
            if stable {
                put(&mut server.disk.borrow_mut(), file.node, offset as usize, data);
            }
            let answer = WriteResult { count: data.len() as u32, stable, verifier: server.verifier() };
            server.take_time().await;
            Ok(answer)
        }
    }

    fn commit(&self, file: FileKey) -> impl Future<Output = Result<Verifier, Errno>> + 'static {
        let server = Rc::clone(&self.0);
        async move {
            server.take_time().await;
            server.commits.set(server.commits.get() + 1);
            server.restart_if_restless();
            let bytes = server.memory.borrow().get(&file.node).cloned().unwrap_or_default();
            server.disk.borrow_mut().insert(file.node, bytes);
            let verifier = server.verifier();
            server.take_time().await;
            Ok(verifier)
        }
    }
}

pub(super) fn put(files: &mut HashMap<NodeId, Vec<u8>>, node: NodeId, offset: usize, data: &[u8]) {
    let file = files.entry(node).or_default();
    if file.len() < offset + data.len() {
        file.resize(offset + data.len(), 0);
    }
    file[offset..offset + data.len()].copy_from_slice(data);
}
