//! The connections of the server, which it can accept, refuse, hold, break or freeze. It speaks TLS over TCP, and over
//! TLS HTTP/1.1 or HTTP/2, as the client prefers.
//!
//! The server runs in a thread with its own tokio runtime. [`Listener::order`] returns when the server has carried out
//! the order: after [`Order::Refuse`], the kernel refuses connections.

use std::net::{Ipv4Addr, SocketAddr};
use std::pin::Pin;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{SyncSender, sync_channel};
use std::sync::{Arc, Mutex};
use std::task::{Context, Poll};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use axum::Router;
use axum::extract::Request;
use hyper_util::rt::{TokioExecutor, TokioIo};
use hyper_util::server::conn::auto::Builder;
use hyper_util::service::TowerToHyperService;
use rustls::ServerConfig;
use rustls::pki_types::CertificateDer;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::{TcpListener, TcpSocket, TcpStream};
use tokio::sync::mpsc::{UnboundedReceiver, UnboundedSender, unbounded_channel};
use tokio::task::JoinSet;
use tokio_rustls::TlsAcceptor;

use super::answers::Cluster;

/// The most streams of a connection: a real server's default.
const STREAMS: u32 = 100;
/// The interval at which a watch without changes gets a bookmark.
const BOOKMARK: Duration = Duration::from_secs(60);

/// The treatment of connections.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Order {
    /// The server accepts and serves new connections.
    Serve,
    /// The server does not listen: the kernel refuses new connections. Existing connections break.
    Refuse,
    /// The server accepts new connections, but reads and sends nothing on them.
    Hold,
    /// Existing connections break.
    Break,
    /// Existing connections stay, but carry no bytes in either direction.
    Freeze,
}

/// A connection of a client.
pub struct Connection {
    pub number: u64,
    pub certificates: Vec<CertificateDer<'static>>,
}

/// The thread with the server.
pub struct Listener {
    pub address: SocketAddr,
    /// The address for connections without TLS, as to `kubectl proxy`.
    pub plain: SocketAddr,
    count: Arc<AtomicU64>,
    orders: Option<UnboundedSender<(Order, SyncSender<()>)>>,
    thread: Option<JoinHandle<()>>,
}

impl Listener {
    pub fn start(cluster: Arc<Cluster>, tls: Arc<Mutex<Arc<ServerConfig>>>) -> Self {
        let (order_sender, orders) = unbounded_channel();
        let (address_sender, addresses) = sync_channel(1);
        let count = Arc::new(AtomicU64::new(0));
        let server_count = Arc::clone(&count);
        let serve = async move {
            let any_port = SocketAddr::from((Ipv4Addr::LOCALHOST, 0));
            // This socket keeps the port while the server does not listen: otherwise another socket of this program
            // could get it.
            let reserved = bind(any_port);
            let listener = listen(reserved.local_addr().expect("an address"));
            let plain = listen(any_port);
            let [address, plain_address] =
                [&listener, &plain].map(|listener| listener.local_addr().expect("an address"));
            address_sender.send((address, plain_address)).expect("the starting thread waits");
            let server = Server {
                cluster,
                tls,
                address,
                connections: JoinSet::new(),
                count: server_count,
                frozen: Arc::default(),
            };
            server.run(listener, plain, orders).await;
            drop(reserved);
        };
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
        let thread = thread::spawn(move || runtime.block_on(serve));
        let (address, plain) = addresses.recv().expect("the server starts");
        Self { address, plain, count, orders: Some(order_sender), thread: Some(thread) }
    }

    /// The number of connections so far.
    pub fn count(&self) -> u64 {
        self.count.load(Ordering::Relaxed)
    }

    #[track_caller]
    pub fn order(&self, order: Order) {
        let (confirmation, carried_out) = sync_channel(1);
        let orders = self.orders.as_ref().expect("the thread runs until the listener is dropped");
        orders.send((order, confirmation)).expect("the server's thread runs");
        carried_out.recv().expect("the server carries out the order");
    }
}

