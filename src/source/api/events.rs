//! Events: what is wrong with volumes, told to the pod in the kubelet's form (ME-02), so that `kubectl describe pod` shows it.
//!
//! Nobody depends on them: what cannot be posted is let go. A trouble that passes within a second is none, and one that
//! stays is told once. There are at most as many events as the kubelet would allow itself: a burst, and then one every
//! few minutes.

use std::collections::BTreeMap;
use std::future::pending;
use std::time::Duration;

use k8s_openapi::jiff::Timestamp;
use serde_json::{Value, json};
use tokio::sync::mpsc::{Receiver, Sender, channel};
use tokio::time::{Instant, sleep_until};
use tracing::debug;

use super::address::Resource;
use super::client::Client;
use crate::manifest::pod::PodIdentity;

/// How long a trouble has to last.
const SETTLE: Duration = Duration::from_secs(1);
const BURST: u32 = 25;
const REFILL: Duration = Duration::from_secs(300);
/// Longest message the API takes.
const MAX_MESSAGE: usize = 1024;
const QUEUE: usize = 64;

/// Where troubles are told. Cheap to clone.
#[derive(Clone)]
pub(super) struct Troubles(Sender<Trouble>);

/// How a volume is now.
struct Trouble {
    volume: String,
    /// What is wrong with it, if anything is.
    reason: Option<String>,
}

impl Troubles {
    /// Says what is wrong with a volume at this moment, if anything is. Never waits.
    pub(super) fn tell(&self, volume: &str, reason: Option<&str>) {
        // Who falls behind that far has enough to tell.
        let _ = self.0.try_send(Trouble { volume: volume.to_owned(), reason: reason.map(str::to_owned) });
    }
}

/// What a volume has to tell.
#[derive(Default)]
struct Story {
    /// What is wrong, and when it will have lasted long enough to be told.
    now: Option<(String, Instant)>,
    /// What was told last.
    told: Option<String>,
}

/// Posts the troubles of a pod's volumes, as whoever holds the first result tells them.
pub(super) fn post(
    client: Client,
    pod: PodIdentity,
    node: Option<String>,
) -> (Troubles, impl Future<Output = ()> + Send + 'static) {
    let (tell, told) = channel(QUEUE);
    (Troubles(tell), Poster { client, pod, node, stories: BTreeMap::new(), budget: Budget::new() }.run(told))
}

struct Poster {
    client: Client,
    pod: PodIdentity,
    node: Option<String>,
    stories: BTreeMap<String, Story>,
    budget: Budget,
}

impl Poster {
    async fn run(mut self, mut told: Receiver<Trouble>) {
        loop {
            let due = self.stories.values().filter_map(|story| story.now.as_ref().map(|(_, due)| *due)).min();
            let wait = async {
                match due {
                    Some(due) => sleep_until(due).await,
                    None => pending().await,
                }
            };
            tokio::select! {
                trouble = told.recv() => match trouble {
                    Some(trouble) => self.hear(trouble),
                    None => return,
                },
                () = wait => self.post_what_is_due().await,
            }
        }
    }

    fn hear(&mut self, Trouble { volume, reason }: Trouble) {
        let story = self.stories.entry(volume).or_default();
        match reason {
            None => *story = Story::default(),
            Some(reason) if story.told.as_ref() == Some(&reason) => story.now = None,
            Some(reason) => {
                let due = story.now.as_ref().map_or_else(|| Instant::now() + SETTLE, |(_, due)| *due);
                story.now = Some((reason, due));
            }
        }
    }

    async fn post_what_is_due(&mut self) {
        let now = Instant::now();
        let mut due = Vec::new();
        for (volume, story) in &mut self.stories {
            if let Some((reason, _)) = story.now.take_if(|(_, at)| *at <= now) {
                due.push(message(volume, &reason));
                story.told = Some(reason);
            }
        }
        for message in due {
            if !self.budget.take(now) {
                debug!("too many events: {message}");
                continue;
            }
            let event = event(&self.pod, self.node.as_deref(), &message);
            if let Err(error) = self.client.create(Resource::EVENT, &self.pod.namespace, &[], &event).await {
                debug!("an event is let go: {error}");
            }
        }
    }
}

/// The kubelet's words.
fn message(volume: &str, reason: &str) -> String {
    let mut message = format!("MountVolume.SetUp failed for volume {volume:?} : {reason}");
    while message.len() > MAX_MESSAGE {
        message.pop();
    }
    message
}

fn event(pod: &PodIdentity, node: Option<&str>, message: &str) -> Value {
    let now = Timestamp::now().strftime("%Y-%m-%dT%H:%M:%SZ").to_string();
    // As long as the name of a pod may be, there is room for a number behind it.
    let name =
        format!("{}.{:016x}", &pod.name[..pod.name.len().min(236)].trim_end_matches(['.', '-']), fastrand::u64(..));
    json!({
        "apiVersion": "v1",
        "kind": "Event",
        "metadata": { "name": name, "namespace": pod.namespace },
        "involvedObject": {
            "apiVersion": "v1", "kind": "Pod",
            "namespace": pod.namespace, "name": pod.name, "uid": pod.uid.as_str(),
        },
        "type": "Warning",
        "reason": "FailedMount",
        "message": message,
        "source": { "component": "podfs", "host": node.unwrap_or_default() },
        "reportingComponent": "podfs",
        "reportingInstance": node.unwrap_or_default(),
        "firstTimestamp": now,
        "lastTimestamp": now,
        "count": 1,
    })
}

/// How many events may be posted at a moment.
struct Budget {
    left: u32,
    refilled: Instant,
}

impl Budget {
    fn new() -> Self {
        Self { left: BURST, refilled: Instant::now() }
    }

    fn take(&mut self, now: Instant) -> bool {
        while self.left < BURST && now.duration_since(self.refilled) >= REFILL {
            self.left += 1;
            self.refilled += REFILL;
        }
        if self.left == BURST {
            self.refilled = now;
        }
        let may = self.left > 0;
        self.left = self.left.saturating_sub(1);
        may
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn me_02_an_event_is_in_the_kubelets_words() {
        let pod = PodIdentity::stand_in();
        let event = event(&pod, Some("n1"), &message("config", "configmap \"app\" not found"));
        let expected = "MountVolume.SetUp failed for volume \"config\" : configmap \"app\" not found";
        assert_eq!((event["message"].as_str(), event["reason"].as_str()), (Some(expected), Some("FailedMount")));
        assert_eq!(event["involvedObject"]["uid"].as_str(), Some(pod.uid.as_str()));
        let name = event["metadata"]["name"].as_str().expect("a name");
        assert!(name.starts_with("podfs.") && name.len() == 22, "{name}");
    }

    #[test]
    fn a_long_message_is_cut_at_a_character() {
        let message = message("config", &"ä".repeat(1000));
        assert!(message.len() <= MAX_MESSAGE && message.ends_with('ä'));
    }

    #[test]
    fn after_a_burst_there_is_an_event_every_five_minutes() {
        let start = Instant::now();
        let mut budget = Budget::new();
        assert_eq!((0..100).filter(|_| budget.take(start)).count(), 25);
        assert!(!budget.take(start + REFILL / 2));
        assert!(budget.take(start + REFILL));
        assert!(!budget.take(start + REFILL));
        assert_eq!((0..100).filter(|_| budget.take(start + REFILL * 4)).count(), 3);
    }
}
