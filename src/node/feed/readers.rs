//! The readers of the objects of CSI volumes, if podfs reads them with the credentials of the pods: for each pod a client of the
//! API server, with the token that the kubelet sends with each publication.

use std::sync::Arc;
use std::time::Duration;

use dashmap::DashMap;
use secrecy::SecretString;
use tokio::sync::OnceCell;
use tokio::time::sleep;

use crate::kube::client::ApiClient;
use crate::kube::settings::{PodToken, SettingsError};
use crate::manifest::pod::PodUid;
use crate::source::SettingsSource;

/// The pause before podfs reads the settings of the API server again, after it could not use them.
const RETRY_PAUSE: Duration = Duration::from_secs(10);

/// The readers of the node's pods. Cheap to clone.
#[derive(Clone)]
pub(in crate::node) struct PodReaders {
    server: SettingsSource,
    pods: Arc<DashMap<PodUid, Arc<PodReader>>>,
}

/// The reader of a pod's objects, with the pod's credentials.
pub(super) struct PodReader {
    server: SettingsSource,
    token: PodToken,
    client: OnceCell<ApiClient>,
}

impl PodReaders {
    /// Readers at this server, without any token.
    pub(super) fn new(server: SettingsSource) -> PodReaders {
        PodReaders { server, pods: Arc::default() }
    }

    /// The reader of a pod, with or without a token.
    pub(super) fn of(&self, uid: &PodUid) -> Arc<PodReader> {
        let new = || {
            let server = self.server.clone();
            Arc::new(PodReader { server, token: PodToken::default(), client: OnceCell::new() })
        };
        Arc::clone(&self.pods.entry(uid.clone()).or_insert_with(new))
    }

    /// Replaces the token of a pod.
    pub(in crate::node) fn renew(&self, uid: &PodUid, token: SecretString) {
        self.of(uid).token.replace(token);
    }

    /// Whether podfs has a token of the pod.
    pub(in crate::node) fn knows(&self, uid: &PodUid) -> bool {
        self.pods.get(uid).is_some_and(|reader| reader.token.is_known())
    }

    /// Forgets the tokens of pods that are not published, unless a task still reads with them.
    pub(in crate::node) fn keep(&self, is_published: impl Fn(&PodUid) -> bool) {
        self.pods.retain(|uid, reader| is_published(uid) || Arc::strong_count(reader) > 1);
    }
}

impl PodReader {
    /// The pod's client, with one connection for all of its objects. Without a token, or if podfs cannot use the settings
    /// of the server, calls `report` with the problem and waits.
    pub(super) async fn client(&self, report: impl Fn(&SettingsError)) -> ApiClient {
        if !self.token.is_known() {
            report(&SettingsError::NoPodToken);
            self.token.wait_until_known().await;
        }
        loop {
            let access = || SettingsSource::AsPod(Box::new(self.server.clone()), self.token.clone());
            match self.client.get_or_try_init(|| ApiClient::open(access())).await {
                Ok(client) => return client.clone(),
                Err(error) => report(&error),
            }
            sleep(RETRY_PAUSE).await;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_token_is_kept_while_the_pod_is_published_or_read_for_and_never_shown() {
        let readers = PodReaders::new(SettingsSource::InCluster);
        let uid = |name: &str| PodUid::parse(name).expect("a uid");
        let (kept, read, gone) = (uid("kept"), uid("read"), uid("gone"));
        [&kept, &read, &gone].into_iter().for_each(|uid| readers.renew(uid, SecretString::from("t0ken")));
        let reader = readers.of(&read);
        readers.keep(|uid| *uid == kept);
        assert!(readers.knows(&kept) && readers.knows(&read) && !readers.knows(&gone));
        assert!(
            !format!("{:?}", SettingsSource::AsPod(Box::new(SettingsSource::InCluster), reader.token.clone()))
                .contains("t0ken")
        );
        drop(reader);
        readers.keep(|_| false);
        assert!(!readers.knows(&kept) && !readers.knows(&read));
    }
}
