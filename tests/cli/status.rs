//! `podfs status`: every pod of the node, in every state.

use std::fs;
use std::io::{Read, Write};
use std::os::fd::AsRawFd;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::{UnixListener, UnixStream};

use crate::common::*;
use nix::sys::signal::{Signal, kill};
use nix::sys::socket::{AddressFamily, SockFlag, SockType, UnixAddr, connect, socket};
use nix::sys::wait::{WaitPidFlag, WaitStatus, waitpid};
use serde_json::{Value, json};

/// A pod whose one volume `config` has the file `a` with content 1.
fn fixture() -> Fixture {
    let fixture = Fixture::new(&config_pod());
    fixture.write("objects/app.json", &config_map("app", &[("a", "1")]));
    fixture
}

/// Another pod beside that of the fixture.
fn second_pod(fixture: &Fixture) -> Running {
    fixture.write("pod.yaml", &config_pod().replace("name: web, labels", "name: db, labels"));
    fixture.run()
}

#[test]
fn no_run_directory_means_no_pod() {
    let fixture = fixture();
    let outcome = fixture.status(&[]);
    outcome.says(0, &["no pod is served here"]);
    assert_eq!(outcome.stdout, "");
    assert_eq!(fixture.pods(), Vec::<Value>::new());
}

#[test]
fn programs_get_this_shape() {
    let volumes = "[{name: config, configMap: {name: app}}, {name: scratch, emptyDir: {}}]";
    let fixture = Fixture::new(&pod(volumes));
    fixture.write("objects/app.json", &config_map("app", &[("a", "1")]));
    let running = fixture.run();
    let mut pods = fixture.pods();
    let ours = |value: &Value| value.as_u64().is_some();
    for volume in pods[0]["volumes"].as_array_mut().expect("volumes") {
        assert!(ours(&volume["requests"]), "{volume}");
        volume["requests"] = json!("some");
    }
    assert!(ours(&pods[0]["volumes"][0]["generationAgeSeconds"]));
    pods[0]["volumes"][0]["generationAgeSeconds"] = json!("few");
    let mode = running.json()["volumes"][1]["mode"].clone();
    let version = env!("CARGO_PKG_VERSION");
    let expected = json!([{
        "namespace": "default",
        "name": "web",
        "uid": running.uid(),
        "state": "running",
        "supervisor": {"pid": running.pid().as_raw(), "version": version},
        "server": {"pid": running.server().as_raw(), "version": version, "restarts": 0},
        "volumes": [{
            "name": "config",
            "kind": "configMap",
            "path": running.volume("config"),
            "state": "live",
            "readOnly": true,
            "mode": "zero-message",
            "transport": "/dev/fuse",
            "generation": generation(&running.volume("config")),
            "generationAgeSeconds": "few",
            "requests": "some",
            "restarts": 0,
        }, {
            "name": "scratch",
            "kind": "emptyDir",
            "path": running.volume("scratch"),
            "state": "live",
            "readOnly": false,
            "mode": mode,
            "transport": "/dev/fuse",
            "requests": "some",
            "restarts": 0,
        }],
    }]);
    assert_eq!(Value::Array(pods), expected);
}

#[test]
fn two_pods_are_shown_and_one_can_be_chosen() {
    let fixture = fixture();
    let first = fixture.run();
    let second = second_pod(&fixture);
    let both = fixture.status(&[]);
    assert_eq!(both.code, Some(0), "{}", both.stderr);
    assert!(
        both.stdout.contains("default/web  running") && both.stdout.contains("default/db  running"),
        "{}",
        both.stdout
    );
    assert!(both.stdout.contains(&format!("pid {}, podfs ", first.pid())), "{}", both.stdout);
    let one = fixture.status(&["--pod", &second.uid()]);
    assert!(one.stdout.contains("default/db") && !one.stdout.contains("default/web"), "{}", one.stdout);
    assert_eq!(one.code, Some(0));
}

#[test]
fn a_pod_that_is_not_there_is_named_and_a_uid_that_is_none_is_refused() {
    let fixture = fixture();
    let _running = fixture.run();
    fixture.status(&["--pod", "nobody"]).says(1, &["pod nobody is not served here", "podfs status lists all"]);
    fixture
        .status(&["--pod", "../other"])
        .says(2, &["not the uid of a pod; podfs status lists all pods with their uids"]);
}

