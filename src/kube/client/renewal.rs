//! The connection that requests use, and the next one with newer credentials.
//!
//! 1. `current` is locked for moments only, never across an `await`.
//! 2. One task at a time opens a connection: it owns `opening`. Tokio drops the task's future when the runtime ends, and the
//!    lock with it, so no request waits for a task that is gone. A request that is dropped does not stop the task.
//! 3. While that task reads files and runs a credential program, which can take a minute, requests use the current connection.
//!    A request waits only if the credentials are of no use: expired, rejected by the server, or read too long ago.
//! 4. A request waits for one opening that began after its credentials had become useless, and then uses the current
//!    connection, also if that opening failed. So a program that fails runs once for all requests that wait.
//! 5. A reason to read the credentials again that comes up during an opening stays, if the opening did not consider it and gives
//!    the same credentials.

use std::sync::{Arc, MutexGuard};
use std::time::{Duration, Instant, SystemTime};

use tokio::sync::OwnedMutexGuard;
use tracing::warn;

use super::ApiClient;
use super::connection::ApiConnection;
use crate::kube::settings::SettingsError;

/// How old credentials may be before podfs reads their files again.
const REREAD_INTERVAL: Duration = Duration::from_secs(60);
/// How old credentials may be for requests to use them while podfs reads their files.
const STALE: Duration = Duration::from_secs(300);
/// How long before its credentials expire podfs runs a program again. Longer than `REREAD_INTERVAL`, so that a client in use
/// does so in time.
const AHEAD: Duration = Duration::from_secs(120);

/// The connection, and what podfs knows of its credentials.
pub(super) struct CurrentConnection {
    connection: Arc<ApiConnection>,
    /// When the last opening ended.
    read: Instant,
    /// How many openings have ended.
    openings: u64,
    reread_reason: RereadReason,
    /// The last problem with the settings.
    problem: Option<String>,
}

/// Why credentials should be read again before their time.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum RereadReason {
    /// There is no reason.
    No,
    /// The server accepts no connection: perhaps because of a certificate.
    Connection,
    /// The server rejects the credentials.
    Identity,
}

/// Whether requests can use the credentials.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum CredentialValidity {
    /// podfs need not do anything.
    Fresh,
    /// Requests use them; podfs reads the files again meanwhile.
    Due,
    /// One request reads the files again and waits for the new credentials; other requests use the present ones.
    Doubtful,
    /// Requests wait for new credentials.
    Useless,
}

impl CurrentConnection {
    pub(super) fn new(connection: ApiConnection) -> CurrentConnection {
        let connection = Arc::new(connection);
        CurrentConnection {
            connection,
            read: Instant::now(),
            openings: 0,
            reread_reason: RereadReason::No,
            problem: None,
        }
    }

    fn validity(&self) -> CredentialValidity {
        let age = self.read.elapsed();
        match self.reread_reason {
            _ if self.expires_within(Duration::ZERO) || age >= STALE => CredentialValidity::Useless,
            RereadReason::Identity => CredentialValidity::Useless,
            RereadReason::Connection => CredentialValidity::Doubtful,
            RereadReason::No if age >= REREAD_INTERVAL => CredentialValidity::Due,
            RereadReason::No => CredentialValidity::Fresh,
        }
    }

    fn expires_within(&self, time: Duration) -> bool {
        self.connection.expires.is_some_and(|at| at <= SystemTime::now() + time)
    }

    /// Whether the next connection keeps the credentials that a program has issued for this one. podfs runs a program neither
    /// every minute nor because the server is unreachable.
    fn keeps_issued(&self) -> bool {
        match self.reread_reason {
            RereadReason::No => !self.expires_within(AHEAD),
            RereadReason::Connection => !self.expires_within(Duration::ZERO),
            RereadReason::Identity => false,
        }
    }

    /// Takes the result of an opening that considered this reason. If podfs cannot read new credentials, the old ones stay.
    fn replace(&mut self, opened: Result<ApiConnection, SettingsError>, considered: RereadReason) {
        let mut is_another = false;
        match opened {
            Ok(connection) => {
                is_another = !connection.same_credentials(&self.connection);
                self.connection = Arc::new(connection);
                self.problem = None;
            }
            Err(error) => {
                let problem = format!("{error}; podfs continues with its present credentials");
                if self.problem.as_ref() != Some(&problem) {
                    warn!("{problem}");
                    self.problem = Some(problem);
                }
            }
        }
        if is_another || self.reread_reason <= considered {
            self.reread_reason = RereadReason::No;
        }
        self.read = Instant::now();
        self.openings += 1;
    }
}

impl ApiClient {
    /// The connection for a request, with credentials that are as new as their files.
    pub(super) async fn connection(&self) -> Arc<ApiConnection> {
        let (validity, openings) = {
            let current = self.current();
            (current.validity(), current.openings)
        };
        let lock = Arc::clone(&self.0.opening);
        let turn = match validity {
            CredentialValidity::Fresh => None,
            CredentialValidity::Due | CredentialValidity::Doubtful => lock.try_lock_owned().ok(),
            CredentialValidity::Useless => Some(lock.lock_owned().await),
        };
        let Some(turn) = turn else { return self.connection_now() };
        let has_been_opened = {
            let current = self.current();
            current.openings != openings && current.reread_reason == RereadReason::No
        };
        if has_been_opened {
            return self.connection_now();
        }
        let opening = tokio::spawn(self.clone().open_next(turn));
        if validity != CredentialValidity::Due {
            // Fails only when the runtime ends.
            let _ = opening.await;
        }
        self.connection_now()
    }

    /// Opens the next connection, and makes it the current one.
    async fn open_next(self, _turn: OwnedMutexGuard<()>) {
        let (before, reread_reason, keeps_issued) = {
            let current = self.current();
            (Arc::clone(&current.connection), current.reread_reason, current.keeps_issued())
        };
        let opened = ApiConnection::open(&self.0.access, Some((&before, keeps_issued))).await;
        self.current().replace(opened, reread_reason);
    }

    /// Requests that podfs reads the credentials of this connection again. If another connection was opened since, this does
    /// nothing: another request has met the same problem.
    pub(super) fn request_reread(&self, connection: &Arc<ApiConnection>, reread_reason: RereadReason) {
        let mut current = self.current();
        if Arc::ptr_eq(&current.connection, connection) {
            current.reread_reason = current.reread_reason.max(reread_reason);
        }
    }

    /// Notes that an answer ended before its time. The connection may be broken, too.
    pub(crate) fn note_broken_connection(&self) {
        let mut current = self.current();
        current.connection.note(false);
        current.reread_reason = current.reread_reason.max(RereadReason::Connection);
    }

    fn connection_now(&self) -> Arc<ApiConnection> {
        Arc::clone(&self.current().connection)
    }

    fn current(&self) -> MutexGuard<'_, CurrentConnection> {
        self.0.current.lock().expect("no code panics while it is locked")
    }
}

#[cfg(test)]
mod tests;
