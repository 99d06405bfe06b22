//! Objects: one watch for each, however many pods refer to it.

use super::*;

const PODS: usize = 110;

#[tokio::test]
async fn mg_01_there_is_one_watch_for_an_object_of_many_pods_and_it_ends_with_the_last_pod() {
    let mut node = Node::of(&pods_of_app(PODS).chain([app("1")]).collect::<Vec<_>>()).await;
    let mut followers = node.followers().await;
    assert_eq!(followers.len(), PODS);
    for follower in &mut followers {
        let first = push(follower).await;
        assert!(first.replace && shown(&first)[1..] == ["ConfigMap app 1"], "{first:?}");
    }
    assert_eq!((node.server.watches("ConfigMap", "app"), node.server.requests().len()), (1, 2));
    node.put_config("2");
    for follower in &mut followers {
        assert_eq!(shown(&push(follower).await), ["ConfigMap app 2"]);
    }
    followers.truncate(1);
    node.put_config("3");
    assert_eq!(shown(&push(&mut followers[0]).await), ["ConfigMap app 3"]);
    followers.clear();
    wait_for("the watch ends", || node.server.watches("ConfigMap", "app") == 0).await;
    assert_eq!((node.server.requests().len(), node.server.connection_count()), (2, 1));
    node.server.assert_conventions();
}

#[tokio::test]
async fn mg_02_mg_03_an_immutable_object_is_followed_by_its_metadata_and_new_pods_see_the_one_made_anew() {
    let immutable = |value: &str| app(value).replace("\"apiVersion\"", "\"immutable\":true,\"apiVersion\"");
    let mut node = Node::of(&[pod("web", "u1", APP), immutable("1")]).await;
    let mut followers = node.followers().await;
    assert_eq!(shown(&push(&mut followers[0]).await)[1..], ["ConfigMap app 1"]);
    node.server.delete("ConfigMap", "default", "app");
    node.server.put(&immutable("2"));
    until(&mut followers[0], "the new one", |push| shown(push) == ["ConfigMap app 2"]).await;
    node.server.put(&pod("new", "u2", APP));
    let FeedEvent::Put(new) = node.event().await else { panic!("a new pod") };
    assert_eq!(shown(&push(&mut node.objects.follow(&new)).await)[1..], ["ConfigMap app 2"]);
}

#[tokio::test]
async fn mg_05_changes_sent_twice_or_out_of_order_never_reach_a_pod() {
    let mut node = Node::of(&[pod("web", "u1", APP), app("1")]).await;
    let mut followers = node.followers().await;
    push(&mut followers[0]).await;
    node.server.change_behaviour(|behaviour| {
        behaviour.disturbance.duplicate = true;
        behaviour.disturbance.outdated = true;
    });
    for value in ["2", "3", "4"] {
        node.put_config(value);
        assert_eq!(shown(&push(&mut followers[0]).await), [format!("ConfigMap app {value}")]);
    }
    assert!(is_quiet(&mut followers[0], Duration::from_millis(20)).await);
}

#[tokio::test]
async fn mg_07_an_object_without_an_answer_is_unknown_and_then_known_to_be_absent() {
    let optional = "[{name: a, configMap: {name: app, optional: true}}]";
    let server = ApiServer::start();
    server.put(&pod("web", "u1", optional));
    server.fail_always("watch", "configmaps", crate::api_server::Answer::Error(500));
    let mut node = Node::at(server, None, &[]).await;
    let mut followers = node.followers().await;
    let first = push(&mut followers[0]).await;
    assert!(first.settling && first.unknown.len() == 1, "{first:?}");
    assert_eq!((first.unknown[0].kind.as_str(), first.unknown[0].name.as_deref()), ("ConfigMap", Some("app")));
    assert!(first.unknown[0].reason.contains("configmap default/app"), "{first:?}");
    node.server.heal();
    until(&mut followers[0], "it does not exist", |push| push.unknown.is_empty()).await;
    node.put_config("1");
    assert_eq!(shown(&push(&mut followers[0]).await), ["ConfigMap app 1"]);
    node.server.delete("ConfigMap", "default", "app");
    assert_eq!(push(&mut followers[0]).await.delete[0].name, "app");
}

#[tokio::test]
async fn an_object_in_the_manifest_directory_is_taken_from_there_and_the_server_is_not_asked() {
    let server = ApiServer::start();
    server.put(&pod("web", "u1", APP));
    server.put(&app("server"));
    let mut node = Node::at(server, None, &[("app.yaml", &app("file"))]).await;
    let mut followers = node.followers().await;
    assert_eq!(shown(&push(&mut followers[0]).await)[1..], ["ConfigMap app file"]);
    assert_eq!(node.server.watches("ConfigMap", "app"), 0);
    std::fs::remove_file(node.manifests.path().join("app.yaml")).expect("removed");
    until(&mut followers[0], "that of the server", |push| shown(push) == ["ConfigMap app server"]).await;
    write(node.manifests.path(), "app.yaml", &app("file again"));
    until(&mut followers[0], "that of the file", |push| shown(push) == ["ConfigMap app file again"]).await;
    wait_for("the watch ends", || node.server.watches("ConfigMap", "app") == 0).await;
}

#[tokio::test]
async fn a_static_pod_takes_objects_without_a_file_from_the_server() {
    let server = ApiServer::start();
    // The server lets the node read what the mirror pod refers to.
    server.put(&pod("web-n1", "u1", APP).replace("uid:", "annotations: {kubernetes.io/config.mirror: s1}, uid:"));
    server.put(&app("server"));
    let mut node = Node::at(server, None, &[("web.yaml", &pod("web", "s1", APP))]).await;
    let pods = node.pods_of(PodSource::Files).await;
    let mut follower = node.objects.follow(&pods[0]);
    until(&mut follower, "that of the server", |push| shown(push).contains(&"ConfigMap app server".to_owned())).await;
}

