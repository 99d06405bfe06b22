//! Containers: what agents ask for over gRPC.

use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::PathBuf;

use podfs::node::service::Client;
use podfs::node::service::proto::PrepareContainerRequest;
use podfs::node::service::proto::container_mount::Source;

use crate::common::node::Node;
use crate::common::{config_map, wait_content};

#[test]
fn a_container_is_prepared_and_released_over_grpc() {
    let node = Node::new();
    node.put("app.yaml", &config_map("app", &[("key", "one")]));
    node.put(
        "web.yaml",
        "{apiVersion: v1, kind: Pod, metadata: {name: web, uid: uid-web}, spec: {containers: [{name: c, image: none, \
         volumeMounts: [{name: config, mountPath: /config}, {name: config, mountPath: /file, subPathExpr: $(NAME)}]}], \
         volumes: [{name: config, configMap: {name: app}}]}}",
    );
    let _daemon = node.start();
    node.expect(&["wait", "default/web"]);
    let request = |container: &str| PrepareContainerRequest {
        pod: "default/web".to_owned(),
        container: container.to_owned(),
        environment: [("NAME".to_owned(), "key".to_owned())].into(),
        pod_ips: vec!["10.0.0.7".to_owned()],
        ..PrepareContainerRequest::default()
    };
    on_the_service(&node, async |client: &mut Client| {
        let mounts = client.prepare_container(request("c")).await.expect("it can be mounted");
        let at = |path: &str| {
            let mount = mounts.iter().find(|mount| mount.container_path == path).expect("a mount there");
            let Some(Source::HostPath(source)) = &mount.source else { panic!("a path of the node") };
            (PathBuf::from(source), mount.read_only)
        };
        assert_eq!(at("/config"), (node.path("web", "config"), true));
        let (file, read_only) = at("/file");
        assert!(read_only);
        assert_eq!(fs::read_to_string(&file).expect("the subPath is there"), "one");
        assert!(fs::read_to_string(at("/etc/hosts").0).expect("a file").contains("10.0.0.7"));

        let refused =
            client.prepare_container(request("other")).await.expect_err("there is no such container").to_string();
        assert!(refused.contains("other"), "{refused}");
        let wrong = PrepareContainerRequest { pod_ips: vec!["ten".to_owned()], ..request("c") };
        let refused = client.prepare_container(wrong).await.expect_err("no address").to_string();
        assert!(refused.contains("pod_ips: \"ten\" is no address"), "{refused}");
        client.release_container("default/web".to_owned(), None).await.expect("nothing uses it");
        assert!(!file.exists(), "the target of the subPath is gone");
    });
}

#[test]
fn sp_05_parts_are_live_where_the_settings_of_the_node_say_so_and_no_annotation_says_otherwise() {
    let node = Node::new();
    node.put("app.yaml", &config_map("app", &[("key", "one")]));
    node.put(
        "web.yaml",
        "{apiVersion: v1, kind: Pod, metadata: {name: web, uid: uid-web, annotations: {podfs.io/sub-path.pinned: pinned}}, \
         spec: {containers: [{name: c, image: none, volumeMounts: [{name: config, mountPath: /live, subPath: key}, \
         {name: pinned, mountPath: /pinned, subPath: key}]}], \
         volumes: [{name: config, configMap: {name: app}}, {name: pinned, configMap: {name: app}}]}}",
    );
    node.fixture.write("podfs.toml", "sub-path = \"live\"\n");
    let mut command = node.command();
    command.env("PODFS_CONFIG", node.fixture.path("podfs.toml"));
    let _daemon = node.start_command(command);
    node.expect(&["wait", "default/web"]);
    let request = PrepareContainerRequest {
        pod: "default/web".to_owned(),
        container: "c".to_owned(),
        ..PrepareContainerRequest::default()
    };
    let prepare = || {
        on_the_service(&node, async |client: &mut Client| {
            client.prepare_container(request.clone()).await.expect("it can be mounted")
        })
    };
    let mounts = prepare();
    let [live, pinned] = [0, 1].map(|index: usize| match &mounts[index].source {
        Some(Source::HostPath(path)) => PathBuf::from(path),
        other => panic!("{other:?}"),
    });
    let inode = fs::metadata(&live).expect("a file").ino();
    node.put("app.yaml", &config_map("app", &[("key", "two")]));
    wait_content(&live, "two");
    wait_content(&node.path("web", "pinned").join("key"), "two");
    assert_eq!(fs::read_to_string(&pinned).expect("a file"), "one");
    prepare();
    assert_eq!(
        (fs::read_to_string(&pinned).expect("a file"), fs::metadata(&live).expect("a file").ino()),
        ("two".to_owned(), inode)
    );
}

/// Asks the daemon over gRPC.
fn on_the_service<T>(node: &Node, questions: impl AsyncFnOnce(&mut Client) -> T) -> T {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
    runtime.block_on(async {
        let mut client = Client::connect(&node.fixture.path("run")).await.expect("the daemon listens");
        questions(&mut client).await
    })
}
