//! A manifest directory as the feed of a node: real files, and the events for the manager and supervisors.

use std::fs;
use std::path::PathBuf;
use std::time::Duration;

use tempfile::TempDir;
use tokio::time::timeout;

use super::*;
use crate::source::Push;

/// A directory of manifests and its feed.
struct FeedHome {
    directory: TempDir,
    feed: Feed,
}

impl FeedHome {
    async fn open(files: &[(&str, &str)]) -> FeedHome {
        let directory = tempfile::tempdir().expect("a directory");
        for (name, text) in files {
            fs::write(directory.path().join(name), text).expect("a file");
        }
        FeedHome::at(directory, None, Vec::new()).await
    }

    async fn at(directory: TempDir, below: Option<&str>, earlier: Vec<NodePod>) -> FeedHome {
        let manifests = Some(directory.path().join(below.unwrap_or_default()));
        let feed = Feed::open(FeedSettings { manifests, earlier, ..FeedSettings::default() }).await.expect("a feed");
        FeedHome { directory, feed }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.directory.path().join(name)
    }

    fn write(&self, name: &str, text: &str) {
        fs::write(self.path("beside"), text).expect("a file");
        fs::rename(self.path("beside"), self.path(name)).expect("renamed");
    }

    async fn next(&mut self) -> String {
        let event = timeout(Duration::from_secs(20), self.feed.next()).await.expect("an event");
        let name = |pod: &NodePod| format!("{} {}", pod.pod.identity, pod.pod.identity.uid);
        match event {
            FeedEvent::Pods(source, pods) => {
                format!("{source:?}: {}", pods.iter().map(name).collect::<Vec<_>>().join(", "))
            }
            FeedEvent::Put(pod) => format!("put {}", name(&pod)),
            FeedEvent::Gone(source, uid) => format!("gone {uid} {source:?}"),
            FeedEvent::Containers(..) => unreachable!("no runtime is here"),
            FeedEvent::Failure(source, sentences) => {
                let home = format!("{}/", self.directory.path().display());
                format!("trouble {source:?}: {}", sentences.join("; ").replace(&home, ""))
            }
        }
    }

    /// The pods at the start.
    async fn pods(&mut self) -> Vec<NodePod> {
        match timeout(Duration::from_secs(20), self.feed.next()).await.expect("an event") {
            FeedEvent::Pods(PodSource::Files, pods) => pods,
            other => panic!("{other:?}"),
        }
    }
}

async fn push(follower: &mut ObjectFollower) -> Push {
    timeout(Duration::from_secs(20), follower.next()).await.expect("a push")
}

/// Whether there is no push.
async fn is_quiet(follower: &mut ObjectFollower) -> bool {
    timeout(Duration::from_millis(1), follower.next()).await.is_err()
}

fn pod(name: &str, uid: &str, volumes: &str) -> String {
    format!(
        "{{apiVersion: v1, kind: Pod, metadata: {{name: {name}, uid: {uid}}}, spec: {{containers: [{{name: c}}], \
         volumes: {volumes}}}}}"
    )
}

fn config_map(namespace: &str, name: &str, value: &str) -> String {
    format!(
        "{{apiVersion: v1, kind: ConfigMap, metadata: {{name: {name}, namespace: {namespace}}}, data: {{k: {value:?}}}}}"
    )
}

/// The objects of a push: kind, name, and the value of `k`.
fn shown(push: &Push) -> Vec<String> {
    let text = |value: &serde_json::Value| value.as_str().unwrap_or_default().to_owned();
    let show = |object: &serde_json::Value| {
        format!("{} {} {}", text(&object["kind"]), text(&object["metadata"]["name"]), text(&object["data"]["k"]))
    };
    push.objects.iter().map(|object| show(object).trim().to_owned()).collect()
}

const APP: &str = "[{name: a, configMap: {name: app}}]";

#[tokio::test]
async fn pods_appear_change_and_go_with_their_files() {
    let mut home = FeedHome::open(&[("web.yaml", &pod("web", "u1", "[]")), ("notes.txt", "no manifest")]).await;
    assert_eq!(home.next().await, "Files: default/web u1");
    let two = format!("{}\n---\n{}", pod("db", "u2", "[]"), pod("cache", "u3", "[]"));
    home.write("two.json.yaml", &two);
    assert_eq!((home.next().await, home.next().await), ("put default/db u2".into(), "put default/cache u3".into()));
    home.write("web.yaml", &pod("web", "u4", "[]"));
    assert_eq!((home.next().await, home.next().await), ("gone u1 Files".into(), "put default/web u4".into()));
    fs::remove_file(home.path("two.json.yaml")).expect("removed");
    assert_eq!((home.next().await, home.next().await), ("gone u2 Files".into(), "gone u3 Files".into()));
}

