//! Metrics over HTTP: `GET /metrics`, as Prometheus sends it.
//!
//! podfs answers every client that reaches the address, so it limits each: it serves a few connections at once, each for a limited
//! time and with small headers. If another client connects then, podfs closes the oldest connection whose request is incomplete, or else
//! the oldest one that does not take its answer, so clients that send nothing more delay no other client for long. podfs takes one
//! reading at a time, on a separate thread, because a pod or a source may be slow to answer.

use std::convert::Infallible;
use std::io;
use std::net::{SocketAddr, TcpListener};
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, Ordering};
use std::thread;
use std::time::Duration;

use http_body_util::Full;
use hyper::body::{Bytes, Incoming};
use hyper::header::{ACCEPT, ALLOW, CONTENT_TYPE};
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper::{Method, Request, Response, StatusCode};
use hyper_util::rt::{TokioIo, TokioTimer};
use tokio::sync::Mutex;
use tokio::task::{AbortHandle, JoinSet};
use tokio::time::{Instant, sleep, sleep_until, timeout};
use tracing::warn;

use super::exposition::{Exposition, ExpositionFormat};

/// The path of the metrics.
const PATH: &str = "/metrics";
/// Most connections at once.
const MAX_CONNECTIONS: usize = 16;
/// Longest time for a client to send the headers of its request.
const HEADER_TIMEOUT: Duration = Duration::from_secs(5);
/// Longest time from the headers until the client has received the answer.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(30);
/// How long a connection stays at least, if others wait, until its request is complete.
const LEAST_HEADER_TIME: Duration = Duration::from_millis(100);
/// How long a connection stays at least after podfs has accepted it, if others wait, until its client has taken the answer.
const LEAST_ANSWER_TIME: Duration = Duration::from_secs(5);
/// Most bytes of a request.
const LONGEST_REQUEST: usize = 16 << 10;
/// Delay after accept(2) failed, mostly for lack of file descriptors.
const PAUSE: Duration = Duration::from_millis(100);

/// Listens, without accepting connections yet.
///
/// # Errors
/// When the address is not this machine's, or another program listens there.
pub fn listen(address: SocketAddr) -> io::Result<TcpListener> {
    let listener = TcpListener::bind(address)?;
    listener.set_nonblocking(true)?;
    Ok(listener)
}

/// Serves the result of `read` on a separate thread, until this process ends.
///
/// # Errors
/// When no thread can be started.
pub fn start(listener: TcpListener, read: impl Fn() -> Exposition + Send + Sync + 'static) -> io::Result<()> {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_io()
        .enable_time()
        .max_blocking_threads(1)
        .thread_keep_alive(HEADER_TIMEOUT)
        .build()?;
    let serve = move || {
        let Err(error) = runtime.block_on(serve(listener, read));
        warn!("podfs cannot serve metrics: {error}");
    };
    thread::Builder::new().name("metrics".to_owned()).spawn(serve).map(drop)
}

/// Serves the result of `read`. It returns only with an error.
///
/// # Errors
/// When the listener cannot be used.
pub async fn serve(
    listener: TcpListener,
    read: impl Fn() -> Exposition + Send + Sync + 'static,
) -> io::Result<Infallible> {
    let listener = tokio::net::TcpListener::from_std(listener)?;
    let read = Arc::new(Mutex::new(Arc::new(read)));
    let mut connections = Connections::default();
    loop {
        let stream = match listener.accept().await {
            Ok((stream, _)) => stream,
            Err(_) => {
                sleep(PAUSE).await;
                continue;
            }
        };
        connections.make_room().await;
        let read = Arc::clone(&read);
        let progress = Progress::default();
        let of_request = progress.clone();
        let service = service_fn(move |request| {
            let (read, progress) = (Arc::clone(&read), of_request.clone());
            async move {
                progress.set(Progress::READING);
                let answer = answer(&request, &read).await;
                progress.set(Progress::ANSWERING);
                Ok::<_, Infallible>(answer)
            }
        });
        connections.add(progress, async move {
            let mut http = http1::Builder::new();
            http.timer(TokioTimer::new()).header_read_timeout(HEADER_TIMEOUT).max_buf_size(LONGEST_REQUEST);
            // Each connection carries one request, so an idle one takes no place of another between two scrapes.
            http.keep_alive(false);
            let served = http.serve_connection(TokioIo::new(stream), service);
            // A client that closes the connection, or does not speak HTTP, gets no answer.
            let _ = timeout(HEADER_TIMEOUT + ANSWER_TIMEOUT, served).await;
        });
    }
}

