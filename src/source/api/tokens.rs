//! Tokens of the pod's service account: issued by the server, bound to the pod, and replaced long before they expire. Beside them
//! are the pod's certificates, see [`super::certificates`].
//!
//! Each token and each certificate that volumes ask for has a task of its own. It runs for as long as podfs serves the pod, also
//! while the pod terminates (TK-10). If podfs cannot replace a token, the earlier one stays until it expires (TK-06).

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use serde::Deserialize;
use serde_json::Value;
use tokio::sync::mpsc::{Receiver, Sender, channel};
use tracing::{Instrument, debug, warn};

use super::certificates::keep_certified;
use super::contacts::Contacts;
use super::credential::{CredentialLifetime, TokenOwner};
use super::object_request::ObjectRequest;
use super::single::{AbortOnDrop, ObjectUpdate};
use crate::kube::address::Resource;
use crate::kube::client::ApiClient;
use crate::kube::error::{ApiError, ErrorClass};
use crate::kube::retry::Retry;
use crate::manifest::Tokens;
use crate::manifest::pod::{PodFacts, PodIdentity};
use crate::manifest::tokens::Token;
use crate::volume::{CredentialKey, TokenKey};

/// The longest life of a token in seconds, ten years, that podfs calculates with.
const LONGEST_LIFE: u64 = 10 * 365 * 24 * 60 * 60;
/// How late an answer may arrive, and how much correct clocks may differ, at most.
const TOLERANCE: Duration = Duration::from_secs(60);
const QUEUE_LENGTH: usize = 16;

/// All tokens and certificates of a pod.
pub(crate) struct IssuedCredentials {
    client: ApiClient,
    contacts: Contacts,
    owner: Option<TokenOwner>,
    tokens: BTreeMap<CredentialKey, WantedCredentials>,
    sender: Sender<(CredentialKey, ObjectUpdate<Token>)>,
    updates: Receiver<(CredentialKey, ObjectUpdate<Token>)>,
}

struct WantedCredentials {
    token: Option<Arc<Token>>,
    request: ObjectRequest,
    _task: AbortOnDrop,
}

impl IssuedCredentials {
    /// No tokens.
    pub(crate) fn new(client: ApiClient, contacts: Contacts) -> IssuedCredentials {
        let (sender, updates) = channel(QUEUE_LENGTH);
        IssuedCredentials { client, contacts, owner: None, tokens: BTreeMap::new(), sender, updates }
    }

    /// Requests these tokens for this pod from the server, and forgets all others. Returns the titles of the others.
    pub(crate) fn want(&mut self, keys: &BTreeSet<CredentialKey>, pod: &PodIdentity, facts: &PodFacts) -> Vec<String> {
        let (service_account, node) = (facts.service_account.clone(), facts.node_name.clone());
        let owner = TokenOwner { pod: pod.clone(), service_account, node };
        let is_same_owner = self.owner.as_ref() == Some(&owner);
        let is_unwanted = |key: &&CredentialKey| !is_same_owner || !keys.contains(*key);
        let forgotten: Vec<String> = self.tokens.keys().filter(is_unwanted).map(|key| self.title(key)).collect();
        self.tokens.retain(|key, _| !is_unwanted(&key));
        forgotten.iter().for_each(|title| self.contacts.forget(title));
        if !is_same_owner {
            // The channel may have tokens of the other owner.
            (self.sender, self.updates) = channel(QUEUE_LENGTH);
        }
        for key in keys {
            if self.tokens.contains_key(key) {
                continue;
            }
            debug!("podfs requests {}", owner.title(key));
            let (client, contacts, sender) = (self.client.clone(), self.contacts.clone(), self.sender.clone());
            let task = match key.clone() {
                CredentialKey::Token(key) => {
                    AbortOnDrop::spawn(keep_issued(client, owner.clone(), key, contacts, sender).in_current_span())
                }
                CredentialKey::Certificate(key) => {
                    AbortOnDrop::spawn(keep_certified(client, owner.clone(), key, contacts, sender).in_current_span())
                }
            };
            let request = ObjectRequest::new();
            self.tokens.insert(key.clone(), WantedCredentials { token: None, request, _task: task });
        }
        self.owner = Some(owner);
        forgotten
    }

