//! Passthrough volumes beside the native directory and bindfs, in one run.
//!
//! `cargo bench -p podfs-fuse --bench passthrough [-- data|names|trees|threads]...` prints tables; every row
//! names the figures of all three and the ratios. Figures are medians of rounds that take turns. It needs
//! root, `/dev/fuse`, `bindfs` and `fio`. `PODFS_THREADS` sets the number of session threads.
//!
//! | module | measures |
//! |---|---|
//! | [`data`] | reading and writing a cached file with fio |
//! | [`names`] | create, stat, open, rename, unlink, one call after the other |
//! | [`trees`] | listing a large directory, `find` over many files |
//! | [`threads`] | the same calls with 1 to 4 session threads, from one caller and from two |

mod data;
mod names;
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
    let groups: [(&str, fn()); 4] =
        [("data", data::run), ("names", names::run), ("trees", trees::run), ("threads", threads::run)];
    for (name, run) in groups {
        if chosen.is_empty() || chosen.iter().any(|group| *group == name) {
            run();
        }
    }
}
