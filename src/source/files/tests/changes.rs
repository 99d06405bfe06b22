//! Files that change.

use std::fs;

use super::*;

#[tokio::test]
async fn a_file_rewritten_in_place_is_read_again() {
    let home = ManifestHome::with_objects(&[("app", "1")]);
    let mut watched = home.watch();
    assert_eq!(watched.value("app"), Some("1"));
    home.write("objects/app.yaml", &config_map("app", "2"));
    watched.change().await;
    assert_eq!(watched.value("app"), Some("2"));
}

#[tokio::test]
async fn a_file_renamed_over_is_read_again() {
    let home = ManifestHome::with_objects(&[("app", "1"), ("db", "1")]);
    let mut watched = home.watch();
    home.replace("objects/app.yaml", &config_map("app", "2"));
    watched.change().await;
    assert_eq!((watched.value("app"), watched.value("db")), (Some("2"), Some("1")));
}

#[tokio::test]
async fn files_come_and_go() {
    let home = ManifestHome::with_objects(&[("app", "1")]);
    let mut watched = home.watch();
    home.write(
        "objects/db.json",
        r#"{"apiVersion":"v1","kind":"ConfigMap","metadata":{"name":"db"},"data":{"key":"1"}}"#,
    );
    watched.change().await;
    assert_eq!((watched.value("app"), watched.value("db")), (Some("1"), Some("1")));
    fs::remove_file(home.path("objects/app.yaml")).expect("a removal");
    watched.change().await;
    assert_eq!((watched.value("app"), watched.value("db")), (None, Some("1")));
    home.rename("objects/db.json", "objects/db.json.off");
    watched.change().await;
    assert_eq!(watched.value("db"), None);
}

#[tokio::test]
async fn a_hard_link_is_complete_at_once() {
    let home = ManifestHome::with_objects(&[]);
    home.write("app.yaml", &config_map("app", "1"));
    let mut watched = home.watch();
    fs::hard_link(home.path("app.yaml"), home.path("objects/app.yaml")).expect("a link");
    watched.change().await;
    assert_eq!(watched.value("app"), Some("1"));
}

#[tokio::test]
async fn a_file_named_by_the_user_may_have_any_name() {
    let home = ManifestHome::new();
    home.write("objects.conf", &config_map("app", "1"));
    let mut watched = home.open(None, &["objects.conf"]).expect("a manifest");
    home.replace("objects.conf", &config_map("app", "2"));
    watched.change().await;
    assert_eq!(watched.value("app"), Some("2"));
    fs::remove_file(home.path("objects.conf")).expect("a removal");
    watched.change().await;
    assert_eq!(watched.value("app"), None);
    home.write("objects.conf", &config_map("app", "3"));
    watched.change().await;
    assert_eq!(watched.value("app"), Some("3"));
}

/// DA: downwardAPI shows labels, so an edit of the pod manifest is a change.
#[tokio::test]
async fn an_edited_label_of_the_pod_is_a_change() {
    let home = ManifestHome::with_objects(&[("app", "1")]);
    home.write("pod.yaml", &pod("one"));
    let mut watched = home.open(Some("pod.yaml"), &["objects"]).expect("good manifests");
    assert_eq!(watched.label("version"), Some("one"));
    home.write("pod.yaml", &pod("two"));
    watched.change().await;
    assert_eq!(watched.label("version"), Some("two"));
    assert_eq!(watched.value("app"), Some("1"));
}

#[tokio::test]
async fn a_burst_costs_few_snapshots() {
    let home = ManifestHome::with_objects(&[("app", "0")]);
    let mut watched = home.watch();
    for round in 1..=200 {
        home.replace("objects/app.yaml", &config_map("app", &round.to_string()));
    }
    let snapshots = watched.until("app", Some("200")).await;
    assert!(snapshots < 100, "{snapshots} snapshots");
}

#[tokio::test]
async fn a_busy_directory_does_not_starve_updates() {
    let home = ManifestHome::with_objects(&[("app", "0"), ("busy", "0")]);
    let mut watched = home.watch();
    home.replace("objects/app.yaml", &config_map("app", "1"));
    // The test and the watching thread run side by side: the test writes until it receives the change.
    let mut round = 0;
    while watched.value("app") != Some("1") {
        round += 1;
        home.replace("objects/busy.yaml", &config_map("busy", &round.to_string()));
        if tokio::time::timeout(Duration::from_micros(200), async { watched.change().await }).await.is_err() {
            continue;
        }
    }
    watched.until("busy", Some(&round.to_string())).await;
}

#[test]
fn an_identical_rewrite_and_a_touch_are_silent() {
    let home = ManifestHome::with_objects(&[("app", "1")]);
    let mut steps = home.step_by_step(&["objects"]);
    home.write("objects/app.yaml", &config_map("app", "1"));
    assert!(steps.scan().is_none());
    home.replace("objects/app.yaml", &config_map("app", "1"));
    assert!(steps.scan().is_none());
    home.write("objects/app.yaml", &config_map("app", "2"));
    let snapshot = steps.scan().expect("a difference");
    assert_eq!(value(&snapshot, "app"), Some("2"));
}

