//! A port mapper, which says on which ports the services of one server are. It is at port 111, where clients expect it: so it
//! needs a network of its own.

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

/// It ends when it is dropped.
pub struct Portmapper {
    address: SocketAddr,
    ended: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Portmapper {
    /// For the server at this address, with its ports of NFS and of MOUNT.
    pub fn start(server: IpAddr, nfs: u16, mount: u16) -> Self {
        let address = SocketAddr::new(server, PORT);
        let listener = TcpListener::bind(address).expect("the port of port mappers");
        let ended = Arc::new(AtomicBool::new(false));
        let ends = Arc::clone(&ended);
        let thread = thread::spawn(move || {
            for connection in listener.incoming().take_while(|_| !ends.load(Ordering::Acquire)) {
                // The client ends the connection.
                thread::spawn(move || connection.and_then(|connection| answer(connection, nfs, mount)));
            }
        });
        Self { address, ended, thread: Some(thread) }
    }
}

impl Drop for Portmapper {
    fn drop(&mut self) {
        self.ended.store(true, Ordering::Release);
        let woken = TcpStream::connect(self.address);
        if let (Ok(_), Some(thread)) = (woken, self.thread.take()) {
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
        let mut question = Reader::new(&call.arguments);
        let (program, protocol) = ((question.u32().unwrap_or(0), question.u32().unwrap_or(0)), question.u32());
        let port = match (program, protocol) {
            (NFS, Some(TCP)) => nfs,
            (MOUNT, Some(TCP)) => mount,
            _ => 0,
        };
        write_record(&mut connection, &accepted(call.xid, 0, &Writer::default().u32(port.into()).bytes()))?;
    }
    Ok(())
}