#[tokio::test]
async fn a_claim_leads_to_its_volume_and_is_read_again_for_a_new_pod() {
    let claim = "{apiVersion: v1, kind: PersistentVolumeClaim, metadata: {name: data, namespace: default}, \
                 spec: {volumeName: one}, status: {phase: Bound}}";
    let volume = "{apiVersion: v1, kind: PersistentVolume, metadata: {name: one}, spec: {hostPath: {path: /x}, \
                  claimRef: {namespace: default, name: data}}}";
    let machine = format!("{{apiVersion: v1, kind: Node, metadata: {{name: {NODE}}}}}");
    let volumes = "[{name: a, persistentVolumeClaim: {claimName: data}}]";
    let mut node = Node::of(&[pod("web", "u1", volumes), claim.to_owned(), volume.to_owned(), machine]).await;
    let mut followers = node.followers().await;
    let all = |push: &Push| shown(push).contains(&"PersistentVolume one".to_owned());
    until(&mut followers[0], "claim and volume", all).await;
    let gets = |node: &Node| node.server.count("get", "persistentvolumeclaims");
    wait_for("podfs gets a bound claim once", || gets(&node) == 1).await;
    node.server.put(&pod("new", "u2", volumes));
    let FeedEvent::Put(new) = node.event().await else { panic!("a new pod") };
    let mut new = node.objects.follow(&new);
    until(&mut new, "claim and volume", all).await;
    wait_for("podfs gets it again", || gets(&node) == 2).await;
    node.server.assert_conventions();
}

#[tokio::test]
async fn cb_01_the_bundles_of_a_signer_are_followed_with_one_watch_for_all_pods() {
    let volumes = "[{name: a, projected: {sources: [{clusterTrustBundle: {path: ca, signerName: x.io/y, \
                   labelSelector: {}}}]}}]";
    let bundle = |name: &str| {
        json!({
            "apiVersion": "certificates.k8s.io/v1beta1", "kind": "ClusterTrustBundle", "metadata": {"name": name},
            "spec": {"signerName": "x.io/y", "trustBundle": "-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n"},
        })
        .to_string()
    };
    let mut node = Node::of(&[pod("web", "u1", volumes), pod("db", "u2", volumes), bundle("x.io:y:one")]).await;
    let mut followers = node.followers().await;
    for follower in &mut followers {
        assert_eq!(shown(&push(follower).await)[1..], ["ClusterTrustBundle x.io:y:one"]);
    }
    node.server.put(&bundle("x.io:y:two"));
    for follower in &mut followers {
        assert_eq!(shown(&push(follower).await), ["ClusterTrustBundle x.io:y:two"]);
    }
    node.server.delete("ClusterTrustBundle", "", "x.io:y:one");
    for follower in &mut followers {
        assert_eq!(push(follower).await.delete[0].name, "x.io:y:one");
    }
    assert_eq!(node.server.count("watch", "clustertrustbundles"), 1);
}

#[tokio::test]
async fn se_03_an_object_of_another_namespace_never_reaches_a_pod() {
    let theirs = app("theirs").replace("\"name\":\"app\"", "\"name\":\"app\",\"namespace\":\"shop\"");
    let mut node = Node::of(&[pod("web", "u1", APP), theirs.clone(), app("ours")]).await;
    let mut followers = node.followers().await;
    assert_eq!(shown(&push(&mut followers[0]).await)[1..], ["ConfigMap app ours"]);
    node.server.put(&theirs.replace("theirs", "theirs, changed"));
    node.put_config("ours, changed");
    assert_eq!(shown(&push(&mut followers[0]).await), ["ConfigMap app ours, changed"]);
    let requests = node.server.requests();
    assert!(requests.iter().all(|request| request.namespace.as_deref().is_none_or(|name| name == "default")));
}

#[tokio::test]
async fn a_label_of_the_pod_and_a_reference_that_is_new_come_with_the_next_push() {
    let mut node = Node::of(&[pod("web", "u1", APP), app("1"), config_map("more", &[("key", "2")])]).await;
    let mut followers = node.followers().await;
    push(&mut followers[0]).await;
    change_pod(&node.server, "web", |pod| {
        label(pod, "blue");
        pod["spec"]["volumes"] = json!([{"name": "a", "configMap": {"name": "more"}}]);
    });
    let FeedEvent::Put(pod) = node.event().await else { panic!("the pod is different") };
    followers[0].update(&pod);
    let change =
        until(&mut followers[0], "the pod", |push| push.objects.iter().any(|object| object["kind"] == "Pod")).await;
    assert_eq!(change.objects[0]["metadata"]["labels"]["color"], "blue");
    if shown(&change).len() == 1 {
        until(&mut followers[0], "the object", |push| shown(push) == ["ConfigMap more 2"]).await;
    }
    wait_for("the other watch ends", || node.server.watches("ConfigMap", "app") == 0).await;
}

/// Waits until the condition holds. The tasks of the feed run meanwhile.
pub(super) async fn wait_for(what: &str, mut condition: impl FnMut() -> bool) {
    let wait = async {
        while !condition() {
            tokio::time::sleep(Duration::from_millis(2)).await;
        }
    };
    timeout(TIMEOUT, wait).await.unwrap_or_else(|_| panic!("still not true: {what}"));
}
