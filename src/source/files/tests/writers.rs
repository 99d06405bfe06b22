//! Files that are being written. A half-written file is never seen.

use std::fs::{self, File, OpenOptions};
use std::io::Write;

use super::*;

#[tokio::test]
async fn a_half_written_file_is_not_seen() {
    let home = ManifestHome::with_objects(&[("app", "old"), ("db", "1")]);
    let mut watched = home.watch();
    let mut writer = File::create(home.path("objects/app.yaml")).expect("a file");
    home.write("objects/db.yaml", &config_map("db", "2"));
    watched.change().await;
    assert_eq!((watched.value("app"), watched.value("db")), (Some("old"), Some("2")), "empty");

    // The first half alone is a good manifest.
    let text = config_map("app", "new");
    writer.write_all(text.as_bytes()).expect("a write");
    home.write("objects/db.yaml", &config_map("db", "3"));
    watched.change().await;
    assert_eq!((watched.value("app"), watched.value("db")), (Some("old"), Some("3")), "half");

    writer.write_all(b"  more: x\n").expect("a write");
    drop(writer);
    watched.change().await;
    assert_eq!(watched.value("app"), Some("new"));
}

#[tokio::test]
async fn a_new_file_is_read_when_its_writer_closes_it() {
    let home = ManifestHome::with_objects(&[("db", "1")]);
    let mut watched = home.watch();
    let mut writer = File::create(home.path("objects/app.yaml")).expect("a file");
    writer.write_all(config_map("app", "half").as_bytes()).expect("a write");
    home.write("objects/db.yaml", &config_map("db", "2"));
    watched.change().await;
    assert_eq!((watched.value("app"), watched.value("db")), (None, Some("2")));
    drop(writer);
    watched.change().await;
    assert_eq!(watched.value("app"), Some("half"));
}

#[test]
fn a_half_written_file_is_not_used_when_events_are_late() {
    let home = ManifestHome::with_objects(&[]);
    let (mut watcher, _stop) = Watcher::new().expect("a watcher");
    let roots = vec![ConfiguredPath::objects(home.path("objects"))];
    let mut store = DocumentStore::new(PodAndObjects::new(AcceptedDocuments::Pods), None, roots);
    let half = |name: &str| {
        let path = home.path(&format!("objects/{name}.yaml"));
        let mut writer = File::create(&path).expect("a file");
        writer.write_all(config_map(name, "half").as_bytes()).expect("a write");
        (path, writer)
    };
    let (first, _writer) = half("first");
    let in_time = std::mem::replace(&mut watcher.marker_timeout, Duration::ZERO);
    assert!(store.next_scan(&mut watcher).unread.contains(&first), "the events may be late");
    // The event of the first marker comes before those of the second file.
    watcher.marker_timeout = in_time;
    let (second, _writer) = half("second");
    let unread = store.next_scan(&mut watcher).unread;
    assert!(unread.contains(&first) && unread.contains(&second), "{unread:?}");
}

#[tokio::test]
async fn a_file_that_is_never_closed_is_read_after_a_second_without_a_write() {
    let home = ManifestHome::with_objects(&[("app", "old")]);
    let mut watched = home.watch();
    let mut writer = File::create(home.path("objects/app.yaml")).expect("a file");
    writer.write_all(config_map("app", "new").as_bytes()).expect("a write");
    watched.change().await;
    assert_eq!(watched.value("app"), Some("new"));
}

#[tokio::test]
async fn a_file_that_stays_empty_has_no_objects() {
    let home = ManifestHome::with_objects(&[("app", "old")]);
    let mut watched = home.watch();
    home.write("objects/app.yaml", "");
    watched.change().await;
    assert_eq!(watched.value("app"), None);
}

#[tokio::test]
async fn a_file_rewritten_all_the_time_is_never_seen_half() {
    let home = ManifestHome::with_objects(&[("app", "0"), ("db", "0")]);
    let mut watched = home.watch();
    let path = home.path("objects/app.yaml");
    let writer = std::thread::spawn(move || {
        for round in 1..=2000_u32 {
            // Two writes: between them, the file is a good manifest with another value.
            let mut file = File::create(&path).expect("a file");
            file.write_all(config_map("app", "half").as_bytes()).expect("a write");
            let rest = format!("---\n{}", config_map("round", &round.to_string()));
            file.write_all(rest.as_bytes()).expect("a write");
        }
    });
    while watched.value("round") != Some("2000") {
        watched.change().await;
        let half = watched.value("app") == Some("half") && watched.value("round").is_none();
        assert!(!half && watched.value("app").is_some(), "half a file was seen");
    }
    writer.join().expect("the writer ends");
}

#[tokio::test]
async fn a_directory_that_was_just_made_may_still_be_filled() {
    let home = ManifestHome::with_objects(&[("app", "1")]);
    home.write("db.yaml", &config_map("db", "1"));
    let mut watched = home.open(None, &["objects", "db.yaml"]).expect("good manifests");
    home.rename("objects", "away");
    fs::create_dir(home.path("objects")).expect("a directory");
    let mut writer = File::create(home.path("objects/app.yaml")).expect("a file");
    writer.write_all(config_map("app", "half").as_bytes()).expect("a write");
    home.write("db.yaml", &config_map("db", "2"));
    watched.change().await;
    assert_ne!(watched.value("app"), Some("half"));
    drop(writer);
    watched.until("app", Some("half")).await;
}

#[test]
fn a_change_in_place_counts_only_after_its_last_event() {
    let home = ManifestHome::with_objects(&[("app", "1"), ("db", "1")]);
    let mut steps = home.step_by_step(&["objects"]);
    let mut writer = OpenOptions::new().append(true).open(home.path("objects/app.yaml")).expect("a file");
    writer.write_all(b"  more: x\n").expect("a write");
    // As if the event had not come yet.
    steps.watcher.catch_up();
    steps.watcher.activity.replace(&home.path("objects/app.yaml").canonicalize().expect("a path"));
    assert!(steps.scan().is_none());
    drop(writer);
    assert!(steps.scan().is_some());
}

#[test]
fn the_start_waits_for_a_file_that_is_being_written() {
    let home = ManifestHome::with_objects(&[("app", "1")]);
    let (mut watcher, _signals) = Watcher::new().expect("a watcher");
    let mut store = DocumentStore::new(
        PodAndObjects::new(AcceptedDocuments::Pods),
        None,
        vec![ConfiguredPath::objects(home.path("objects"))],
    );
    watcher.activity.write(&home.path("objects/app.yaml").canonicalize().expect("a path"));
    let snapshot = store.first_scan(&mut watcher).expect("good manifests");
    assert_eq!(value(&snapshot, "app"), Some("1"));
}
