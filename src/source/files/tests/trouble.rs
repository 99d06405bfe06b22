//! Files that turn bad or go away while the pod runs.

use std::fs;

use super::*;

#[tokio::test]
async fn a_malformed_file_keeps_its_last_objects_until_it_is_mended() {
    let home = ManifestHome::with_objects(&[("app", "1"), ("db", "1")]);
    let mut watched = home.watch();
    home.write("objects/app.yaml", "a: [hunter2\n");
    home.write("objects/db.yaml", &config_map("db", "2"));
    watched.change().await;
    assert_eq!((watched.value("app"), watched.value("db")), (Some("1"), Some("2")));
    home.write("objects/app.yaml", &config_map("app", "3"));
    watched.change().await;
    assert_eq!(watched.value("app"), Some("3"));
}

#[test]
fn a_problem_is_reported_once_and_again_when_it_comes_back() {
    let home = ManifestHome::with_objects(&[("app", "1"), ("db", "1")]);
    let mut steps = home.step_by_step(&["objects"]);
    home.write("objects/app.yaml", "a: [hunter2\n");
    assert!(steps.scan().is_none());
    let problems: Vec<_> = steps.store.problems().collect();
    let sentence = "objects/app.yaml:1:4: unclosed bracket '['; until then, podfs uses the earlier content";
    assert!(matches!(problems[..], [only] if only.ends_with(sentence)), "{problems:?}");

    home.write("objects/db.yaml", &config_map("db", "2"));
    assert!(steps.scan().is_some());
    assert_eq!(steps.store.problems().count(), 1, "still the same problem");

    home.write("objects/app.yaml", &config_map("app", "1"));
    assert!(steps.scan().is_none(), "mended to what it was");
    assert_eq!(steps.store.problems().count(), 0);
}

#[tokio::test]
async fn a_pod_that_turns_bad_or_disappears_stays() {
    let home = ManifestHome::with_objects(&[("app", "1")]);
    home.write("pod.yaml", &pod("one"));
    let mut watched = home.open(Some("pod.yaml"), &["objects"]).expect("good manifests");
    for (round, spoil) in ["in place", "no pod", "gone"].into_iter().enumerate() {
        match spoil {
            "in place" => home.write("pod.yaml", "kind: ["),
            "no pod" => home.replace("pod.yaml", &config_map("other", "1")),
            _ => fs::remove_file(home.path("pod.yaml")).expect("a removal"),
        }
        let value = format!("after {round}");
        home.write("objects/app.yaml", &config_map("app", &value));
        watched.until("app", Some(&value)).await;
        assert_eq!(watched.label("version"), Some("one"), "{spoil}");
        assert_eq!(watched.value("other"), None);
    }
    home.write("pod.yaml", &pod("two"));
    watched.change().await;
    assert_eq!(watched.label("version"), Some("two"));
}

#[tokio::test]
async fn a_duplicate_keeps_the_last_snapshot() {
    let home = ManifestHome::with_objects(&[("app", "1"), ("db", "1")]);
    let mut watched = home.watch();
    home.write("objects/again.yaml", &config_map("app", "2"));
    home.write("objects/db.yaml", &config_map("db", "2"));
    fs::remove_file(home.path("objects/again.yaml")).expect("a removal");
    watched.change().await;
    assert_eq!((watched.value("app"), watched.value("db")), (Some("1"), Some("2")));
}

#[test]
fn a_duplicate_is_reported_with_both_places() {
    let home = ManifestHome::with_objects(&[("app", "1")]);
    let mut steps = home.step_by_step(&["objects"]);
    home.write("objects/again.yaml", &config_map("app", "2"));
    home.write("objects/db.yaml", &config_map("db", "1"));
    let mut snapshot = None;
    while snapshot.as_ref().and_then(|snapshot| value(snapshot, "db")).is_none() || steps.store.problems().count() == 0
    {
        snapshot = steps.scan().or(snapshot);
    }
    assert_eq!(value(&snapshot.expect("a snapshot"), "app"), Some("1"), "the content before");
    let problems: Vec<_> = steps.store.problems().collect();
    let places = "objects/again.yaml and in ";
    assert!(
        matches!(problems[..], [only] if only.contains(places) && only.ends_with("until then, podfs uses the earlier content")),
        "{problems:?}"
    );
}

