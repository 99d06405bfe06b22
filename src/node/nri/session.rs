//! The connection to the container runtime: connecting, the requests on it, and reconnecting after it was lost.
//!
//! The plugin connects and registers itself. The runtime may send its first request before it answers the registration.
//! The plugin answers requests in their order.

use std::convert::Infallible;
use std::fs::File;
use std::io::{self, ErrorKind};
use std::path::{Path, PathBuf};
use std::time::Duration;

use nix::fcntl::{Flock, FlockArg};
use podfs_fuse::DoublingPause;
use prost::Message as _;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::UnixStream;
use tokio::time::{Instant, sleep, timeout, timeout_at};
use tracing::info;

use super::answers::{Answered, NriAnswers};
use super::frames::{FrameError, FrameReader, MessageType, TO_PLUGIN, TO_RUNTIME, TtrpcMessage};
use super::messages::nri::RegisterPluginRequest;
use super::messages::ttrpc::{Request, Response, Status};
use super::{NriSettings, PLUGIN};
use crate::node::NodeHandle;
use crate::node::csi::target::{KubeletRoot, NoKubelet};
use crate::node::feed::RuntimeChange;
use crate::node::metrics::Recorder;

/// The service of the runtime.
const RUNTIME_SERVICE: &str = "nri.pkg.api.v1alpha1.Runtime";
/// The status of ttrpc, as of gRPC, for an unknown method.
const UNIMPLEMENTED: i32 = 12;
/// How long a runtime may take from the connection to its list of all containers.
const SYNCHRONIZE_TIMEOUT: Duration = Duration::from_secs(30);
/// How long a runtime may take to read an answer.
const WRITE_TIMEOUT: Duration = Duration::from_secs(2);
/// The pauses between attempts to connect: each is twice the one before.
const FIRST_PAUSE: Duration = Duration::from_millis(100);
const PAUSE: DoublingPause = DoublingPause::new(FIRST_PAUSE, Duration::from_secs(2));
/// How often podfs checks which directories of pods the kubelet has, while podfs is not connected.
const CHECK_INTERVAL: Duration = Duration::from_secs(10);
/// How long podfs waits for another podfs node that ends.
const PREDECESSOR_TIMEOUT: Duration = Duration::from_secs(3);

/// Why podfs node cannot be a plugin of the runtime.
#[derive(Debug, thiserror::Error)]
pub enum NriError {
    /// The directory does not belong to a kubelet.
    #[error(transparent)]
    KubeletRoot(NoKubelet),
    /// Another podfs node is the plugin.
    #[error("another podfs node is the plugin of the container runtime at {}; a node has only one: stop that one first", .0.display())]
    InUse(PathBuf),
}

/// The plugin, before it connects.
pub struct NriPlugin {
    settings: NriSettings,
    plugin_lock: Option<Flock<File>>,
}

