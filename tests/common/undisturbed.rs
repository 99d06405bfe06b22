//! Tests of the kernel's caches, on machines whose kernel may reclaim cached memory at any time.

use std::fs;

/// Counters of `/proc/vmstat` that grow when the kernel gives up cached pages, entries or inodes.
const RECLAIM: [&str; 6] =
    ["balloon_inflate", "drop_", "kswapd_inodesteal", "pginodesteal", "pgsteal_", "slabs_scanned"];

/// Runs `attempt`. Runs it again if it fails and the kernel has reclaimed caches meanwhile. Fails the test if the
/// attempt fails without that.
#[track_caller]
pub fn undisturbed(mut attempt: impl FnMut() -> Result<(), String>) {
    const ATTEMPTS: usize = 5;
    for _ in 0..ATTEMPTS {
        let before = reclaimed();
        match attempt() {
            Ok(()) => return,
            Err(failure) => assert_ne!(reclaimed(), before, "{failure}"),
        }
    }
    panic!("caches were reclaimed in each of {ATTEMPTS} attempts");
}

fn reclaimed() -> u64 {
    let counters = fs::read_to_string("/proc/vmstat").expect("counters");
    let counters = counters.lines().filter(|line| RECLAIM.iter().any(|prefix| line.starts_with(prefix)));
    counters.filter_map(|line| line.split_whitespace().nth(1)?.parse::<u64>().ok()).sum()
}
