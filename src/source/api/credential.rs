//! A credential of the pod, which is a token or a certificate: for which pod and service account it is, and for how long.

use std::time::{Duration, SystemTime};

use serde_json::{Value, json};
use tokio::time::{Instant, sleep};

use crate::manifest::pod::PodIdentity;
use crate::volume::{CredentialKey, TokenKey};

/// The age at which podfs replaces a token, however long it is valid.
pub(super) const LONGEST_USE: Duration = Duration::from_secs(24 * 60 * 60);
/// podfs replaces a token when no more than this part of its life is left.
const REST: f64 = 0.2;
/// podfs does so up to this much earlier, so that not all pods ask at once.
const SPREAD: Duration = Duration::from_secs(10);
/// The shortest use of a token, unless it is valid for less: a clock may be wrong.
const SHORTEST_USE: Duration = Duration::from_secs(60);
/// How often podfs checks the age of a token: clocks can be set, and time passes while a machine sleeps.
const CHECK_INTERVAL: Duration = Duration::from_secs(600);

/// The pod and service account of tokens. Tokens of another pod or another service account are of no use (TK-07). As for the
/// kubelet, a service account is its name: podfs does not notice that an account was created again with another uid.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct TokenOwner {
    pub(super) pod: PodIdentity,
    pub(super) service_account: String,
    pub(super) node: Option<String>,
}

/// When to replace a token or a certificate, and when it ends: by the wall clock, which may be set, or by the monotonic
/// clock, whichever comes first.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct CredentialLifetime {
    issued: (SystemTime, Instant),
    pub(super) due: Duration,
    pub(super) end: Duration,
}

impl TokenOwner {
    /// The title of a token in messages: `Token default/app for "vault"`.
    pub(super) fn title(&self, key: &CredentialKey) -> String {
        let account = format!("{}/{}", self.pod.namespace, self.service_account);
        match key {
            CredentialKey::Token(TokenKey { audience: Some(audience), expiration_seconds }) => {
                format!("Token {account} for {audience:?}, {expiration_seconds} s")
            }
            CredentialKey::Token(TokenKey { audience: None, expiration_seconds }) => {
                format!("Token {account}, {expiration_seconds} s")
            }
            CredentialKey::Certificate(key) => format!("Certificate of {} by {:?}", self.pod, key.signer),
        }
    }

    /// The body of the TokenRequest (TK-01).
    pub(super) fn request(&self, key: &TokenKey) -> Value {
        json!({
            "apiVersion": "authentication.k8s.io/v1",
            "kind": "TokenRequest",
            "spec": {
                "audiences": key.audience.iter().collect::<Vec<_>>(),
                "expirationSeconds": key.expiration_seconds,
                "boundObjectRef":
                    {"apiVersion": "v1", "kind": "Pod", "name": self.pod.name, "uid": self.pod.uid.as_str()},
            },
        })
    }
}

impl CredentialLifetime {
    /// The life of a token that is valid for `left` of its `whole` life. `early` is the part of the spread by which podfs
    /// replaces it earlier.
    pub(super) fn new(now: SystemTime, whole: Duration, left: Duration, early: f64) -> CredentialLifetime {
        let age = whole.saturating_sub(left);
        let spread = SPREAD.min(whole.mul_f64(REST / 2.0)).mul_f64(early);
        let by_rest = left.saturating_sub(whole.mul_f64(REST));
        let by_age = LONGEST_USE.saturating_sub(age);
        let due = by_rest.min(by_age).saturating_sub(spread).max(SHORTEST_USE.min(left / 2));
        CredentialLifetime { issued: (now, Instant::now()), due, end: left }
    }

    /// The life of a credential that has to be replaced, and ends, so much later than now.
    pub(super) fn of(due: Duration, end: Duration) -> CredentialLifetime {
        CredentialLifetime { issued: (SystemTime::now(), Instant::now()), due, end }
    }

    /// Waits until the credential has to be replaced (TK-05).
    pub(super) async fn until_due(&self) {
        self.until(self.due).await;
    }