#[tokio::test]
async fn a_manifest_that_stops_parsing_keeps_its_pod_and_is_reported_with_its_line() {
    let mut home = FeedHome::open(&[("web.yaml", &pod("web", "u1", "[]"))]).await;
    assert_eq!(home.next().await, "Files: default/web u1");
    home.write("web.yaml", "apiVersion: v1\nkind: [Pod\n");
    let trouble = home.next().await;
    assert!(trouble.starts_with("trouble Files: web.yaml:2:7: "), "{trouble}");
    assert!(trouble.ends_with("; until then, podfs uses the earlier content"), "{trouble}");
    home.write("web.yaml", &pod("web", "u1", "[{name: a, emptyDir: {}}]"));
    assert_eq!((home.next().await, home.next().await), ("put default/web u1".into(), "trouble Files: ".into()));
}

#[tokio::test]
async fn a_broken_manifest_at_the_start_keeps_the_pod_of_an_earlier_daemon_and_nothing_else_waits() {
    let mut before =
        FeedHome::open(&[("web.yaml", &pod("web", "u1", "[]")), ("gone.yaml", &pod("gone", "u2", "[]"))]).await;
    let earlier = before.pods().await;
    let FeedHome { directory, feed } = before;
    drop(feed);
    fs::write(directory.path().join("web.yaml"), "kind: [").expect("a file");
    fs::remove_file(directory.path().join("gone.yaml")).expect("removed");
    fs::write(directory.path().join("new.yaml"), pod("new", "u3", "[]")).expect("a file");
    let mut home = FeedHome::at(directory, None, earlier).await;
    assert!(home.next().await.starts_with("trouble Files: web.yaml:1:7: "));
    assert_eq!(home.next().await, "Files: default/web u1, default/new u3");
    home.write("web.yaml", &pod("web", "u1", APP));
    assert_eq!(home.next().await, "put default/web u1");
}

#[tokio::test]
async fn a_directory_that_does_not_exist_yet_lists_no_pods() {
    let mut home = FeedHome::at(tempfile::tempdir().expect("a directory"), Some("manifests"), Vec::new()).await;
    assert_eq!(home.next().await, "trouble Files: manifests: there is no such file or directory");
    fs::create_dir(home.path("manifests")).expect("a directory");
    assert_eq!((home.next().await, home.next().await), ("Files: ".into(), "trouble Files: ".into()));
    home.write("manifests/web.yaml", &pod("web", "u1", "[]"));
    assert_eq!(home.next().await, "put default/web u1");
}

#[tokio::test]
async fn a_follower_pushes_all_objects_once_and_then_the_changes() {
    let web = pod("web", "u1", APP);
    let mut home = FeedHome::open(&[
        ("app.yaml", &config_map("default", "app", "1")),
        ("other.yaml", &config_map("default", "other", "1")),
        ("web.yaml", &web),
    ])
    .await;
    let pods = home.pods().await;
    let objects = home.feed.objects();
    let mut follower = objects.follow(&pods[0]);
    let first = push(&mut follower).await;
    assert_eq!((shown(&first), first.replace), (vec!["Pod web".to_owned(), "ConfigMap app 1".to_owned()], true));
    home.write("other.yaml", &config_map("default", "other", "2"));
    home.write("app.yaml", &config_map("default", "app", "2"));
    let change = push(&mut follower).await;
    assert_eq!((shown(&change), change.replace), (vec!["ConfigMap app 2".to_owned()], false));
    fs::remove_file(home.path("app.yaml")).expect("removed");
    let gone = push(&mut follower).await;
    assert_eq!((gone.objects.len(), gone.delete[0].name.as_str()), (0, "app"));
    follower.restart();
    let again = push(&mut follower).await;
    assert_eq!((shown(&again), again.replace), (vec!["Pod web".to_owned()], true));
    assert!(is_quiet(&mut follower).await);
}

#[tokio::test]
async fn se_03_objects_of_another_namespace_never_reach_a_pod() {
    let files = [("app.yaml", config_map("shop", "app", "theirs")), ("web.yaml", pod("web", "u1", APP))];
    let mut home = FeedHome::open(&files.each_ref().map(|(name, text)| (*name, text.as_str()))).await;
    let pods = home.pods().await;
    let mut follower = home.feed.objects().follow(&pods[0]);
    assert_eq!(shown(&push(&mut follower).await), ["Pod web"]);
    home.write("app.yaml", &config_map("shop", "app", "theirs, changed"));
    home.write("web.yaml", &pod("web", "u1", "[]"));
    assert_eq!(home.next().await, "put default/web u1");
    assert!(is_quiet(&mut follower).await);
}

