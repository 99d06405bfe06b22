//! How many session threads serve best: the same calls, by one caller and by two at once.

use std::thread;

use super::names::{MEASUREMENTS, measure};
use super::rig::{Place, medians};

const ROUNDS: usize = 7;
const MOST: u8 = 4;

pub fn run() {
    let places: Vec<_> = (1..=MOST).map(|threads| Place::podfs(Some(threads))).collect();
    for callers in [1, 2] {
        print!("\n{:<44}", format!("one call (us), {callers} at once"));
        places.iter().for_each(|place| print!(" {:>11}", place.name));
        println!();
        for measurement in MEASUREMENTS {
            let figures = medians(&places, ROUNDS, |place| {
                thread::scope(|scope| {
                    let callers: Vec<_> = (0..callers).map(|_| scope.spawn(|| measure(place, measurement))).collect();
                    let count = callers.len() as f64;
                    callers.into_iter().map(|caller| caller.join().expect("it measures")).sum::<f64>() / count
                })
            });
            print!("{:<44}", measurement.0);
            figures.iter().for_each(|figure| print!(" {figure:>11.2}"));
            println!();
        }
    }
}
