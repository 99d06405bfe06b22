//! A server that is away, slow, or talks nonsense: volumes keep their content, and in the end they are current.

use std::fs;
use std::time::Duration;

use crate::api_server::{Answer, End, Order, Presents};
use crate::common::*;
use crate::rig::Rig;

/// A pod whose volume shows `1`, and the file that does.
fn running() -> (Rig, Running, std::path::PathBuf) {
    let rig = Rig::of_config("1");
    let running = rig.run();
    let file = running.volume("config").join("key");
    rig.wait_watched("ConfigMap", "app");
    (rig, running, file)
}

#[test]
fn a_server_that_is_away_leaves_volumes_as_they_are_and_is_gone_on_with_when_it_is_back() {
    let (rig, running, file) = running();
    let lists = rig.server.count("list", "configmaps");
    rig.server.connections(Order::Refuse);
    running.wait_log("the API server is away, and volumes stay as they are");
    rig.put_config("2");
    assert_eq!(fs::read_to_string(&file).expect("a file"), "1");
    rig.server.connections(Order::Serve);
    wait_content(&file, "2");
    running.wait_log("the API server answers again");
    assert_eq!(rig.server.count("list", "configmaps"), lists, "the watch goes on from where it was");
    assert_eq!(running.log().matches("is away").count(), 1, "{}", running.log());
}

#[test]
fn changes_that_the_server_has_forgotten_are_found_by_another_list() {
    let (rig, running, file) = running();
    rig.server.connections(Order::Refuse);
    running.wait_log("is away");
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
fn a_frozen_connection_is_given_up() {
    let (rig, _running, file) = running();
    rig.server.connections(Order::Freeze);
    rig.put_config("2");
    // Pings find out. It takes longer than anything else here may.
    let deadline = std::time::Instant::now() + Duration::from_secs(60);
    while fs::read_to_string(&file).expect("a file") != "2" {
        assert!(std::time::Instant::now() < deadline, "nobody notices");
        std::thread::sleep(Duration::from_millis(10));
    }
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
fn answers_that_are_none_keep_what_is_known() {
    // MG-06
    let answers = [
        (Answer::Error(500), "500"),
        (Answer::Error(503), "503"),
        (Answer::Html, "no API server"),
        (Answer::Redirect("https://127.0.0.1:1/".to_owned()), "sends podfs elsewhere (302 Found)"),
        (Answer::Oversize(5 << 20), "larger than 4 MiB"),
        (Answer::InvalidUtf8, "not UTF-8"),
    ];
    let (rig, running, file) = running();
    for (answer, sentence) in answers {
        rig.server.fail_only("watch", "configmaps", 1, answer.clone());
        rig.server.connections(Order::Break);
        running.wait_log(sentence);
        assert!(fs::read_to_string(&file).is_ok_and(|is| !is.is_empty()), "{answer:?}");
        let value = format!("after {answer:?}");
        rig.put_config(&value);
        wait_content(&file, &value);
    }
}

#[test]
fn lists_that_fail_are_asked_for_again() {
    let rig = Rig::of_config("1");
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
fn a_server_that_takes_connections_and_never_answers_is_waited_for_with_a_reason() {
    let rig = Rig::of_config("1");
    rig.server.fail_always("list", "configmaps", Answer::Never);
    let mut running = rig.start();
    running.wait_log("not heard of yet");
    assert!(rig.reason("config").is_some_and(|reason| reason.contains("not heard of yet")));
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
fn the_status_tells_of_each_object_what_is_known_and_what_is_wrong() {
    let (rig, running, _file) = running();
    let version = rig.server.version().to_string();
    let object = rig.object("ConfigMap default/app").expect("an object");
    assert_eq!((object["watch"].as_str(), object["resourceVersion"].as_str()), (Some("watching"), Some(&*version)));
    assert!(object["contactAgeSeconds"].as_u64().is_some_and(|age| age < 20));
    assert!(rig.object("Pod default/web").is_some());
    rig.server.connections(Order::Refuse);
    running.wait_log("is away");
    let trouble = || rig.object("ConfigMap default/app").expect("an object")["trouble"].to_string();
    eventually("the status says what is wrong", || trouble().contains("the server cannot be reached"));
    assert_eq!(rig.object("ConfigMap default/app").expect("an object")["resourceVersion"].as_str(), Some(&*version));
}
