//! Paths that lead elsewhere from one moment to the next.

use std::fs;

use super::*;

/// Fills a generation as the kubelet's AtomicWriter does, and switches to it: write, link, rename.
fn switch_to(home: &ManifestHome, generation: &str, value: &str) {
    let directory = format!("objects/..{generation}");
    fs::create_dir(home.path(&directory)).expect("a directory");
    home.write(&format!("{directory}/app.yaml"), &config_map("app", value));
    home.write(&format!("{directory}/db.yaml"), &config_map("db", value));
    home.link(format!("..{generation}"), "objects/..data_tmp");
    home.rename("objects/..data_tmp", "objects/..data");
}

#[tokio::test]
async fn a_config_map_volume_may_be_switched_many_times() {
    let home = ManifestHome::with_objects(&[]);
    switch_to(&home, "2026_01", "1");
    home.link("..data/app.yaml", "objects/app.yaml");
    home.link("..data/db.yaml", "objects/db.yaml");
    let mut watched = home.watch();
    assert_eq!((watched.value("app"), watched.value("db")), (Some("1"), Some("1")));
    for (old, new, value) in [("2026_01", "2026_02", "2"), ("2026_02", "2026_03", "3"), ("2026_03", "2026_01", "4")] {
        switch_to(&home, new, value);
        fs::remove_dir_all(home.path(&format!("objects/..{old}"))).expect("a removal");
        watched.change().await;
        assert_eq!((watched.value("app"), watched.value("db")), (Some(value), Some(value)));
    }
}

#[tokio::test]
async fn a_parent_may_be_a_link_that_is_switched() {
    let home = ManifestHome::new();
    for (name, value) in [("one", "1"), ("two", "2")] {
        fs::create_dir_all(home.path(&format!("{name}/deep/objects"))).expect("directories");
        home.write(&format!("{name}/deep/objects/app.yaml"), &config_map("app", value));
    }
    home.link("one", "current");
    let mut watched = home.open(None, &["current/deep/objects"]).expect("good manifests");
    home.link("two", "next");
    home.rename("next", "current");
    watched.change().await;
    assert_eq!(watched.value("app"), Some("2"));
    home.write("two/deep/objects/app.yaml", &config_map("app", "3"));
    watched.change().await;
    assert_eq!(watched.value("app"), Some("3"));
}

#[tokio::test]
async fn a_directory_may_be_replaced_by_rename() {
    let home = ManifestHome::with_objects(&[("app", "1")]);
    let mut watched = home.watch();
    for value in ["2", "3"] {
        fs::create_dir(home.path("next")).expect("a directory");
        home.write("next/app.yaml", &config_map("app", value));
        home.rename("objects", &format!("before {value}"));
        home.rename("next", "objects");
        watched.until("app", Some(value)).await;
    }
    home.write("objects/app.yaml", &config_map("app", "4"));
    watched.change().await;
    assert_eq!(watched.value("app"), Some("4"));
}

#[tokio::test]
async fn a_directory_above_may_be_replaced_by_rename() {
    let home = ManifestHome::new();
    fs::create_dir_all(home.path("a/b/objects")).expect("directories");
    home.write("a/b/objects/app.yaml", &config_map("app", "1"));
    let mut watched = home.open(None, &["a/b/objects"]).expect("good manifests");
    fs::create_dir_all(home.path("next/b/objects")).expect("directories");
    home.write("next/b/objects/app.yaml", &config_map("app", "2"));
    home.rename("a", "before");
    home.rename("next", "a");
    watched.change().await;
    assert_eq!(watched.value("app"), Some("2"));
}

#[tokio::test]
async fn a_link_to_a_file_elsewhere_is_followed() {
    let home = ManifestHome::with_objects(&[]);
    home.write("elsewhere.txt", &config_map("app", "1"));
    home.link("../elsewhere.txt", "objects/app.yaml");
    let mut watched = home.watch();
    home.write("elsewhere.txt", &config_map("app", "2"));
    watched.change().await;
    assert_eq!(watched.value("app"), Some("2"));
    home.replace("elsewhere.txt", &config_map("app", "3"));
    watched.change().await;
    assert_eq!(watched.value("app"), Some("3"));
}