    /// Whether podfs requests this token. A task that has ended may have sent an update of another one before.
    pub(crate) fn is_wanted(&self, key: &CredentialKey) -> bool {
        self.tokens.contains_key(key)
    }

    /// Waits for the next update. Cancel-safe.
    pub(crate) async fn next(&mut self) -> (CredentialKey, ObjectUpdate<Token>) {
        self.updates.recv().await.expect("`self.sender` keeps the channel open")
    }

    /// Takes an update of a token. Returns whether the tokens have changed.
    pub(crate) fn take(&mut self, key: &CredentialKey, update: ObjectUpdate<Token>) -> bool {
        let Some(wanted) = self.tokens.get_mut(key) else { return false };
        match update {
            ObjectUpdate::Is(token) => {
                wanted.token = Some(token);
                wanted.request.trouble = None;
                true
            }
            ObjectUpdate::Absent => wanted.token.take().is_some(),
            ObjectUpdate::Alive => false,
            ObjectUpdate::Failure(error) => {
                wanted.request.trouble = Some(error);
                wanted.token.is_none()
            }
        }
    }

    /// The name of a token in the log.
    pub(crate) fn title(&self, key: &CredentialKey) -> String {
        self.owner.as_ref().map_or_else(|| "Token".to_owned(), |owner| owner.title(key))
    }

    /// Requests for tokens that podfs does not have yet.
    pub(crate) fn unanswered(&self) -> impl Iterator<Item = &ObjectRequest> {
        self.tokens.values().filter(|wanted| wanted.token.is_none()).map(|wanted| &wanted.request)
    }

    /// Whether there is an answer for each token.
    pub(crate) fn are_answered(&self) -> bool {
        self.tokens.values().all(|wanted| wanted.token.is_some() || wanted.request.trouble.is_some())
    }

    /// The present tokens.
    pub(crate) fn tokens(&self) -> Tokens {
        self.each().map(|(key, token)| (key.clone(), token.map(|token| Token::clone(token)))).collect()
    }

    /// Each wanted token, or the reason why it is missing.
    pub(crate) fn each(&self) -> impl Iterator<Item = (&CredentialKey, Result<&Arc<Token>, String>)> {
        let token = |(key, wanted)| {
            let WantedCredentials { token, request, .. }: &WantedCredentials = wanted;
            (key, token.as_ref().ok_or_else(|| request.why(&self.title(key))))
        };
        self.tokens.iter().map(token)
    }
}

/// Sends a token, and the next one in time, until the receiver is dropped.
async fn keep_issued(
    client: ApiClient,
    owner: TokenOwner,
    key: TokenKey,
    contacts: Contacts,
    sender: Sender<(CredentialKey, ObjectUpdate<Token>)>,
) {
    let request = owner.request(&key);
    let key = CredentialKey::Token(key);
    let title = owner.title(&key);
    let below = [owner.service_account.as_str(), "token"];
    let mut retry = Retry::new(client.clone());
    let mut life: Option<CredentialLifetime> = None;
    let mut is_warned = false;
    loop {
        let answer = client.create(Resource::SERVICE_ACCOUNT, Some(&owner.pod.namespace), &below, &request).await;
        match answer.and_then(|answer| IssuedToken::parse(answer, SystemTime::now())) {
            Ok(IssuedToken { token, life: granted, clocks_differ }) => {
                retry.reset();
                if clocks_differ && !std::mem::replace(&mut is_warned, true) {
                    warn!(
                        "{title}: the clocks of this node and of the API server differ by more than a minute; podfs replaces the \
                         token by the time that passes; set the clocks"
                    );
                }
                contacts.answered(&title, "issued", None);
                if sender.send((key.clone(), ObjectUpdate::Is(token.into()))).await.is_err() {
                    return;
                }
                granted.until_due().await;
                life = Some(granted);
            }
            Err(mut error) => {
                contacts.trouble(&title, "waiting", &error);
                let pause = retry.failed(&error);
                let is_over = life.as_ref().is_some_and(CredentialLifetime::is_over);
                if is_over {
                    error.sentence = format!("the token has expired and refresh failed: {}", error.sentence);
                }
                if sender.send((key.clone(), ObjectUpdate::Failure(error))).await.is_err() {
                    return;
                }
                // The task sends the reason first, so that a missing token always has one.
                if is_over && sender.send((key.clone(), ObjectUpdate::Absent)).await.is_err() {
                    return;
                }
                retry.wait(&pause).await;
            }
        }
    }
}

