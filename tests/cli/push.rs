//! `podfs push`: an agent of the node gives a pod its objects, over the control socket.

use std::fs;
use std::io::{self, Read, Write};
use std::os::fd::AsRawFd;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::PathBuf;
use std::process::Command;
use std::time::Duration;

use crate::common::outcome::{Outcome, finish};
use crate::common::*;
use nix::sys::socket::{AddressFamily, Backlog, SockFlag, SockType, UnixAddr, bind, listen, socket};
use serde_json::{Value, json};

/// A ConfigMap that may be missing, a Secret, and a projected volume with a token, a ClusterTrustBundle and the pod's labels.
const VOLUMES: &str = "[{name: config, configMap: {name: app, optional: true}}, \
    {name: keys, secret: {secretName: db}}, \
    {name: access, projected: {sources: [{serviceAccountToken: {path: token}}, \
        {clusterTrustBundle: {path: ca.crt, name: ca}}, \
        {downwardAPI: {items: [{path: labels, fieldRef: {fieldPath: metadata.labels}}]}}]}}]";

/// A pod whose objects are pushed. Fields are dropped in this order.
struct Pushed {
    running: Running,
    fixture: Fixture,
}

impl Pushed {
    fn start() -> Pushed {
        let fixture = Fixture::new(&manifest());
        let running = serve_pushed(&fixture);
        Pushed { running, fixture }
    }

    /// A pod with all objects that it needs.
    fn complete() -> Pushed {
        let mut pushed = Self::start();
        pushed.push_objects(&everything()).says(0, &["has 3 objects and 1 token now"]);
        pushed.running.wait_ready();
        pushed
    }

    fn push(&self, arguments: &[&str]) -> Outcome {
        finish(self.fixture.operator("push").args(["--pod", UID]).args(arguments))
    }

    /// Pushes these objects from a file.
    #[track_caller]
    fn push_objects(&self, objects: &[String]) -> Outcome {
        self.fixture.write("pushed.yaml", &objects.join("\n---\n"));
        self.push(&["-f", self.fixture.path("pushed.yaml").to_str().expect("text")])
    }

    /// A file of a volume.
    fn file(&self, kind: &str, volume: &str, name: &str) -> PathBuf {
        self.fixture.path(&format!("root/pods/{UID}/volumes/kubernetes.io~{kind}/{volume}/{name}"))
    }

    fn setting(&self) -> PathBuf {
        self.file("configmap", "config", "a")
    }
}

/// Starts a podfs that takes pushes.
fn serve_pushed(fixture: &Fixture) -> Running {
    let mut command = fixture.command();
    command.arg("--push");
    serve(fixture, command)
}

/// Starts podfs and waits until it listens.
fn serve(fixture: &Fixture, command: Command) -> Running {
    let running = fixture.start_command(command);
    let socket = fixture.path(&format!("run/{UID}/control.sock"));
    eventually("podfs listens", || UnixStream::connect(&socket).is_ok());
    running
}

const UID: &str = "5a1c7b52-0d4e-4b52-8f0c-3f6d2e9b7a11";

fn manifest() -> String {
    pod(VOLUMES).replace("name: web, labels", &format!("name: web, uid: {UID}, labels"))
}

fn token(token: &str) -> String {
    json!({
        "apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest",
        "spec": {"audiences": [], "expirationSeconds": 3600}, "status": {"token": token},
    })
    .to_string()
}

fn trust_bundle(body: &str) -> String {
    json!({
        "apiVersion": "certificates.k8s.io/v1beta1", "kind": "ClusterTrustBundle", "metadata": {"name": "ca"},
        "spec": {"trustBundle": pem(body)},
    })
    .to_string()
}

fn pem(body: &str) -> String {
    format!("-----BEGIN CERTIFICATE-----\n{body}\n-----END CERTIFICATE-----\n")
}

fn everything() -> Vec<String> {
    vec![config_map("app", &[("a", "1")]), secret("db", &[("k", "s")]), token("first"), trust_bundle("AAAA")]
}

/// Sends a question to the control socket and returns the answer, in the form of the protocol: the length of the message in
/// four bytes, then JSON.
fn ask(fixture: &Fixture, question: &Value) -> Value {
    let mut stream = connect(fixture);
    send(&mut stream, question);
    let mut answer = Vec::new();
    stream.read_to_end(&mut answer).expect("an answer");
    serde_json::from_slice(answer.get(4..).expect("a length")).expect("JSON")
}

