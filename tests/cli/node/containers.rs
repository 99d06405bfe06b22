//! Containers: what agents ask for over gRPC, which is what they can ask the pod's supervisor for.

use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use podfs::mounts::{ContainerMount, Environment, MountSource};
use podfs::node::service::Client;
use podfs::node::service::proto::container_mount::Source;
use podfs::node::service::proto::{self, PrepareContainerRequest};
use podfs::supervisor::control::{Answer, ContainerRequest, Question, ask};

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
fn the_service_and_the_control_socket_say_the_same_of_a_container() {
    let node = Node::new();
    let host = tempfile::tempdir().expect("a directory");
    node.put("app.yaml", &config_map("app", &[("key", "one")]));
    node.put(
        "web.yaml",
        &format!(
            "{{apiVersion: v1, kind: Pod, metadata: {{name: web, uid: uid-web}}, spec: {{containers: [{{name: c, image: none, \
             terminationMessagePath: /tmp/message, securityContext: {{privileged: true}}, volumeMounts: [\
             {{name: config, mountPath: /config, readOnly: true, recursiveReadOnly: Enabled}}, \
             {{name: config, mountPath: /file, subPath: key}}, {{name: app, mountPath: /app, subPath: bin}}, \
             {{name: host, mountPath: /late, mountPropagation: HostToContainer}}, \
             {{name: host, mountPath: /both, subPathExpr: logs/$(NAME), mountPropagation: Bidirectional}}]}}], volumes: [\
             {{name: config, configMap: {{name: app}}}}, {{name: host, hostPath: {{path: {}}}}}, \
             {{name: app, image: {{reference: \"registry.example/app:1\"}}}}]}}}}",
            host.path().display()
        ),
    );
    let _daemon = node.start();
    node.expect(&["wait", "default/web"]);
    let variables = [("NAME".to_owned(), "web-0".to_owned())];
    let request = PrepareContainerRequest {
        pod: "uid-web".to_owned(),
        container: "c".to_owned(),
        environment: variables.clone().into(),
        pod_ips: vec!["10.0.0.7".to_owned()],
        recursive_read_only: true,
        ..PrepareContainerRequest::default()
    };
    let of_service = on_the_service(&node, async |client: &mut Client| {
        client.prepare_container(request.clone()).await.expect("it can be mounted")
    });
    let environment = Environment {
        variables: variables.into(),
        pod_ips: vec!["10.0.0.7".parse().expect("an address")],
        ..Environment::default()
    };
    let container = "c".to_owned();
    let request = ContainerRequest { container, environment, recursive_read_only: true, only_volumes: false };
    let directory = node.fixture.path("run/uid-web");
    let Ok(Answer::Prepared(of_socket)) = ask(&directory, &Question::PrepareContainer(request), None) else {
        panic!("the supervisor prepares the container");
    };
    let of_service: Vec<_> = of_service.iter().map(told_by_service).collect();
    let of_socket: Vec<_> = of_socket.iter().map(told_by_socket).collect();
    assert_eq!(of_service.len(), 7, "{of_service:?}");
    assert_eq!(of_service, of_socket);

    // What one of them has made, the other takes away.
    let part = host.path().join("logs/web-0");
    assert!(part.is_dir());
    let parts = node.fixture.path("root/pods/uid-web/volume-subpaths");
    assert!(parts.join("host/c/4").exists());
    on_the_service(&node, async |client: &mut Client| {
        client.release_container("uid-web".to_owned(), Some("c".to_owned())).await.expect("nothing uses it");
    });
    assert!(!parts.exists());
    let released = ask(&directory, &Question::ReleaseContainer { container: None }, None);
    assert!(matches!(released, Ok(Answer::Released)), "{released:?}");
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

/// The source of a mount, and everything else. The name of the file for the termination message is another each time.
type Told = (String, String);

fn told_by_service(mount: &proto::ContainerMount) -> Told {
    let source = match &mount.source {
        Some(Source::HostPath(path)) => source_path(&mount.name, Path::new(path)),
        Some(Source::Image(image)) => format!("image {} {}", image.reference, image.sub_path),
        other => panic!("{other:?}"),
    };
    let flags = [mount.read_only, mount.recursive_read_only, mount.selinux_relabel, mount.id_mapped];
    let options = [mount.nosuid, mount.nodev, mount.noexec];
    let propagation = mount.propagation();
    (source, format!("{} {} {propagation:?} {flags:?} {options:?}", mount.name, mount.container_path))
}

fn told_by_socket(mount: &ContainerMount) -> Told {
    let source = match &mount.source {
        MountSource::HostPath(path) => source_path(&mount.name, path),
        MountSource::Image { reference, sub_path } => format!("image {reference} {sub_path}"),
        MountSource::Device(device) => panic!("{device:?}"),
    };
    let flags = [mount.read_only, mount.recursive_read_only, mount.selinux_relabel, mount.id_mapped];
    let options = [mount.nosuid, mount.nodev, mount.noexec];
    let propagation = mount.propagation;
    (source, format!("{} {} {propagation:?} {flags:?} {options:?}", mount.name, mount.container_path))
}

fn source_path(name: &str, path: &Path) -> String {
    let path = if name == "termination-log" { path.parent().expect("a directory") } else { path };
    path.display().to_string()
}
