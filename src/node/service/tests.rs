//! The service and its client, over a real socket and a node without a manager.

use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;

use tokio::task::JoinHandle;

use super::fabricated::{FakeManager, UID, node, pod, volume};
use super::proto::watch_response::Event;
use super::proto::{MountedVolume, WatchResponse};
use super::*;
use crate::node::{CommandError, ManagerCommand, PodEntry, PodStage};
use crate::types::golden::golden;
use MountState::{Mounted, NotMounted};

/// A daemon without a manager.
struct Daemon {
    run: tempfile::TempDir,
    fabricated: FakeManager,
    _lock: DaemonLock,
    _serving: JoinHandle<io::Result<()>>,
}

impl Daemon {
    fn start(state: NodeState) -> Daemon {
        let run = tempfile::tempdir().expect("a directory");
        let (fabricated, handle) = FakeManager::new(state);
        let mut lock = DaemonLock::take(run.path()).expect("the lock");
        let serving = tokio::spawn(serve(lock.listen().expect("it listens"), handle, run.path().to_owned()));
        Daemon { run, fabricated, _lock: lock, _serving: serving }
    }

    fn directory(&self) -> &Path {
        self.run.path()
    }

    async fn client(&self) -> DaemonClient {
        DaemonClient::connect(self.directory()).await.expect("the daemon listens")
    }
}

#[tokio::test]
async fn a_client_gets_the_state_as_the_manager_has_it() {
    let mut claim = volume("data", NotMounted);
    claim.unique_name = "kubernetes.io/local-volume/disk-1".to_owned();
    claim.reason = Some("persistentvolumeclaim \"data\" not found".to_owned());
    claim.selinux = Some("system_u:object_r:container_file_t:s0".to_owned());
    claim.group = Some(0);
    claim.path = None;
    claim.size = Some(1 << 30);
    let mut attached = volume("attached", NotMounted);
    (attached.unique_name, attached.attachable) = ("kubernetes.io/csi/d^one".to_owned(), Some(true));
    let mut unknown = volume("unknown", NotMounted);
    (unknown.unique_name, unknown.attachable) = ("kubernetes.io/csi/d^two".to_owned(), None);
    let mut other = pod([claim, attached, unknown]);
    (other.uid, other.name, other.stage, other.supervisor) = ("other".to_owned(), None, None, None);
    other.origin = Some(crate::node::PodOrigin::File("/etc/pods/other.yaml".into()));
    other.errors = vec!["one".to_owned(), "two".to_owned()];
    other.notes = vec!["three".to_owned()];
    let mut state = node([pod([volume("config", Mounted)]), other]);
    state.trouble = vec!["pods: forbidden".to_owned()];
    let daemon = Daemon::start(state.clone());
    assert_eq!(daemon.client().await.state().await.expect("an answer"), state);
    assert_eq!(volumes_in_use(&state), ["kubernetes.io/csi/d^one"], "only what a controller attaches");
}

#[test]
fn until_the_daemon_has_found_everything_the_volumes_in_use_only_become_more() {
    let mut attached = volume("new", NotMounted);
    (attached.unique_name, attached.attachable) = ("kubernetes.io/csi/d^new".to_owned(), Some(true));
    let mut state = node([pod([attached])]);
    let known = ["kubernetes.io/csi/d^old".to_owned()];
    assert_eq!(volumes_to_report(&state, &known), ["kubernetes.io/csi/d^new"]);
    state.states_synced = false;
    assert_eq!(volumes_to_report(&state, &known), ["kubernetes.io/csi/d^new", "kubernetes.io/csi/d^old"]);
}

#[tokio::test]
async fn an_agent_takes_a_pod_through_its_life() {
    let mut daemon = Daemon::start(node([]));
    let mut client = daemon.client().await;
    let mut waiting = daemon.client().await;
    let wait = tokio::spawn(async move { waiting.wait_for_volumes("default/web".to_owned(), None).await });
    let mut config = volume("config", Mounted);
    (config.group, config.selinux) = (Some(2000), Some("label".to_owned()));
    daemon.fabricated.publish(node([pod([config.clone(), volume("b", NotMounted)])]));
    assert!(matches!(daemon.fabricated.commands.recv().await, Some(ManagerCommand::Reprocess(_))));
    let mounted = client.mounted_volumes(UID.to_owned()).await.expect("an answer");
    let expected = MountedVolume {
        name: "config".to_owned(),
        path: format!("/var/lib/podfs/pods/{UID}/volumes/kubernetes.io~configmap/config"),
        kind: "configMap".to_owned(),
        read_only: true,
        selinux_label: Some("label".to_owned()),
        supplemental_group: Some(2000),
    };
    assert_eq!(mounted, [expected], "b is not mounted yet");
    daemon.fabricated.publish(node([pod([config.clone()])]));
    wait.await.expect("no panic").expect("it is mounted");

    client.mark_remount_required(UID.to_owned()).await.expect("an answer");
    assert!(matches!(daemon.fabricated.commands.recv().await, Some(ManagerCommand::RemountRequired(_))));

    for (verdict, beginning) in [
        (
            Err(CommandError::Wanted("default/web".to_owned())),
            "pod default/web is to run on this node: delete it first",
        ),
        (Ok(()), ""),
    ] {
        let mut releasing = daemon.client().await;
        let released = tokio::spawn(async move { releasing.release("default/web".to_owned()).await });
        let Some(ManagerCommand::Release(uid, answer)) = daemon.fabricated.commands.recv().await else {
            panic!("a release")
        };
        assert_eq!(uid.as_str(), UID);
        answer.send(verdict.clone()).expect("the call waits for it");
        let answer = released.await.expect("no panic").map_err(|error| error.to_string());
        assert_eq!(answer.is_ok(), verdict.is_ok());
        assert!(answer.err().unwrap_or_default().starts_with(beginning));
    }
    daemon.fabricated.publish(node([]));
    client.wait_for_unmount(UID.to_owned(), None).await.expect("it is gone");
}

