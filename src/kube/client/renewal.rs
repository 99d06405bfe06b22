//! The connection that requests use, and the next one with newer credentials.
//!
//! 1. `current` is locked for moments only, never across an `await`.
//! 2. One task at a time opens a connection: it owns `opening`. Tokio drops the task's future when the runtime ends, and the
//!    lock with it, so no request waits for a task that is gone. A request that is dropped does not stop the task.
//! 3. While that task reads files and runs a credential program, which can take a minute, requests use the connection they
//!    have. Only those wait whose credentials are of no use: expired, rejected by the server, or read too long ago.
//! 4. A request waits for one opening that began after its credentials had become useless, and then uses the current
//!    connection, also if that opening failed. So a program that fails runs once for all requests that wait.
//! 5. A doubt that is raised during an opening stays if the opening did not consider it and gives the same credentials.

use std::sync::{Arc, MutexGuard};
use std::time::{Duration, Instant, SystemTime};

use tokio::sync::OwnedMutexGuard;
use tracing::warn;

use super::ApiClient;
use super::connection::ApiConnection;
use crate::kube::settings::SettingsError;

/// How old credentials may be before their files are read again.
const FRESH: Duration = Duration::from_secs(60);
/// How old they may be so that requests use them while their files are read.
const STALE: Duration = Duration::from_secs(300);
/// How long before the credentials of a program expire it is run again. Longer than `FRESH`, so that a client in use does it in
/// time.
const AHEAD: Duration = Duration::from_secs(120);

/// The connection, and what podfs knows of its credentials.
pub(super) struct CurrentConnection {
    connection: Arc<ApiConnection>,
    /// When the last opening ended.
    read: Instant,
    /// How many openings have ended.
    openings: u64,
    doubt: RereadReason,
    /// The last problem with the settings.
    complaint: Option<String>,
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
    /// The request that reads the files again waits for that; others use what they have.
    Doubtful,
    /// Requests wait for others.
    Useless,
}

impl CurrentConnection {
    pub(super) fn new(connection: ApiConnection) -> CurrentConnection {
        let connection = Arc::new(connection);
        CurrentConnection { connection, read: Instant::now(), openings: 0, doubt: RereadReason::No, complaint: None }
    }

    fn validity(&self) -> CredentialValidity {
        let age = self.read.elapsed();
        match self.doubt {
            _ if self.expires_within(Duration::ZERO) || age >= STALE => CredentialValidity::Useless,
            RereadReason::Identity => CredentialValidity::Useless,
            RereadReason::Connection => CredentialValidity::Doubtful,
            RereadReason::No if age >= FRESH => CredentialValidity::Due,
            RereadReason::No => CredentialValidity::Fresh,
        }
    }

    fn expires_within(&self, time: Duration) -> bool {
        self.connection.expires.is_some_and(|at| at <= SystemTime::now() + time)
    }

    /// Whether the next connection has what a program has issued for this one. podfs does not run a program every minute, and
    /// not because the server is unreachable.
    fn keeps_issued(&self) -> bool {
        match self.doubt {
            RereadReason::No => !self.expires_within(AHEAD),
            RereadReason::Connection => !self.expires_within(Duration::ZERO),
            RereadReason::Identity => false,
        }
    }

    /// Takes the result of an opening that considered this doubt. If new credentials cannot be read, the old ones stay.
    fn replace(&mut self, opened: Result<ApiConnection, SettingsError>, considered: RereadReason) {
        let mut is_another = false;
        match opened {
            Ok(connection) => {
                is_another = !connection.same_credentials(&self.connection);
                self.connection = Arc::new(connection);
                self.complaint = None;
            }
            Err(error) => {
                let complaint = format!("{error}; podfs continues with its present credentials");
                if self.complaint.as_ref() != Some(&complaint) {
                    warn!("{complaint}");
                    self.complaint = Some(complaint);
                }
            }
        }
        if is_another || self.doubt <= considered {
            self.doubt = RereadReason::No;
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
            current.openings != openings && current.doubt == RereadReason::No
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
        let (before, doubt, keeps_issued) = {
            let current = self.current();
            (Arc::clone(&current.connection), current.doubt, current.keeps_issued())
        };
        let opened = ApiConnection::open(&self.0.access, Some((&before, keeps_issued))).await;
        self.current().replace(opened, doubt);
    }

    /// Raises a doubt about this connection. A connection that was opened since is not in doubt: other requests have
    /// met the same problem.
    pub(super) fn request_reread(&self, connection: &Arc<ApiConnection>, doubt: RereadReason) {
        let mut current = self.current();
        if Arc::ptr_eq(&current.connection, connection) {
            current.doubt = current.doubt.max(doubt);
        }
    }

    /// Notes that an answer broke off, perhaps with the connection.
    pub(crate) fn broke(&self) {
        let mut current = self.current();
        current.connection.note(false);
        current.doubt = current.doubt.max(RereadReason::Connection);
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
