//! Sends a pod's status to the programs that follow the pod.
//!
//! 1. A follower is a program that follows the pod. It costs a small task on the supervisor's runtime and no thread. It does
//!    not count as one of the few clients that the supervisor serves at once (`MAX_CLIENTS`): followers have a limit of their
//!    own, [`MAX_FOLLOWERS`].
//! 2. The task never blocks: it reads the status store, as all clients do, and writes to a socket that does not block.
//! 3. The task drops a follower that does not read for two seconds. It drops a follower that disconnects or sends anything as
//!    soon as it waits for the next change.
//! 4. The task sends a status when it differs from the last one in more than ages and counts of requests. After each status of
//!    a burst, the pause doubles from 1 ms to 50 ms, and the next status has all changes of that pause. So a follower
//!    learns at once that the volumes of a new pod are mounted, and a supervisor of a thousand volumes does not send the
//!    status a thousand times.

use std::io::{self, ErrorKind};
use std::os::unix::net;
use std::sync::Arc;
use std::time::Duration;

use podfs_fuse::DoublingPause;
use podfs_fuse::protocol::frame;
use tokio::io::AsyncWriteExt;
use tokio::net::UnixStream;
use tokio::runtime::Handle;
use tokio::sync::{Notify, OwnedSemaphorePermit, Semaphore};
use tokio::time::{Instant, sleep, timeout};

use super::protocol::{ControlAnswer, Envelope, PROTOCOL, TIMEOUT};
use crate::supervisor::status::store::StatusStore;

/// Most programs that follow the pod at once.
const MAX_FOLLOWERS: usize = 8;
/// The pause from one status of a burst to the next.
const PAUSE: DoublingPause = DoublingPause::new(Duration::from_millis(1), Duration::from_millis(50));
/// How often a follower's task reads the status of a pod that has a problem, or has objects from an API server. Such a status
/// may change without a notice from the supervisor's task.
const REREAD_INTERVAL: Duration = Duration::from_secs(1);

/// The programs that follow the pod.
pub(super) struct Followers {
    runtime: Handle,
    free: Arc<Semaphore>,
    gone: Arc<Notify>,
}

impl Followers {
    /// No followers yet. Call it on the supervisor's runtime.
    pub(super) fn new() -> Followers {
        Followers { runtime: Handle::current(), free: Arc::new(Semaphore::new(MAX_FOLLOWERS)), gone: Arc::default() }
    }

    /// Whether no program follows the pod.
    pub(super) fn is_empty(&self) -> bool {
        self.free.available_permits() == MAX_FOLLOWERS
    }

    /// Waits until a follower has disconnected. Cancel-safe.
    pub(super) async fn wait_for_disconnect(&self) {
        self.gone.notified().await;
    }

    /// Starts a task that sends each change of the pod's status to the program at the other end of `stream`. If too many
    /// programs follow the pod already, starts none, and returns an answer for that program.
    ///
    /// # Errors
    /// When the socket does not work.
    pub(super) fn add(&self, stream: net::UnixStream, store: &StatusStore) -> io::Result<Option<ControlAnswer>> {
        let Ok(permit) = Arc::clone(&self.free).try_acquire_owned() else {
            let sentence = format!("{MAX_FOLLOWERS} programs follow the pod already; end one of them");
            return Ok(Some(ControlAnswer::Busy(sentence)));
        };
        stream.set_nonblocking(true)?;
        let (store, gone) = (store.clone(), Arc::clone(&self.gone));
        self.runtime.spawn(async move {
            send_changes(stream, store, permit).await;
            gone.notify_one();
        });
        Ok(None)
    }
}

/// Sends the status to one follower, until it disconnects.
async fn send_changes(stream: net::UnixStream, store: StatusStore, _permit: OwnedSemaphorePermit) -> Option<()> {
    let mut stream = UnixStream::from_std(stream).ok()?;
    let mut changes = store.changes();
    let mut last_sent = None;
    let mut sent_in_burst = 0;
    loop {
        changes.mark_unchanged();
        let status = store.status();
        let may_recover_alone = status.may_recover_alone();
        let digest = status.digest();
        if last_sent.replace(digest) != Some(digest) {
            let answer = ControlAnswer::Status(Box::new(status));
            let frame = frame(&Envelope { version: PROTOCOL, message: &answer, stays: false }).ok()?;
            drop(answer);
            timeout(TIMEOUT, stream.write_all(&frame)).await.ok()?.ok()?;
            sleep(PAUSE.after(sent_in_burst)).await;
            sent_in_burst += 1;
        } else {
            drop(status);
            sleep(PAUSE.after(0)).await;
        }
        let quiet_since = Instant::now();
        tokio::select! {
            changed = changes.changed() => changed.ok()?,
            () = is_over(&stream) => return None,
            () = sleep(REREAD_INTERVAL), if may_recover_alone => {}
        }
        if quiet_since.elapsed() >= PAUSE.longest() {
            sent_in_burst = 0;
        }
    }
}

/// Waits until the follower disconnects, or sends anything.
async fn is_over(stream: &UnixStream) {
    while stream.readable().await.is_ok() {
        match stream.try_read(&mut [0]) {
            Err(error) if error.kind() == ErrorKind::WouldBlock => {}
            _ => return,
        }
    }
}
