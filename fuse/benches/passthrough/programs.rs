//! Everyday programs over 5 000 files of 4 KiB in 50 directories, and over a database.

use std::fs;
use std::path::Path;
use std::process::{Command, Stdio};

use super::rig::{Place, SIZE, file, forget_names, header, millis, row};

const ROUNDS: usize = 6;
const DIRECTORIES: usize = 50;
const IN_EACH: usize = 100;
const TRANSACTIONS: usize = 1000;

pub fn run() {
    let places = Place::all();
    let beside = tempfile::TempDir::new().expect("a directory");
    let (archive, sql) = (beside.path().join("tree.tar"), beside.path().join("transactions.sql"));
    pack(beside.path(), &archive);
    write_transactions(&sql);
    for place in &places {
        fs::create_dir(place.source.join("work")).expect("a directory");
        commit_tree(&place.shown, &archive);
    }
    header("programs (ms)", &places);
    let status = |place: &Place| millis(|| git(&place.shown.join("repository"), &["status", "--porcelain"]));
    row("git status, 5 000 files", &places, ROUNDS, status);
    for (what, arguments) in [("find, 5 000 files", &[][..]), ("find -size, 5 000 files", &["-size", "+1"])] {
        let find = |place: &Place| {
            forget_names();
            millis(|| run_in(&place.shown, "find", &[&["repository"], arguments].concat()))
        };
        row(&format!("{what}, cold"), &places, ROUNDS, find);
        let find = |place: &Place| millis(|| run_in(&place.shown, "find", &[&["repository"], arguments].concat()));
        row(what, &places, ROUNDS, find);
    }
    let archive = archive.to_str().expect("text");
    let unpack = |place: &Place| {
        let took = millis(|| run_in(&place.shown.join("work"), "tar", &["xf", archive]));
        fs::remove_dir_all(place.source.join("work/tree")).expect("removed");
        took
    };
    row("tar xf, 5 000 files", &places, ROUNDS, unpack);
    let remove = |place: &Place| {
        run_in(&place.source.join("work"), "tar", &["xf", archive]);
        millis(|| run_in(&place.shown.join("work"), "rm", &["-rf", "tree"]))
    };
    row("rm -rf of files made on the disk", &places, ROUNDS, remove);
    let unpack_and_remove = |place: &Place| {
        run_in(&place.shown.join("work"), "tar", &["xf", archive]);
        millis(|| run_in(&place.shown.join("work"), "rm", &["-rf", "tree"]))
    };
    row("rm -rf of files made in the mount", &places, ROUNDS, unpack_and_remove);
    let transact = |place: &Place| {
        let database = place.shown.join("work/database");
        let took = millis(|| sqlite(&database, &sql));
        fs::remove_file(&database).expect("removed");
        took
    };
    row("1 000 SQLite transactions", &places, ROUNDS, transact);
}

/// Makes an archive of the files in `directory`.
fn pack(directory: &Path, archive: &Path) {
    for number in 0..DIRECTORIES {
        let within = directory.join(format!("tree/directory-{number:02}"));
        fs::create_dir_all(&within).expect("a directory");
        for number in 0..IN_EACH {
            fs::write(file(&within, number), vec![b'x'; SIZE]).expect("written");
        }
    }
    run_in(directory, "tar", &["cf", archive.to_str().expect("text"), "tree"]);
}

/// Makes a repository of git in which everything is committed.
fn commit_tree(directory: &Path, archive: &Path) {
    let repository = directory.join("repository");
    fs::create_dir(&repository).expect("a directory");
    run_in(&repository, "tar", &["xf", archive.to_str().expect("text")]);
    git(&repository, &["init", "--quiet"]);
    git(&repository, &["add", "."]);
    git(&repository, &["commit", "--quiet", "--message=all"]);
}

fn git(repository: &Path, arguments: &[&str]) {
    let settings = ["-c", "user.name=bench", "-c", "user.email=bench@localhost", "-c", "gc.auto=0"];
    run_in(repository, "git", &[&settings, arguments].concat());
}

/// Writes one statement for each transaction. SQLite does not wait for the disk, whose speed is not measured here.
fn write_transactions(sql: &Path) {
    let mut text = "PRAGMA synchronous = OFF; CREATE TABLE numbers (number INTEGER);\n".to_owned();
    for number in 0..TRANSACTIONS {
        text += &format!("INSERT INTO numbers VALUES ({number});\n");
    }
    fs::write(sql, text).expect("written");
}

fn sqlite(database: &Path, sql: &Path) {
    let input = fs::File::open(sql).expect("the transactions");
    let status = Command::new("sqlite3").arg(database).stdin(input).stdout(Stdio::null()).status();
    assert!(status.expect("sqlite3 is installed (apt-get install sqlite3)").success());
}

fn run_in(directory: &Path, program: &str, arguments: &[&str]) {
    let status = Command::new(program).args(arguments).current_dir(directory).stdout(Stdio::null()).status();
    let status = status.unwrap_or_else(|error| panic!("{program} cannot be started: {error}"));
    assert!(status.success(), "{program} {arguments:?}: {status}");
}