fn connect(fixture: &Fixture) -> UnixStream {
    let stream = UnixStream::connect(fixture.run_files().join("control.sock")).expect("the supervisor listens");
    stream.set_read_timeout(Some(Duration::from_secs(20))).expect("set");
    stream
}

fn send(stream: &mut UnixStream, question: &Value) {
    try_send(stream, question).expect("it is read");
}

/// As [`send`], with an error if podfs has closed the connection.
fn try_send(stream: &mut UnixStream, question: &Value) -> io::Result<()> {
    let text = question.to_string();
    let length = u32::try_from(text.len()).expect("short").to_ne_bytes();
    stream.write_all(&[&length, text.as_bytes()].concat())
}

/// The next answer on a connection that stays open; `None` when podfs has closed it.
fn next(stream: &mut UnixStream) -> Option<Value> {
    let mut length = [0; 4];
    stream.read_exact(&mut length).ok()?;
    let mut answer = vec![0; u32::from_ne_bytes(length) as usize];
    stream.read_exact(&mut answer).expect("all of it");
    Some(serde_json::from_slice(&answer).expect("JSON"))
}

#[test]
fn an_agent_may_keep_its_connection_for_more_pushes() {
    let mut pushed = Pushed::complete();
    let push = |value: &str| {
        let object: Value = serde_json::from_str(&config_map("app", &[("a", value)])).expect("JSON");
        json!({"version": 1, "stays": true, "message": {"push": {"objects": [object]}}})
    };
    let mut agents: Vec<_> = (0..5).map(|_| connect(&pushed.fixture)).collect();
    let taken = json!({"version": 1, "message": {"pushed": {"objects": 3, "tokens": 1}}});
    for (number, agent) in agents.iter_mut().enumerate() {
        send(agent, &push(&format!("first of {number}")));
        assert_eq!(next(agent), Some(taken.clone()), "agent {number}");
    }
    assert_eq!(next(&mut agents[4]), None, "four keep their connections");
    // Other questions are answered meanwhile, however long nothing is pushed.
    for _ in 0..10 {
        assert_eq!(ask(&pushed.fixture, &json!({"version": 1, "message": "status"}))["version"], 1);
    }
    // A message may come in parts, and two at once.
    let text = push("in parts").to_string();
    let message = [&u32::try_from(text.len()).expect("short").to_ne_bytes(), text.as_bytes()].concat();
    let (begin, end) = message.split_at(message.len() / 2);
    // podfs waits two seconds for the rest of a message, and then closes the connection. On a busy machine, that may be too short.
    eventually("a message in two parts arrives in time", || {
        agents[0].write_all(begin).expect("it is read");
        send(&mut agents[1], &push("of another"));
        assert_eq!(next(&mut agents[1]), Some(taken.clone()));
        wait_content(&pushed.setting(), "of another");
        let sent = agents[0].write_all(&[end, &message].concat());
        let answers = sent.is_ok().then(|| [next(&mut agents[0]), next(&mut agents[0])]);
        let is_in_time = answers.as_ref().is_some_and(|answers| answers.iter().all(Option::is_some));
        match is_in_time {
            true => assert_eq!(answers, Some([Some(taken.clone()), Some(taken.clone())])),
            false => agents[0] = connect(&pushed.fixture),
        }
        is_in_time
    });
    wait_content(&pushed.setting(), "in parts");
    // podfs refuses an invalid push and keeps the connection. A message that is no push ends the connection.
    send(&mut agents[0], &json!({"version": 1, "message": {"push": {"objects": [{"kind": "Pod"}]}}}));
    let refused = next(&mut agents[0]).expect("an answer");
    assert!(refused["message"]["refused"].is_string(), "{refused}");
    send(&mut agents[0], &push("after a refusal"));
    assert!(next(&mut agents[0]).is_some());
    wait_content(&pushed.setting(), "after a refusal");
    send(&mut agents[0], &json!({"version": 1, "message": "status"}));
    assert_eq!(next(&mut agents[0]), None);
    // So does a push of another version, after the answer that the pod's podfs does not understand it.
    send(&mut agents[1], &json!({"version": 2, "message": {"push": {"replace": true}}, "stays": true}));
    let refused = next(&mut agents[1]).expect("an answer").to_string();
    assert!(refused.contains("does not understand the question; use the same version to ask"), "{refused}");
    assert_eq!(next(&mut agents[1]), None);
    assert_eq!(fs::read_to_string(pushed.setting()).expect("a file"), "after a refusal");
    // So a fifth connection may stay open again.
    let mut agent = connect(&pushed.fixture);
    eventually("another agent may stay", || {
        agent = connect(&pushed.fixture);
        send(&mut agent, &push("late"));
        assert!(next(&mut agent).is_some());
        try_send(&mut agent, &push("last")).is_ok() && next(&mut agent).is_some()
    });
    wait_content(&pushed.setting(), "last");
    assert!(pushed.running.stop().success());
    pushed.fixture.assert_nothing_left();
}