#[tokio::test]
async fn mg_01_one_object_reaches_all_pods_that_refer_to_it_and_nothing_is_kept_for_pods_that_are_gone() {
    const PODS: usize = 110;
    let mut files = vec![("app.yaml".to_owned(), config_map("default", "app", "1"))];
    files.extend((0..PODS).map(|n| (format!("pod-{n}.yaml"), pod(&format!("web-{n}"), &format!("u{n}"), APP))));
    let files: Vec<_> = files.iter().map(|(name, text)| (name.as_str(), text.as_str())).collect();
    let mut home = FeedHome::open(&files).await;
    let objects = home.feed.objects();
    let pods = home.pods().await;
    let mut followers: Vec<_> = pods.iter().map(|pod| objects.follow(pod)).collect();
    for follower in &mut followers {
        push(follower).await;
    }
    assert_eq!(objects.registry.subscriptions(), (1, PODS));
    home.write("app.yaml", &config_map("default", "app", "2"));
    for follower in &mut followers {
        assert_eq!(shown(&push(follower).await), ["ConfigMap app 2"]);
    }
    followers.truncate(1);
    assert_eq!(objects.registry.subscriptions(), (1, 1));
    followers.clear();
    assert_eq!(objects.registry.subscriptions(), (0, 0));
}

#[tokio::test]
async fn a_claim_leads_to_its_volume_and_changed_references_are_pushed() {
    let claim = |volume: &str| {
        format!(
            "{{apiVersion: v1, kind: PersistentVolumeClaim, metadata: {{name: data}}, spec: {{volumeName: {volume}}}}}"
        )
    };
    let volume = |name: &str| {
        format!(
            "{{apiVersion: v1, kind: PersistentVolume, metadata: {{name: {name}}}, spec: {{hostPath: {{path: /x}}, \
             claimRef: {{namespace: default, name: data}}}}}}"
        )
    };
    let volumes = "[{name: a, persistentVolumeClaim: {claimName: data}}]";
    let node = "{apiVersion: v1, kind: Node, metadata: {name: n1}}";
    let mut home = FeedHome::open(&[
        ("claim.yaml", &claim("one")),
        ("node.yaml", node),
        ("one.yaml", &volume("one")),
        ("two.yaml", &volume("two")),
        ("web.yaml", &pod("web", "u1", volumes)),
    ])
    .await;
    let pods = home.pods().await;
    let mut follower = home.feed.objects().follow(&pods[0]);
    assert_eq!(
        shown(&push(&mut follower).await),
        ["Pod web", "Node n1", "PersistentVolume one", "PersistentVolumeClaim data"]
    );
    home.write("claim.yaml", &claim("two"));
    let change = push(&mut follower).await;
    assert_eq!(shown(&change), ["PersistentVolume two", "PersistentVolumeClaim data"]);
    assert_eq!(change.delete[0].name, "one");
    home.write("web.yaml", &pod("web", "u1", "[]"));
    let FeedEvent::Put(pod) = home.feed.next().await else { panic!("the pod is different") };
    follower.update(&pod);
    let change = push(&mut follower).await;
    assert_eq!((shown(&change), change.delete.len()), (vec!["Pod web".to_owned()], 3));
}

#[tokio::test]
async fn a_token_without_an_issuer_is_unknown_with_advice() {
    let volumes = "[{name: a, projected: {sources: [{serviceAccountToken: {path: token, audience: vault}}]}}]";
    let mut home = FeedHome::open(&[("web.yaml", &pod("web", "u1", volumes))]).await;
    let pods = home.pods().await;
    let first = push(&mut home.feed.objects().follow(&pods[0])).await;
    assert_eq!((first.unknown.len(), first.settling), (1, false));
    assert_eq!((first.unknown[0].kind.as_str(), first.unknown[0].audience.as_deref()), ("TokenRequest", Some("vault")));
    assert!(first.unknown[0].reason.contains("--kubeconfig"));
}

#[tokio::test]
async fn an_object_is_unknown_while_it_may_be_in_a_file_that_podfs_has_never_read() {
    let mut home = FeedHome::open(&[("app.yaml", "kind: ["), ("web.yaml", &pod("web", "u1", APP))]).await;
    assert!(home.next().await.starts_with("trouble Files: app.yaml:1:7: "));
    let pods = home.pods().await;
    let mut follower = home.feed.objects().follow(&pods[0]);
    let reason = |push: &Push| push.unknown.iter().map(|unknown| unknown.reason.clone()).collect::<Vec<_>>().join("; ");
    let may_be_in = |home: &FeedHome, name: &str| {
        let file = home.path(name);
        format!(
            "ConfigMap default/app may be in {}, which podfs could not read yet; mend or remove this file",
            file.display()
        )
    };
    let first = push(&mut follower).await;
    assert_eq!((reason(&first), first.settling), (may_be_in(&home, "app.yaml"), false));
    fs::rename(home.path("app.yaml"), home.path("moved.yaml")).expect("renamed");
    assert_eq!(reason(&push(&mut follower).await), may_be_in(&home, "moved.yaml"));
    home.write("moved.yaml", &config_map("default", "app", "1"));
    let mended = push(&mut follower).await;
    assert_eq!((shown(&mended), reason(&mended)), (vec!["ConfigMap app 1".to_owned()], String::new()));
    // podfs has read everything, so a new file that it cannot read hides no deletion.
    home.write("new.yaml", "kind: [");
    fs::remove_file(home.path("moved.yaml")).expect("removed");
    assert_eq!(push(&mut follower).await.delete[0].name, "app");
}
