//! The time from a changed payload in memory to the switch of `..data`, beside the `AtomicWriter`'s calls on tmpfs.

use super::atomic_writer;
use super::rig::{DIRECTORIES, Mounted, Tmpfs, header, layout, median, payload, row, show};
use podfs_fuse::client::Commit;
use std::time::{Duration, Instant};

const ROUNDS: usize = 41;

pub fn run() {
    header("commit to the switch", "AtomicWriter");
    let (mut whole, mut parts) = (Vec::new(), Vec::new());
    for (count, size, what) in [
        (1, 1024, "1 key of 1 KiB"),
        (10, 1024, "10 keys of 1 KiB"),
        (100, 1024, "100 keys of 1 KiB"),
        (1000, 1024, "1000 keys of 1 KiB"),
        (1, 1 << 20, "1 key of 1 MiB"),
    ] {
        let tmpfs = Tmpfs::new();
        let directory = tempfile::tempdir().expect("a directory");
        let mut mounted = Mounted::at(directory.path(), &payload(count, size, 0));
        let (mut ours, mut ours_whole, mut peer, mut peer_whole) = (vec![], vec![], vec![], vec![]);
        let mut switches = vec![];
        atomic_writer::write(tmpfs.path(), &payload(count, size, 0), 0);
        for round in 1..=ROUNDS {
            let next = payload(count, size, round);
            // Real commits come one by one: the work that the last commit left for later has ended.
            std::thread::sleep(Duration::from_millis(2));
            let began = Instant::now();
            match mounted.projection.commit(&layout(&next), DIRECTORIES).expect("a commit") {
                Commit::Switched { staged_in, switched_in, .. } => {
                    ours.push(staged_in + switched_in);
                    switches.push(switched_in);
                }
                Commit::Unchanged => unreachable!("each round has another payload"),
            }
            ours_whole.push(began.elapsed());
            let began = Instant::now();
            peer.push(atomic_writer::write(tmpfs.path(), &next, round));
            peer_whole.push(began.elapsed());
        }
        row(what, median(ours), median(peer));
        parts.push((what, median(switches)));
        whole.push((what, median(ours_whole), median(peer_whole)));
    }
    header("the whole commit, old generation removed", "AtomicWriter");
    for (what, ours, peer) in whole {
        row(what, ours, peer);
    }
    println!("\n{:<44} {:>12}", "of that, the switch itself (mkdir to rename)", "podfs");
    for (what, ours) in parts {
        println!("{what:<44} {:>12}", show(ours));
    }
}
