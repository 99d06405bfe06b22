//! Connects when there is a call to send, reads replies, and writes the bytes that the socket did not take at once.

use std::future::poll_fn;
use std::io;
use std::rc::Rc;
use std::task::Poll;

use tokio::io::Interest;
use tokio::time::sleep;
use tracing::debug;

use super::dial::Stream;
use super::message::{RecordKind, receive};
use super::pending::SharedConnection;
use super::policy::RETRY;
use super::record::{Incoming, StreamError};
use super::slice::Slice;

/// Why a stream cannot be used any more.
#[derive(Debug, thiserror::Error)]
enum StreamEnd {
    #[error("the server closed the connection")]
    Closed,
    #[error("{0}")]
    Failed(#[from] io::Error),
    #[error("{0}")]
    StreamError(#[from] StreamError),
}

/// Connects whenever there is a call, for as long as the connection exists.
pub(super) async fn drive(shared: Rc<SharedConnection>) {
    let mut backoff = RETRY.backoff();
    let mut is_reconnect = false;
    loop {
        poll_fn(|context| {
            shared.driver.wait(context);
            if shared.has_work() { Poll::Ready(()) } else { Poll::Pending }
        })
        .await;
        let connected = async {
            if connect(&shared, &mut is_reconnect).await {
                backoff.reset();
            } else {
                sleep(backoff.fail()).await;
            }
        };
        tokio::select! {
            () = connected => continue,
            () = shared.cut.notified() => {}
        }
        // Failures at the old address say nothing about the server at the new one.
        backoff.reset();
        hang_up(&shared);
    }
}

/// Connects once, and uses the connection until it ends. Returns whether the server has sent a valid message. Sets
/// `is_reconnect` for the next time.
async fn connect(shared: &SharedConnection, is_reconnect: &mut bool) -> bool {
    match shared.dialer.dial(shared.peer.address()).await {
        Ok(stream) => {
            shared.peer.connected(std::mem::replace(is_reconnect, true));
            shared.attach(stream);
            let (got_message, end) = exchange_messages(shared).await;
            hang_up(shared);
            ended(shared, &end);
            got_message
        }
        Err(error) => {
            shared.peer.attempt_failed();
            shared.peer.set_last_error(error.to_string());
            false
        }
    }
}

/// Ends the stream, if there is one.
fn hang_up(shared: &SharedConnection) {
    if shared.stream.borrow().is_some() {
        shared.detach();
        shared.peer.disconnected();
    }
}

/// Records why a stream ended, and logs it.
fn ended(shared: &SharedConnection, end: &StreamEnd) {
    let server = shared.peer.name();
    match end {
        // Servers close idle connections.
        StreamEnd::Closed if !shared.has_work() => debug!(server, "the idle connection was closed"),
        StreamEnd::StreamError(error) => shared.peer.log_garbage(&error.to_string()),
        end => debug!(server, "the connection was lost: {end}"),
    }
    shared.peer.set_last_error(end.to_string());
}

/// Sends and receives on the stream until it ends. Returns why, and whether the server has sent a valid message.
async fn exchange_messages(shared: &SharedConnection) -> (bool, StreamEnd) {
    let stream = shared.stream.borrow().clone().expect("it was just attached");
    let mut incoming = Incoming::new(shared.pool.clone());
    let mut got_message = false;
    loop {
        let readable = poll_fn(|context| {
            shared.driver.wait(context);
            loop {
                if let Some(kind) = shared.broken.take() {
                    return Poll::Ready(Err(kind.into()));
                }
                if !shared.has_queue() || stream.poll_write_ready(context)?.is_pending() {
                    return stream.poll_read_ready(context);
                }
                shared.write();
            }
        })
        .await;
        let read =
            readable.map_err(StreamEnd::from).and_then(|()| read(shared, &stream, &mut incoming, &mut got_message));
        if let Err(end) = read {
            return (got_message, end);
        }
    }
}

/// Reads from the stream once.
fn read(
    shared: &SharedConnection,
    stream: &Stream,
    incoming: &mut Incoming,
    got_message: &mut bool,
) -> Result<(), StreamEnd> {
    let buffer = incoming.read_buffer();
    let space = buffer.len();
    let count = match stream.try_read(buffer) {
        Ok(0) => return Err(StreamEnd::Closed),
        Ok(count) => count,
        Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(()),
        Err(error) => return Err(error.into()),
    };
    if count < space {
        // A short read means that the socket is empty. This clears tokio's readiness, and later data sets it again.
        let _ = stream.try_io(Interest::READABLE, || Err::<(), _>(io::ErrorKind::WouldBlock.into()));
    }
    incoming.read(count, |record| {
        take(shared, record)?;
        *got_message = true;
        Ok(())
    })?;
    shared.peer.note_received();
    Ok(())
}

/// Parses a record, and gives it to the call that waits for it.
fn take(shared: &SharedConnection, record: Slice) -> Result<(), StreamError> {
    match receive(&record).map_err(|_| StreamError::NoReply)? {
        RecordKind::Reply { xid, results } => {
            shared.deliver(xid, record, results);
        }
        RecordKind::Call => {}
    }
    Ok(())
}
