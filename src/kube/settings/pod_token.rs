//! The token of a pod's service account, which the kubelet sends to podfs as a CSI driver. podfs keeps it in memory
//! only, until the kubelet sends the next one.

use std::fmt;
use std::sync::Arc;

use secrecy::SecretString;
use tokio::sync::watch;

use super::SettingsError;

/// A token that may arrive later, and is replaced in time. Clones share the token.
#[derive(Clone)]
pub struct PodToken(Arc<watch::Sender<Option<SecretString>>>);

impl Default for PodToken {
    fn default() -> PodToken {
        PodToken(Arc::new(watch::Sender::new(None)))
    }
}

impl PodToken {
    /// Replaces the token.
    pub fn replace(&self, token: SecretString) {
        self.0.send_replace(Some(token));
    }

    /// Whether there is a token.
    pub fn is_known(&self) -> bool {
        self.0.borrow().is_some()
    }

    /// Waits for a token.
    pub(crate) async fn wait_until_known(&self) {
        // Fails only when the sender is dropped, which this struct owns.
        let _ = self.0.subscribe().wait_for(Option::is_some).await;
    }

    pub(super) fn read(&self) -> Result<SecretString, SettingsError> {
        self.0.borrow().clone().ok_or(SettingsError::NoPodToken)
    }
}

impl PartialEq for PodToken {
    fn eq(&self, other: &PodToken) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }
}

impl Eq for PodToken {}

impl fmt::Debug for PodToken {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str("PodToken")
    }
}
