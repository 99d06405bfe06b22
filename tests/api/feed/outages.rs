//! Servers that are unreachable, refuse requests, or have lost their history.

use super::objects::wait_for;
use super::*;
use crate::api_server::{Answer, Order};

#[tokio::test]
async fn a_server_that_is_away_at_the_start_keeps_no_static_pod_waiting_and_its_pods_come_later() {
    let server = ApiServer::start();
    server.put(&pod("web", "u1", APP));
    server.put(&app("1"));
    server.crash();
    let files = [("app.yaml", app("file")), ("static.yaml", pod("static", "s1", APP))];
    let files = files.each_ref().map(|(name, text)| (*name, text.as_str()));
    let mut node = Node::at(server, None, &files).await;
    let mut first = [node.next().await, node.next().await];
    first.sort();
    assert_eq!(first[0], "Files: default/static s1 Desired");
    assert!(first[1].starts_with("trouble Api: cannot watch pods of node n1: "), "{first:?}");
    assert!(first[1].ends_with("; podfs asks again, and the pods stay as they are"), "{first:?}");
    node.server.connections(Order::Serve);
    let web = node.pods_of(PodSource::Api).await;
    assert_eq!(node.next().await, "trouble Api: ");
    assert_eq!(shown(&push(&mut node.objects.follow(&web[0])).await)[1..], ["ConfigMap app file"]);
}

#[tokio::test]
async fn mg_06_errors_keep_known_objects_and_later_changes_follow() {
    let mut node = Node::of(&[pod("web", "u1", APP), app("1")]).await;
    let mut followers = node.followers().await;
    push(&mut followers[0]).await;
    for answer in [Answer::Error(500), Answer::Unauthorized, Answer::Gone, Answer::Html, Answer::TooMany(1)] {
        node.server.fail_always("watch", "configmaps", answer.clone());
        let before = node.server.count("watch", "configmaps");
        node.server.connections(Order::Break);
        wait_for("the feed tries again", || node.server.count("watch", "configmaps") > before + 1).await;
        assert!(is_quiet(&mut followers[0], Duration::from_millis(5)).await, "{answer:?}");
        let value = format!("{answer:?}");
        node.put_config(&value);
        node.server.heal();
        let push = push(&mut followers[0]).await;
        assert_eq!(shown(&push), [format!("ConfigMap app {value}")]);
    }
}

#[tokio::test]
async fn a_pod_that_was_deleted_during_an_outage_is_gone_after_it_and_a_crash_costs_few_requests() {
    const PODS: usize = 30;
    let configs = (0..PODS).map(|number| config_map(&format!("app-{number}"), &[("key", "1")]));
    let pods = (0..PODS).map(|number| {
        let volumes = format!("[{{name: a, configMap: {{name: app-{number}}}}}]");
        pod(&format!("web-{number}"), &format!("u{number}"), &volumes)
    });
    let mut node = Node::of(&pods.chain(configs).collect::<Vec<_>>()).await;
    let mut followers = node.followers().await;
    for follower in &mut followers {
        push(follower).await;
    }
    assert_eq!(node.server.requests().len(), PODS + 1);
    node.server.crash();
    assert!(node.next().await.starts_with("trouble Api: "));
    node.server.delete("Pod", "default", "web-0");
    let changed: Vec<_> = (1..PODS).map(|number| config_map(&format!("app-{number}"), &[("key", "2")])).collect();
    put_all(&node.server, &changed);
    node.server.forget_requests();
    // The new server has no history, and does not know at once what the node may read.
    node.server.boot();
    node.server.become_ready();
    for follower in &mut followers[1..] {
        assert_eq!(push(follower).await.objects[0]["data"]["key"], "2");
    }
    while node.next().await != "gone u0 Api" {}
    let requests = node.server.requests().len();
    assert!(requests <= 3 * (PODS + 1), "{requests} requests for {} watches", PODS + 1);
}

#[tokio::test]
async fn a_storm_of_410_ends_with_one_list_for_each_object() {
    const PODS: usize = 20;
    let mut node = Node::of(&pods_of_app(PODS).chain([app("1")]).collect::<Vec<_>>()).await;
    let mut followers = node.followers().await;
    for follower in &mut followers {
        push(follower).await;
    }
    for round in 0..5 {
        node.server.forget_requests();
        node.put_config(&format!("round {round}"));
        for follower in &mut followers {
            assert_eq!(shown(&push(follower).await), [format!("ConfigMap app round {round}")]);
        }
        node.server.compact();
        node.server.connections(Order::Break);
        wait_for("it is watched again", || node.server.watches("ConfigMap", "app") == 1).await;
        let requests = node.server.count("watch", "configmaps") + node.server.count("list", "configmaps");
        assert!(requests <= 4, "{requests} requests for one object of {PODS} pods");
    }
}