#[test]
fn volumes_wait_for_the_first_push_and_show_it() {
    let mut pushed = Pushed::start();
    // Before the first push, podfs does not know whether the optional ConfigMap exists, so its volume waits, too.
    pushed.running.wait_log(r#"configmap "app" is not known yet: nothing was pushed"#);
    pushed.running.wait_log(r#"secret "db" is not known yet: nothing was pushed"#);
    pushed.running.wait_log("failed to fetch token: it was not pushed");
    assert!(!pushed.running.is_ready());
    pushed.push_objects(&everything()).says(0, &[]);
    pushed.running.wait_ready();
    assert_eq!(fs::read_to_string(pushed.setting()).expect("a file"), "1");
    assert_eq!(fs::read_to_string(pushed.file("secret", "keys", "k")).expect("a file"), "s");
    assert_eq!(fs::read_to_string(pushed.file("projected", "access", "token")).expect("a file"), "first");
    assert_eq!(fs::read_to_string(pushed.file("projected", "access", "ca.crt")).expect("a file"), pem("AAAA"));
    assert_eq!(pushed.running.stop().code(), Some(0));
}

#[test]
fn tk_09_a_second_push_replaces_the_first() {
    let pushed = Pushed::complete();
    pushed.push_objects(&[token("second"), trust_bundle("BBBB")]).says(0, &["has 3 objects and 1 token now"]);
    wait_content(&pushed.file("projected", "access", "token"), "second");
    // Both came in one push, so they are switched together.
    assert_eq!(fs::read_to_string(pushed.file("projected", "access", "ca.crt")).expect("a file"), pem("BBBB"));
    assert_eq!(fs::read_to_string(pushed.setting()).expect("a file"), "1");
}

#[test]
fn cm_07_cm_08_an_optional_object_that_is_deleted_vanishes_and_a_required_one_stays() {
    let pushed = Pushed::complete();
    pushed.push(&["--delete", "ConfigMap/app", "--delete", "Secret/db"]).says(0, &["has 1 object and 1 token now"]);
    eventually("the file is gone", || !pushed.setting().exists());
    pushed.running.wait_log(r#"secret "db" not found"#);
    assert_eq!(fs::read_to_string(pushed.file("secret", "keys", "k")).expect("a file"), "s");
}

#[test]
fn the_pod_itself_is_pushed_for_its_labels() {
    let pushed = Pushed::complete();
    pushed.push_objects(&[manifest().replace("app: web", "app: web, color: blue")]).says(0, &[]);
    wait_content(&pushed.file("projected", "access", "labels"), "app=\"web\"\ncolor=\"blue\"");
}

#[test]
fn a_push_with_one_bad_object_changes_nothing() {
    let pushed = Pushed::complete();
    let bad = r#"{apiVersion: v1, kind: Secret, metadata: {name: db}, data: {k: "hunter2%"}}"#;
    let outcome = pushed.push_objects(&[config_map("app", &[("a", "2")]), bad.to_owned()]);
    outcome.says(1, &["the push, item 2: data.k: is not base64"]);
    assert!(!outcome.stderr.contains("hunter2"), "{}", outcome.stderr);
    // The volume shows the next push, and nothing of this one.
    pushed.push_objects(&[token("second")]).says(0, &[]);
    wait_content(&pushed.file("projected", "access", "token"), "second");
    assert_eq!(fs::read_to_string(pushed.setting()).expect("a file"), "1");
}

#[test]
fn programs_push_with_the_protocol_of_the_control_socket() {
    let pushed = Pushed::complete();
    let object: Value = serde_json::from_str(&config_map("app", &[("a", "2")])).expect("JSON");
    let delete = json!([{"kind": "Secret", "name": "db"}]);
    let question = json!({"version": 1, "message": {"push": {"objects": [object], "delete": delete}}});
    let taken = json!({"version": 1, "message": {"pushed": {"objects": 2, "tokens": 1}}});
    assert_eq!(ask(&pushed.fixture, &question), taken);
    wait_content(&pushed.setting(), "2");
    let question = json!({"version": 1, "message": {"push": {"replace": true}}});
    assert_eq!(ask(&pushed.fixture, &question)["message"], json!({"pushed": {"objects": 0, "tokens": 0}}));
    let question = json!({"version": 1, "message": {"push": {"object": []}}});
    let refused = ask(&pushed.fixture, &question)["message"]["refused"].clone();
    assert!(refused.as_str().is_some_and(|reason| reason.contains("does not understand the question")), "{refused}");
}

#[test]
fn an_impossible_push_is_refused_in_one_sentence() {
    let pushed = Pushed::complete();
    pushed.push(&[]).says(2, &["there is nothing to push; give objects with -f"]);
    let outcome = pushed.push(&["--delete", "app"]);
    assert_eq!(outcome.code, Some(2));
    assert!(outcome.stderr.contains("write the kind and the name, such as ConfigMap/app"), "{}", outcome.stderr);
    pushed.push(&["-f", "/nowhere.yaml"]).says(2, &["/nowhere.yaml: cannot be read"]);
    let large = "x".repeat(1 << 20);
    let many: Vec<String> = (0..17).map(|number| config_map(&format!("o{number}"), &[("a", large.as_str())])).collect();
    pushed.push_objects(&many).says(2, &["and a push may have at most", "push them one after another"]);
}

#[test]
fn a_pod_that_takes_no_objects_says_so() {
    let fixture = Fixture::new(&manifest());
    let _running = serve(&fixture, fixture.command());
    fixture.write("pushed.json", &config_map("app", &[("a", "2")]));
    let mut push = fixture.operator("push");
    push.args(["--pod", UID, "-f"]).arg(fixture.path("pushed.json"));
    finish(&mut push).says(1, &["the pod takes no objects; start its podfs run with --push"]);
}

#[test]
fn the_next_supervisor_keeps_the_content_and_waits_for_a_push() {
    let mut pushed = Pushed::complete();
    let shown = generation(&pushed.file("projected", "access", ""));
    pushed.fixture.kill_supervisor(&mut pushed.running);
    pushed.running = serve_pushed(&pushed.fixture);
    eventually("volumes are behind", || {
        let pods = pushed.fixture.pods();
        let volumes = pods[0]["volumes"].as_array().cloned().unwrap_or_default();
        volumes.len() == 3 && volumes.iter().all(|volume| volume["state"] == "behind")
    });
    assert_eq!(fs::read_to_string(pushed.setting()).expect("a file"), "1");
    assert_eq!(generation(&pushed.file("projected", "access", "")), shown);
    pushed.push_objects(&everything()).says(0, &[]);
    eventually("volumes are live", || {
        pushed.fixture.pods()[0]["volumes"].as_array().expect("volumes").iter().all(|volume| volume["state"] == "live")
    });
    // The same content is no other generation.
    assert_eq!(generation(&pushed.file("projected", "access", "")), shown);
    assert_eq!(pushed.running.stop().code(), Some(0));
}

#[test]
fn nothing_is_sent_to_a_process_of_another_user() {
    let fixture = Fixture::new(&manifest());
    let directory = fixture.path("run/u1");
    fs::create_dir_all(&directory).expect("a directory");
    fs::write(directory.join("lock"), "").expect("written");
    let kind = (AddressFamily::Unix, SockType::Stream);
    let socket = socket(kind.0, kind.1, SockFlag::SOCK_CLOEXEC, None).expect("a socket");
    bind(socket.as_raw_fd(), &UnixAddr::new(&directory.join("control.sock")).expect("an address")).expect("bound");
    // The kernel reports the credentials of the thread that called listen(2). The system call, unlike the function of the C
    // library, changes the user of this thread alone.
    let listener = std::thread::spawn(move || {
        // SAFETY: the call takes numbers, and changes only the calling thread, which ends soon.
        let changed = unsafe { libc::syscall(libc::SYS_setresuid, -1, 65534, -1) };
        assert_eq!(changed, 0);
        listen(&socket, Backlog::new(5).expect("a number")).expect("it listens");
        UnixListener::from(socket)
    });
    let listener = listener.join().expect("no panic");
    fixture.write("pushed.yaml", &everything().join("\n---\n"));
    let mut push = fixture.operator("push");
    push.args(["--pod", "u1", "-f"]).arg(fixture.path("pushed.yaml"));
    finish(&mut push).says(1, &["uid 65534 listens on", "nothing was sent to it"]);
    let mut received = Vec::new();
    listener.accept().expect("a connection").0.read_to_end(&mut received).expect("its end");
    assert_eq!(received, b"");
}