#[tokio::test]
async fn a_release_by_name_concerns_the_deleted_pod_and_not_the_next_one_with_its_name() {
    let next = PodEntry { uid: "0-next".to_owned(), ..pod([]) };
    let deleted = PodEntry { stage: None, origin: None, ..pod([volume("config", Mounted)]) };
    let released = PodEntry { uid: "0-released".to_owned(), released: true, ..deleted.clone() };
    let mut daemon = Daemon::start(node([next, deleted, released]));
    let mut client = daemon.client().await;
    let answered = tokio::spawn(async move { client.release("default/web".to_owned()).await });
    let Some(ManagerCommand::Release(uid, answer)) = daemon.fabricated.commands.recv().await else {
        panic!("a release")
    };
    assert_eq!(uid.as_str(), UID);
    answer.send(Ok(())).expect("the call waits for it");
    answered.await.expect("no panic").expect("it is released");
}

#[tokio::test]
async fn an_error_is_one_sentence() {
    let daemon = Daemon::start(node([pod([volume("config", NotMounted)])]));
    let mut client = daemon.client().await;
    let late = client.wait_for_volumes(UID.to_owned(), Some(0)).await.expect_err("it is not mounted").to_string();
    let text =
        "unmounted volumes=[config], unattached volumes=[], failed to process volumes=[]: context deadline exceeded";
    assert_eq!(late, text);
    let unknown = client.mounted_volumes("default/db".to_owned()).await.expect_err("no such pod").to_string();
    assert!(unknown.starts_with("pod default/db: this node does not have it"), "{unknown}");
    for name in ["", "/", "a/", "/a", "a/b/c", "a b"] {
        let no_name = client.release(name.to_owned()).await.expect_err("no name").to_string();
        assert_eq!(no_name, format!("pod {name:?}: neither a uid nor NAMESPACE/NAME"));
    }
    let absent =
        DaemonClient::connect(&daemon.directory().join("none")).await.expect_err("nothing listens").to_string();
    assert!(absent.starts_with("podfs node does not run here: ") && absent.contains("none/node.sock"), "{absent}");
}

#[tokio::test(start_paused = true)]
async fn a_client_does_not_wait_for_ever_for_a_daemon_that_is_stopped() {
    let run = tempfile::tempdir().expect("a directory");
    let _listener = std::os::unix::net::UnixListener::bind(run.path().join(socket::SOCKET)).expect("it listens");
    let mut client = DaemonClient::connect(run.path()).await.expect("the kernel connects it");
    let silent = "has not answered for 10 s: it hangs, or its process is stopped";
    let state = client.state().await.expect_err("nothing answers").to_string();
    assert!(state.contains(silent), "{state}");
    let mut client = DaemonClient::connect(run.path()).await.expect("the kernel connects it");
    let waited = client.wait_for_volumes(UID.to_owned(), None).await.expect_err("nothing answers").to_string();
    assert!(waited.contains(silent), "{waited}");
}

#[tokio::test]
async fn a_client_that_watches_gets_all_pods_and_then_changes() {
    let other = || {
        let mut other = pod([]);
        (other.uid, other.name) = ("other".to_owned(), Some("other".to_owned()));
        other
    };
    let daemon = Daemon::start(node([pod([volume("a", NotMounted)]), other()]));
    let mut client = daemon.client().await;
    let mut all = client.watch(String::new()).await.expect("a stream");
    let mut one = client.watch("default/web".to_owned()).await.expect("a stream");
    let next_event = async |stream: &mut tonic::Streaming<WatchResponse>| match stream
        .message()
        .await
        .expect("no error")
        .and_then(|response| response.event)
    {
        Some(Event::Pod(pod)) => {
            format!("{}: {:?}", pod.name, pod.volumes.iter().map(|v| v.mount()).collect::<Vec<_>>())
        }
        Some(Event::Gone(uid)) => format!("{uid} is gone"),
        Some(Event::Initial(_)) => "initial".to_owned(),
        None => "the end".to_owned(),
    };
    assert_eq!(next_event(&mut all).await, "web: [None]");
    assert_eq!(next_event(&mut all).await, "other: []");
    assert_eq!(next_event(&mut all).await, "initial");
    assert_eq!(next_event(&mut one).await, "web: [None]");
    assert_eq!(next_event(&mut one).await, "initial");
    daemon.fabricated.publish(node([pod([volume("a", Mounted)]), other()]));
    assert_eq!(next_event(&mut all).await, "web: [Mounted]");
    assert_eq!(next_event(&mut one).await, "web: [Mounted]");
    let mut ending = other();
    ending.stage = Some(PodStage::Terminating);
    daemon.fabricated.publish(node([ending]));
    assert_eq!(next_event(&mut all).await, format!("{UID} is gone"));
    assert_eq!(next_event(&mut all).await, "other: []");
    assert_eq!(next_event(&mut one).await, format!("{UID} is gone"));
    drop(daemon.fabricated);
    assert_eq!(next_event(&mut all).await, "the end");
}

