//! Reading and writing a file of 256 MiB that is in the page cache, with fio's psync engine.

use std::process::Command;

use super::rig::{Place, header, row};

const ROUNDS: usize = 5;

/// What fio does, and its arguments.
const JOBS: [(&str, &[&str]); 4] = [
    ("sequential read, 1 MiB", &["--rw=read", "--bs=1m"]),
    ("sequential write, 1 MiB", &["--rw=write", "--bs=1m"]),
    ("random read, 4 KiB", &["--rw=randread", "--bs=4k"]),
    ("random write, 4 KiB", &["--rw=randwrite", "--bs=4k"]),
];

pub fn run() {
    let places = Place::all();
    header("256 MiB in the page cache (MiB/s)", &places);
    for (what, job) in JOBS {
        row(what, &places, ROUNDS, |place| fio(place, job));
    }
}

/// MiB/s of two seconds of a job.
fn fio(place: &Place, job: &[&str]) -> f64 {
    let output = Command::new("fio")
        .args(["--name=cached", "--filename=cached", "--size=256m", "--ioengine=psync", "--fallocate=none"])
        .args(["--invalidate=0", "--overwrite=1", "--time_based", "--runtime=2", "--output-format=json"])
        .args(job)
        .current_dir(&place.shown)
        .output()
        .expect("fio is installed (apt-get install fio)");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let report: serde_json::Value = serde_json::from_slice(&output.stdout).expect("a report");
    let moved = ["read", "write"].map(|direction| report["jobs"][0][direction]["bw_bytes"].as_f64().expect("a figure"));
    (moved[0] + moved[1]) / f64::from(1 << 20)
}
