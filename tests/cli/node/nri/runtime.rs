//! A container runtime as its NRI plugin sees it: it listens, waits for the plugin to register, and sends requests about pods
//! and containers whose mounts come from a kubelet's directory. It stands for the NRI code of containerd 1.7 to 2.3 and of
//! CRI-O, with the behaviour observed there: the limits on frames, the reaction to unknown events and the order of requests. It
//! does not show what a runtime does with the answers; the tests with `containerd.rs` do.

use std::collections::BTreeMap;
use std::fs;
use std::io::{ErrorKind, Read, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Instant;

use podfs::node::nri::messages::nri::*;
use podfs::node::nri::messages::ttrpc::{Request, Response, Status};
use prost::Message;

use crate::common::node::Node;
use crate::common::{Running, TIMEOUT};

/// The longest part of a frame that a runtime takes.
const LONGEST: usize = 4096;
const TO_PLUGIN: u32 = 1;
const TO_RUNTIME: u32 = 2;

/// A node with a kubelet and a container runtime.
pub struct Machine {
    pub node: Node,
}

/// A runtime that listens.
pub struct Runtime {
    listener: UnixListener,
}

/// A plugin's connection.
pub struct Plugin {
    stream: UnixStream,
    received: BTreeMap<u32, Vec<u8>>,
    stream_id: u32,
    /// The plugin's registration.
    pub registered: RegisterPluginRequest,
    /// The lengths of all frames from the plugin.
    pub frames: Vec<usize>,
    /// The most bytes that are sent at once in one frame.
    pub cut: usize,
}

impl Machine {
    pub fn new() -> Machine {
        let node = Node::new();
        for directory in ["kubelet/pods", "nri"] {
            fs::create_dir_all(node.fixture.path(directory)).expect("a directory");
        }
        Machine { node }
    }

    pub fn root(&self) -> PathBuf {
        self.node.fixture.path("kubelet")
    }

    pub fn socket(&self) -> PathBuf {
        self.node.fixture.path("nri/nri.sock")
    }

    /// `podfs node --nri` for this runtime.
    pub fn command(&self) -> Command {
        self.command_with(&["--kubelet-root", self.root().to_str().expect("text")])
    }

    /// As [`Self::command`], with these options instead of `--kubelet-root`: podfs refuses an option that is given twice.
    pub fn command_with(&self, options: &[&str]) -> Command {
        let mut command = self.node.bare_command();
        command
            .arg("--manifests")
            .arg(self.node.fixture.path("manifests"))
            .arg("--nri")
            .arg(self.socket())
            .args(options);
        command
    }

    pub fn start(&self) -> Running {
        self.node.start_command(self.command())
    }

    /// A runtime, which replaces an earlier one at the socket.
    pub fn listen(&self) -> Runtime {
        Runtime::at(&self.socket())
    }

    /// The pod of a sandbox, with the value `mark` of the label by which podfs chooses pods.
    pub fn sandbox(&self, pod: &str, mark: Option<&str>) -> PodSandbox {
        PodSandbox {
            id: format!("sandbox-{pod}"),
            name: pod.to_owned(),
            uid: format!("uid-{pod}"),
            namespace: "default".to_owned(),
            labels: mark.map(|mark| ("podfs.io/volumes".to_owned(), mark.to_owned())).into_iter().collect(),
            ..PodSandbox::default()
        }
    }

    /// A mount of the kubelet's volume of a pod.
    pub fn mount(&self, pod: &str, volume: &str, destination: &str) -> Mount {
        mount(&self.root().join(format!("pods/uid-{pod}/{volume}")), destination)
    }

    /// The value of the metric `line`: a family with its labels.
    pub fn metric(&self, line: &str) -> Option<String> {
        let log = self.node.log();
        let address = log.rsplit("metrics are served at http://").next().and_then(|url| url.split('/').next());
        let mut stream = std::net::TcpStream::connect(address.expect("an address")).expect("it listens");
        stream.write_all(b"GET /metrics HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n").expect("sent");
        let mut text = String::new();
        stream.read_to_string(&mut text).expect("an answer");
        text.lines().find_map(|metric| metric.strip_prefix(line)).map(|value| value.trim().to_owned())
    }
}

/// A bind mount as runtimes make it from the kubelet's.
pub fn mount(source: &Path, destination: &str) -> Mount {
    Mount {
        destination: destination.to_owned(),
        r#type: "bind".to_owned(),
        source: source.to_str().expect("text").to_owned(),
        options: ["rbind", "rprivate", "ro"].map(str::to_owned).to_vec(),
    }
}

pub fn container(sandbox: &PodSandbox, name: &str, mounts: Vec<Mount>) -> Container {
    Container {
        id: format!("{}-{name}", sandbox.id),
        pod_sandbox_id: sandbox.id.clone(),
        name: name.to_owned(),
        mounts,
        ..Container::default()
    }
}

impl Runtime {
    /// A runtime at this socket, which replaces an earlier one.
    pub fn at(socket: &Path) -> Runtime {
        let _ = fs::remove_file(socket);
        let listener = UnixListener::bind(socket).expect("a socket");
        listener.set_nonblocking(true).expect("set");
        Runtime { listener }
    }

    /// The next plugin that connects, not registered yet.
    #[track_caller]
    pub fn accept(&self) -> Plugin {
        let deadline = Instant::now() + TIMEOUT;
        loop {
            match self.listener.accept() {
                Ok((stream, _)) => {
                    stream.set_nonblocking(false).expect("set");
                    stream.set_read_timeout(Some(TIMEOUT)).expect("set");
                    let registered = RegisterPluginRequest::default();
                    let (received, frames) = (BTreeMap::new(), Vec::new());
                    return Plugin { stream, received, stream_id: 1, registered, frames, cut: usize::MAX };
                }
                Err(error) if error.kind() == ErrorKind::WouldBlock => {
                    assert!(Instant::now() < deadline, "no plugin connects");
                    std::thread::sleep(std::time::Duration::from_millis(5));
                }
                Err(error) => panic!("{error}"),
            }
        }
    }

    /// The next plugin, registered, with the list of sandboxes and containers.
    #[track_caller]
    pub fn begin(&self, pods: Vec<PodSandbox>, containers: Vec<Container>) -> Plugin {
        let mut plugin = self.accept();
        plugin.take_registration();
        plugin.confirm_registration();
        plugin.configure("containerd", "1.7.24", 2000);
        let more = plugin.synchronize(SynchronizeRequest { pods, containers, more: false });
        assert!(!more.more);
        plugin
    }
}

impl Plugin {
    #[track_caller]
    pub fn take_registration(&mut self) {
        let (kind, stream, body) = self.receive(TO_RUNTIME);
        let request = Request::decode(body.as_slice()).expect("a request");
        assert_eq!((kind, stream, request.method.as_str()), (1, 1, "RegisterPlugin"));
        assert_eq!(request.service, "nri.pkg.api.v1alpha1.Runtime");
        self.registered = RegisterPluginRequest::decode(request.payload.as_slice()).expect("a message");
    }

    pub fn confirm_registration(&mut self) {
        self.send(TO_RUNTIME, 1, 2, &Response::default().encode_to_vec());
    }

    /// Refuses the registration, as a runtime does whose limit is reached.
    pub fn refuse_registration(&mut self, message: &str) {
        let status = Status { code: 2, message: message.to_owned() };
        self.send(TO_RUNTIME, 1, 2, &Response { status: Some(status), payload: Vec::new() }.encode_to_vec());
    }

    #[track_caller]
    pub fn configure(&mut self, name: &str, version: &str, request_timeout: i64) -> i32 {
        let request = ConfigureRequest {
            runtime_name: name.to_owned(),
            runtime_version: version.to_owned(),
            registration_timeout: 5000,
            request_timeout,
        };
        let answer: ConfigureResponse = self.call("Configure", &request).expect("an answer");
        answer.events
    }

    #[track_caller]
    pub fn synchronize(&mut self, request: SynchronizeRequest) -> SynchronizeResponse {
        self.call("Synchronize", &request).expect("an answer")
    }

    #[track_caller]
    pub fn event(&mut self, event: Event, pod: &PodSandbox, container: Option<&Container>) {
        let change = StateChangeEvent { event: event.into(), pod: Some(pod.clone()), container: container.cloned() };
        let _: Empty = self.call("StateChange", &change).expect("an answer");
    }

    /// The mounts by which the plugin replaces mounts of a new container.
    #[track_caller]
    pub fn create(&mut self, pod: &PodSandbox, container: &Container) -> Vec<Mount> {
        let request = CreateContainerRequest { pod: Some(pod.clone()), container: Some(container.clone()) };
        let answer: CreateContainerResponse = self.call("CreateContainer", &request).expect("an answer");
        answer.adjust.unwrap_or_default().mounts
    }

    #[track_caller]
    pub fn call<A: Message + Default>(&mut self, method: &str, request: &impl Message) -> Result<A, Status> {
        self.call_bytes(method, request.encode_to_vec()).map(|bytes| A::decode(bytes.as_slice()).expect("a message"))
    }

    #[track_caller]
    pub fn call_bytes(&mut self, method: &str, payload: Vec<u8>) -> Result<Vec<u8>, Status> {
        let stream = self.stream_id;
        self.stream_id += 2;
        let (service, method) = ("nri.pkg.api.v1alpha1.Plugin".to_owned(), method.to_owned());
        let request = Request { service, method, payload, timeout_nano: 2_000_000_000 };
        self.send(TO_PLUGIN, stream, 1, &request.encode_to_vec());
        let (kind, answered, body) = self.receive(TO_PLUGIN);
        assert_eq!((kind, answered), (2, stream));
        let Response { status, payload } = Response::decode(body.as_slice()).expect("a response");
        match status {
            Some(status) if status.code != 0 => Err(status),
            _ => Ok(payload),
        }
    }

    fn send(&mut self, connection: u32, stream: u32, kind: u8, body: &[u8]) {
        let mut message = Vec::new();
        message.extend(u32::try_from(body.len()).expect("short").to_be_bytes());
        message.extend(stream.to_be_bytes());
        message.extend([kind, 0]);
        message.extend(body);
        for part in message.chunks(self.cut.min(message.len())) {
            let mut frame = connection.to_be_bytes().to_vec();
            frame.extend(u32::try_from(part.len()).expect("short").to_be_bytes());
            frame.extend(part);
            self.send_raw(&frame);
        }
    }

    pub fn send_raw(&mut self, bytes: &[u8]) {
        self.stream.write_all(bytes).expect("the plugin reads");
    }

    /// The next message of a connection: its type, its stream and its envelope.
    #[track_caller]
    fn receive(&mut self, connection: u32) -> (u8, u32, Vec<u8>) {
        loop {
            let bytes = self.received.entry(connection).or_default();
            if bytes.len() >= 10 {
                let length = number(&bytes[..4]) as usize;
                if bytes.len() >= 10 + length {
                    let message: Vec<u8> = bytes.drain(..10 + length).collect();
                    return (message[8], number(&message[4..8]), message[10..].to_vec());
                }
            }
            let mut header = [0; 8];
            self.stream.read_exact(&mut header).expect("the plugin answers");
            let (of, length) = (number(&header[..4]), number(&header[4..]) as usize);
            assert!(length <= LONGEST, "a frame of {length} bytes breaks the connection");
            self.frames.push(length);
            let mut part = vec![0; length];
            self.stream.read_exact(&mut part).expect("the whole frame");
            self.received.entry(of).or_default().extend(part);
        }
    }

    /// Waits until the plugin closes the connection. Returns false if the plugin does not close it within [`TIMEOUT`].
    pub fn is_closed(&mut self) -> bool {
        match self.stream.read_to_end(&mut Vec::new()) {
            Ok(_) => true,
            Err(error) => error.kind() == ErrorKind::ConnectionReset,
        }
    }
}

fn number(bytes: &[u8]) -> u32 {
    u32::from_be_bytes(bytes.try_into().expect("four bytes"))
}
