//! Calls that name files, one after the other, in a directory of 400 files of 4 KiB.

use std::fs::{self, File};
use std::hint::black_box;
use std::io::{Read, Write};
use std::path::Path;
use std::sync::atomic::{AtomicUsize, Ordering};

use super::rig::{Place, SIZE, file, fill, forget_names, header, per_call, row};

const ROUNDS: usize = 11;
const FILES: usize = 400;

/// The title of a measurement, and its function. That gets a new directory, as it is shown and on the disk, and returns the
/// microseconds of a call.
pub type Measurement = (&'static str, fn(&Path, &Path) -> f64);

pub const MEASUREMENTS: [Measurement; 8] = [
    ("create + write + close", create),
    ("stat, cold", stat_cold),
    ("stat, warm", stat_warm),
    ("stat of an absent name", stat_absent),
    ("open + read + close", open_read_close),
    ("rename", rename),
    ("unlink", unlink),
    ("mkdir + rmdir", make_directory),
];

pub fn run() {
    let places = Place::all();
    header("one call (us)", &places);
    for measurement in MEASUREMENTS {
        row(measurement.0, &places, ROUNDS, |place| measure(place, measurement));
    }
}

/// Takes one measurement in a new directory. No cache has its name, which is new.
pub fn measure(place: &Place, (_, measurement): Measurement) -> f64 {
    static NEXT: AtomicUsize = AtomicUsize::new(0);
    let name = format!("directory-{}", NEXT.fetch_add(1, Ordering::Relaxed));
    let on_disk = place.source.join(&name);
    let figure = measurement(&place.shown.join(&name), &on_disk);
    fs::remove_dir_all(on_disk).expect("removed");
    figure
}

fn create(shown: &Path, _: &Path) -> f64 {
    fs::create_dir(shown).expect("a directory");
    per_call(FILES, |number| {
        let mut new = File::create_new(file(shown, number)).expect("created");
        new.write_all(&[b'x'; SIZE]).expect("written");
    })
}

fn stat_cold(shown: &Path, on_disk: &Path) -> f64 {
    fill(on_disk, FILES);
    forget_names();
    per_call(FILES, |number| stat(shown, number))
}

fn stat_warm(shown: &Path, on_disk: &Path) -> f64 {
    fill(on_disk, FILES);
    per_call(FILES, |number| stat(shown, number));
    per_call(FILES, |number| stat(shown, number))
}

/// Calls `stat(2)`, as most programs do. The standard library calls `statx(2)`, which asks for the birth time too.
fn stat(shown: &Path, number: usize) {
    black_box(rustix::fs::stat(file(shown, number)).expect("a file"));
}

fn stat_absent(shown: &Path, on_disk: &Path) -> f64 {
    fill(on_disk, FILES);
    per_call(FILES, |number| assert!(rustix::fs::stat(file(shown, FILES + number)).is_err()))
}

fn open_read_close(shown: &Path, on_disk: &Path) -> f64 {
    fill(on_disk, FILES);
    let read = |number| {
        let mut buffer = [0; 2 * SIZE];
        let mut opened = File::open(file(shown, number)).expect("a file");
        assert_eq!(opened.read(black_box(&mut buffer)).expect("read"), SIZE);
    };
    per_call(FILES, read);
    per_call(FILES, read)
}

fn rename(shown: &Path, on_disk: &Path) -> f64 {
    fill(on_disk, FILES);
    per_call(FILES, |number| fs::rename(file(shown, number), file(shown, FILES + number)).expect("renamed"))
}

fn unlink(shown: &Path, on_disk: &Path) -> f64 {
    fill(on_disk, FILES);
    per_call(FILES, |number| fs::remove_file(file(shown, number)).expect("removed"))
}

fn make_directory(shown: &Path, _: &Path) -> f64 {
    fs::create_dir(shown).expect("a directory");
    per_call(FILES, |number| {
        fs::create_dir(file(shown, number)).expect("made");
        fs::remove_dir(file(shown, number)).expect("removed");
    })
}
