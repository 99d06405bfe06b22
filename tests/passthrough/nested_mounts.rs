//! Directories in a projection on which other volumes are mounted.

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
            let metadata = fs::symlink_metadata(served.path().join(directory)).expect("the directory exists");
            assert!(metadata.is_dir(), "{directory}");
        }
        let mut below = names(&served.path().join("deep/er"));
        below.sort();
        assert_eq!(below, ["still", "too"]);
    }
}

#[test]
fn a_directory_hides_a_key_of_its_name() {
    // AW-21: this is no error; the key is visible below `..data`.
    let mut served = Served::new(&root(&["nested"]));
    served.commit(&[("a", "1"), ("nested", "hidden")]);
    assert_eq!(names(&served.path().join("nested")), Vec::<String>::new());
    assert_eq!(fs::read_to_string(served.path().join("..data/nested")).expect("a file"), "hidden");
    served.commit(&[("a", "2")]);
    assert!(served.path().join("nested").is_dir(), "the directory stays when the key is removed");
}

#[test]
fn nested_mounts_survive_updates() {
    // NM-02: this also holds right after names and directories beside the mount points are added and removed.
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
            assert_eq!(fs::read_to_string(point.join("own")).expect("the other volume is mounted"), "mine");
        }
    }
}

#[test]
fn a_pod_gets_the_mount_points_that_its_containers_need() {
    // NM-01, NM-02, AW-21: podfs takes the mount points from the pod's manifest.
    let mounts = "{name: web, image: web, volumeMounts: [{name: config, mountPath: /etc/web}, \
                  {name: other, mountPath: /etc/web/other}]}";
    let volumes = "[{name: config, configMap: {name: app}}, {name: other, configMap: {name: more}}]";
    let fixture = Fixture::new(&pod(volumes).replace("{name: web, image: web}", mounts));
    fixture.write("objects/app.yaml", &config_map("app", &[("a", "1")]));
    fixture.write("objects/more.yaml", &config_map("more", &[("b", "1")]));
    let running = fixture.run();
    let (volume, other) = (running.volume("config"), running.volume("other"));
    let mount_point = volume.join("other");
    crate::common::namespace::bind(&other, &mount_point);
    fixture.write("objects/app.yaml", &config_map("app", &[("a", "2"), ("c", "2")]));
    wait_content(&volume.join("c"), "2");
    assert_eq!(fs::read_to_string(mount_point.join("b")).expect("the other volume is mounted"), "1");
    fixture.write("objects/more.yaml", &config_map("more", &[("b", "2")]));
    wait_content(&mount_point.join("b"), "2");
    assert_eq!(files(&mount_point), parse("b=2"));
    let mut visible = names(&volume);
    visible.retain(|name| !name.starts_with(".."));
    visible.sort();
    assert_eq!(visible, ["a", "c", "other"]);
}
