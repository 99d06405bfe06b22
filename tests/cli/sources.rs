//! The ways in which manifest files change, seen from the volume.

use std::fs::{self, File, FileTimes};
use std::path::Path;
use std::time::SystemTime;

use crate::common::watch::Watcher;
use crate::common::*;

/// A running pod whose volume `config` shows the ConfigMap `app` of `objects/app.json`, with the file `a`.
fn running(content: &str) -> (Fixture, Running) {
    let fixture = Fixture::new(&config_pod());
    fixture.write("objects/app.json", &app(content));
    let running = fixture.run();
    (fixture, running)
}

fn app(content: &str) -> String {
    config_map("app", &[("a", content)])
}

#[test]
fn a_file_rewritten_in_place_or_renamed_over_is_read_again() {
    let (fixture, running) = running("1");
    let file = running.volume("config").join("a");
    fs::write(fixture.path("objects/app.json"), app("2")).expect("written");
    wait_content(&file, "2");
    fixture.write("objects/app.json", &app("3"));
    wait_content(&file, "3");
    // Longer, shorter, and of the same length.
    for content in ["a longer text", "", "4", "5"] {
        fs::write(fixture.path("objects/app.json"), app(content)).expect("written");
        wait_content(&file, content);
    }
}

#[test]
fn a_null_value_of_an_object_is_an_empty_file_as_in_go() {
    let fixture =
        Fixture::new(&pod("[{name: config, configMap: {name: app}}, {name: keys, secret: {secretName: keys}}]"));
    fixture.write(
        "objects/app.yaml",
        "apiVersion: v1\nkind: ConfigMap\nmetadata: {name: app, labels: {x: null}}\ndata:\n  redis.db:\n  a: x\n",
    );
    fixture.write(
        "objects/keys.json",
        r#"{"apiVersion":"v1","kind":"Secret","metadata":{"name":"keys"},"data":{"k":null},"stringData":{"s":null}}"#,
    );
    let running = fixture.run();
    let read = |volume: &str, key: &str| fs::read_to_string(running.volume(volume).join(key)).expect("a file");
    assert_eq!((read("config", "redis.db"), read("config", "a")), (String::new(), "x".to_owned()));
    assert_eq!((read("keys", "k"), read("keys", "s")), (String::new(), String::new()));
}

#[test]
fn a_directory_of_objects_that_is_itself_a_config_map_volume_is_followed() {
    // The layout of a ConfigMap volume, and the switch as the kubelet does it.
    let fixture = Fixture::new(&config_pod());
    let generation = |name: &str, content: &str| {
        fs::create_dir(fixture.path("objects").join(name)).expect("a directory");
        fs::write(fixture.path("objects").join(name).join("app.json"), app(content)).expect("written");
    };
    let data = fixture.path("objects/..data");
    generation("..one", "1");
    switch_link(&data, "..one");
    std::os::unix::fs::symlink("..data/app.json", fixture.path("objects/app.json")).expect("a link");
    let running = fixture.run();
    let file = running.volume("config").join("a");
    wait_content(&file, "1");
    for (old, new, content) in [("..one", "..two", "2"), ("..two", "..three", "3")] {
        generation(new, content);
        switch_link(&data, new);
        fs::remove_dir_all(fixture.path("objects").join(old)).expect("removed");
        wait_content(&file, content);
    }
}