/// The connections that are served now.
#[derive(Default)]
struct Connections {
    tasks: JoinSet<()>,
    /// In the order in which podfs has accepted them.
    open: Vec<OpenConnection>,
}

struct OpenConnection {
    accepted: Instant,
    progress: Progress,
    task: AbortHandle,
}

/// How far a connection is.
#[derive(Clone, Default)]
struct Progress(Arc<AtomicU8>);

impl Progress {
    /// The request is incomplete.
    const RECEIVING: u8 = 0;
    /// podfs takes a reading for the answer.
    const READING: u8 = 1;
    /// The client takes the answer.
    const ANSWERING: u8 = 2;

    fn set(&self, progress: u8) {
        self.0.store(progress, Ordering::Relaxed);
    }
}

impl Connections {
    fn add(&mut self, progress: Progress, serve: impl Future<Output = ()> + Send + 'static) {
        let task = self.tasks.spawn(serve);
        self.open.push(OpenConnection { accepted: Instant::now(), progress, task });
    }

    /// Waits until there is room for another connection. Closes a connection that takes too long.
    async fn make_room(&mut self) {
        loop {
            while self.tasks.try_join_next().is_some() {}
            self.open.retain(|connection| !connection.task.is_finished());
            if self.open.len() < MAX_CONNECTIONS {
                return;
            }
            let oldest = self.oldest(Progress::RECEIVING, LEAST_HEADER_TIME);
            let oldest = oldest.or_else(|| self.oldest(Progress::ANSWERING, LEAST_ANSWER_TIME));
            let now = Instant::now();
            match oldest {
                Some((place, closes)) if closes <= now => self.open[place].task.abort(),
                // Without such a connection, podfs looks again soon: a reading ends, and then the client may not take the answer.
                _ => {
                    let until = oldest.map_or(now + LEAST_HEADER_TIME, |(_, closes)| closes);
                    tokio::select! {
                        _ended = self.tasks.join_next() => {}
                        () = sleep_until(until) => {}
                    }
                    continue;
                }
            }
            let _closed = self.tasks.join_next().await;
        }
    }

    /// The oldest connection with this progress, and when podfs closes it.
    fn oldest(&self, progress: u8, least: Duration) -> Option<(usize, Instant)> {
        let is_so = |connection: &OpenConnection| connection.progress.0.load(Ordering::Relaxed) == progress;
        let place = self.open.iter().position(is_so)?;
        Some((place, self.open[place].accepted + least))
    }
}

type SharedReader<F> = Mutex<Arc<F>>;

async fn answer<F: Fn() -> Exposition + Send + Sync + 'static>(
    request: &Request<Incoming>,
    read: &SharedReader<F>,
) -> Response<Full<Bytes>> {
    match (request.uri().path(), request.method()) {
        (PATH, &Method::GET | &Method::HEAD) => {}
        (PATH, _) => return refusal(StatusCode::METHOD_NOT_ALLOWED, "metrics can only be read: GET /metrics\n"),
        _ => return refusal(StatusCode::NOT_FOUND, "there is nothing but /metrics\n"),
    }
    let accepted = request.headers().get_all(ACCEPT).iter().filter_map(|value| value.to_str().ok());
    let format = preferred_format(&accepted.collect::<Vec<_>>().join(","));
    let reading = read.lock().await;
    let read = Arc::clone(&reading);
    let text = tokio::task::spawn_blocking(move || read().text(format)).await;
    drop(reading);
    match text {
        Ok(text) => {
            let mut response = Response::new(Full::from(text));
            response.headers_mut().insert(CONTENT_TYPE, format.media_type().parse().expect("a media type"));
            response
        }
        Err(_) => refusal(StatusCode::INTERNAL_SERVER_ERROR, "the metrics cannot be read; podfs' log says why\n"),
    }
}