#[test]
fn a_volume_that_waits_is_shown_with_its_reason_until_it_is_there() {
    let fixture = Fixture::new(&pod("[{name: config, configMap: {name: app}}, {name: late, configMap: {name: late}}]"));
    fixture.write("objects/app.json", &config_map("app", &[("a", "1")]));
    let mut running = fixture.start();
    running.wait_log(r#"configmap "late" not found"#);
    eventually("the other volume is up", || fixture.pods()[0]["volumes"][0]["state"] == "live");
    let outcome = fixture.status(&[]);
    outcome.says(1, &["pod default/web is degraded"]);
    assert!(outcome.stdout.contains("    waiting: configmap \"late\" not found"), "{}", outcome.stdout);
    fixture.write("objects/late.json", &config_map("late", &[("a", "1")]));
    running.wait_ready();
    let pods = fixture.pods();
    assert_eq!(pods[0]["state"], "running");
    assert_eq!(pods[0]["volumes"][1]["lastError"], r#"configmap "late" not found"#);
    assert_eq!(pods[0]["volumes"][1]["reason"], Value::Null);
}

#[test]
fn every_answer_names_all_volumes_in_the_order_of_the_manifest_also_before_they_are_mounted() {
    const QUESTION: &[u8] = br#"{"version":1,"message":"status"}"#;
    let names: Vec<_> = (0..40).map(|number| format!("v{number}")).collect();
    let volumes: Vec<_> = names.iter().map(|name| format!("{{name: {name}, configMap: {{name: app}}}}")).collect();
    let fixture = Fixture::new(&pod(&format!("[{}]", volumes.join(", "))));
    fixture.write("objects/app.json", &config_map("app", &[("a", "1")]));
    let mut running = fixture.start();
    eventually("there is a lock", || {
        fs::read_dir(fixture.path("run")).is_ok_and(|mut entries| entries.next().is_some())
    });
    let socket = fixture.run_files().join("control.sock");
    let ask = || {
        let mut stream = UnixStream::connect(&socket).ok()?;
        stream.write_all(&u32::try_from(QUESTION.len()).expect("short").to_ne_bytes()).ok()?;
        stream.write_all(QUESTION).ok()?;
        stream.read_exact(&mut [0; 4]).ok()?;
        let mut answer = Vec::new();
        stream.read_to_end(&mut answer).ok()?;
        Some(serde_json::from_slice::<Value>(&answer).expect("an answer")["message"]["status"].take())
    };
    let deadline = std::time::Instant::now() + TIMEOUT;
    while !running.is_ready() {
        assert!(std::time::Instant::now() < deadline, "podfs is not ready:\n{}", running.log());
        let Some(status) = ask() else { continue };
        let volumes: Vec<_> =
            status["volumes"].as_array().expect("volumes").iter().map(|volume| &volume["name"]).collect();
        assert_eq!(volumes, names.iter().collect::<Vec<_>>(), "{status:#}");
    }
    running.wait_ready();
    assert_eq!(fixture.pods()[0]["state"], "running");
}

#[test]
fn a_supervisor_that_hangs_delays_no_other() {
    let fixture = fixture();
    let first = fixture.run();
    let second = second_pod(&fixture);
    first.signal(Signal::SIGSTOP);
    let outcome = fixture.status(&[]);
    first.signal(Signal::SIGCONT);
    outcome.says(1, &["pod default/web is not answering"]);
    let nothing =
        format!("the supervisor (pid {}) does not answer: nothing came within 2 s; it is stopped", first.pid());
    assert!(outcome.stdout.contains(&nothing), "{}", outcome.stdout);
    assert!(outcome.stdout.contains("default/db  running"), "{}", outcome.stdout);
    assert!(outcome.stdout.contains(&second.uid()), "{}", outcome.stdout);
}

#[test]
fn a_stopped_supervisor_is_named_also_when_its_queue_of_clients_is_full() {
    let fixture = fixture();
    let running = fixture.run();
    running.signal(Signal::SIGSTOP);
    // Until all of its threads have stopped, it accepts clients.
    let stopped = waitpid(running.pid(), Some(WaitPidFlag::WUNTRACED));
    assert!(matches!(stopped, Ok(WaitStatus::Stopped(..))), "{stopped:?}");
    let socket_path = fixture.path(&format!("run/{}/control.sock", running.uid()));
    let mut clients = Vec::new();
    loop {
        let client = socket(AddressFamily::Unix, SockType::Stream, SockFlag::SOCK_NONBLOCK, None).expect("a socket");
        match connect(client.as_raw_fd(), &UnixAddr::new(&socket_path).expect("an address")) {
            Ok(()) => clients.push(client),
            Err(errno) => break assert_eq!(errno, nix::errno::Errno::EAGAIN),
        }
    }
    let outcome = fixture.status(&[]);
    running.signal(Signal::SIGCONT);
    let reason =
        format!("the supervisor (pid {}) does not answer: it accepts no connections; it is stopped", running.pid());
    assert!(outcome.stdout.contains(&reason), "{}", outcome.stdout);
}

#[test]
fn a_server_that_hangs_does_not_keep_its_supervisor_from_answering() {
    let fixture = fixture();
    let running = fixture.run();
    kill(running.server(), Signal::SIGSTOP).expect("the server is there");
    let states: Vec<_> = (0..3).map(|_| fixture.pods()[0]["state"].clone()).collect();
    kill(running.server(), Signal::SIGCONT).expect("the server is there");
    assert_eq!(states, ["running"; 3]);
}

#[test]
fn invalid_questions_do_not_disturb_the_supervisor() {
    let fixture = fixture();
    let running = fixture.run();
    let socket = fixture.run_files().join("control.sock");
    assert_eq!(fs::metadata(&socket).expect("a socket").permissions().mode() & 0o7777, 0o600);
    let call = || {
        let stream = UnixStream::connect(&socket).expect("a connection");
        stream.set_read_timeout(Some(TIMEOUT)).expect("a time limit");
        stream
    };
    let says = |bytes: &[u8]| {
        let mut stream = call();
        let _ = stream.write_all(bytes);
        let mut answer = Vec::new();
        let _ = stream.shutdown(std::net::Shutdown::Write).and_then(|()| stream.read_to_end(&mut answer).map(drop));
        String::from_utf8_lossy(&answer).into_owned()
    };
    assert_eq!(says(b""), "");
    assert_eq!(says(b"GET / HTTP/1.1\r\n\r\n"), "");
    assert_eq!(says(&[0xff; 4096]), "");
    assert_eq!(says(&[100, 0, 0, 0, b'{']), "");
    let framed = |text: &str| [&u32::try_from(text.len()).expect("short").to_ne_bytes()[..], text.as_bytes()].concat();
    assert!(says(&framed(r#"{"version":1,"message":"dance"}"#)).contains("does not understand the question"));
    assert!(says(&framed(r#"{"version":99,"message":"status"}"#)).contains("does not understand the question"));
    assert!(says(&framed(r#"{"version":1,"message":{"trace":{"volume":"config"}}}"#)).contains("without a pipe"));
    // The supervisor drops silent clients when others connect.
    let silent: Vec<_> = (0..40).map(|_| UnixStream::connect(&socket)).collect();
    fixture.write("objects/app.json", &config_map("app", &[("a", "2")]));
    wait_content(&running.volume("config").join("a"), "2");
    eventually("the supervisor answers again", || fixture.pods()[0]["state"] == "running");
    drop(silent);
}

#[test]
fn a_foreign_socket_is_shown_as_such() {
    let fixture = fixture();
    let mut running = fixture.run();
    fixture.kill_both(&mut running);
    let socket = fixture.run_files().join("control.sock");
    fs::remove_file(&socket).expect("the socket of the one that was killed");
    let listener = UnixListener::bind(&socket).expect("a socket");
    let answer = std::thread::spawn(move || {
        let (mut stream, _) = listener.accept().expect("a connection");
        stream.read_exact(&mut [0; 4]).expect("a question");
        stream.write_all(&[0xff; 64]).expect("written");
    });
    let outcome = fixture.status(&[]);
    answer.join().expect("podfs status asked");
    outcome.says(1, &["pod default/web is not answering"]);
    let sentence = format!("podfs does not understand the answer of pid {}", std::process::id());
    assert!(outcome.stdout.contains(&sentence), "{}", outcome.stdout);
}

#[test]
fn a_pod_of_which_both_processes_were_killed_is_dead_even_if_its_pid_lives_again() {
    let fixture = fixture();
    let mut running = fixture.run();
    fixture.kill_both(&mut running);
    // Makes the record name the process id of a program that is not podfs: this test.
    let (lock, mut record) = fixture.lock_record();
    record["pid"] = json!(std::process::id());
    fs::write(&lock, record.to_string()).expect("written");
    let outcome = fixture.status(&[]);
    outcome.says(1, &["pod default/web is dead"]);
    assert!(outcome.stdout.contains("podfs cleanup removes them"), "{}", outcome.stdout);
    assert!(!outcome.stdout.contains("supervisor"), "{}", outcome.stdout);
    // The stale socket is no obstacle for the next podfs.
    let mut next = fixture.run();
    assert_eq!(fixture.pods()[0]["state"], "running");
    assert_eq!(next.stop().code(), Some(0));
    fixture.assert_nothing_left();
}

#[test]
fn a_lock_file_without_a_record_is_shown_and_other_directories_are_not() {
    let fixture = fixture();
    for (name, content) in [("full-disk", ""), ("other", "not a record")] {
        fs::create_dir_all(fixture.path("run").join(name)).expect("a directory");
        fs::write(fixture.path("run").join(name).join("lock"), content).expect("written");
    }
    let pods = fixture.pods();
    assert_eq!(pods.len(), 1, "{pods:?}");
    assert_eq!((&pods[0]["uid"], &pods[0]["state"]), (&json!("full-disk"), &json!("dead")));
}

#[test]
fn control_characters_of_a_record_are_escaped() {
    let fixture = fixture();
    fs::create_dir_all(fixture.path("run/u1")).expect("a directory");
    let name = "\u{1b}[2J\u{9b}31m\u{202e}gpj";
    let record = json!({"pid": 1, "pod": {"namespace": "shop", "name": name}, "run": [], "directories": []});
    fs::write(fixture.path("run/u1/lock"), record.to_string()).expect("written");
    let outcome = fixture.status(&[]);
    for text in [&outcome.stdout, &outcome.stderr] {
        assert!(!text.contains(['\u{1b}', '\u{9b}', '\u{202e}']), "{text:?}");
        assert!(text.contains(r"\u001b[2J\u009b31m\u202egpj"), "{text:?}");
    }
    // The JSON output has the name itself.
    assert_eq!(fixture.pods()[0]["name"], json!(name));
}

#[test]
fn a_run_directory_that_others_can_write_to_is_not_believed() {
    let fixture = fixture();
    let run = fixture.path("run");
    fs::create_dir_all(run.join("u1")).expect("a directory");
    fs::write(run.join("u1/lock"), "").expect("written");
    fs::set_permissions(&run, fs::Permissions::from_mode(0o777)).expect("its mode");
    fixture.status(&[]).says(1, &["run can be written to by other users (mode 0777)"]);
    fixture.cleanup(&[]).says(1, &["run can be written to by other users (mode 0777)"]);
    assert!(run.join("u1/lock").exists());
}

#[test]
fn a_pod_whose_supervisor_was_killed_is_served_without_one_until_the_next() {
    let fixture = fixture();
    let mut running = fixture.run();
    let volume = running.volume("config");
    let server = fixture.kill_supervisor(&mut running);
    // Silent clients delay neither a question nor the next podfs.
    let socket = fixture.run_files().join("server.sock");
    let _silent: Vec<_> = (0..20).map(|_| UnixStream::connect(&socket).expect("a connection")).collect();
    let pods = fixture.pods();
    assert_eq!((&pods[0]["state"], &pods[0]["name"]), (&json!("noSupervisor"), &json!("web")));
    assert_eq!((&pods[0]["supervisor"], &pods[0]["server"]["pid"]), (&Value::Null, &json!(server.as_raw())));
    let outcome = fixture.status(&[]);
    outcome.says(1, &["pod default/web is without a supervisor"]);
    assert!(outcome.stdout.contains("podfs run of the pod takes them over"), "{}", outcome.stdout);
    wait_content(&volume.join("a"), "1");
    let mut next = fixture.run();
    let pods = fixture.pods();
    assert_eq!((&pods[0]["state"], &pods[0]["server"]["pid"]), (&json!("running"), &json!(server.as_raw())));
    assert_eq!(next.stop().code(), Some(0));
    fixture.assert_nothing_left();
}

#[test]
fn servers_that_follow_each_other_are_counted() {
    let fixture = fixture();
    let running = fixture.run();
    for restarts in 1..=3 {
        kill(running.server(), Signal::SIGKILL).expect("the server is there");
        eventually("another server goes on", || fixture.pods()[0]["server"]["restarts"] == restarts);
    }
    let pods = fixture.pods();
    assert_eq!(pods[0]["server"]["pid"], running.server().as_raw());
    assert_eq!((&pods[0]["state"], &pods[0]["volumes"][0]["restarts"]), (&json!("degraded"), &json!(3)));
    let reason = pods[0]["reason"].as_str().expect("a reason");
    assert!(reason.contains("3 restarts so far"), "{reason}");
}
