//! An agent adds volumes to a running pod and removes them again. The other volumes of the pod stay usable, also when the test
//! kills processes of podfs meanwhile.

use std::fs;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::{self, JoinHandle};

use nix::mount::{MntFlags, umount2};
use nix::sys::signal::{Signal, kill};
use podfs::supervisor::control::{self, StatusFollower};
use podfs::supervisor::status::{PodStatus, VolumeState};
use serde_json::{Value, json};
use tempfile::TempDir;

use crate::common::control::{Connection, ask};
use crate::common::identity::identity;
use crate::common::outcome::finish;
use crate::common::passthrough::disk_directory;
use crate::common::*;

const UID: &str = "0f0c1f0e-8a43-4c11-9a55-6f3f6c1f6a01";

/// A pod whose volumes change while it runs, with the ConfigMaps `one` and `two`, and a directory of the node.
pub struct Dynamic {
    pub fixture: Fixture,
    source: TempDir,
}

impl Dynamic {
    pub fn new(volumes: &[&str]) -> Self {
        let source = disk_directory();
        fs::write(source.path().join("f"), "host").expect("written");
        let fixture = Fixture::new("");
        fixture.write("objects/one.json", &config_map("one", &[("k", "1")]));
        fixture.write("objects/two.json", &config_map("two", &[("k", "2")]));
        let dynamic = Self { fixture, source };
        dynamic.write(volumes);
        dynamic
    }

    /// The manifest of the pod with these volumes.
    fn manifest(&self, volumes: &[&str]) -> Value {
        let volume = |name: &&str| match *name {
            "host" => json!({"name": "host", "hostPath": {"path": self.source.path(), "type": "Directory"}}),
            name if name.starts_with("scratch") => json!({"name": name, "emptyDir": {}}),
            "memory" => json!({"name": "memory", "emptyDir": {"medium": "Memory", "sizeLimit": "1Mi"}}),
            name => json!({"name": name, "configMap": {"name": name}}),
        };
        json!({
            "apiVersion": "v1", "kind": "Pod", "metadata": {"name": "web", "namespace": "default", "uid": UID},
            "spec": {"containers": [{"name": "c"}], "volumes": volumes.iter().map(volume).collect::<Vec<_>>()},
        })
    }

    /// Writes the manifest that the next supervisor reads.
    fn write(&self, volumes: &[&str]) {
        let name = self.fixture.pod().file_name().expect("a name").to_str().expect("text").to_owned();
        self.fixture.write(&name, &self.manifest(volumes).to_string());
    }

    fn run_directory(&self) -> PathBuf {
        self.fixture.path(&format!("run/{UID}"))
    }

    #[track_caller]
    fn ask(&self, question: &Value) -> Value {
        ask(&self.run_directory(), question)
    }

    #[track_caller]
    pub fn publish(&self, volumes: &[&str]) -> Value {
        self.ask(&json!({"publish": {"manifest": self.manifest(volumes)}}))
    }

    #[track_caller]
    fn unpublish(&self, volumes: &[&str]) {
        let answer = self.ask(&json!({"unpublish": {"volumes": volumes}}));
        assert_eq!(answer, json!({"unpublished": {"volumes": volumes}}));
    }

    /// The path at which the kubelet's plugin of this name would mount the volume.
    pub fn volume(&self, plugin: &str, name: &str) -> PathBuf {
        self.fixture.path(&format!("root/pods/{UID}/volumes/kubernetes.io~{plugin}/{name}"))
    }

    /// The directory with the content of an emptyDir.
    fn empty_dir(&self, name: &str) -> PathBuf {
        self.fixture.path(&format!("root/pods/{UID}/plugins/kubernetes.io~empty-dir/{name}"))
    }

    /// Waits until every volume is mounted.
    pub fn wait_live(&self) {
        let is_running = || self.ask(&json!("status"))["status"]["state"] == "running";
        eventually("every volume is mounted", is_running);
    }

    /// The names of the pod's volumes, from its status.
    fn names(&self) -> Vec<String> {
        let status = self.ask(&json!("status"));
        let volumes = status["status"]["volumes"].as_array().expect("volumes");
        volumes.iter().map(|volume| volume["name"].as_str().expect("a name").to_owned()).collect()
    }
}

