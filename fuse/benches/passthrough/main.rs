//! Passthrough volumes beside the native directory, bindfs, and libfuse's example `passthrough_hp`, in one run.
//!
//! `cargo bench -p podfs-fuse --bench passthrough [-- data|names|programs|trees|threads]...` prints tables: for each place the
//! median of rounds in which the places take turns, and half of the distance between the quartiles in percent. It needs root,
//! `/dev/fuse`, `bindfs`, `fio`, `git` and `sqlite3`; `passthrough_hp` if `fuse/benches/passthrough/libfuse` has built it.
//! `PODFS_THREADS` sets the number of podfs's session threads.
//!
//! | module | measures |
//! |---|---|
//! | [`data`] | reading and writing a cached file with fio |
//! | [`names`] | create, stat, open, rename, unlink, one call after the other |
//! | [`programs`] | git, find, tar, rm, SQLite |
//! | [`trees`] | listing a large directory, `find` over many files |
//! | [`threads`] | the same calls with 1 to 4 session threads, from one caller and from two |

mod data;
mod names;
mod programs;
mod rig;
mod threads;
mod trees;

fn main() {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    if arguments.iter().any(|argument| argument == rig::SERVE) {
        rig::serve();
        return;
    }
    let chosen: Vec<_> = arguments.iter().filter(|argument| !argument.starts_with('-')).collect();
    let groups: [(&str, fn()); 5] = [
        ("data", data::run),
        ("names", names::run),
        ("programs", programs::run),
        ("trees", trees::run),
        ("threads", threads::run),
    ];
    for (name, run) in groups {
        if chosen.is_empty() || chosen.iter().any(|group| *group == name) {
            run();
        }
    }
}
