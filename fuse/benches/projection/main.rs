//! Projections beside the same work on tmpfs, in one run.
//!
//! `cargo bench -p podfs-fuse --bench projection` prints tables; every row names its peer's figure and
//! the ratio. Figures are medians. It needs root and `/dev/fuse`.
//!
//! | module | measures |
//! |---|---|
//! | [`read`] | a warm volume: open + read + close, stat, list |
//! | [`commit`] | from a changed payload to the switch of `..data` |
//! | [`switches`] | how often four readers that open files through `..data` meet `ENOENT` |

mod atomic_writer;
mod commit;
mod read;
mod rig;
mod switches;

fn main() {
    if std::env::args().any(|argument| argument == rig::SERVE) {
        rig::serve();
        return;
    }
    read::run();
    commit::run();
    switches::run();
}