/// Threads that list directories and read files again and again, until the test stops them.
struct Readers {
    stop: Arc<AtomicBool>,
    reads: Arc<AtomicU64>,
    threads: Vec<JoinHandle<Vec<String>>>,
}

impl Readers {
    fn start(files: &[(PathBuf, &'static str)]) -> Self {
        let (stop, reads) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicU64::new(0)));
        let read = |(file, content): &(PathBuf, &'static str)| {
            let (file, content, stop, reads) = (file.clone(), *content, Arc::clone(&stop), Arc::clone(&reads));
            thread::spawn(move || {
                let mut failures = Vec::new();
                while !stop.load(Ordering::Relaxed) {
                    // A listing causes requests to the server, also when the kernel has cached the file.
                    let listed = fs::read_dir(file.parent().expect("a directory")).map(Iterator::count);
                    match (listed, fs::read_to_string(&file)) {
                        (Ok(_), Ok(text)) if text == content => {}
                        failure => failures.push(format!("{}: {failure:?}", file.display())),
                    }
                    reads.fetch_add(1, Ordering::Relaxed);
                }
                failures
            })
        };
        Self { threads: files.iter().map(read).collect(), stop, reads }
    }

    /// Waits until the threads together have made 50 more reads.
    fn wait_for_reads(&self) {
        let goal = self.reads.load(Ordering::Relaxed) + 50;
        eventually("the readers read more", || self.reads.load(Ordering::Relaxed) > goal);
    }

    /// Stops the threads, and checks that no read has failed.
    #[track_caller]
    fn assert_none_failed(self) {
        self.wait_for_reads();
        self.stop.store(true, Ordering::Relaxed);
        for thread in self.threads {
            assert_eq!(thread.join().expect("no panic"), Vec::<String>::new());
        }
    }
}

fn content(path: &Path) -> String {
    fs::read_to_string(path).unwrap_or_default()
}

#[test]
fn volumes_come_and_go_while_others_are_read() {
    let pod = Dynamic::new(&["one"]);
    let mut running = pod.fixture.run();
    let server = running.server();
    let one = pod.volume("configmap", "one").join("k");
    let readers = Readers::start(&[(one.clone(), "1")]);
    readers.wait_for_reads();
    let all = ["one", "two", "host", "scratch", "memory"];
    assert_eq!(pod.publish(&all), json!({"published": {"volumes": ["two", "host", "scratch", "memory"]}}));
    assert_eq!(pod.names(), all);
    wait_content(&pod.volume("configmap", "two").join("k"), "2");
    wait_content(&pod.volume("host-path", "host").join("f"), "host");
    let (scratch, memory) = (pod.volume("empty-dir", "scratch"), pod.volume("empty-dir", "memory"));
    pod.wait_live();
    assert!(fs::write(scratch.join("f"), "x").is_ok() && fs::write(memory.join("f"), "x").is_ok());
    assert_ne!(
        running.server(),
        server,
        "a server with the rights for a hostPath has replaced the server of projections"
    );
    readers.wait_for_reads();
    // To publish a mounted volume again changes nothing.
    assert_eq!(pod.publish(&all), json!({"published": {"volumes": []}}));
    // A volume that the manifest no longer has stays until it is unpublished.
    assert_eq!(pod.publish(&["two"]), json!({"published": {"volumes": []}}));
    assert_eq!(pod.names(), all);
    let host = pod.volume("host-path", "host");
    let host_readers = Readers::start(&[(host.join("f"), "host")]);
    pod.unpublish(&["two", "scratch", "memory"]);
    for removed in [pod.volume("configmap", "two"), scratch, memory, pod.empty_dir("scratch"), pod.empty_dir("memory")]
    {
        assert!(!removed.exists(), "{}", removed.display());
    }
    assert_eq!(pod.names(), ["one", "host"]);
    assert_eq!(pod.fixture.mounts(), [pod.volume("configmap", "one"), host.clone()]);
    host_readers.assert_none_failed();
    pod.unpublish(&["host"]);
    assert!(!host.exists() && pod.source.path().join("f").exists(), "the directory of the node still has its files");
    // An unpublished volume can be published again, and shows changes of its object.
    assert_eq!(pod.publish(&["one", "two"]), json!({"published": {"volumes": ["two"]}}));
    let two = pod.volume("configmap", "two").join("k");
    wait_content(&two, "2");
    pod.fixture.write("objects/two.json", &config_map("two", &[("k", "3")]));
    wait_content(&two, "3");
    readers.assert_none_failed();
    assert!(running.stop().success());
    pod.fixture.assert_nothing_left();
}

