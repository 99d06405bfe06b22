//! A server that is unreachable, slow, or sends invalid answers: volumes keep their content, and in the end they are
//! current.

use std::fs;

use crate::api_server::{Answer, End, InitialEvents, Order, Presents};
use crate::common::*;
use crate::rig::Rig;

/// A running pod, and a file of its volume, with the content `1`.
fn running() -> (Rig, Running, std::path::PathBuf) {
    let rig = Rig::of_config("1");
    let running = rig.run();
    let file = running.volume("config").join("key");
    rig.wait_watched("ConfigMap", "app");
    (rig, running, file)
}

#[test]
fn volumes_stay_while_the_server_is_unreachable_and_follow_it_when_it_is_back() {
    let (rig, running, file) = running();
    let lists = rig.server.lists("configmaps");
    rig.server.connections(Order::Refuse);
    running.wait_log("the API server is unreachable, and volumes stay as they are");
    rig.put_config("2");
    assert_eq!(fs::read_to_string(&file).expect("a file"), "1");
    rig.server.connections(Order::Serve);
    wait_content(&file, "2");
    running.wait_log("the API server answers again");
    assert_eq!(rig.server.lists("configmaps"), lists, "the watch continues at its last version");
    assert_eq!(running.log().matches("is unreachable").count(), 1, "{}", running.log());
}

#[test]
fn changes_that_the_server_has_forgotten_are_found_by_another_list() {
    let (rig, running, file) = running();
    rig.server.connections(Order::Refuse);
    running.wait_log("is unreachable");
    rig.put_config("2");
    rig.put_config("3");
    rig.server.compact();
    rig.server.connections(Order::Serve);
    wait_content(&file, "3");
}

#[test]
fn an_answer_410_to_a_watch_leads_to_another_list() {
    let (rig, _running, file) = running();
    rig.server.fail_only("watch", "configmaps", 2, Answer::Gone);
    rig.server.connections(Order::Break);
    rig.put_config("2");
    wait_content(&file, "2");
}

#[test]
fn requests_to_a_server_that_has_just_started_are_repeated_with_one_log_line() {
    const OBJECTS: usize = 20;
    let sources: Vec<_> = (0..OBJECTS)
        .map(|number| format!("{{configMap: {{name: c{number}, items: [{{key: k, path: f{number}}}]}}}}"))
        .collect();
    let rig = Rig::new(&format!("[{{name: all, projected: {{sources: [{}]}}}}]", sources.join(", ")));
    let put = |value: &str| {
        (0..OBJECTS).for_each(|number| {
            rig.server.put(&config_map(&format!("c{number}"), &[("k", value)]));
        });
    };
    put("1");
    let running = rig.run();
    (0..OBJECTS).for_each(|number| rig.wait_watched("ConfigMap", &format!("c{number}")));
    rig.server.crash();
    running.wait_log("is unreachable");
    put("2");
    rig.server.forget_requests();
    rig.server.boot();
    // podfs does not log refusals that end within seconds. These last longer.
    running.wait_log("so it is with 20 more objects; podfs asks again");
    let refused = rig.server.count("watch", "configmaps");
    assert!(refused >= 10 * OBJECTS, "pauses after a start are short: {refused} requests");
    let log = running.log();
    let about = |words: &str| log.lines().filter(|line| line.contains("WARN") && line.contains(words)).count();
    assert_eq!((about("is forbidden"), about("too old resource version")), (1, 0), "{log}");
    rig.server.become_ready();
    (0..OBJECTS).for_each(|number| wait_content(&running.volume("all").join(format!("f{number}")), "2"));
    running.wait_log("over after ");
}

#[test]
fn podfs_requests_lists_from_a_server_without_initial_events() {
    for initial in [InitialEvents::Refused, InitialEvents::Ignored] {
        let rig =
            Rig::new("[{name: config, configMap: {name: app}}, {name: other, configMap: {name: o, optional: true}}]");
        rig.put_config("1");
        rig.server.initial_events(initial);
        let running = rig.run();
        let file = running.volume("config").join("key");
        wait_content(&file, "1");
        eventually("there are lists", || rig.server.count("list", "configmaps") == 2);
        for value in ["2", "3"] {
            rig.put_config(value);
            wait_content(&file, value);
        }
        rig.server.put(&config_map("o", &[("o", "1")]));
        wait_content(&running.volume("other").join("o"), "1");
        if initial == InitialEvents::Refused {
            assert_eq!(rig.server.lists("configmaps"), 2, "the answer about the pod is remembered");
        }
    }
}

#[test]
fn a_frozen_connection_is_given_up() {
    let (rig, _running, file) = running();
    rig.server.connections(Order::Freeze);
    rig.put_config("2");
    // Pings detect the frozen connection, after most of a minute.
    wait_content(&file, "2");
}

#[test]
fn watches_that_end_all_the_time_are_no_trouble() {
    let rig = Rig::of_config("0");
    let running = rig.run();
    let file = running.volume("config").join("key");
    for end in [End::Clean, End::Broken, End::MidLine] {
        rig.server.cut(Some(1), None, end);
        for value in 1..6 {
            let value = format!("{end:?} {value}");
            rig.put_config(&value);
            wait_content(&file, &value);
        }
    }
    assert!(rig.server.count("watch", "configmaps") >= 10);
}