/// Why a connection has ended.
#[derive(Debug, thiserror::Error)]
enum ConnectionEnd {
    #[error("the runtime has closed the connection")]
    Closed,
    #[error("the connection is lost: {0}")]
    Lost(#[from] io::Error),
    #[error("the runtime does not speak NRI: {0}")]
    FrameError(#[from] FrameError),
    #[error("the runtime refuses podfs as a plugin: {0}")]
    Refused(String),
    #[error("the runtime has not registered podfs within {} s", SYNCHRONIZE_TIMEOUT.as_secs())]
    Silent,
    #[error("the runtime does not read its answers")]
    Full,
}

impl NriPlugin {
    /// Takes the lock on the directory of the runtime's socket, if the directory exists. Only one podfs node of a node
    /// can have the lock, and be the plugin. Waits for a podfs node that ends.
    ///
    /// # Errors
    /// When another podfs node is the plugin, or the directory does not belong to a kubelet.
    pub async fn open(settings: NriSettings) -> Result<NriPlugin, NriError> {
        KubeletRoot::open(&settings.kubelet_root).map_err(NriError::KubeletRoot)?;
        let until = Instant::now() + PREDECESSOR_TIMEOUT;
        loop {
            match lock(&settings.socket) {
                Some(Ok(plugin_lock)) => return Ok(NriPlugin { settings, plugin_lock: Some(plugin_lock) }),
                Some(Err(())) if Instant::now() > until => return Err(NriError::InUse(settings.socket)),
                Some(Err(())) => sleep(FIRST_PAUSE).await,
                None => return Ok(NriPlugin { settings, plugin_lock: None }),
            }
        }
    }

    /// Its settings.
    pub fn settings(&self) -> &NriSettings {
        &self.settings
    }
}

/// The lock, unless another process has it; `None` if the directory does not exist.
fn lock(socket: &Path) -> Option<Result<Flock<File>, ()>> {
    let directory = File::open(socket.parent()?).ok()?;
    Some(Flock::lock(directory, FlockArg::LockExclusiveNonblock).map_err(drop))
}

/// Serves the runtime, and connects again when the connection has ended, until the future is dropped.
pub async fn serve(
    plugin: NriPlugin,
    root_directory: PathBuf,
    run_directory: PathBuf,
    node: NodeHandle,
    recorder: Recorder,
    changes: Box<dyn Fn(RuntimeChange) -> bool + Send + Sync>,
) -> Infallible {
    let NriPlugin { settings, mut plugin_lock } = plugin;
    recorder.nri_connected(false);
    let socket = settings.socket.clone();
    let index = settings.index.clone();
    let mut answers = NriAnswers::new(settings, root_directory, run_directory, node, recorder.clone(), changes);
    let (mut backoff, mut last_trouble, mut next_check) = (PAUSE.backoff(), None, Instant::now() + CHECK_INTERVAL);
    loop {
        if plugin_lock.is_none() {
            plugin_lock = lock(&socket).and_then(Result::ok);
        }
        let trouble = match UnixStream::connect(&socket).await {
            Err(error) => no_runtime(&socket, &error),
            Ok(_) if plugin_lock.is_none() => format!("{}; podfs tries again", NriError::InUse(socket.clone())),
            Ok(stream) => {
                let mut session = NriConnection { stream, reader: FrameReader::default(), is_synchronized: false };
                let end = session.run(&index, &mut answers, || {
                    backoff.reset();
                    recorder.nri_connected(true);
                    if last_trouble.take().is_some() {
                        info!("the container runtime at {} is connected again", socket.display());
                    }
                });
                let end = end.await;
                recorder.nri_connected(false);
                answers.report(RuntimeChange::Lost);
                format!(
                    "container runtime at {}: {end}; new containers have the kubelet's volumes; podfs connects again",
                    socket.display()
                )
            }
        };
        if last_trouble.as_ref() != Some(&trouble) {
            answers.report(RuntimeChange::Failure(vec![trouble.clone()]));
            last_trouble = Some(trouble);
        }
        if Instant::now() > next_check {
            answers.report(RuntimeChange::NoDirectory(answers.without_directory()));
            next_check = Instant::now() + CHECK_INTERVAL;
        }
        sleep(backoff.fail()).await;
    }
}

fn no_runtime(socket: &Path, error: &io::Error) -> String {
    let reason = match error.kind() {
        ErrorKind::NotFound => "there is no such socket: the runtime does not run, or has no NRI".to_owned(),
        ErrorKind::ConnectionRefused => "no runtime listens there".to_owned(),
        _ => error.to_string(),
    };
    format!(
        "container runtime at {}: {reason}; new containers have the kubelet's volumes; enable NRI in the runtime's settings \
         (containerd 1.7: disable = false in [plugins.\"io.containerd.nri.v1.nri\"]), or give its socket with --nri",
        socket.display()
    )
}

/// One connection.
struct NriConnection {
    stream: UnixStream,
    reader: FrameReader,
    is_synchronized: bool,
}

impl NriConnection {
    /// Registers the plugin and answers requests until the connection ends. Calls `begun` when the runtime has listed
    /// containers.
    async fn run(&mut self, index: &str, answers: &mut NriAnswers, mut begun: impl FnMut()) -> ConnectionEnd {
        match self.serve(index, answers, &mut begun).await {
            Ok(never) => match never {},
            Err(end) => end,
        }
    }

    async fn serve(
        &mut self,
        index: &str,
        answers: &mut NriAnswers,
        begun: &mut impl FnMut(),
    ) -> Result<Infallible, ConnectionEnd> {
        let until = Instant::now() + SYNCHRONIZE_TIMEOUT;
        self.register(index).await?;
        loop {
            let message = match self.is_synchronized {
                true => self.receive().await?,
                false => timeout_at(until, self.receive()).await.map_err(|_| ConnectionEnd::Silent)??,
            };
            match (message.connection, message.kind) {
                (TO_PLUGIN, MessageType::Request) => {
                    let was_synchronized = self.is_synchronized;
                    self.answer(&message, answers).await?;
                    if self.is_synchronized && !was_synchronized {
                        answers.report(RuntimeChange::Failure(Vec::new()));
                        begun();
                    }
                }
                (TO_RUNTIME, MessageType::Response) => {
                    let status = Response::decode(message.body.as_slice()).ok().and_then(|response| response.status);
                    if let Some(Status { message, .. }) = status.filter(|status| status.code != 0) {
                        return Err(ConnectionEnd::Refused(message));
                    }
                }
                // podfs makes no other request.
                _ => {}
            }
        }
    }

    async fn register(&mut self, index: &str) -> Result<(), ConnectionEnd> {
        let plugin = RegisterPluginRequest { plugin_name: PLUGIN.to_owned(), plugin_idx: index.to_owned() };
        let request = Request {
            service: RUNTIME_SERVICE.to_owned(),
            method: "RegisterPlugin".to_owned(),
            payload: plugin.encode_to_vec(),
            timeout_nano: 0,
        };
        let body = request.encode_to_vec();
        self.send(&TtrpcMessage { connection: TO_RUNTIME, stream: 1, kind: MessageType::Request, body }).await
    }

    async fn answer(&mut self, message: &TtrpcMessage, answers: &mut NriAnswers) -> Result<(), ConnectionEnd> {
        let response = match Request::decode(message.body.as_slice()) {
            Ok(request) => match answers.answer(&request.method, &request.payload).await {
                Answered::Message(payload, is_last_list) => {
                    self.is_synchronized |= is_last_list;
                    Response { status: None, payload }
                }
                Answered::Unimplemented => {
                    let message = format!("podfs does not implement {}", request.method);
                    Response { status: Some(Status { code: UNIMPLEMENTED, message }), payload: Vec::new() }
                }
            },
            Err(_) => Response::default(),
        };
        let body = response.encode_to_vec();
        self.send(&TtrpcMessage { connection: TO_PLUGIN, stream: message.stream, kind: MessageType::Response, body })
            .await
    }

    async fn receive(&mut self) -> Result<TtrpcMessage, ConnectionEnd> {
        let mut bytes = [0; 16 << 10];
        loop {
            if let Some(message) = self.reader.message()? {
                return Ok(message);
            }
            match self.stream.read(&mut bytes).await? {
                0 => return Err(ConnectionEnd::Closed),
                read => self.reader.feed(&bytes[..read]),
            }
        }
    }

    async fn send(&mut self, message: &TtrpcMessage) -> Result<(), ConnectionEnd> {
        let frames = message.frames();
        timeout(WRITE_TIMEOUT, self.stream.write_all(&frames))
            .await
            .map_err(|_| ConnectionEnd::Full)?
            .map_err(ConnectionEnd::Lost)
    }
}
