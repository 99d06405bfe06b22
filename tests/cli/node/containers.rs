//! Containers: the requests of agents over gRPC, which are the same that agents can send to the pod's supervisor.

use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use nix::sys::signal::{Signal, kill};
use podfs::mounts::{AgentFacts, ContainerMount, MountSource};
use podfs::node::service::DaemonClient;
use podfs::node::service::proto::container_mount::Source;
use podfs::node::service::proto::{self, PrepareContainerRequest};
use podfs::supervisor::control::{ContainerRequest, ControlAnswer, ControlQuestion, ask};
use serde_json::{Value, json};

use crate::common::node::Node;
use crate::common::{PODFS, config_map, eventually, wait_content};

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
    on_the_service(&node, async |client: &mut DaemonClient| {
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
    let of_service = on_the_service(&node, async |client: &mut DaemonClient| {
        client.prepare_container(request.clone()).await.expect("it can be mounted")
    });
    let environment = AgentFacts {
        variables: variables.into(),
        pod_ips: vec!["10.0.0.7".parse().expect("an address")],
        ..AgentFacts::default()
    };
    let container = "c".to_owned();
    let request = ContainerRequest { container, environment, recursive_read_only: true, only_volumes: false };
    let directory = node.fixture.path("run/uid-web");
    let Ok(ControlAnswer::Prepared(of_socket)) = ask(&directory, &ControlQuestion::PrepareContainer(request), None)
    else {
        panic!("the supervisor prepares the container");
    };
    let of_service: Vec<_> = of_service.iter().map(mount_from_service).collect();
    let of_socket: Vec<_> = of_socket.iter().map(mount_from_socket).collect();
    assert_eq!(of_service.len(), 7, "{of_service:?}");
    assert_eq!(of_service, of_socket);

    // The service removes the mounts that the control socket has made.
    let part = host.path().join("logs/web-0");
    assert!(part.is_dir());
    let parts = node.fixture.path("root/pods/uid-web/volume-subpaths");
    assert!(parts.join("host/c/4").exists());
    on_the_service(&node, async |client: &mut DaemonClient| {
        client.release_container("uid-web".to_owned(), Some("c".to_owned())).await.expect("nothing uses it");
    });
    assert!(!parts.exists());
    let released = ask(&directory, &ControlQuestion::ReleaseContainer { container: None }, None);
    assert!(matches!(released, Ok(ControlAnswer::Released)), "{released:?}");
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
        on_the_service(&node, async |client: &mut DaemonClient| {
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

#[test]
fn a_pod_that_mounts_no_volume_has_a_supervisor_that_prepares_its_containers() {
    let node = Node::new();
    let pod = |name: &str, spec: &str| {
        format!(
            "{{apiVersion: v1, kind: Pod, metadata: {{name: {name}, uid: uid-{name}}}, spec: {{containers: [{{name: c, image: \
             none, {spec}}}"
        )
    };
    node.put("bare.yaml", &(pod("bare", "") + "]}}"));
    let image = "volumeMounts: [{name: app, mountPath: /app}]";
    let volumes = "], volumes: [{name: app, image: {reference: \"registry.example/app:1\"}}]}}";
    node.put("image.yaml", &(pod("image", image) + volumes));
    let daemon = node.start();
    let prepared = |name: &str| {
        node.expect(&["wait", &format!("default/{name}")]);
        let mut command = Command::new(PODFS);
        command.args([
            "mounts",
            "prepare",
            "--pod",
            &format!("uid-{name}"),
            "--container",
            "c",
            "--pod-ip",
            "10.0.0.7",
        ]);
        command.args(["--output", "json", "--run-dir"]).arg(node.fixture.path("run"));
        let Output { status, stdout, stderr } = command.output().expect("podfs runs");
        assert!(status.success(), "{name}: {}\n{}", String::from_utf8_lossy(&stderr), node.log());
        let mounts: Vec<ContainerMount> = serde_json::from_slice(&stdout).expect("mounts");
        mounts.into_iter().map(|mount| mount.name).collect::<Vec<_>>()
    };
    let files = ["k8s-managed-etc-hosts", "termination-log"];
    assert_eq!(prepared("bare"), files);
    assert_eq!(prepared("image"), ["app", files[0], files[1]]);

    // The pod has a supervisor as long as it exists, whichever process is killed.
    let first = node.supervisor("bare");
    kill(first, Signal::SIGKILL).expect("it runs");
    eventually("another supervisor", || {
        node.pod("bare")
            .is_some_and(|pod| pod["supervisor"].as_i64().is_some_and(|pid| pid != i64::from(first.as_raw())))
    });
    assert_eq!(prepared("bare"), files);
    let before = ["bare", "image"].map(|name| node.supervisor(name));
    drop(daemon);
    let _daemon = node.start();
    assert_eq!(prepared("image"), ["app", files[0], files[1]]);
    assert_eq!(prepared("bare"), files);
    assert_eq!(["bare", "image"].map(|name| node.supervisor(name)), before, "the next daemon adopts them");

    // The supervisor ends with its pod.
    for name in ["bare", "image"] {
        node.remove(&format!("{name}.yaml"));
        eventually("the pod is gone", || node.pod(name).is_some_and(|pod| pod["stage"].is_null()));
        node.expect(&["release", &format!("default/{name}")]);
        eventually("nothing of the pod is left", || node.is_clean(&format!("uid-{name}")));
    }
}

#[test]
fn a_pod_whose_volumes_are_taken_out_of_its_manifest_keeps_a_supervisor() {
    let node = Node::new();
    node.put("app.yaml", &config_map("app", &[("key", "one")]));
    let pod = |mounts: &str| {
        format!(
            "{{apiVersion: v1, kind: Pod, metadata: {{name: web, uid: uid-web}}, spec: {{containers: [{{name: c, image: none, \
             volumeMounts: [{mounts}]}}], volumes: [{{name: config, configMap: {{name: app}}}}]}}}}"
        )
    };
    node.put("web.yaml", &pod("{name: config, mountPath: /config}"));
    let _daemon = node.start();
    node.expect(&["wait", "default/web"]);
    node.put("web.yaml", &pod(""));
    eventually("the volume stays for containers that still run", || {
        let notes = node.pod("web").expect("the pod")["notes"].to_string();
        notes.contains("is used by no container of the manifest any more")
    });
    node.expect(&["wait", "default/web"]);
    let request =
        PrepareContainerRequest { pod: "uid-web".to_owned(), container: "c".to_owned(), ..Default::default() };
    let mounts = on_the_service(&node, async |client: &mut DaemonClient| {
        client.prepare_container(request).await.expect("it can be mounted")
    });
    assert_eq!(mounts.iter().map(|mount| mount.name.as_str()).collect::<Vec<_>>(), ["termination-log"]);
}

#[test]
fn the_ids_of_a_pod_with_a_user_namespace_are_in_its_mounts() {
    let node = Node::new();
    node.put("app.yaml", &config_map("app", &[("key", "one")]));
    let pod = |name: &str, host_users: bool| {
        format!(
            "{{apiVersion: v1, kind: Pod, metadata: {{name: {name}, uid: uid-{name}}}, spec: {{hostUsers: {host_users}, \
             containers: [{{name: c, image: none, volumeMounts: [{{name: config, mountPath: /config}}]}}], \
             volumes: [{{name: config, configMap: {{name: app}}}}]}}}}"
        )
    };
    node.put("mapped.yaml", &pod("mapped", false));
    node.put("plain.yaml", &pod("plain", true));
    let _daemon = node.start();
    let cri = |name: &str, arguments: &[&str]| {
        node.expect(&["wait", &format!("default/{name}")]);
        let mut command = Command::new(PODFS);
        command.args(["mounts", "prepare", "--pod", &format!("uid-{name}"), "--container", "c", "--output", "cri"]);
        command.args(arguments).arg("--run-dir").arg(node.fixture.path("run")).output().expect("podfs runs")
    };
    let both = ["--uid-map", "0:100000:65536", "--gid-map", "0:200000:1000", "--gid-map", "1000:300000:1"];
    let mounts: Value = serde_json::from_slice(&cri("mapped", &both).stdout).expect("JSON");
    let uids = json!([{"container_id": 0, "host_id": 100_000, "length": 65536}]);
    let gids = json!([
        {"container_id": 0, "host_id": 200_000, "length": 1000},
        {"container_id": 1000, "host_id": 300_000, "length": 1}
    ]);
    let mounts = mounts.as_array().expect("mounts");
    assert_eq!(mounts.len(), 2, "{mounts:?}");
    for mount in mounts {
        assert_eq!((&mount["uidMappings"], &mount["gidMappings"]), (&uids, &gids), "{mount}");
    }
    let rows: [(&str, &[&str], &str); 4] = [
        ("mapped", &[], "volumeMount \"config\": the pod has a user namespace, so a Mount message needs its ids"),
        ("plain", &both, "pod default/plain shares the users of the node (hostUsers is not false)"),
        ("mapped", &both[..2], "--gid-map <IDS>"),
        ("mapped", &["--uid-map", "0:1", "--gid-map", "0:1:1"], "\"0:1\" maps no ids; write CONTAINER:HOST:LENGTH"),
    ];
    for (name, arguments, expected) in rows {
        let Output { status, stderr, .. } = cri(name, arguments);
        let refused = String::from_utf8_lossy(&stderr);
        assert!(!status.success() && refused.contains(expected), "{name} {arguments:?}: {refused}");
    }

    let mapping = |container_id, host_id, length| proto::IdMapping { container_id, host_id, length };
    let request = |length| PrepareContainerRequest {
        pod: "uid-mapped".to_owned(),
        container: "c".to_owned(),
        uid_mappings: vec![mapping(0, 100_000, length)],
        gid_mappings: vec![mapping(0, 200_000, 65536)],
        ..Default::default()
    };
    on_the_service(&node, async |client: &mut DaemonClient| {
        let mounts = client.prepare_container(request(65536)).await.expect("it can be mounted");
        for mount in &mounts {
            assert_eq!(mount.uid_mappings, [mapping(0, 100_000, 65536)]);
            assert_eq!(mount.gid_mappings, [mapping(0, 200_000, 65536)]);
        }
        let refused = client.prepare_container(request(0)).await.expect_err("no id").to_string();
        assert!(refused.contains("uid_mappings: a mapping of 0:100000 with length 0 maps no id"), "{refused}");
    });
}

/// Calls the daemon over gRPC.
fn on_the_service<T>(node: &Node, questions: impl AsyncFnOnce(&mut DaemonClient) -> T) -> T {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
    runtime.block_on(async {
        let mut client = DaemonClient::connect(&node.fixture.path("run")).await.expect("the daemon listens");
        questions(&mut client).await
    })
}

/// The source of a mount, and its other fields. The source is without the name of the file for the termination message,
/// which differs each time.
type ComparedMount = (String, String);

fn mount_from_service(mount: &proto::ContainerMount) -> ComparedMount {
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

fn mount_from_socket(mount: &ContainerMount) -> ComparedMount {
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