#[tokio::test]
async fn garbage_ends_the_connection_and_nothing_else() {
    let daemon = Daemon::start(node([pod([])]));
    let path = daemon.directory().join(socket::SOCKET);
    for garbage in ["GET / HTTP/1.1\r\n\r\n", "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\u{7f}garbage", "\0\0\0\0"] {
        let path = path.clone();
        let ended = tokio::task::spawn_blocking(move || {
            let mut stream = UnixStream::connect(path).expect("it listens");
            stream.write_all(garbage.as_bytes()).expect("it is taken");
            stream.shutdown(std::net::Shutdown::Write).expect("shut down");
            // Closed by the daemon, with or without an answer.
            let _reset = stream.read_to_end(&mut Vec::new());
        });
        ended.await.expect("no panic");
    }
    daemon.client().await.wait_for_volumes(UID.to_owned(), Some(0)).await.expect("the daemon goes on");
}

#[test]
fn the_service_has_the_fields_and_numbers_that_agents_and_other_versions_read() {
    let (mut scopes, mut fields) = (Vec::new(), Vec::new());
    let source = include_str!("../../../proto/podfs/volumemanager/v1/volumemanager.proto");
    for line in source.lines().map(|line| line.split("//").next().unwrap_or_default().trim()) {
        match line {
            "" => {}
            "}" => drop(scopes.pop()),
            empty if empty.ends_with("{}") => {}
            scope if scope.ends_with('{') => scopes.push(scope.split(' ').nth(1).expect("a name")),
            field => fields.push(format!("{} {field}", scopes.join(".")).trim().to_owned()),
        }
    }
    let recorded: Vec<_> = golden!("node-service.txt").lines().collect();
    assert_eq!(
        fields, recorded,
        "agents and other versions of podfs read these messages: a field keeps its number and its type for ever, and an incompatible \
         change needs a new package (v2), and a test that a client of v1 is answered. Add new fields to the golden file"
    );
}

#[tokio::test]
async fn a_package_that_the_daemon_does_not_know_is_refused() {
    let daemon = Daemon::start(node([pod([])]));
    let stream = tokio::net::UnixStream::connect(daemon.directory().join(socket::SOCKET)).await.expect("it listens");
    let mut stream = Some(hyper_util::rt::TokioIo::new(stream));
    let connector = tower::service_fn(move |_: tonic::transport::Uri| {
        let stream = stream.take().ok_or_else(|| io::Error::from(io::ErrorKind::NotConnected));
        async move { stream }
    });
    let endpoint = tonic::transport::Endpoint::from_static("http://podfs.node");
    let channel = endpoint.connect_with_connector(connector).await.expect("connected");
    let mut later = tonic::client::Grpc::new(channel);
    later.ready().await.expect("ready");
    let path = tonic::codegen::http::uri::PathAndQuery::from_static("/podfs.volumemanager.v2.VolumeManager/Release");
    let codec = tonic_prost::ProstCodec::<proto::ReleaseRequest, proto::ReleaseResponse>::default();
    let request = tonic::Request::new(proto::ReleaseRequest { pod: UID.to_owned() });
    let refused = later.unary(request, path, codec).await.expect_err("there is no v2");
    assert_eq!(refused.code(), tonic::Code::Unimplemented);
    daemon.client().await.wait_for_volumes(UID.to_owned(), Some(0)).await.expect("nothing has changed");
}

#[tokio::test]
async fn a_daemon_that_does_not_know_the_package_of_a_command_has_another_version() {
    let run = tempfile::tempdir().expect("a directory");
    let listener = tokio::net::UnixListener::bind(run.path().join(socket::SOCKET)).expect("a socket");
    let later = tonic::transport::Server::builder().add_routes(tonic::service::Routes::default());
    let serving = tokio::spawn(later.serve_with_incoming(UnixListenerStream::new(listener)));
    let mut client = DaemonClient::connect(run.path()).await.expect("it listens");
    let refused = client.release(UID.to_owned()).await.expect_err("it is of another version").to_string();
    assert!(refused.ends_with("does not know the question; use the podfs of that version"), "{refused}");
    serving.abort();
}