    /// Waits until the credential has ended.
    pub(super) async fn until_over(&self) {
        self.until(self.end).await;
    }

    async fn until(&self, age: Duration) {
        loop {
            let left = age.saturating_sub(self.passed());
            if left.is_zero() {
                return;
            }
            sleep(left.min(CHECK_INTERVAL)).await;
        }
    }

    pub(super) fn is_over(&self) -> bool {
        self.passed() >= self.end
    }

    fn passed(&self) -> Duration {
        let (clock, instant) = self.issued;
        clock.elapsed().unwrap_or_default().max(instant.elapsed())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MINUTE: u64 = 60;
    const HOUR: u64 = 60 * MINUTE;

    fn due(whole: u64, left: u64) -> u64 {
        let seconds = Duration::from_secs;
        let exact = |early| CredentialLifetime::new(SystemTime::now(), seconds(whole), seconds(left), early).due;
        let (last, first) = (exact(0.0), exact(1.0));
        assert!(first <= last && last - first <= SPREAD, "{first:?} {last:?}");
        last.as_secs()
    }

    #[test]
    fn tk_05_a_token_is_replaced_when_a_fifth_of_its_life_is_left_or_after_a_day() {
        assert_eq!(due(HOUR, HOUR), 48 * MINUTE);
        assert_eq!(due(HOUR, 50 * MINUTE), 38 * MINUTE);
        assert_eq!(due(60 * HOUR, 60 * HOUR), 24 * HOUR);
        assert_eq!(due(60 * HOUR, 59 * HOUR), 23 * HOUR);
        assert_eq!(due(30 * HOUR, 30 * HOUR), 24 * HOUR);
    }

    #[tokio::test(start_paused = true)]
    async fn tk_05_a_clock_that_is_set_keeps_no_token_beyond_its_time() {
        let hour = Duration::from_secs(3600);
        let life = CredentialLifetime::new(SystemTime::now(), hour, hour, 0.0);
        // As after the clock was set back by a day: the time that passed counts.
        let back = CredentialLifetime { issued: (life.issued.0 + 24 * hour, life.issued.1), ..life };
        assert!(!life.is_over() && !back.is_over());
        tokio::time::advance(hour).await;
        assert!(back.is_over());
        // As after it was set forward, or after the machine was suspended: the clock counts.
        let now = Instant::now();
        let ahead = CredentialLifetime { issued: (life.issued.0 - 24 * hour, now), ..life };
        assert!(ahead.is_over());
        ahead.until_due().await;
        assert_eq!(Instant::now(), now, "it is due at once");
    }

    #[test]
    fn tk_05_clocks_that_differ_do_not_lead_to_a_storm_of_requests() {
        assert_eq!(due(HOUR, 5 * MINUTE), MINUTE);
        assert_eq!(due(HOUR, 10), 5);
        assert_eq!(due(10 * HOUR, 10 * HOUR), 8 * HOUR);
    }

    #[test]
    fn tk_05_a_token_of_a_few_seconds_is_replaced_in_its_life() {
        let life = CredentialLifetime::new(SystemTime::now(), Duration::from_secs(5), Duration::from_secs(5), 1.0);
        assert_eq!(life.due, Duration::from_millis(3500));
    }

    #[test]
    fn tk_01_the_request_is_bound_to_the_pod() {
        let owner = TokenOwner { pod: PodIdentity::placeholder(), service_account: "app".to_owned(), node: None };
        let uid = owner.pod.uid.as_str();
        let bound = json!({"apiVersion": "v1", "kind": "Pod", "name": "podfs", "uid": uid});
        let spec = |key: &TokenKey| owner.request(key)["spec"].clone();
        assert_eq!(
            spec(&TokenKey::new(Some("vault".to_owned()), None)),
            json!({"audiences": ["vault"], "expirationSeconds": 3600, "boundObjectRef": bound})
        );
        assert_eq!(
            spec(&TokenKey::new(None, Some(7200))),
            json!({"audiences": [], "expirationSeconds": 7200, "boundObjectRef": bound})
        );
    }
}
