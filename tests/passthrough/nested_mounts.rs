//! Directories that other volumes are mounted on, inside a volume.

use std::fs;

use podfs_fuse::projection::tree::Root;

use crate::common::namespace::mount_tmpfs;
use crate::common::tree::{files, names, parse};
use crate::common::{Fixture, Served, config_map, pod, wait_content};

fn root(directories: &[&str]) -> Root {
    Root { mode: 0o777, gid: 0, directories: directories.iter().map(|path| (*path).to_owned()).collect() }
}

#[test]
fn mount_points_are_directories_from_the_start() {
    // NM-01, AW-21
    let mut served = Served::new(&root(&["nested", "deep/er/still", "deep/er/too"]));
    for round in ["1", "2"] {
        served.commit(&[("a", round), ("sub/b", round)]);
        assert_eq!(files(served.path()), parse(&format!("a={round}; sub/b={round}")));
        for directory in ["nested", "deep", "deep/er", "deep/er/still", "deep/er/too"] {
            let found = fs::symlink_metadata(served.path().join(directory)).expect("it is there");
            assert!(found.is_dir(), "{directory}");
        }
        let mut below = names(&served.path().join("deep/er"));
        below.sort();
        assert_eq!(below, ["still", "too"]);
    }
}

#[test]
fn a_directory_hides_a_key_of_its_name() {
    // AW-21: no error; the key is there below `..data`.
    let mut served = Served::new(&root(&["nested"]));
    served.commit(&[("a", "1"), ("nested", "hidden")]);
    assert_eq!(names(&served.path().join("nested")), Vec::<String>::new());
    assert_eq!(fs::read_to_string(served.path().join("..data/nested")).expect("a file"), "hidden");
    served.commit(&[("a", "2")]);
    assert!(served.path().join("nested").is_dir(), "a removed key takes no directory away");
}

#[test]
fn nested_mounts_survive_updates() {
    // NM-02: also right after names and directories come and go beside it.
    let mut served = Served::new(&root(&["nested", "deep/er"]));
    served.commit(&[("a", "0")]);
    let points = ["nested", "deep/er"].map(|directory| served.path().join(directory));
    for point in &points {
        mount_tmpfs(point);
        fs::write(point.join("own"), "mine").expect("the other volume is writable");
    }
    for round in 1..20 {
        let text = round.to_string();
        served.commit(&[("a", &text), (&format!("key-{round}"), ""), ("nested", &text), ("other/x", &text)]);
        assert_eq!(fs::read_to_string(served.path().join("a")).expect("a file"), text);
        for point in &points {
            assert_eq!(fs::read_to_string(point.join("own")).expect("the other volume is there"), "mine");
        }
    }
}

#[test]
fn a_pod_gets_the_mount_points_that_its_containers_need() {
    // NM-01, NM-02, AW-21, from the pod's manifest.
    let mounts = "{name: web, image: web, volumeMounts: [{name: config, mountPath: /etc/web}, \
                  {name: other, mountPath: /etc/web/other}]}";
    let volumes = "[{name: config, configMap: {name: app}}, {name: other, configMap: {name: more}}]";
    let fixture = Fixture::new(&pod(volumes).replace("{name: web, image: web}", mounts));
    fixture.write("objects/app.yaml", &config_map("app", &[("a", "1")]));
    fixture.write("objects/more.yaml", &config_map("more", &[("b", "1")]));
    let running = fixture.run();
    let (volume, other) = (running.volume("config"), running.volume("other"));
    let inside = volume.join("other");
    crate::common::namespace::bind(&other, &inside);
    fixture.write("objects/app.yaml", &config_map("app", &[("a", "2"), ("c", "2")]));
    wait_content(&volume.join("c"), "2");
    assert_eq!(fs::read_to_string(inside.join("b")).expect("the volume below is there"), "1");
    fixture.write("objects/more.yaml", &config_map("more", &[("b", "2")]));
    wait_content(&inside.join("b"), "2");
    assert_eq!(files(&inside), parse("b=2"));
    let mut shown = names(&volume);
    shown.retain(|name| !name.starts_with(".."));
    shown.sort();
    assert_eq!(shown, ["a", "c", "other"]);
}