fn refusal(code: StatusCode, sentence: &'static str) -> Response<Full<Bytes>> {
    let mut response = Response::new(Full::from(sentence));
    *response.status_mut() = code;
    response.headers_mut().insert(CONTENT_TYPE, "text/plain; charset=utf-8".parse().expect("a media type"));
    if code == StatusCode::METHOD_NOT_ALLOWED {
        response.headers_mut().insert(ALLOW, "GET, HEAD".parse().expect("methods"));
    }
    response
}

/// The format that the `Accept` header prefers; without a preference, the text format, which every client reads.
fn preferred_format(accept: &str) -> ExpositionFormat {
    let weight_of = |media_types: &[&str], versions: &[&str]| {
        let of_range = |range: &str| {
            let mut words = range.split(';').map(str::trim);
            let media = words.next().filter(|media| media_types.contains(&media.to_ascii_lowercase().as_str()))?;
            let mut weight = 1.0;
            for (name, value) in words.filter_map(|word| word.split_once('=')) {
                match name {
                    "q" => weight = value.parse().unwrap_or(0.0),
                    "version" if !versions.contains(&value.trim_matches('"')) => return None,
                    _ => {}
                }
            }
            (!media.is_empty()).then_some(weight)
        };
        accept.split(',').filter_map(of_range).fold(0.0, f64::max)
    };
    let open_metrics = weight_of(&["application/openmetrics-text"], &["1.0.0"]);
    let plain = weight_of(&["text/plain", "text/*", "*/*"], &["0.0.4"]);
    if open_metrics > 0.0 && open_metrics >= plain {
        ExpositionFormat::OpenMetrics
    } else {
        ExpositionFormat::Prometheus
    }
}

#[cfg(test)]
mod tests {
    use std::io::{Read, Write};
    use std::net::TcpStream;

    use super::*;

    /// The answer to a whole request; empty if podfs closes the connection.
    fn scrape(address: SocketAddr) -> String {
        let mut client = TcpStream::connect(address).expect("connected");
        client.set_read_timeout(Some(Duration::from_secs(20))).expect("a limit");
        client.write_all(b"GET /metrics HTTP/1.1\r\nHost: podfs\r\n\r\n").expect("sent");
        let mut answer = String::new();
        client.read_to_string(&mut answer).expect("an answer within the limit");
        answer
    }

    #[test]
    fn clients_that_send_half_a_request_delay_no_other_for_long() {
        let listener = listen("127.0.0.1:0".parse().expect("an address")).expect("a free port");
        let address = listener.local_addr().expect("an address");
        start(listener, || Exposition::of(Vec::new())).expect("a thread");
        let half = |_| {
            let mut client = TcpStream::connect(address).expect("connected");
            client.write_all(b"GET /metrics HTTP/1.1\r\nHost:").expect("sent");
            client
        };
        let _halves: Vec<_> = (0..145).map(half).collect();
        assert!(scrape(address).starts_with("HTTP/1.1 200"));
        assert!(scrape(address).starts_with("HTTP/1.1 200"));
    }

    #[test]
    fn a_client_gets_the_available_format_that_it_prefers() {
        let prometheus = "application/openmetrics-text;version=1.0.0;q=0.5,application/openmetrics-text;version=0.0.1;\
                          q=0.4,text/plain;version=0.0.4;q=0.3,*/*;q=0.2";
        for accept in [prometheus, "application/openmetrics-text", "Application/OpenMetrics-Text; version=\"1.0.0\""] {
            assert_eq!(preferred_format(accept), ExpositionFormat::OpenMetrics, "{accept}");
        }
        let other_version = "application/openmetrics-text;version=2.0.0,text/plain;version=0.0.4;q=0.1";
        let refused = "application/openmetrics-text;q=0";
        for accept in ["", "*/*", "text/plain", "text/html", other_version, refused, ",;=;,", "q=1"] {
            assert_eq!(preferred_format(accept), ExpositionFormat::Prometheus, "{accept}");
        }
    }
}