/// An issued token.
struct IssuedToken {
    token: Token,
    life: CredentialLifetime,
    /// Whether the clock of this node or that of the server is wrong: the token ends before now, or long after its whole life.
    clocks_differ: bool,
}

#[derive(Deserialize)]
struct TokenResponse {
    #[serde(default)]
    spec: Spec,
    status: Option<TokenResponseStatus>,
}

#[derive(Default, Deserialize)]
#[serde(rename_all = "camelCase")]
struct Spec {
    expiration_seconds: Option<u64>,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct TokenResponseStatus {
    token: String,
    expiration_timestamp: Time,
}

impl IssuedToken {
    /// Parses the server's answer. An error quotes nothing of it, because it has a token.
    fn parse(answer: Value, now: SystemTime) -> Result<IssuedToken, ApiError> {
        let invalid_answer = |sentence: &str| ApiError::new(ErrorClass::InvalidAnswer, sentence);
        let answer: TokenResponse = serde_json::from_value(answer)
            .map_err(|_| invalid_answer("the answer of the server is no TokenRequest"))?;
        let status = answer.status.filter(|status| !status.token.is_empty());
        let TokenResponseStatus { token, expiration_timestamp } =
            status.ok_or_else(|| invalid_answer("the answer of the server has no token"))?;
        let expires = SystemTime::from(expiration_timestamp.0);
        let by_clock = expires.duration_since(now).unwrap_or_default();
        let whole =
            answer.spec.expiration_seconds.map_or(by_clock, |seconds| Duration::from_secs(seconds.min(LONGEST_LIFE)));
        if whole.is_zero() {
            return Err(invalid_answer("the server issued a token that has expired already"));
        }
        let clocks_differ = by_clock.is_zero() || by_clock > whole + TOLERANCE;
        // A token is good for its whole life when it is issued, whatever the clocks say.
        let left = if by_clock.is_zero() { whole } else { by_clock.min(whole) };
        let token = Token { bytes: token.into_bytes(), expires: Some(expires) };
        Ok(IssuedToken { token, life: CredentialLifetime::new(now, whole, left, fastrand::f64()), clocks_differ })
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use k8s_openapi::jiff::Timestamp;

    use serde_json::json;

    use super::super::credential::LONGEST_USE;
    use super::*;
    use crate::kube::settings::SettingsSource;

    const HOUR: u64 = 3600;

    #[test]
    fn tk_05_a_token_is_good_for_its_life_with_any_clock() {
        let grant = |hours: u64| {
            let until =
                json!(Time(Timestamp::from_second(i64::try_from(hours * HOUR).expect("a number")).expect("a time")));
            let answer =
                json!({"spec": {"expirationSeconds": HOUR}, "status": {"token": "t", "expirationTimestamp": until}});
            let grant =
                IssuedToken::parse(answer, SystemTime::UNIX_EPOCH + Duration::from_secs(100 * HOUR)).expect("a token");
            (grant.life.end.as_secs(), grant.clocks_differ)
        };
        assert_eq!(grant(101), (HOUR, false));
        assert_eq!(grant(77), (HOUR, true), "the clock of the node is a day ahead");
        assert_eq!(grant(125), (HOUR, true), "the clock of the node is a day behind");
    }

    #[tokio::test]
    async fn a_token_that_no_volume_wants_any_more_is_forgotten() {
        let directory = tempfile::tempdir().expect("a directory");
        let kubeconfig = directory.path().join("config");
        // No server listens there.
        let text = "{current-context: c, contexts: [{name: c, context: {cluster: k}}], \
            clusters: [{name: k, cluster: {server: 'http://127.0.0.1:1'}}]}";
        fs::write(&kubeconfig, text).expect("written");
        let client = ApiClient::open(SettingsSource::Kubeconfig(kubeconfig)).await.expect("settings");
        let contacts = Contacts::default();
        let mut tokens = IssuedCredentials::new(client, contacts.clone());
        let (pod, facts) = (PodIdentity::placeholder(), PodFacts::placeholder());
        let key = |audience: &str| CredentialKey::Token(TokenKey::new(Some(audience.to_owned()), None));
        let (first, other) = (key("first"), key("other"));
        let objects = || contacts.all().into_iter().map(|(object, _)| object).collect::<Vec<_>>();
        assert!(tokens.want(&BTreeSet::from([first.clone()]), &pod, &facts).is_empty());
        let (failed, update) = tokens.next().await;
        tokens.take(&failed, update);
        let title = tokens.title(&first);
        assert_eq!(objects(), std::slice::from_ref(&title));
        assert_eq!(tokens.want(&BTreeSet::from([other.clone()]), &pod, &facts), [title]);
        assert!(objects().is_empty() && !tokens.is_wanted(&first));
        // Another service account needs another token.
        let (_, update) = tokens.next().await;
        tokens.take(&other, update);
        let title = tokens.title(&other);
        let facts = PodFacts { service_account: "other".to_owned(), ..facts };
        assert_eq!(tokens.want(&BTreeSet::from([other.clone()]), &pod, &facts), [title]);
        assert!(objects().is_empty() && tokens.is_wanted(&other));
    }

    #[test]
    fn tk_05_a_token_for_ever_is_replaced_after_a_day() {
        for until in ["2030-03-17T18:46:40Z", "1970-01-01T00:00:00Z", "9999-01-01T00:00:00Z"] {
            let answer = json!({"spec": {"expirationSeconds": u64::MAX}, "status": {"token": "t", "expirationTimestamp": until}});
            let issued = IssuedToken::parse(answer, SystemTime::UNIX_EPOCH + Duration::from_secs(1_900_000_000));
            assert!(issued.expect("a token").life.due <= LONGEST_USE, "{until}");
        }
    }

    #[test]
    fn an_answer_without_a_good_token_is_reported_and_not_quoted() {
        let now = SystemTime::UNIX_EPOCH + Duration::from_secs(1_900_000_000);
        let parse =
            |answer: Value| IssuedToken::parse(answer, now).map(|grant| grant.life.end).map_err(|error| error.sentence);
        let answer = |token: &str, until: &str| json!({"spec": {"expirationSeconds": 3600}, "status": {"token": token, "expirationTimestamp": until}});
        assert_eq!(parse(answer("hunter2", "2030-03-17T18:46:40Z")), Ok(Duration::from_secs(3600)));
        let expired = json!({"status": {"token": "hunter2", "expirationTimestamp": "2030-03-17T17:46:40Z"}});
        assert_eq!(parse(expired), Err("the server issued a token that has expired already".to_owned()));
        assert_eq!(parse(answer("", "2030-03-17T18:46:40Z")), Err("the answer of the server has no token".to_owned()));
        assert_eq!(parse(answer("hunter2", "tomorrow")), Err("the answer of the server is no TokenRequest".to_owned()));
    }
}
