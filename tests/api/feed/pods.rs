//! The pods that the feed reports to the manager.

use super::*;

#[tokio::test]
async fn the_pods_of_the_node_are_followed_with_one_watch_and_others_are_not() {
    let other = pod("other", "u9", "[]").replace(&format!("nodeName: {NODE}"), "nodeName: n2");
    let mut node = Node::of(&[pod("web", "u1", "[]"), other]).await;
    assert_eq!(node.next().await, "Api: default/web u1 Desired");
    node.server.put(&pod("db", "u2", "[]"));
    assert_eq!(node.next().await, "put default/db u2 Desired");
    change_pod(&node.server, "web", |pod| pod["status"] = json!({"phase": "Running"}));
    change_pod(&node.server, "web", |pod| label(pod, "blue"));
    assert_eq!(node.next().await, "put default/web u1 Desired");
    change_pod(&node.server, "web", |pod| pod["metadata"]["deletionTimestamp"] = "2030-01-01T00:00:00Z".into());
    assert_eq!(node.next().await, "put default/web u1 Terminating");
    node.server.delete("Pod", "default", "web");
    assert_eq!(node.next().await, "gone u1 Api");
    change_pod(&node.server, "db", |pod| pod["status"] = json!({"phase": "Failed"}));
    assert_eq!(node.next().await, "put default/db u2 Terminal");
    node.server.put(&pod("late", "u3", "[]").replace("spec:", "status: {phase: Succeeded}, spec:"));
    assert_eq!(node.next().await, "put default/late u3 Terminal");
    assert_eq!((node.server.requests().len(), node.server.connection_count()), (1, 1));
    node.server.assert_conventions();
}

#[tokio::test]
async fn a_pod_with_a_new_uid_follows_the_one_that_had_its_name() {
    let mut node = Node::of(&[pod("web", "u1", "[]")]).await;
    assert_eq!(node.next().await, "Api: default/web u1 Desired");
    node.server.delete("Pod", "default", "web");
    node.server.put(&pod("web", "u2", "[]"));
    assert_eq!((node.next().await, node.next().await), ("gone u1 Api".into(), "put default/web u2 Desired".into()));
}

#[tokio::test]
async fn a_static_pod_and_its_mirror_pod_count_once() {
    let server = ApiServer::start();
    let annotations = "annotations: {kubernetes.io/config.mirror: s1, kubernetes.io/config.source: file}, uid:";
    server.put(&pod("web-n1", "u1", "[]").replace("uid:", annotations));
    server.put(&pod("db", "u2", "[]"));
    let mut node = Node::at(server, None, &[("web.yaml", &pod("web", "s1", "[]"))]).await;
    let mut first = [node.next().await, node.next().await];
    first.sort();
    assert_eq!(first, ["Api: default/db u2 Desired", "Files: default/web s1 Desired"]);
    std::fs::remove_file(node.manifests.path().join("web.yaml")).expect("removed");
    assert_eq!(node.next().await, "gone s1 Files");
    node.server.delete("Pod", "default", "db");
    assert_eq!(node.next().await, "gone u2 Api", "the mirror pod was never put");
}

#[tokio::test]
async fn pods_that_may_not_be_listed_are_reported_with_advice_and_requested_again() {
    let server = ApiServer::start();
    server.put(&pod("web", "u1", "[]"));
    let mut node = Node::at(server, Some("n2"), &[]).await;
    let trouble = node.next().await;
    assert!(trouble.starts_with("trouble Api: pods is forbidden: User \"system:node:n2\" cannot"), "{trouble}");
    assert!(trouble.contains("its credentials must be those of the node n1"), "{trouble}");
    let user = crate::api_server::User { name: "system:node:n2".to_owned(), groups: Vec::new() };
    node.server.permit(&user, &["list", "watch"], "pods");
    assert_eq!((node.next().await, node.next().await), ("Api: default/web u1 Desired".into(), "trouble Api: ".into()));
}

#[tokio::test]
async fn a_node_without_a_name_is_refused() {
    let server = ApiServer::start();
    let access = SettingsSource::Kubeconfig(server.kubeconfig(NODE, Style::Embedded));
    let feed = Feed::open(FeedSettings { api: Some(access), ..FeedSettings::default() }).await;
    let error = feed.err().expect("no feed").to_string();
    assert!(error.contains("--node-name"), "{error}");
}