#[test]
fn a_pod_that_has_no_volumes_takes_its_first_one() {
    let pod = Dynamic::new(&[]);
    let mut running = pod.fixture.run();
    assert_eq!(running.json()["volumes"], json!([]));
    assert_eq!(pod.ask(&json!("status"))["status"]["state"], "running");
    assert_eq!(pod.publish(&["host", "one"]), json!({"published": {"volumes": ["host", "one"]}}));
    wait_content(&pod.volume("host-path", "host").join("f"), "host");
    wait_content(&pod.volume("configmap", "one").join("k"), "1");
    pod.unpublish(&["host", "one"]);
    assert_eq!(pod.fixture.mounts(), Vec::<PathBuf>::new());
    assert_eq!(pod.ask(&json!("status"))["status"]["state"], "running");
    assert!(running.stop().success());
    pod.fixture.assert_nothing_left();
}

#[test]
fn the_next_supervisor_adopts_a_volume_that_was_published_before_a_kill() {
    let pod = Dynamic::new(&["one"]);
    let mut running = pod.fixture.run();
    let one = pod.volume("configmap", "one").join("k");
    let readers = Readers::start(&[(one, "1")]);
    let mut wanted = vec!["one"];
    for next in ["two", "host", "scratch"] {
        wanted.push(next);
        pod.write(&wanted);
        assert_eq!(pod.publish(&wanted), json!({"published": {"volumes": [next]}}));
        // The supervisor may or may not have mounted the volume when it is killed. The next supervisor completes the work.
        running.signal(Signal::SIGKILL);
        running.wait();
        running = pod.fixture.run();
        running.wait_log("podfs takes them over");
        assert_eq!(pod.names(), wanted);
    }
    // This is also true for a volume that the server already served and the killed supervisor had not mounted yet.
    assert_eq!(content(&pod.volume("configmap", "two").join("k")), "2");
    assert_eq!(content(&pod.volume("host-path", "host").join("f")), "host");
    let scratch = pod.volume("empty-dir", "scratch");
    fs::write(scratch.join("f"), "x").expect("written");
    // The agent has sent the request, and the supervisor is killed before it answers.
    pod.write(&["one", "host"]);
    running.signal(Signal::SIGSTOP);
    let _unanswered = Connection::ask(&pod.run_directory(), &json!({"unpublish": {"volumes": ["scratch", "two"]}}));
    running.signal(Signal::SIGKILL);
    running.wait();
    running = pod.fixture.run();
    for removed in [scratch, pod.empty_dir("scratch"), pod.volume("configmap", "two")] {
        eventually(&format!("{} is removed", removed.display()), || !removed.exists());
    }
    assert_eq!(pod.names(), ["one", "host"]);
    readers.assert_none_failed();
    // The supervisor is killed just after the volume was unpublished. The manifest still has the volume, so the next supervisor
    // mounts it again.
    pod.unpublish(&["host"]);
    running.signal(Signal::SIGKILL);
    running.wait();
    running = pod.fixture.run();
    assert_eq!(content(&pod.volume("host-path", "host").join("f")), "host", "the manifest still has the volume");
    assert!(running.stop().success());
    pod.fixture.assert_nothing_left();
}

