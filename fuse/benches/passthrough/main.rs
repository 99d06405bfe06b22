//! Passthrough volumes beside the native directory, bindfs, a file system of the crate `fuser`, and libfuse's example
//! `passthrough_hp`, in one run.
//!
//! `cargo bench -p podfs-fuse --bench passthrough [-- data|names|programs|trees|threads]...` prints tables: for each place the
//! median of rounds in which the places take turns, and half of the distance between the quartiles in percent. `row=TEXT`
//! chooses the rows with TEXT in their title, `place=NAME` chooses places, and `rounds=N` sets the number of rounds; each of the
//! first two may be given several times. `cpu=N` lets the callers run on one CPU alone: then no answer wakes another CPU, which
//! takes longer than most calls and hides what a server costs. The bench needs root, `/dev/fuse`, `bindfs`, `fio`, `git` and
//! `sqlite3`. It measures `passthrough_hp` if `fuse/benches/passthrough/libfuse` has built it. `PODFS_THREADS` sets the number of
//! podfs's session threads.
//!
//! | module | measures, or owns |
//! |---|---|
//! | [`choice`] | what the arguments choose |
//! | [`disk`] | the file system on which the bench measures |
//! | [`fuser_peer`] | a file system of the crate `fuser` |
//! | [`data`] | reading and writing a cached file with fio |
//! | [`names`] | create, stat, open, rename, unlink, one call after the other |
//! | [`programs`] | git, find, tar, rm, SQLite |
//! | [`trees`] | listing a large directory, `find` over many files |
//! | [`threads`] | the same calls with 1 to 4 session threads, from one caller and from two |

mod choice;
mod data;
mod disk;
mod fuser_peer;
mod names;
mod programs;
mod rig;
mod threads;
mod trees;

fn main() {
    if std::env::args().any(|argument| argument == rig::SERVE) {
        rig::serve();
        return;
    }
    let arguments: Vec<_> = std::env::args_os().collect();
    if let [_, serve, source, shown] = &*arguments
        && serve == fuser_peer::SERVE
    {
        fuser_peer::serve(source.as_ref(), shown.as_ref());
        return;
    }
    let _disk = disk::begin();
    let choice = choice::Choice::of_arguments();
    let groups: [(&str, fn()); 5] = [
        ("data", data::run),
        ("names", names::run),
        ("programs", programs::run),
        ("trees", trees::run),
        ("threads", threads::run),
    ];
    for (name, run) in groups {
        if choice.has_group(name) {
            run();
        }
    }
}
