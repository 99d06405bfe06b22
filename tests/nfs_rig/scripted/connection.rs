//! The connections of the server. Each has its own thread.

use std::io::{Result, Write};
use std::net::{Ipv4Addr, Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::{self, JoinHandle};

use super::{Reply, Script, procedures};
use crate::nfs_rig::rpc::{Call, accepted, read_record, write_record};

pub struct Listener {
    address: SocketAddr,
    state: Arc<State>,
    thread: Option<JoinHandle<()>>,
}

#[derive(Default)]
struct State {
    ended: AtomicBool,
    /// The connections that the server has accepted since the last [`Listener::cut`].
    connections: Mutex<Vec<TcpStream>>,
}

impl Listener {
    pub fn start(script: Arc<Mutex<Script>>) -> Self {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).expect("a port");
        let address = listener.local_addr().expect("the socket is bound");
        let state = Arc::new(State::default());
        let thread_state = Arc::clone(&state);
        let thread = thread::spawn(move || {
            for connection in listener.incoming().flatten() {
                if thread_state.ended.load(Ordering::Acquire) {
                    return;
                }
                let (copy, script) = (connection.try_clone().expect("a descriptor"), Arc::clone(&script));
                thread_state.connections.lock().expect("no panic").push(copy);
                thread::spawn(move || {
                    let _ = serve(&connection, &script);
                    let _ = connection.shutdown(Shutdown::Both);
                });
            }
        });
        Self { address, state, thread: Some(thread) }
    }

    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Ends all connections.
    pub fn cut(&self) {
        for connection in self.state.connections.lock().expect("no panic").drain(..) {
            let _ = connection.shutdown(Shutdown::Both);
        }
    }
}

impl Drop for Listener {
    fn drop(&mut self) {
        self.state.ended.store(true, Ordering::Release);
        // The connection makes the thread look at `ended`.
        let connected = TcpStream::connect(self.address);
        if let (Ok(_), Some(thread)) = (connected, self.thread.take()) {
            let _ = thread.join();
        }
        self.cut();
    }
}

/// Answers calls until the connection ends.
fn serve(mut connection: &TcpStream, script: &Arc<Mutex<Script>>) -> Result<()> {
    connection.set_nodelay(true)?;
    let writer = Arc::new(Mutex::new(connection.try_clone()?));
    while let Some(record) = read_record(&mut connection)? {
        let Some(call) = Call::read(&record) else { break };
        let reply = script.lock().expect("no rule panics").reply(call.clone());
        let Reply::Held { gate, executed_first } = reply else {
            if !send(&writer, &call, reply)? {
                break;
            }
            continue;
        };
        let (writer, script) = (Arc::clone(&writer), Arc::clone(script));
        let execute = move |call| script.lock().expect("no rule panics").regular_reply(call);
        let executed = executed_first.then(|| execute(call.clone()));
        thread::spawn(move || {
            gate.pass();
            let reply = executed.unwrap_or_else(|| execute(call.clone()));
            // The connection may have ended meanwhile.
            let _ = send(&writer, &call, reply);
        });
    }
    Ok(())
}

/// Sends a reply. Returns whether the connection goes on.
fn send(writer: &Mutex<TcpStream>, call: &Call, reply: Reply) -> Result<bool> {
    let mut connection = writer.lock().expect("no panic");
    match reply {
        Reply::Results(results) => write_record(&mut *connection, &accepted(call.xid, 0, &results))?,
        Reply::Error(error) => {
            let results = procedures::failed((call.program, call.procedure), error);
            write_record(&mut *connection, &accepted(call.xid, 0, &results))?;
        }
        Reply::Record(record) => write_record(&mut *connection, &record)?,
        Reply::Bytes(bytes) => connection.write_all(&bytes)?,
        Reply::Nothing | Reply::Held { .. } => {}
        Reply::Close => return Ok(false),
    }
    Ok(true)
}