#[test]
fn supervisor_and_server_may_be_killed_at_once_after_a_publication_or_while_volumes_leave() {
    let pod = Dynamic::new(&["one"]);
    let mut running = pod.fixture.run();
    // New mounts cover the dead mounts of the killed processes. podfs removes the dead mounts of `one` only at the end of the
    // pod.
    let one = pod.volume("configmap", "one");
    for round in 0..6 {
        let wanted = ["one", "two", "host", "scratch"];
        pod.write(&wanted);
        pod.publish(&wanted);
        if round % 2 == 0 {
            pod.wait_live();
        }
        pod.fixture.kill_both(&mut running);
        running = pod.fixture.run();
        assert_eq!(pod.names(), wanted);
        assert_eq!(content(&pod.volume("configmap", "two").join("k")), "2");
        fs::write(pod.volume("empty-dir", "scratch").join("f"), "x").expect("written");
        pod.write(&["one"]);
        let _answer = Connection::ask(&pod.run_directory(), &json!({"unpublish": {"volumes": wanted[1..]}}));
        pod.fixture.kill_both(&mut running);
        running = pod.fixture.run();
        eventually("podfs has removed the unpublished volumes", || {
            let removed = [pod.volume("configmap", "two"), pod.volume("host-path", "host"), pod.empty_dir("scratch")];
            pod.names() == ["one"]
                && removed.iter().all(|path| !path.exists())
                && pod.fixture.mounts().iter().all(|mount| *mount == one)
        });
        assert_eq!(content(&pod.source.path().join("f")), "host");
    }
    assert!(running.stop().success());
    pod.fixture.assert_nothing_left();
}

#[test]
fn the_successor_has_all_open_files_after_volumes_have_left() {
    let pod = Dynamic::new(&["one", "two", "scratch-1"]);
    let mut running = pod.fixture.run();
    let wanted = ["one", "two", "scratch-1", "host", "scratch-2", "scratch-3"];
    pod.publish(&wanted);
    pod.wait_live();
    // The server opens the next files at the descriptor numbers of these two volumes, because they are the lowest free ones.
    pod.unpublish(&["one", "two"]);
    let directory = pod.volume("empty-dir", "scratch-3");
    let open: Vec<_> = (0..50)
        .map(|index| {
            let path = directory.join(index.to_string());
            fs::write(&path, index.to_string()).expect("written");
            (index, fs::OpenOptions::new().read(true).write(true).open(path).expect("open"))
        })
        .collect();
    let first = running.server();
    kill(first, Signal::SIGKILL).expect("the server exists");
    eventually("another server serves the pod", || running.server() != first);
    pod.wait_live();
    for (index, file) in &open {
        assert_eq!(file.metadata().expect("attributes").len(), index.to_string().len() as u64);
        file.write_all_at(b"again", 0).expect("written");
        assert_eq!(fs::read_to_string(directory.join(index.to_string())).expect("read"), "again");
    }
    drop(open);
    assert!(running.stop().success());
    pod.fixture.assert_nothing_left();
}

#[test]
fn impossible_publications_are_refused_with_a_sentence() {
    let pod = Dynamic::new(&["one"]);
    let mut running = pod.fixture.run();
    let refusal = |question: Value| {
        let answer = pod.ask(&question);
        answer["refused"].as_str().unwrap_or_else(|| panic!("{answer}")).to_owned()
    };
    let publish = |manifest: Value| refusal(json!({"publish": {"manifest": manifest}}));
    let mut other_definition = pod.manifest(&["one", "two"]);
    other_definition["spec"]["volumes"][0]["configMap"]["name"] = json!("two");
    let mut other_pod = pod.manifest(&["two"]);
    other_pod["metadata"]["uid"] = json!("other");
    let mut twice = pod.manifest(&["two", "two"]);
    assert_eq!(
        publish(other_definition),
        "volume \"one\" is mounted with another definition; unpublish it first, or publish the new one under another name"
    );
    assert_eq!(
        publish(other_pod),
        format!(
            "the manifest is that of pod default/web (uid other), and podfs serves default/web (uid {UID}); publish it to \
             the podfs of that pod"
        )
    );
    let reason = publish(twice.take());
    assert!(
        reason.starts_with("the manifest: spec.volumes[1].name: ") && reason.contains("another volume"),
        "{reason}"
    );
    let reason = publish(json!({"kind": "Pod"}));
    assert!(reason.starts_with("the manifest: "), "{reason}");
    let reason = publish(json!("garbage"));
    assert!(reason.starts_with("the manifest"), "{reason}");
    let unknown = "pod default/web has no volume \"two\"; it has one";
    assert_eq!(refusal(json!({"unpublish": {"volumes": ["one", "two"]}})), unknown);
    assert_eq!(refusal(json!({"remount": {"volumes": ["two"]}})), unknown);
    for garbage in
        [json!({"publish": {}}), json!({"unpublish": "one"}), json!({"follow": 1}), json!({"remount": {"all": 1}})]
    {
        let reason = refusal(garbage);
        assert!(reason.contains("does not understand the question"), "{reason}");
    }
    // None of the requests had an effect.
    assert_eq!(pod.names(), ["one"]);
    assert_eq!(content(&pod.volume("configmap", "one").join("k")), "1");
    assert!(running.stop().success());
    pod.fixture.assert_nothing_left();
}

