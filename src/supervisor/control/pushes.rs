//! Receives the pushes of a program that keeps its connection open, as `podfs node` does.
//!
//! 1. A client's thread reads the first push on a connection, like any other question. The connection then costs a small task
//!    on the supervisor's runtime, but no thread, and does not count as one of the few clients that the supervisor serves at
//!    once (`MAX_CLIENTS`).
//! 2. The task parses a push, which takes milliseconds for a megabyte, and puts it into the inbox. It never waits for volumes.
//! 3. The task disconnects a program that sends anything but pushes, or does not read the answer within two seconds. It answers a push
//!    of another version of the protocol before.

use std::os::unix::net;
use std::sync::Arc;

use podfs_fuse::protocol::frame;
use serde_json::Value;
use tokio::io::AsyncWriteExt;
use tokio::runtime::Handle;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::time::timeout;

use super::frames::Frames;
use super::protocol::{ControlAnswer, ControlQuestion, Envelope, LONGEST_PUSH, PROTOCOL, TIMEOUT, not_understood};
use crate::source::PushReceiver;

/// Most programs that keep a connection open at once.
const MAX_PUSHERS: usize = 4;

/// The programs that push.
pub(super) struct PushTasks {
    runtime: Handle,
    free: Arc<Semaphore>,
}

impl PushTasks {
    /// No programs yet. Call it on the supervisor's runtime.
    pub(super) fn new() -> PushTasks {
        PushTasks { runtime: Handle::current(), free: Arc::new(Semaphore::new(MAX_PUSHERS)) }
    }

    /// Starts a task that receives more pushes from this connection. If too many programs push already, starts none, and
    /// returns false.
    pub(super) fn add(&self, stream: net::UnixStream, inbox: &PushReceiver) -> bool {
        let Ok(permit) = Arc::clone(&self.free).try_acquire_owned() else { return false };
        self.runtime.spawn(take_all(stream, inbox.clone(), permit));
        true
    }
}

/// Receives pushes, and answers each, until the connection ends.
async fn take_all(stream: net::UnixStream, inbox: PushReceiver, _permit: OwnedSemaphorePermit) -> Option<()> {
    let mut frames = Frames::new(stream).ok()?;
    loop {
        let message = frames.next(LONGEST_PUSH).await.ok()??;
        let Envelope { version, message, .. } = serde_json::from_slice::<Envelope<Value>>(&message).ok()?;
        if version != PROTOCOL {
            let refused = frame(&Envelope { version: PROTOCOL, message: &not_understood(), stays: false }).ok()?;
            timeout(TIMEOUT, frames.stream.write_all(&refused)).await.ok()?.ok()?;
            return None;
        }
        let ControlQuestion::Push(push) = serde_json::from_value(message).ok()? else { return None };
        let answer =
            inbox.take(push).map_or_else(|error| ControlAnswer::Refused(error.to_string()), ControlAnswer::Pushed);
        let answer = frame(&Envelope { version: PROTOCOL, message: &answer, stays: false }).ok()?;
        timeout(TIMEOUT, frames.stream.write_all(&answer)).await.ok()?.ok()?;
    }
}
