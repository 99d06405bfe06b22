//! Metrics over HTTP: `GET /metrics`, as Prometheus sends it.
//!
//! podfs answers every client that reaches the address, so it limits each: it serves a few connections at once, each for a limited
//! time and with small headers; the others wait in the kernel. It takes one reading at a time, on a separate thread, because a pod
//! or a source may be slow to answer.

use std::convert::Infallible;
use std::io;
use std::net::{SocketAddr, TcpListener};
use std::sync::Arc;
use std::thread;
use std::time::Duration;

use http_body_util::Full;
use hyper::body::{Bytes, Incoming};
use hyper::header::{ACCEPT, ALLOW, CONTENT_TYPE};
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper::{Method, Request, Response, StatusCode};
use hyper_util::rt::{TokioIo, TokioTimer};
use tokio::sync::{Mutex, Semaphore};
use tokio::time::{sleep, timeout};
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
    let connections = Arc::new(Semaphore::new(MAX_CONNECTIONS));
    loop {
        let permit = Arc::clone(&connections).acquire_owned().await.expect("the semaphore is never closed");
        let stream = match listener.accept().await {
            Ok((stream, _)) => stream,
            Err(_) => {
                sleep(PAUSE).await;
                continue;
            }
        };
        let read = Arc::clone(&read);
        let service = service_fn(move |request| {
            let read = Arc::clone(&read);
            async move { Ok::<_, Infallible>(answer(&request, &read).await) }
        });
        tokio::spawn(async move {
            let mut http = http1::Builder::new();
            http.timer(TokioTimer::new()).header_read_timeout(HEADER_TIMEOUT).max_buf_size(LONGEST_REQUEST);
            // Each connection carries one request, so idle connections do not use up the few permits between two scrapes.
            http.keep_alive(false);
            let served = http.serve_connection(TokioIo::new(stream), service);
            // A client that closes the connection, or does not speak HTTP, gets no answer.
            let _ = timeout(HEADER_TIMEOUT + ANSWER_TIMEOUT, served).await;
            drop(permit);
        });
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
    use super::*;

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