#[test]
fn published_volumes_show_pushed_objects() {
    let pod = Dynamic::new(&[]);
    let mut command = pod.fixture.command();
    command.arg("--push");
    let mut running = pod.fixture.start_command(command);
    running.wait_ready();
    let mut manifest = pod.manifest(&["three"]);
    manifest["spec"]["volumes"]
        .as_array_mut()
        .expect("a list")
        .push(json!({"name": "access", "projected": {"sources": [{"serviceAccountToken": {"path": "token"}}]}}));
    let answer = pod.ask(&json!({"publish": {"manifest": manifest}}));
    assert_eq!(answer, json!({"published": {"volumes": ["three", "access"]}}));
    running.wait_log(r#"configmap "three" is not known yet: nothing was pushed"#);
    let token = json!({
        "apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest",
        "spec": {"audiences": [], "expirationSeconds": 3600}, "status": {"token": "t"},
    });
    let object: Value = serde_json::from_str(&config_map("three", &[("k", "3")])).expect("JSON");
    let answer = pod.ask(&json!({"push": {"objects": [object, token]}}));
    assert_eq!(answer, json!({"pushed": {"objects": 1, "tokens": 1}}));
    wait_content(&pod.volume("configmap", "three").join("k"), "3");
    wait_content(&pod.volume("projected", "access").join("token"), "t");
    assert!(running.stop().success());
    pod.fixture.assert_nothing_left();
}

#[test]
fn volumes_are_refreshed_and_mounted_again_when_an_agent_asks() {
    let pod = Dynamic::new(&["one", "host"]);
    let mut running = pod.fixture.run();
    let (one, host) = (pod.volume("configmap", "one"), pod.volume("host-path", "host"));
    for _ in 0..3 {
        umount2(&one, MntFlags::MNT_DETACH).expect("unmounted");
        umount2(&host, MntFlags::MNT_DETACH).expect("unmounted");
        let answer = pod.ask(&json!({"remount": {"volumes": ["one", "host"]}}));
        assert_eq!(answer, json!({"remounting": {"volumes": ["one", "host"]}}));
        wait_content(&one.join("k"), "1");
        wait_content(&host.join("f"), "host");
    }
    assert!(running.stop().success());
    pod.fixture.assert_nothing_left();
}

/// The next status for which `condition` is true.
async fn next(follower: &mut StatusFollower, condition: impl Fn(&PodStatus) -> bool) -> PodStatus {
    loop {
        let status = follower.next().await.expect("a valid message").expect("the supervisor still runs");
        if condition(&status) {
            return status;
        }
    }
}

#[test]
fn a_follower_of_a_pod_gets_every_change_until_its_end() {
    let pod = Dynamic::new(&["one"]);
    let mut running = pod.fixture.run();
    let directory = pod.run_directory();
    // A follower that does not read its messages does not delay the other followers.
    let mut not_reading = Connection::ask(&directory, &json!("follow"));
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
    runtime.block_on(async {
        let mut follower = control::follow(&directory).await.expect("the supervisor listens");
        assert_eq!(follower.pid(), running.pid().as_raw() as u32);
        let first = follower.next().await.expect("a valid message").expect("a status at once");
        assert_eq!((first.uid.as_str(), first.volumes.len()), (UID, 1));
        let generation = first.volumes[0].generation.clone();
        pod.fixture.write("objects/one.json", &config_map("one", &[("k", "11")]));
        let changed = next(&mut follower, |status| status.volumes[0].generation != generation).await;
        assert_eq!(changed.volumes[0].state, VolumeState::Live);
        pod.publish(&["one", "host"]);
        let is_live = |status: &PodStatus| status.volumes.len() == 2 && status.volumes[1].state == VolumeState::Live;
        let published = next(&mut follower, is_live).await;
        assert_eq!(published.volumes[1].path, Some(pod.volume("host-path", "host")));
        pod.unpublish(&["host"]);
        next(&mut follower, |status| status.volumes.len() == 1).await;
        kill(running.server(), Signal::SIGKILL).expect("the server exists");
        let restarts = published.server.expect("a server").restarts;
        next(&mut follower, |status| status.server.as_ref().is_some_and(|server| server.restarts > restarts)).await;
        // Followers have a separate limit, and do not count for the limit of other connections.
        let more: Vec<_> = (0..6).map(|_| Connection::ask(&directory, &json!("follow"))).collect();
        let first_answer = || Connection::ask(&directory, &json!("follow")).next().expect("an answer");
        eventually("podfs refuses one more follower", || first_answer()["busy"].is_string());
        assert_eq!(pod.names(), ["one"]);
        drop(more);
        eventually("podfs accepts another follower", || first_answer()["status"].is_object());
        assert!(running.stop().success());
        while follower.next().await.expect("a valid message").is_some() {}
    });
    assert!(not_reading.next().is_some(), "this follower got messages, too");
    pod.fixture.assert_nothing_left();
}

#[test]
fn the_mount_of_a_claim_outlives_the_volume_that_it_was_made_for() {
    let source = disk_directory();
    fs::create_dir(source.path().join("part")).expect("a directory");
    let fixture = Fixture::new("");
    let reference = json!({"namespace": "default", "name": "data", "uid": "c-1"});
    let claim = json!({
        "apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": {"name": "data", "uid": "c-1"},
        "spec": {"volumeName": "pv-1"}, "status": {"phase": "Bound"},
    });
    let volume = json!({
        "apiVersion": "v1", "kind": "PersistentVolume", "metadata": {"name": "pv-1"},
        "spec": {"claimRef": reference, "local": {"path": source.path()}},
    });
    fixture.write("objects/claim.json", &claim.to_string());
    fixture.write("objects/volume.json", &volume.to_string());
    let write = |names: &[&str]| {
        let mounts = names.iter().map(|name| json!({"name": name, "mountPath": format!("/{name}"), "subPath": "part"}));
        let volumes = names.iter().map(|name| json!({"name": name, "persistentVolumeClaim": {"claimName": "data"}}));
        let manifest = json!({
            "apiVersion": "v1", "kind": "Pod", "metadata": {"name": "web", "namespace": "default", "uid": UID},
            "spec": {
                "containers": [{"name": "c", "volumeMounts": mounts.collect::<Vec<_>>()}],
                "volumes": volumes.collect::<Vec<_>>(),
            },
        });
        fixture.write("pod.yaml", &manifest.to_string());
    };
    let parts = || fixture.mounts().iter().filter(|at| at.iter().any(|name| name == "volume-subpaths")).count();
    write(&["a", "b"]);
    let mut running = fixture.run();
    let volume = running.volume("b");
    let before = identity(&volume);
    let operate = |words: &[&str]| {
        let outcome = finish(fixture.operator("mounts").args(words));
        assert_eq!((outcome.code, outcome.stderr.as_str()), (Some(0), ""));
    };
    operate(&["prepare", "--pod", UID, "--container", "c"]);
    assert_eq!(parts(), 2);
    let run_directory = fixture.path(&format!("run/{UID}"));
    let unpublished = json!({"volumes": ["a"]});
    assert_eq!(ask(&run_directory, &json!({"unpublish": unpublished})), json!({"unpublished": unpublished}));
    assert_eq!(identity(&volume), before, "volume b shows the mount");
    assert_eq!(parts(), 2);
    operate(&["release", "--pod", UID]);
    assert_eq!(parts(), 0);
    // The next supervisors know the claim by other volumes than the one for which podfs has mounted it.
    for names in [&["b"][..], &["c", "b"]] {
        write(names);
        running.signal(Signal::SIGKILL);
        running.wait();
        running = fixture.run();
        assert_eq!(identity(&volume), before, "{}", running.log());
    }
    assert!(running.stop().success());
    fixture.assert_nothing_left();
}