#[test]
fn files_may_be_added_and_deleted() {
    let (fixture, running) = running("1");
    let file = running.volume("config").join("a");
    fixture.remove("objects/app.json");
    running.wait_log(r#"configmap "app" not found"#);
    fixture.write("objects/another-name.yml", &app("2"));
    wait_content(&file, "2");
    fixture.write("objects/not-a-manifest.txt", "data: [");
    fixture.write("objects/another-name.yml", &app("3"));
    wait_content(&file, "3");
    assert!(!running.log().contains("not-a-manifest"), "{}", running.log());
}

#[test]
fn an_object_that_moves_to_another_file_is_not_missed() {
    let (fixture, running) = running("1");
    fixture.write("objects/both.yaml", &format!("{}\n---\n{}", app("2"), config_map("more", &[])));
    running.wait_log("ConfigMap default/app is described twice");
    fixture.remove("objects/app.json");
    wait_content(&running.volume("config").join("a"), "2");
    assert!(!running.log().contains("not found"), "{}", running.log());
}

#[test]
fn the_directory_of_objects_may_be_replaced_by_another() {
    let (fixture, running) = running("1");
    let file = running.volume("config").join("a");
    fs::create_dir(fixture.path("new")).expect("a directory");
    fixture.write("new/app.json", &app("2"));
    fs::rename(fixture.objects(), fixture.path("old")).expect("renamed");
    fs::rename(fixture.path("new"), fixture.objects()).expect("renamed");
    wait_content(&file, "2");
    // podfs watches the new directory, not the old one.
    fixture.write("old/app.json", &app("old"));
    fixture.write("objects/app.json", &app("3"));
    wait_content(&file, "3");
}

#[test]
fn an_objects_directory_that_disappears_leaves_the_files_in_place() {
    // CM-08, VM-09
    let (fixture, running) = running("1");
    fs::rename(fixture.objects(), fixture.path("old")).expect("renamed");
    running.wait_log("objects: has disappeared");
    assert_eq!(fs::read_to_string(running.volume("config").join("a")).expect("kept"), "1");
    fixture.write("old/app.json", &app("2"));
    fs::rename(fixture.path("old"), fixture.objects()).expect("renamed back");
    wait_content(&running.volume("config").join("a"), "2");
}

#[test]
fn a_burst_of_rewrites_ends_in_the_last_content_with_few_generations() {
    const REWRITES: usize = 100;
    let (fixture, running) = running("start");
    let volume = running.volume("config");
    let watcher = Watcher::on("root", &volume);
    for number in 1..=REWRITES {
        fixture.write("objects/app.json", &app(&number.to_string()));
    }
    wait_content(&volume.join("a"), &REWRITES.to_string());
    let switches = watcher.switches();
    assert!((1..REWRITES).contains(&switches), "{switches} generations for {REWRITES} rewrites");
}

#[test]
fn a_change_outside_the_payload_raises_no_event() {
    // AW-10, EV-06
    let fixture =
        Fixture::new(&pod("[{name: config, configMap: {name: app}}, {name: beside, configMap: {name: beside}}]"));
    let beside = |content: &str| fixture.write("objects/beside.json", &config_map("beside", &[("b", content)]));
    fixture.write("objects/app.json", &app("1"));
    beside("start");
    let running = fixture.run();
    let (volume, marker) = (running.volume("config"), running.volume("beside").join("b"));
    let watcher = Watcher::on("root", &volume);
    let path = fixture.path("objects/app.json");
    let unchanged: [(&str, &dyn Fn()); 6] = [
        ("written again", &|| fs::write(&path, app("1")).expect("written")),
        ("renamed over", &|| fixture.write("objects/app.json", &app("1"))),
        ("touched", &|| touch(&path)),
        ("written in another form", &|| fixture.write("objects/app.json", &format!("\n{}\n", app("1")))),
        ("an unused object", &|| fixture.write("objects/other.json", &config_map("other", &[("a", "unused")]))),
        ("the pod in another form", &|| fixture.write("pod.yaml", &format!("# Again.\n{}", read(&fixture.pod())))),
    ];
    for (name, change) in unchanged {
        change();
        // podfs has looked at all files once it shows this.
        beside(name);
        wait_content(&marker, name);
        assert_eq!(watcher.events(), [] as [&str; 0], "{name}");
    }
    fixture.write("objects/app.json", &app("2"));
    wait_content(&volume.join("a"), "2");
    assert_eq!(watcher.switches(), 1, "the watch works");
}

fn read(path: &Path) -> String {
    fs::read_to_string(path).expect("text")
}

fn touch(path: &Path) {
    let file = File::options().append(true).open(path).expect("a file");
    file.set_times(FileTimes::new().set_modified(SystemTime::now())).expect("touched");
}