impl Drop for Listener {
    fn drop(&mut self) {
        self.orders = None;
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

fn listen(address: SocketAddr) -> TcpListener {
    bind(address).listen(1024).expect("it listens")
}

/// A socket that is bound to this address. Other sockets of this function may be bound to the same address.
fn bind(address: SocketAddr) -> TcpSocket {
    let socket = TcpSocket::new_v4().expect("a socket");
    socket.set_reuseaddr(true).expect("set");
    socket.set_reuseport(true).expect("set");
    socket.bind(address).expect("the address is free");
    socket
}

struct Server {
    cluster: Arc<Cluster>,
    tls: Arc<Mutex<Arc<ServerConfig>>>,
    address: SocketAddr,
    connections: JoinSet<()>,
    /// The number of connections so far.
    count: Arc<AtomicU64>,
    /// Connections with a lower number are frozen.
    frozen: Arc<AtomicU64>,
}

impl Server {
    async fn run(
        mut self,
        listener: TcpListener,
        plain: TcpListener,
        mut orders: UnboundedReceiver<(Order, SyncSender<()>)>,
    ) {
        let mut listener = Some(listener);
        let mut holds = false;
        let mut bookmarks = tokio::time::interval(BOOKMARK);
        loop {
            tokio::select! {
                order = orders.recv() => {
                    let Some((order, confirmation)) = order else { return };
                    match order {
                        Order::Serve | Order::Hold => {
                            holds = order == Order::Hold;
                            if listener.is_none() {
                                listener = Some(listen(self.address));
                            }
                        }
                        Order::Refuse => {
                            listener = None;
                            self.connections.shutdown().await;
                        }
                        Order::Break => self.connections.shutdown().await,
                        Order::Freeze => self.frozen.store(self.count.load(Ordering::Relaxed), Ordering::Relaxed),
                    }
                    let _ = confirmation.send(());
                }
                stream = accept(listener.as_ref()) => self.serve(stream, holds),
                stream = accept(Some(&plain)) => self.serve_plain(stream),
                _ = bookmarks.tick() => self.cluster.state().store.bookmark(),
                Some(_) = self.connections.join_next() => {}
            }
        }
    }

    fn serve(&mut self, stream: TcpStream, hold: bool) {
        let number = self.count.fetch_add(1, Ordering::Relaxed);
        if hold {
            self.connections.spawn(async move {
                std::future::pending::<()>().await;
                drop(stream);
            });
            return;
        }
        // Without Nagle's algorithm, the kernel sends small answers at once.
        let _ = stream.set_nodelay(true);
        let stream = Freezing { stream, number, frozen: Arc::clone(&self.frozen) };
        let acceptor = TlsAcceptor::from(Arc::clone(&self.tls.lock().expect("no panic")));
        let cluster = Arc::clone(&self.cluster);
        self.connections.spawn(async move {
            // A client that does not trust the server closes the connection in the handshake.
            let Ok(stream) = acceptor.accept(stream).await else { return };
            let certificates = stream.get_ref().1.peer_certificates().unwrap_or_default();
            let certificates = certificates.iter().map(|certificate| certificate.clone().into_owned()).collect();
            answer(cluster, Connection { number, certificates }, stream).await;
        });
    }

    fn serve_plain(&mut self, stream: TcpStream) {
        let number = self.count.fetch_add(1, Ordering::Relaxed);
        let _ = stream.set_nodelay(true);
        let cluster = Arc::clone(&self.cluster);
        self.connections.spawn(answer(cluster, Connection { number, certificates: Vec::new() }, stream));
    }
}

/// Answers the requests of a connection.
async fn answer(
    cluster: Arc<Cluster>,
    connection: Connection,
    stream: impl AsyncRead + AsyncWrite + Unpin + Send + 'static,
) {
    let connection = Arc::new(connection);
    let answer = move |request: Request| Arc::clone(&cluster).answer(Arc::clone(&connection), request);
    let service = TowerToHyperService::new(Router::new().fallback(answer));
    let mut http = Builder::new(TokioExecutor::new());
    http.http2().max_concurrent_streams(STREAMS);
    let _ = http.serve_connection(TokioIo::new(stream), service).await;
}

/// The next connection. Without a listener, this future never ends.
async fn accept(listener: Option<&TcpListener>) -> TcpStream {
    let Some(listener) = listener else { return std::future::pending().await };
    loop {
        if let Ok((stream, _)) = listener.accept().await {
            return stream;
        }
    }
}

/// A connection that can be frozen: it stays open, but carries no bytes, as after a failure of the network between
/// client and server.
struct Freezing {
    stream: TcpStream,
    number: u64,
    frozen: Arc<AtomicU64>,
}

impl Freezing {
    fn is_frozen(&self) -> bool {
        self.number < self.frozen.load(Ordering::Relaxed)
    }
}

// `Pending` without a registered waker is right here: a frozen connection never thaws.
impl AsyncRead for Freezing {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<std::io::Result<()>> {
        if self.is_frozen() { Poll::Pending } else { Pin::new(&mut self.stream).poll_read(context, buffer) }
    }
}

impl AsyncWrite for Freezing {
    fn poll_write(mut self: Pin<&mut Self>, context: &mut Context<'_>, bytes: &[u8]) -> Poll<std::io::Result<usize>> {
        if self.is_frozen() { Poll::Pending } else { Pin::new(&mut self.stream).poll_write(context, bytes) }
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<std::io::Result<()>> {
        if self.is_frozen() { Poll::Pending } else { Pin::new(&mut self.stream).poll_flush(context) }
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<std::io::Result<()>> {
        if self.is_frozen() { Poll::Pending } else { Pin::new(&mut self.stream).poll_shutdown(context) }
    }
}
