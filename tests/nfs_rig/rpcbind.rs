//! A replacement for rpcbind: a server of NFSv3 does not start unless it can register with rpcbind.
//!
//! It listens on a socket named `rpcbind.sock` and answers every call with TRUE. A server registers at its start
//! (`SET`) and at its end (`UNSET`); this needs no other answer. The replacement records no registration and answers no
//! `GETPORT`.

use std::io;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{self, JoinHandle};

use super::rpc::{Call, accepted, read_record, write_record};
use super::xdr::Writer;

/// The running replacement. Dropping it ends it.
pub struct Rpcbind {
    socket: PathBuf,
    ended: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Rpcbind {
    /// Listens in this directory, which the server has as its `/run`.
    pub fn start(run: &Path) -> Self {
        let socket = run.join("rpcbind.sock");
        let listener = UnixListener::bind(&socket).expect("a socket");
        let ended = Arc::new(AtomicBool::new(false));
        let thread_ended = Arc::clone(&ended);
        let thread = thread::spawn(move || {
            for connection in listener.incoming().take_while(|_| !thread_ended.load(Ordering::Acquire)) {
                // This thread ends when the server closes the connection, at the latest with the server's process.
                thread::spawn(|| connection.and_then(answer));
            }
        });
        Self { socket, ended, thread: Some(thread) }
    }
}

impl Drop for Rpcbind {
    fn drop(&mut self) {
        self.ended.store(true, Ordering::Release);
        // The connection makes the thread look at `ended`.
        let connected = UnixStream::connect(&self.socket);
        if let (Ok(_), Some(thread)) = (connected, self.thread.take()) {
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
