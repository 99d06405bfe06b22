//! Names and attributes in a volume.

use std::fs;

use crate::mounted::Mounted;
use crate::nfs_rig::Ganesha;

#[test]
fn the_volume_shows_the_files_of_the_server() {
    let server = Ganesha::start();
    fs::write(server.exported().join("hello"), "world").expect("written");
    fs::create_dir_all(server.exported().join("a/b")).expect("made");
    let mounted = Mounted::new(&server);
    assert_eq!(fs::read_to_string(mounted.at("hello")).expect("read"), "world");
    let mut names: Vec<_> =
        fs::read_dir(mounted.at("")).expect("listed").map(|entry| entry.expect("an entry").file_name()).collect();
    names.sort();
    assert_eq!(names, ["a", "hello"]);
    assert!(fs::metadata(mounted.at("a/b")).expect("there").is_dir());
    assert!(!fs::exists(mounted.at("missing")).expect("looked up"));
}

#[test]
fn changes_in_the_volume_reach_the_server() {
    let server = Ganesha::start();
    let mounted = Mounted::new(&server);
    let exported = server.exported();
    fs::create_dir(mounted.at("directory")).expect("created");
    fs::write(mounted.at("directory/file"), "some content").expect("written");
    assert_eq!(fs::read_to_string(exported.join("directory/file")).expect("read"), "some content");
    fs::rename(mounted.at("directory/file"), mounted.at("moved")).expect("renamed");
    assert_eq!(fs::read_to_string(exported.join("moved")).expect("read"), "some content");
    std::os::unix::fs::symlink("moved", mounted.at("link")).expect("linked");
    assert_eq!(fs::read_to_string(mounted.at("link")).expect("read"), "some content");
    fs::remove_file(mounted.at("moved")).expect("removed");
    fs::remove_dir(mounted.at("directory")).expect("removed");
    let entries = fs::read_dir(exported).expect("listed");
    let names: Vec<_> = entries.map(|entry| entry.expect("an entry").file_name()).collect();
    assert_eq!(names, ["link"]);
}