#[test]
fn a_server_that_is_busy_says_when_it_is_to_be_asked_again() {
    let (rig, running, file) = running();
    rig.server.fail_only("watch", "configmaps", 1, Answer::TooMany(1));
    rig.server.connections(Order::Break);
    rig.put_config("2");
    running.wait_log("429");
    wait_content(&file, "2");
}

#[test]
fn invalid_answers_leave_known_objects_as_they_are() {
    // MG-06
    let answers = [
        (Answer::Error(500), "500"),
        (Answer::Error(503), "503"),
        (Answer::Html, "no API server"),
        (Answer::Redirect("https://127.0.0.1:1/".to_owned()), "redirects podfs (302 Found)"),
        (Answer::Oversize(5 << 20), "larger than 4 MiB"),
        (Answer::InvalidUtf8, "not UTF-8"),
    ];
    let (rig, running, file) = running();
    for (answer, sentence) in answers {
        rig.server.fail_only("watch", "configmaps", 1, answer.clone());
        rig.server.connections(Order::Break);
        running.wait_log(sentence);
        assert!(fs::read_to_string(&file).is_ok_and(|content| !content.is_empty()), "{answer:?}");
        let value = format!("after {answer:?}");
        rig.put_config(&value);
        wait_content(&file, &value);
    }
}

#[test]
fn failed_lists_are_requested_again() {
    let rig = Rig::of_config("1");
    rig.server.initial_events(InitialEvents::Refused);
    let answers =
        [Answer::Error(500), Answer::Truncated, Answer::Broken, Answer::InvalidUtf8, Answer::Html, Answer::TooMany(1)];
    for answer in answers {
        rig.server.fail_only("list", "configmaps", 1, answer);
    }
    let running = rig.run();
    assert_eq!(fs::read_to_string(running.volume("config").join("key")).expect("a file"), "1");
    assert_eq!(rig.server.pending_failures(), 0);
}

#[test]
fn podfs_waits_with_a_reason_for_a_server_that_never_answers() {
    let rig = Rig::of_config("1");
    rig.server.initial_events(InitialEvents::Refused);
    rig.server.fail_always("list", "configmaps", Answer::Never);
    let mut running = rig.start();
    let reason = "ConfigMap default/app: the API server has not answered yet";
    running.wait_log("serving 1 volume(s)");
    eventually("the status has the reason", || rig.reason("config").as_deref() == Some(reason));
    // In the first seconds, podfs does not log that as a problem.
    assert!(!running.log().contains(reason), "{}", running.log());
    running.wait_log(&format!(r#"MountVolume.SetUp failed for volume "config" : {reason}"#));
    running.wait_log("the server does not answer in time");
    rig.server.heal();
    running.wait_ready();
}

#[test]
fn a_server_with_a_certificate_that_has_expired_is_not_trusted_until_it_has_another() {
    let (rig, running, file) = running();
    rig.server.present(Presents::Expired);
    rig.server.connections(Order::Break);
    running.wait_log("its certificate has expired");
    rig.put_config("2");
    rig.server.present(Presents::Good);
    wait_content(&file, "2");
}

#[test]
fn the_status_has_the_version_and_the_error_of_each_object() {
    let (rig, running, _file) = running();
    let version = rig.server.version().to_string();
    let object = || rig.object("ConfigMap default/app").expect("an object");
    eventually("it is watched", || object()["watch"] == "watching");
    let object = object();
    assert_eq!(object["resourceVersion"].as_str(), Some(&*version));
    assert!(object["contactAgeSeconds"].as_u64().is_some_and(|age| age < 20));
    assert!(rig.object("Pod default/web").is_some());
    rig.server.connections(Order::Refuse);
    running.wait_log("is unreachable");
    let trouble = || rig.object("ConfigMap default/app").expect("an object")["trouble"].to_string();
    eventually("the status says what is wrong", || trouble().contains("the server cannot be reached"));
    assert_eq!(rig.object("ConfigMap default/app").expect("an object")["resourceVersion"].as_str(), Some(&*version));
}

#[test]
fn a_pod_is_degraded_while_the_server_is_away_and_the_status_says_since_when() {
    let (rig, _running, file) = running();
    assert_eq!(rig.status()["state"], "running");
    rig.server.connections(Order::Refuse);
    eventually("the pod is degraded", || rig.status()["state"] == "degraded");
    let status = rig.status();
    let reason = status["reason"].as_str().expect("a reason").to_owned();
    assert!(reason.starts_with("the API server cannot be reached, and nothing is refreshed: cannot "), "{reason}");
    let since = status["stateSince"].as_str().expect("a time").to_owned();
    assert!(since.starts_with("20") && since.ends_with('Z'), "{since}");
    let table = rig.fixture.status(&[]);
    table.says(1, &["pod default/web is degraded"]);
    assert!(table.stdout.contains(&format!("  since       {since}")), "{}", table.stdout);
    assert_eq!(status["volumes"][0]["state"], "live", "its content stays");
    rig.put_config("2");
    rig.server.connections(Order::Serve);
    wait_content(&file, "2");
    eventually("the pod is as it should be", || rig.status()["state"] == "running");
    assert_eq!(rig.status().get("stateSince"), None);
}
