//! Many files: a directory of 10 000, and `find` over 100 000.

use std::fs;
use std::path::Path;
use std::process::{Command, Stdio};

use super::rig::{Place, forget_names, header, millis, row};

const LISTED: usize = 10_000;
const DIRECTORIES: usize = 100;
const IN_EACH: usize = 1000;

pub fn run() {
    let places = Place::all();
    for place in &places {
        fill_empty(&place.source.join("many"), LISTED);
        fs::create_dir(place.source.join("tree")).expect("a directory");
        for number in 0..DIRECTORIES {
            fill_empty(&place.source.join(format!("tree/directory-{number}")), IN_EACH);
        }
    }
    header("many files (ms)", &places);
    row("readdir of 10 000 entries", &places, 15, |place| millis(|| list(&place.shown.join("many"))));
    row("readdir of 10 000 entries, cold", &places, 5, |place| {
        forget_names();
        millis(|| list(&place.shown.join("many")))
    });
    for (what, arguments) in [("find", &[][..]), ("find -size", &["-size", "+1"])] {
        for cold in [true, false] {
            let title = format!("{what} over 100 000 files, {}", if cold { "cold" } else { "warm" });
            row(&title, &places, 3, |place| {
                if cold {
                    forget_names();
                }
                millis(|| find(&place.shown.join("tree"), arguments))
            });
        }
    }
}

fn fill_empty(directory: &Path, count: usize) {
    fs::create_dir(directory).expect("a directory");
    for number in 0..count {
        fs::File::create_new(directory.join(format!("file-{number}"))).expect("created");
    }
}

fn list(directory: &Path) {
    assert_eq!(fs::read_dir(directory).expect("a listing").count(), LISTED);
}

fn find(directory: &Path, arguments: &[&str]) {
    let status = Command::new("find").arg(directory).args(arguments).stdout(Stdio::null()).status();
    assert!(status.expect("find runs").success());
}
