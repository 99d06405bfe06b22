//! The cost of a plugin for each new container, measured with a real containerd: without a plugin, with a plugin that changes
//! nothing, and with podfs, in turns. `cargo test --test cli node::nri::cost -- --ignored --nocapture` runs it.

use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use podfs::node::nri::frames::{FrameReader, MessageType, TO_PLUGIN, TO_RUNTIME, TtrpcMessage};
use podfs::node::nri::messages::nri::*;
use podfs::node::nri::messages::ttrpc::{Request, Response};
use prost::Message as _;

use super::containerd::{Containerd, Wanted};
use super::real::{CHOSEN, CONFIG, LOGIN, PART, make_kubelets_volumes, run_with_podfs};
use super::replaced::{machine, start};
use crate::common::eventually;

const ROUNDS: usize = 5;
/// Containers in a turn.
const CONTAINERS: usize = 10;

/// A plugin that gets a call for each container and changes nothing. Dropping this ends it.
struct Empty {
    stream: UnixStream,
    thread: Option<JoinHandle<()>>,
}

impl Empty {
    fn start(socket: &Path) -> Empty {
        let mut stream = UnixStream::connect(socket).expect("the runtime listens");
        let registered = RegisterPluginRequest { plugin_name: "empty".to_owned(), plugin_idx: "50".to_owned() };
        let request = Request {
            service: "nri.pkg.api.v1alpha1.Runtime".to_owned(),
            method: "RegisterPlugin".to_owned(),
            payload: registered.encode_to_vec(),
            timeout_nano: 0,
        };
        send(&mut stream, TO_RUNTIME, 1, MessageType::Request, request.encode_to_vec());
        let mut reader = FrameReader::default();
        while !answer(&mut stream, &mut reader).expect("the runtime begins") {}
        let mut answering = stream.try_clone().expect("a descriptor");
        let thread = thread::spawn(move || while answer(&mut answering, &mut reader).is_some() {});
        Empty { stream, thread: Some(thread) }
    }
}

impl Drop for Empty {
    fn drop(&mut self) {
        let _ = self.stream.shutdown(std::net::Shutdown::Both);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

/// Answers one message. Returns whether it was the runtime's list (`Synchronize`); `None` at the end of the connection.
fn answer(stream: &mut UnixStream, reader: &mut FrameReader) -> Option<bool> {
    let message = loop {
        if let Some(message) = reader.message().expect("NRI") {
            break message;
        }
        let mut bytes = [0; 16 << 10];
        match stream.read(&mut bytes) {
            Ok(0) | Err(_) => return None,
            Ok(read) => reader.feed(&bytes[..read]),
        }
    };
    if message.kind == MessageType::Response {
        return Some(false);
    }
    let request = Request::decode(message.body.as_slice()).expect("a request");
    let payload = match request.method.as_str() {
        "Configure" => ConfigureResponse { events: 1 << (Event::CreateContainer as i32 - 1) }.encode_to_vec(),
        _ => Vec::new(),
    };
    let response = Response { status: None, payload };
    send(stream, TO_PLUGIN, message.stream, MessageType::Response, response.encode_to_vec());
    Some(request.method == "Synchronize")
}

fn send(stream: &mut UnixStream, connection: u32, number: u32, kind: MessageType, body: Vec<u8>) {
    let frames = TtrpcMessage { connection, stream: number, kind, body }.frames();
    stream.write_all(&frames).expect("the runtime reads");
}

/// The times of creating and of starting containers.
#[derive(Default)]
struct Times(Vec<Duration>, Vec<Duration>);

impl Times {
    fn take(&mut self, containerd: &Containerd<'_>, sandbox: &str, mounts: &[Wanted<'_>]) {
        for _ in 0..CONTAINERS {
            let began = Instant::now();
            let container = containerd.create("web", sandbox, "cost", mounts);
            let created = Instant::now();
            containerd.launch(&container);
            self.0.push(created - began);
            self.1.push(created.elapsed());
            containerd.remove(container);
        }
    }

    /// Prints the medians.
    fn print(&mut self, plugin: &str) {
        let median = |times: &mut Vec<Duration>| {
            times.sort();
            times[times.len() / 2].as_secs_f64() * 1e3
        };
        println!("{plugin:24} create {:6.2} ms, start {:6.2} ms", median(&mut self.0), median(&mut self.1));
    }
}

#[test]
#[ignore = "a measurement"]
fn the_cost_of_a_plugin_for_a_container() {
    let machine = machine();
    make_kubelets_volumes(&machine);
    let Some(containerd) = Containerd::start_or_skip(&machine, "the_cost_of_a_plugin_for_a_container") else { return };
    let sandbox = containerd.run_pod("web", &CHOSEN);
    for (what, mounts) in [("two volumes", vec![CONFIG, LOGIN]), ("and a subPath", vec![CONFIG, LOGIN, PART])] {
        let (mut none, mut empty, mut podfs) = (Times::default(), Times::default(), Times::default());
        for _ in 0..ROUNDS {
            none.take(&containerd, &sandbox, &mounts);
            let plugin = Empty::start(&machine.socket());
            empty.take(&containerd, &sandbox, &mounts);
            drop(plugin);
            let mut daemon = start(&machine);
            eventually("podfs is connected", || machine.metric("podfs_nri_connected").as_deref() == Some("1"));
            containerd.remove(run_with_podfs(&containerd, &sandbox, &mounts));
            podfs.take(&containerd, &sandbox, &mounts);
            for of in ["sum", "count"] {
                let line = format!("podfs_nri_request_duration_seconds_{of}{{method=\"CreateContainer\"}}");
                print!("{of} {} ", machine.metric(&line).unwrap_or_default());
            }
            println!();
            daemon.stop();
        }
        println!("{what}");
        none.print("no plugin");
        empty.print("a plugin without changes");
        podfs.print("podfs");
    }
}
