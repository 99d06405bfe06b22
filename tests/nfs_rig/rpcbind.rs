//! Stands for rpcbind, which a server of NFSv3 insists on registering with.
//!
//! It listens on a socket named `rpcbind.sock` and answers every call with TRUE. That is all that a server asks at its
//! start and its end (`SET`, `UNSET`). It keeps nothing and answers no question.

use std::io;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{self, JoinHandle};

use super::rpc::{Call, accepted, read_record, write_record};
use super::xdr::Writer;

/// The stand-in; it ends when it is dropped.
pub struct Rpcbind {
    socket: PathBuf,
    ended: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Rpcbind {
    /// Listens in this directory, which the server sees as `/run`.
    pub fn start(run: &Path) -> Self {
        let socket = run.join("rpcbind.sock");
        let listener = UnixListener::bind(&socket).expect("a socket");
        let ended = Arc::new(AtomicBool::new(false));
        let ends = Arc::clone(&ended);
        let thread = thread::spawn(move || {
            for connection in listener.incoming().take_while(|_| !ends.load(Ordering::Acquire)) {
                // A server ends its connection itself, at the latest by its death.
                thread::spawn(|| connection.and_then(answer));
            }
        });
        Self { socket, ended, thread: Some(thread) }
    }
}

impl Drop for Rpcbind {
    fn drop(&mut self) {
        self.ended.store(true, Ordering::Release);
        let woken = UnixStream::connect(&self.socket);
        if let (Ok(_), Some(thread)) = (woken, self.thread.take()) {
            let _ = thread.join();
        }
    }
}

fn answer(mut connection: UnixStream) -> io::Result<()> {
    while let Some(record) = read_record(&mut connection)? {
        let Some(call) = Call::read(&record) else { break };
        write_record(&mut connection, &accepted(call.xid, 0, &Writer::default().u32(1).bytes()))?;
    }
    Ok(())
}
