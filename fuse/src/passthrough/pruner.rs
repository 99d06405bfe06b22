//! Makes the kernel forget files that callers may have had a mapping of.
//!
//! The server gets no request for stores through a mapping, nor for the end of the mapping. So it never lets the kernel cache the
//! attributes of a file that was open for reading and writing (`Node::is_mappable`), until the kernel has forgotten the file, which
//! a mapping prevents. By itself the kernel forgets a file only when it needs memory. Before Linux 6.18 a server cannot ask the
//! kernel to forget a file.
//!
//! While the server answers a request about the file, the caller of the request uses the file, and the kernel would not forget it.
//! So a separate thread asks the kernel a moment later. The thread ends when no file is left.

use std::collections::HashSet;
use std::sync::{Arc, Mutex, MutexGuard};
use std::thread;
use std::time::Duration;

use crate::session::{NodeId, Notifier};

/// The pause before the thread asks the kernel. Meanwhile the system calls whose requests came last can end.
const PAUSE: Duration = Duration::from_millis(20);

/// Asks the kernel to forget nodes.
pub struct Pruner {
    notifier: Notifier,
    state: Arc<Mutex<PrunerState>>,
}

#[derive(Default)]
struct PrunerState {
    nodes: HashSet<NodeId>,
    /// Whether the pruner's thread runs.
    running: bool,
    /// Whether the kernel has refused the notification, because it is older than 6.18 or because the file system is unmounted.
    refused: bool,
}

impl Pruner {
    /// A pruner without work.
    pub fn new(notifier: Notifier) -> Self {
        Self { notifier, state: Arc::default() }
    }

    /// Makes the kernel forget a node, unless it is still in use.
    pub fn prune_soon(&self, node: NodeId) {
        let mut state = lock(&self.state);
        if state.refused {
            return;
        }
        state.nodes.insert(node);
        if !state.running {
            let (notifier, shared) = (self.notifier.clone(), Arc::clone(&self.state));
            let started = thread::Builder::new().name("pruner".to_owned()).spawn(move || run(&notifier, &shared));
            // Without a thread the kernel goes on asking for attributes, and the next request tries again.
            state.running = started.is_ok();
        }
    }
}

fn run(notifier: &Notifier, state: &Mutex<PrunerState>) {
    loop {
        thread::sleep(PAUSE);
        let nodes = {
            let mut state = lock(state);
            if state.nodes.is_empty() {
                state.running = false;
                return;
            }
            std::mem::take(&mut state.nodes)
        };
        let nodes: Vec<NodeId> = nodes.into_iter().collect();
        if notifier.prune(&nodes).is_err() {
            // The kernel is too old, or the file system is unmounted.
            lock(state).refused = true;
        }
    }
}

fn lock(state: &Mutex<PrunerState>) -> MutexGuard<'_, PrunerState> {
    state.lock().expect("a thread that panics ends the process")
}