#[tokio::test]
async fn a_bad_document_keeps_its_earlier_content_and_the_others_of_its_file_change() {
    let home = ManifestHome::with_objects(&[]);
    let file =
        |app: &str, db: &str, bad: &str| format!("{}---\n{}---\n{bad}\n", config_map("app", app), config_map("db", db));
    home.write("objects/all.yaml", &file("1", "1", ""));
    let mut watched = home.watch();
    for (round, (app, bad, expected)) in [
        ("2", "a: [hunter2", "2"),
        ("{a: b}", "", "2"),
        ("{a: b}", "apiVersion: v1\nkind: ConfigMap", "2"),
        ("3", "", "3"),
    ]
    .into_iter()
    .enumerate()
    {
        let db = format!("after {round}");
        let text = file(app, &db, bad).replace("\"{a: b}\"", "{a: b}");
        home.replace("objects/all.yaml", &text);
        watched.until("db", Some(&db)).await;
        assert_eq!(watched.value("app"), Some(expected), "{text}");
    }
    home.replace("objects/all.yaml", &format!("{}---\na: [\n", config_map("app", "4")));
    watched.until("app", Some("4")).await;
    assert_eq!(watched.value("db"), Some("after 3"), "the document that cannot be read may be its own");
    home.replace("objects/all.yaml", &config_map("app", "5"));
    watched.until("app", Some("5")).await;
    assert_eq!(watched.value("db"), None);
}

#[tokio::test]
async fn a_vanished_directory_keeps_its_objects() {
    let home = ManifestHome::with_objects(&[("app", "1")]);
    home.write("db.yaml", &config_map("db", "1"));
    let mut watched = home.open(None, &["objects", "db.yaml"]).expect("good manifests");

    home.rename("objects", "away");
    home.write("db.yaml", &config_map("db", "2"));
    watched.change().await;
    assert_eq!((watched.value("app"), watched.value("db")), (Some("1"), Some("2")));

    // An empty mount point looks like this.
    fs::create_dir(home.path("objects")).expect("a directory");
    home.write("db.yaml", &config_map("db", "3"));
    watched.change().await;
    assert_eq!((watched.value("app"), watched.value("db")), (Some("1"), Some("3")));

    fs::remove_dir(home.path("objects")).expect("a removal");
    home.write("away/app.yaml", &config_map("app", "2"));
    home.rename("away", "objects");
    watched.change().await;
    assert_eq!(watched.value("app"), Some("2"));
    home.write("objects/app.yaml", &config_map("app", "3"));
    watched.change().await;
    assert_eq!(watched.value("app"), Some("3"));
}

#[tokio::test]
async fn a_file_whose_directory_vanished_keeps_its_objects() {
    let home = ManifestHome::with_objects(&[("app", "1")]);
    home.write("db.yaml", &config_map("db", "1"));
    let mut watched = home.open(None, &["objects/app.yaml", "db.yaml"]).expect("good manifests");
    home.rename("objects", "away");
    home.write("db.yaml", &config_map("db", "2"));
    watched.change().await;
    assert_eq!((watched.value("app"), watched.value("db")), (Some("1"), Some("2")));
}

#[tokio::test]
async fn the_last_file_of_a_directory_may_be_deleted() {
    let home = ManifestHome::with_objects(&[("app", "1")]);
    let mut watched = home.watch();
    fs::remove_file(home.path("objects/app.yaml")).expect("a removal");
    watched.change().await;
    assert_eq!(watched.value("app"), None);
}

#[test]
fn a_problem_of_a_file_that_was_never_valid_names_no_earlier_content() {
    let home = ManifestHome::with_objects(&[("app", "1")]);
    let mut steps = home.step_by_step(&["objects"]);
    home.write("objects/new.yaml", "a: [hunter2\n");
    assert!(steps.scan().is_none());
    let problems: Vec<_> = steps.store.problems().collect();
    let sentence = "; until then, podfs leaves this document out, and mounted volumes keep their content";
    assert!(matches!(problems[..], [only] if only.ends_with(sentence)), "{problems:?}");
}

#[test]
fn a_file_that_was_never_valid_is_unread_until_it_has_been_gone_for_a_second() {
    let home = ManifestHome::with_objects(&[("app", "1")]);
    home.write("objects/bad.yaml", "a: [hunter2\n");
    let mut steps = home.step_by_step_of_good_files(&["objects"]);
    fs::remove_file(home.path("objects/bad.yaml")).expect("a removal");
    assert!(steps.watcher.wait());
    let unread = steps.store.next_scan(&mut steps.watcher).unread;
    assert_eq!(unread.into_iter().collect::<Vec<_>>(), [home.path("objects/bad.yaml")]);
    assert!(steps.watcher.wait());
    assert!(steps.store.next_scan(&mut steps.watcher).unread.is_empty());
}
