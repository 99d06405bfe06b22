//! Makes a program that shows a difference as short as possible.

use std::time::{Duration, Instant};

use super::lockstep::{Difference, Lockstep, Verdict};
use super::program::Program;

/// A short program that still shows a difference, and that difference. `None` if the program shows none when it runs again.
pub fn shrink(lockstep: &mut Lockstep, program: &Program, limit: Duration) -> Option<(Program, Difference)> {
    let deadline = Instant::now() + limit;
    let mut difference_of = |program: &Program| match lockstep.run(program) {
        Ok(Verdict::Different(difference)) => Some(difference),
        Ok(_) => None,
        Err(reason) => {
            println!("{reason}");
            None
        }
    };
    let mut best = (0..3).find_map(|_| difference_of(program)).map(|difference| (program.clone(), difference))?;
    let mut size = best.0.0.len().div_ceil(2);
    while size > 0 && Instant::now() < deadline {
        let mut start = 0;
        let mut is_shorter = false;
        while start < best.0.0.len() && Instant::now() < deadline {
            let mut steps = best.0.0.clone();
            steps.drain(start..(start + size).min(steps.len()));
            let shorter = Program(steps);
            match difference_of(&shorter) {
                Some(difference) => {
                    best = (shorter, difference);
                    is_shorter = true;
                }
                None => start += size,
            }
        }
        if !is_shorter || size > 1 {
            size /= 2;
        }
    }
    Some(best)
}
