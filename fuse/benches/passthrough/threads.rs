//! How many session threads serve best: the same calls, by one caller and by two at once.

use std::thread;

use super::names::{MEASUREMENTS, measure};
use super::rig::{Place, header, row};

const ROUNDS: usize = 7;
const THREADS: [(&str, u8); 4] = [("1 thread", 1), ("2 threads", 2), ("3 threads", 3), ("4 threads", 4)];

pub fn run() {
    let places = THREADS.map(|(name, threads)| Place::with_threads(name, threads));
    for callers in [1, 2] {
        header(&format!("one call (us), {callers} at once"), &places);
        for measurement in MEASUREMENTS {
            row(measurement.0, &places, ROUNDS, |place| {
                thread::scope(|scope| {
                    let callers: Vec<_> = (0..callers).map(|_| scope.spawn(|| measure(place, measurement))).collect();
                    let count = callers.len() as f64;
                    callers.into_iter().map(|caller| caller.join().expect("it measures")).sum::<f64>() / count
                })
            });
        }
    }
}
