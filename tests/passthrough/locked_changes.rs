//! Changes under a lock: a process that holds a lock sees what the last holder wrote, through another mount of the directory, through
//! the same one, or on the host (HP-10).

use std::collections::BTreeMap;
use std::fs;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::atomic::Ordering;

use podfs_fuse::passthrough::{CacheMode, DataPath, PassthroughOptions};
use rustix::fs::{FlockOperation, flock};

use super::shared::{SharedNumber, open};
use crate::common::locker::Locker;
use crate::common::passthrough::{Mounted, disk_directory};

const KINDS: [&str; 3] = ["flock", "posix", "ofd"];

/// A kind of volume whose directory another process may use, too.
struct Kind {
    what: &'static str,
    options: PassthroughOptions,
    /// The number of records that each process appends.
    records: usize,
}

/// The kernel reads and writes the files of the first kind by itself, the server those of the others. Of the last two kinds, the
/// kernel caches the data, with and without a look at the file's time.
fn volumes() -> [Kind; 4] {
    let limited = PassthroughOptions { limit: Some(1 << 40), ..PassthroughOptions::default() };
    let data = PassthroughOptions { exclusive: true, ..limited.clone() };
    let everything = PassthroughOptions { cache: CacheMode::Always, ..limited.clone() };
    [
        Kind { what: "the kernel reads and writes", options: PassthroughOptions::default(), records: 1000 },
        Kind { what: "the server reads and writes", options: limited, records: 500 },
        Kind { what: "the kernel caches data", options: data, records: 100 },
        Kind { what: "the kernel caches everything", options: everything, records: 100 },
    ]
}

fn appender(file: &Path, kind: &str, how: &str, name: &str, records: usize) -> Child {
    let program = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/peers/appender.py");
    let mut command = Command::new("python3");
    command.args(["-I", "-S"]).arg(program).arg(file).args([kind, how, name, &records.to_string()]);
    command.stderr(Stdio::piped()).spawn().expect("python starts")
}

/// Two processes append records in these two directories.
#[track_caller]
fn append_in(places: [&Path; 2], source: &Path, what: &str, records: usize) {
    for kind in KINDS {
        for how in ["seek", "stat"] {
            let what = format!("{what}, {kind}, {how}");
            let name = format!("{kind}-{how}");
            fs::write(source.join(&name), "").expect("written");
            let children = [("first", places[0]), ("other", places[1])]
                .map(|(writer, place)| appender(&place.join(&name), kind, how, writer, records));
            for child in children {
                let output = child.wait_with_output().expect("a child");
                assert!(output.status.success(), "{what}: {}", String::from_utf8_lossy(&output.stderr));
            }
            let text = fs::read_to_string(source.join(&name)).expect("text");
            let mut next = BTreeMap::<&str, usize>::new();
            for line in text.lines() {
                let (writer, record) = line.trim_end_matches(';').trim_end().split_once(' ').expect("a record");
                let expected = next.entry(writer).or_default();
                assert_eq!(record, expected.to_string(), "{what}: the records of {writer} are in order");
                *expected += 1;
            }
            assert_eq!(next.into_values().collect::<Vec<_>>(), [records; 2], "{what}");
        }
    }
}

#[test]
fn records_appended_under_a_lock_through_two_mounts_are_all_there() {
    for Kind { what, options, records } in volumes() {
        let source = disk_directory();
        let first = Mounted::of_with_options(source.path(), options.clone());
        let second = Mounted::of_with_options(source.path(), options);
        append_in([first.path(), second.path()], source.path(), what, records);
    }
}

#[test]
fn records_appended_under_a_lock_by_the_host_and_a_mount_are_all_there() {
    for Kind { what, options, records } in volumes() {
        let source = disk_directory();
        let mounted = Mounted::of_with_options(source.path(), options);
        append_in([mounted.path(), source.path()], source.path(), what, records);
    }
}

#[test]
fn records_appended_under_a_lock_through_one_mount_are_all_there() {
    for Kind { what, options, records } in volumes() {
        let source = disk_directory();
        let mounted = Mounted::of_with_options(source.path(), options);
        append_in([mounted.path(), mounted.path()], source.path(), what, records);
    }
    let alone = Mounted::alone();
    append_in([alone.path(), alone.path()], alone.source(), "an emptyDir", 1000);
}

#[test]
fn a_file_that_the_kernel_caches_is_read_anew_under_a_lock_although_its_size_is_the_same() {
    for Kind { what, options, .. } in volumes() {
        let source = disk_directory();
        let places = [(); 2].map(|()| Mounted::of_with_options(source.path(), options.clone()));
        let path = source.path().join("file");
        fs::write(&path, [0; 100]).expect("written");
        let file = |place: &Path| fs::File::options().read(true).write(true).open(place.join("file")).expect("a file");
        let files = [file(places[0].path()), file(places[1].path()), file(source.path())];
        for round in 0..100_usize {
            let bytes = [u8::try_from(round).expect("small"); 100];
            let (writer, reader) = (&files[round % 3], &files[(round / 3) % 2]);
            flock(writer, FlockOperation::LockExclusive).expect("locked");
            writer.write_all_at(&bytes, 0).expect("written");
            flock(writer, FlockOperation::Unlock).expect("unlocked");
            flock(reader, FlockOperation::LockShared).expect("locked");
            let mut read = [0; 100];
            reader.read_exact_at(&mut read, 0).expect("read");
            flock(reader, FlockOperation::Unlock).expect("unlocked");
            assert_eq!(read, bytes, "{what}: round {round}");
        }
    }
}

#[test]
fn what_a_holder_stored_through_a_mapping_is_read_under_the_next_lock() {
    for Kind { what, options, .. } in volumes() {
        let source = disk_directory();
        let places = [(); 2].map(|()| Mounted::of_with_options(source.path(), options.clone()));
        fs::write(source.path().join("file"), [0; SharedNumber::LENGTH]).expect("written");
        let [mapped, other] = [places[0].path(), places[1].path()].map(open);
        let Some(number) = SharedNumber::try_map(&mapped) else { continue };
        for round in 1..20_u64 {
            flock(&mapped, FlockOperation::LockExclusive).expect("locked");
            number.number().store(round, Ordering::SeqCst);
            flock(&mapped, FlockOperation::Unlock).expect("unlocked");
            flock(&other, FlockOperation::LockExclusive).expect("locked");
            let mut bytes = [0; 8];
            other.read_exact_at(&mut bytes, 0).expect("read");
            other.write_all_at(&(round + 100).to_ne_bytes(), 0).expect("written");
            flock(&other, FlockOperation::Unlock).expect("unlocked");
            assert_eq!(u64::from_ne_bytes(bytes), round, "{what}");
            flock(&mapped, FlockOperation::LockShared).expect("locked");
            assert_eq!(number.number().load(Ordering::SeqCst), round + 100, "{what}");
            flock(&mapped, FlockOperation::Unlock).expect("unlocked");
        }
    }
}

#[test]
fn a_lock_costs_no_attributes_of_a_file_whose_attributes_the_kernel_does_not_cache() {
    let mounted = Mounted::new();
    if mounted.data_path() == DataPath::Server {
        return;
    }
    // The attributes of a file that is open for reading and writing are not cached, so a lock need not end them.
    let mut locker = Locker::with(&mounted.path().join("file"));
    let requests = mounted.requests_during(|| {
        for _ in 0..10 {
            locker.does("lock f posix exclusive 0 10");
            locker.does("lock f posix none 0 10");
        }
    });
    assert_eq!(requests.into_iter().collect::<Vec<_>>(), [("SETLK", 20)]);
}
