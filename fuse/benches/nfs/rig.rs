//! Code that the benches share: a server in memory, and figures.

use std::future::Future;
use std::time::{Duration, Instant};

use nix::sys::resource::{UsageWho, getrusage};
use nix::sys::time::TimeValLike;

use crate::nfs_rig::Ganesha;
use crate::nfs_rig::ganesha::{Export, Setup, Storage};

/// A server whose files are in memory.
pub fn server() -> Ganesha {
    let export = Export { storage: Storage::Tmpfs("size=1g"), ..Export::default() };
    Ganesha::with(Setup { exports: vec![export], ..Setup::default() })
}

/// Runs `future` on one thread, as podfs's server runs the client.
pub fn run<T>(future: impl Future<Output = T>) -> T {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
    tokio::task::LocalSet::new().block_on(&runtime, future)
}

/// The rate and the cost of a number of calls.
#[derive(Clone, Copy)]
pub struct Figure {
    /// Calls in a second.
    pub rate: f64,
    /// CPU time of a call in microseconds; NaN where that is not known.
    pub cost: f64,
}

/// Measures `count` calls of this thread.
pub async fn measure(count: u64, calls: impl Future<Output = ()>) -> Figure {
    let (began, used) = (Instant::now(), thread_time());
    calls.await;
    let (elapsed, used) = (began.elapsed(), thread_time() - used);
    Figure { rate: count as f64 / elapsed.as_secs_f64(), cost: used.as_secs_f64() * 1e6 / count as f64 }
}

/// Measures `count` calls of other threads. The CPU time is that of this whole process.
pub fn measure_threads(count: u64, calls: impl FnOnce()) -> Figure {
    let (began, used) = (Instant::now(), time_of(UsageWho::RUSAGE_SELF));
    calls();
    let (elapsed, used) = (began.elapsed(), time_of(UsageWho::RUSAGE_SELF) - used);
    Figure { rate: count as f64 / elapsed.as_secs_f64(), cost: used.as_secs_f64() * 1e6 / count as f64 }
}

fn thread_time() -> Duration {
    time_of(UsageWho::RUSAGE_THREAD)
}

fn time_of(who: UsageWho) -> Duration {
    let usage = getrusage(who).expect("it is always known");
    let micros = (usage.user_time() + usage.system_time()).num_microseconds();
    Duration::from_micros(micros.unsigned_abs())
}

/// The figure with the median rate.
pub fn median(mut figures: Vec<Figure>) -> Figure {
    figures.sort_unstable_by(|one, other| one.rate.total_cmp(&other.rate));
    figures[figures.len() / 2]
}

pub fn header(title: &str, peer: &str) {
    println!("\n{title:<36} {:>11} {:>9} {peer:>13} {:>9} {:>8}", "podfs /s", "µs CPU", "µs CPU", "ratio");
}

pub fn row(what: &str, ours: Figure, peer: Figure) {
    let ratio = ours.rate / peer.rate;
    let [ours_cost, peer_cost] = [ours.cost, peer.cost].map(|cost| match cost.is_nan() {
        true => "-".to_owned(),
        false => format!("{cost:.1}"),
    });
    println!("{what:<36} {:>11.0} {ours_cost:>9} {:>13.0} {peer_cost:>9} {ratio:>7.2}x", ours.rate, peer.rate);
}
