//! A port mapper, which answers with the ports of one server's services. It listens on port 111, where clients expect it; a
//! test with it needs its own network namespace, because another port mapper may use this port.

use std::io;
use std::net::{IpAddr, SocketAddr, TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{self, JoinHandle};

use super::protocol::procedure::GETPORT;
use super::protocol::{MOUNT, NFS, PORTMAP};
use super::rpc::{Call, accepted, read_record, write_record};
use super::xdr::{Reader, Writer};

const PORT: u16 = 111;
const TCP: u32 = 6;

/// A running port mapper. Dropping it ends it.
pub struct Portmapper {
    address: SocketAddr,
    ended: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Portmapper {
    /// Starts the port mapper of the server at this address, whose NFS and MOUNT services have these ports.
    pub fn start(server: IpAddr, nfs: u16, mount: u16) -> Self {
        let address = SocketAddr::new(server, PORT);
        let listener = TcpListener::bind(address).expect("the port of port mappers");
        let ended = Arc::new(AtomicBool::new(false));
        let thread_ended = Arc::clone(&ended);
        let thread = thread::spawn(move || {
            for connection in listener.incoming().take_while(|_| !thread_ended.load(Ordering::Acquire)) {
                // This thread ends when the client closes the connection.
                thread::spawn(move || connection.and_then(|connection| answer(connection, nfs, mount)));
            }
        });
        Self { address, ended, thread: Some(thread) }
    }
}

impl Drop for Portmapper {
    fn drop(&mut self) {
        self.ended.store(true, Ordering::Release);
        // The connection makes the thread look at `ended`.
        let connected = TcpStream::connect(self.address);
        if let (Ok(_), Some(thread)) = (connected, self.thread.take()) {
            let _ = thread.join();
        }
    }
}

fn answer(mut connection: TcpStream, nfs: u16, mount: u16) -> io::Result<()> {
    while let Some(record) = read_record(&mut connection)? {
        let Some(call) = Call::read(&record) else { break };
        if ((call.program, call.version), call.procedure) != (PORTMAP, GETPORT) {
            break;
        }
        let mut arguments = Reader::new(&call.arguments);
        let (program, protocol) = ((arguments.u32().unwrap_or(0), arguments.u32().unwrap_or(0)), arguments.u32());
        let port = match (program, protocol) {
            (NFS, Some(TCP)) => nfs,
            (MOUNT, Some(TCP)) => mount,
            _ => 0,
        };
        write_record(&mut connection, &accepted(call.xid, 0, &Writer::default().u32(port.into()).bytes()))?;
    }
    Ok(())
}