#[tokio::test]
async fn an_identical_rewrite_adds_no_snapshot() {
    let home = ManifestHome::with_objects(&[("app", "1"), ("db", "1")]);
    let mut watched = home.watch();
    home.write("objects/app.yaml", &config_map("app", "1"));
    home.write("objects/db.yaml", &config_map("db", "2"));
    watched.change().await;
    assert_eq!((watched.value("app"), watched.value("db")), (Some("1"), Some("2")));
}

#[test]
fn reading_causes_no_further_scan() {
    let home = ManifestHome::with_objects(&[("app", "1")]);
    let mut steps = home.step_by_step(&["objects"]);
    steps.watcher.catch_up();
    assert!(!steps.watcher.activity.is_scan_due());
    fs::read(home.path("objects/app.yaml")).expect("a file");
    fs::read_dir(home.path("objects")).expect("a directory").count();
    steps.watcher.catch_up();
    assert!(!steps.watcher.activity.is_scan_due());
}

#[test]
fn lost_events_cost_a_scan_and_no_change() {
    let home = ManifestHome::with_objects(&[("app", "1")]);
    let mut steps = home.step_by_step(&["objects"]);
    let overflow = notify::Event::new(notify::EventKind::Other).set_flag(notify::event::Flag::Rescan);
    steps.signals.send(WatchMessage::Event(Ok(overflow))).expect("a receiver");
    assert!(steps.scan().is_none());
    home.replace("objects/app.yaml", &config_map("app", "2"));
    assert!(steps.scan().is_some());
}

#[tokio::test]
async fn a_wait_may_be_cancelled() {
    let home = ManifestHome::with_objects(&[("app", "1")]);
    let mut watched = home.watch();
    for _ in 0..3 {
        assert!(tokio::time::timeout(Duration::from_millis(1), watched.source.changed()).await.is_err());
    }
    home.write("objects/app.yaml", &config_map("app", "2"));
    watched.change().await;
    assert_eq!(watched.value("app"), Some("2"));
}

#[tokio::test]
async fn an_immutable_object_keeps_its_content_until_it_was_gone() {
    // CM-12, MG-03
    let immutable = |value| config_map("app", value).replace("kind:", "immutable: true\nkind:");
    let home = ManifestHome::with_objects(&[("other", "1")]);
    home.write("objects/app.yaml", &immutable("1"));
    let mut watched = home.watch();
    home.replace("objects/app.yaml", &immutable("2"));
    home.replace("objects/other.yaml", &config_map("other", "2"));
    watched.until("other", Some("2")).await;
    assert_eq!(watched.value("app"), Some("1"));
    std::fs::remove_file(home.path("objects/app.yaml")).expect("removed");
    watched.until("app", None).await;
    home.replace("objects/app.yaml", &immutable("3"));
    watched.until("app", Some("3")).await;
}

#[tokio::test]
async fn an_immutable_object_cannot_become_a_mutable_one() {
    // CM-12
    let immutable = |value| config_map("app", value).replace("kind:", "immutable: true\nkind:");
    let home = ManifestHome::with_objects(&[("other", "1")]);
    home.write("objects/app.yaml", &immutable("1"));
    let mut watched = home.watch();
    for (app, other) in [("1", "2"), ("2", "3")] {
        home.replace("objects/app.yaml", &config_map("app", app));
        home.replace("objects/other.yaml", &config_map("other", other));
        watched.until("other", Some(other)).await;
        assert_eq!(watched.value("app"), Some("1"));
    }
}

#[tokio::test]
async fn a_file_that_an_editor_removes_and_writes_again_is_never_gone() {
    let home = ManifestHome::with_objects(&[("app", "1")]);
    let mut watched = home.watch();
    for value in ["2", "3", "4"] {
        fs::rename(home.path("objects/app.yaml"), home.path("objects/app.yaml~")).expect("renamed");
        std::thread::sleep(Duration::from_millis(10));
        home.write("objects/app.yaml", &config_map("app", value));
        while watched.value("app") != Some(value) {
            watched.change().await;
            assert!(watched.value("app").is_some(), "the object was gone for a moment");
        }
    }
    fs::remove_file(home.path("objects/app.yaml")).expect("removed");
    watched.until("app", None).await;
}

#[tokio::test]
async fn an_object_that_moves_to_another_file_is_there_once() {
    let home = ManifestHome::with_objects(&[("app", "1"), ("other", "1")]);
    let mut watched = home.watch();
    fs::rename(home.path("objects/app.yaml"), home.path("objects/renamed.yaml")).expect("renamed");
    home.write("objects/other.yaml", &config_map("other", "2"));
    watched.until("other", Some("2")).await;
    assert_eq!(watched.value("app"), Some("1"));
}

#[tokio::test]
async fn an_object_that_a_new_file_describes_is_not_described_twice() {
    let home = ManifestHome::with_objects(&[("app", "1"), ("other", "1")]);
    let mut watched = home.watch();
    fs::remove_file(home.path("objects/app.yaml")).expect("removed");
    home.write("objects/moved.yaml", &config_map("app", "2"));
    home.write("objects/other.yaml", &config_map("other", "2"));
    watched.until("app", Some("2")).await;
    watched.until("other", Some("2")).await;
}
