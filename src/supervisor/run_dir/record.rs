//! The record in a pod's lock file: what a podfs has made for the pod, so that the next one removes it.
//!
//! podfs cannot replace the file by another one, because the lock belongs to the file. It writes over the record, and a SIGKILL or a
//! full disk may end the write in the middle. So the file has the record twice:
//!
//! ```text
//! 0             {"edition":7, ...}\n7\n
//! half the size {"edition":7, ...}\n7\n
//! ```
//!
//! 1. A copy is whole if the number behind it is that of its `edition`. Each write has another number, and writes the number behind
//!    the copy last.
//! 2. podfs reserves the space of both copies before it writes, so a full disk leaves the file as it was. It writes the second copy
//!    first, and only while the first copy is whole (`RecordWriter`). So one of them is whole at any moment.
//! 3. Earlier versions of podfs read and write one record at the beginning, without a number.
//! 4. A record of another version, which has a field `version`, is refused: the pod is neither served nor cleaned up.
//!
//! The supervisor holds the lock of the file while it writes. Others read without a lock.

use std::fs::{File, OpenOptions};
use std::io::{self, ErrorKind, Read};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use rustix::fs::{FallocateFlags, fallocate};
use rustix::io::{Errno, retry_on_intr};
use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::file_names::LOCK;
use super::trust;
use crate::types::{PodName, UnusableRecord, check_version};

/// The unit of the space for a copy: a page of a tmpfs.
const UNIT: usize = 4096;

/// The content of the lock file.
#[derive(Debug, Default, Serialize, Deserialize)]
pub struct PodLockRecord {
    /// The number of the write that wrote the record; 0 if an earlier version of podfs wrote it.
    #[serde(default)]
    pub(super) edition: u64,
    /// The process id of the supervisor that wrote the record.
    pub pid: u32,
    /// The namespace and name of the pod.
    #[serde(default)]
    pub pod: PodName,
    /// The directories that were made for the lock file, in the order in which they were made.
    pub run: Vec<PathBuf>,
    /// The directories that were made for the pod's volumes, in the order in which they were made.
    pub directories: Vec<PathBuf>,
    /// Files in these directories that are mount points.
    #[serde(default)]
    pub files: Vec<PathBuf>,
    /// Mount points of volumes, and of parts of volumes (subPath).
    #[serde(default)]
    pub mounts: Vec<PathBuf>,
    /// Files for containers, which podfs removes with any content.
    #[serde(default)]
    pub written: Vec<PathBuf>,
    /// The cgroup of the server.
    #[serde(default)]
    pub cgroup: Option<PathBuf>,
    /// The definitions of the pod's volumes (`DefinedVolume`), as podfs serves them. Unparsed: a definition that this version does not
    /// take must not make the record unreadable. None if `podfs node` gives the supervisor the pod.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub definitions: Vec<Value>,
}

impl PodLockRecord {
    /// The record in the lock file of this directory, if the lock file has one that this version of podfs can read.
    pub fn read(directory: &Path) -> Option<PodLockRecord> {
        Self::parse(&content(directory)?).ok()
    }

    /// Checks that the lock file of this directory, if there is one, has no record of another version of podfs.
    ///
    /// # Errors
    /// When the record has another version.
    pub fn check_version(directory: &Path) -> Result<(), UnusableRecord> {
        let bytes = content(directory).unwrap_or_default();
        [&bytes, second(&bytes)].into_iter().try_for_each(check_version)
    }

    /// The record in the content of a lock file; an empty record if there is no content.
    pub(super) fn parse(bytes: &[u8]) -> Result<PodLockRecord, UnusableRecord> {
        let copies = [bytes, second(bytes)];
        copies.into_iter().try_for_each(check_version)?;
        if let Some(record) = copies.into_iter().find_map(whole) {
            return Ok(record);
        }
        // The file is empty while a process writes the first record. A killed process may have left zeros.
        let end = bytes.iter().rposition(|byte| *byte != 0).map_or(0, |last| last + 1);
        // An earlier podfs that was killed while it wrote a shorter record over a longer one has left the end of the longer one.
        let mut values = serde_json::Deserializer::from_slice(&bytes[..end]).into_iter();
        Ok(values.next().unwrap_or_else(|| Ok(PodLockRecord::default()))?)
    }
}

/// The content of the lock file of this directory.
fn content(directory: &Path) -> Option<Vec<u8>> {
    let mut bytes = Vec::new();
    trust::open(OpenOptions::new().read(true), &directory.join(LOCK)).ok()?.read_to_end(&mut bytes).ok()?;
    Some(bytes)
}

/// The second copy of the record, in the content of a lock file.
fn second(bytes: &[u8]) -> &[u8] {
    &bytes[bytes.len() / 2..]
}

/// The record in a copy, if it is whole.
fn whole(copy: &[u8]) -> Option<PodLockRecord> {
    let mut lines = copy.split(|byte| *byte == b'\n');
    let record: PodLockRecord = serde_json::from_slice(lines.next()?).ok()?;
    let number = str::from_utf8(lines.next()?).ok()?;
    (record.edition != 0 && number == record.edition.to_string()).then_some(record)
}

/// Writes the records of one supervisor to its lock file.
#[derive(Debug, Default)]
pub(super) struct RecordWriter {
    /// The number of the last write.
    edition: u64,
    /// Whether the first copy in the file is whole. False if the writer has not looked yet.
    is_first_whole: bool,
}

impl RecordWriter {
    /// Writes to another file from now on.
    pub(super) fn change_file(&mut self) {
        self.is_first_whole = false;
    }

    /// Writes a record.
    ///
    /// # Errors
    /// When the disk is full, or fails. The file has the last record or this one then.
    pub(super) fn write(&mut self, file: &File, mut record: PodLockRecord) -> io::Result<()> {
        if !self.is_first_whole {
            let last = restore_first(file)?;
            self.is_first_whole = last.is_some();
            self.edition = self.edition.max(last.unwrap_or_default());
        }
        // Also after a write that failed: the file may have a part of that record.
        self.edition += 1;
        record.edition = self.edition;
        let mut copy = serde_json::to_vec(&record)?;
        copy.extend_from_slice(
            format!(
                "
{}
",
                self.edition
            )
            .as_bytes(),
        );
        let size = file.metadata()?.len();
        let half = match self.reserve(file, size, copy.len()) {
            // The file of an earlier version has no space for two copies. The kernel ends no write within a page.
            Err(error)
                if matches!(error.kind(), ErrorKind::StorageFull | ErrorKind::QuotaExceeded)
                    && size > 0
                    && copy.len() <= UNIT =>
            {
                file.write_all_at(&copy, 0)?;
                self.is_first_whole = true;
                return file.set_len(copy.len() as u64);
            }
            reserved => reserved?,
        };
        file.write_all_at(&copy, half)?;
        self.is_first_whole = false;
        file.write_all_at(&copy, 0)?;
        self.is_first_whole = true;
        Ok(())
    }

    /// Reserves the space for two copies of this length in a file of this size. Returns where the second one begins.
    fn reserve(&self, file: &File, size: u64, length: usize) -> io::Result<u64> {
        if self.is_first_whole && size / 2 >= length as u64 {
            return Ok(size / 2);
        }
        // The record of an earlier version may take the whole file. The second copy begins after it.
        let used = if self.is_first_whole { 0 } else { usize::try_from(size).unwrap_or_default() };
        let half = length.max(used).next_multiple_of(UNIT) as u64;
        // A tmpfs of Linux before 6.10 ends the call when any signal arrives.
        match retry_on_intr(|| fallocate(file, FallocateFlags::KEEP_SIZE, 0, 2 * half)) {
            // Not all file systems can reserve space.
            Ok(()) | Err(Errno::OPNOTSUPP | Errno::NOSYS) => {}
            Err(errno) => return Err(errno.into()),
        }
        file.set_len(2 * half)?;
        Ok(half)
    }
}

/// If the first copy in the file is not whole, writes the second one over it. Returns the highest number of a whole copy; `None` if
/// none is whole.
fn restore_first(file: &File) -> io::Result<Option<u64>> {
    let mut bytes = vec![0; usize::try_from(file.metadata()?.len()).unwrap_or_default()];
    file.read_exact_at(&mut bytes, 0)?;
    let copies = [&bytes, second(&bytes)].map(|copy| whole(copy).map(|record| record.edition));
    if let [None, Some(_)] = copies {
        file.write_all_at(second(&bytes), 0)?;
    }
    Ok(copies.into_iter().flatten().max())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::supervisor::run_dir::defined_volume::DefinedVolume;
    use crate::types::golden::{CHANGED, golden, parts};

    fn record(mounts: usize) -> PodLockRecord {
        let mounts = (0..mounts).map(|number| PathBuf::from(format!("/root/pods/u/volumes/p/volume-{number}")));
        PodLockRecord { pid: 1, mounts: mounts.collect(), ..PodLockRecord::default() }
    }

    fn bytes_of(file: &File) -> Vec<u8> {
        let mut bytes = vec![0; file.metadata().expect("a size").len() as usize];
        file.read_exact_at(&mut bytes, 0).expect("read");
        bytes
    }

    /// Some places in a copy at which its write may end: everywhere, and around the number behind the record.
    fn ends(copy: &[u8]) -> Vec<usize> {
        let lines = copy.iter().enumerate().filter(|(_, byte)| **byte == b'\n').flat_map(|(at, _)| at - 2..=at + 1);
        (0..copy.len()).step_by(61).chain(lines).collect()
    }

    #[test]
    fn a_write_that_ends_at_any_byte_leaves_the_record_before_or_the_new_one() {
        for (before, after) in [(3, 4), (4, 3), (90, 91), (91, 90), (300, 299), (250, 2)] {
            let file = tempfile::tempfile().expect("a file");
            let mut writer = RecordWriter::default();
            writer.write(&file, record(before)).expect("written");
            let old = bytes_of(&file);
            writer.write(&file, record(after)).expect("written");
            let new = bytes_of(&file);
            let half = old.len() / 2;
            assert_eq!(old.len(), new.len(), "the file has the space for the new record");
            for end in ends(&new[..half]) {
                let in_second = [&old[..half], &new[half..half + end], &old[half + end..]].concat();
                let in_first = [&new[..end], &old[end..half], &new[half..]].concat();
                for torn in [in_second, in_first] {
                    let found = PodLockRecord::parse(&torn).expect("a record").mounts.len();
                    assert!(found == before || found == after, "{before} {after} {end}: {found}");
                    // The next podfs goes on with such a file.
                    let file = tempfile::tempfile().expect("a file");
                    file.write_all_at(&torn, 0).expect("written");
                    RecordWriter::default().write(&file, record(400)).expect("written");
                    assert_eq!(PodLockRecord::parse(&bytes_of(&file)).expect("a record").mounts.len(), 400);
                }
            }
        }
    }

    #[test]
    fn a_longer_record_leaves_the_record_before_until_it_is_written() {
        let file = tempfile::tempfile().expect("a file");
        // The file of an earlier version.
        file.write_all_at(&serde_json::to_vec(&record(150)).expect("JSON"), 0).expect("written");
        let mut old = bytes_of(&file);
        let mut writer = RecordWriter::default();
        for mounts in [151, 1, 500] {
            let before = PodLockRecord::parse(&old).expect("a record").mounts.len();
            writer.write(&file, record(mounts)).expect("written");
            let new = bytes_of(&file);
            old.resize(new.len(), 0);
            let half = new.len() / 2;
            for end in ends(&new[..half]) {
                let in_second = [&old[..half], &new[half..half + end], &old[half + end..]].concat();
                let in_first = [&new[..end], &old[end..half], &new[half..]].concat();
                for torn in [in_second, in_first] {
                    let found = PodLockRecord::parse(&torn).expect("a record").mounts.len();
                    assert!(found == before || found == mounts, "{mounts} {end}: {found}");
                }
            }
            old = new;
        }
    }

    #[test]
    fn an_earlier_version_finds_the_record_at_the_beginning() {
        let file = tempfile::tempfile().expect("a file");
        RecordWriter::default().write(&file, record(3)).expect("written");
        let bytes = bytes_of(&file);
        let mut values = serde_json::Deserializer::from_slice(&bytes).into_iter::<PodLockRecord>();
        assert_eq!(values.next().expect("a value").expect("a record").mounts, record(3).mounts);
    }

    #[test]
    fn a_record_has_the_bytes_that_other_versions_read() {
        let recorded = golden!("pod-lock.txt");
        let record = PodLockRecord::parse(recorded.as_bytes()).expect(CHANGED);
        assert_eq!((record.pid, record.mounts.len(), record.cgroup.is_some()), (7, 1, true), "{CHANGED}");
        assert_eq!(DefinedVolume::of_record(record.definitions.clone()).expect(CHANGED).len(), 1);
        let file = tempfile::tempfile().expect("a file");
        RecordWriter::default().write(&file, record).expect("written");
        let bytes = bytes_of(&file);
        assert_eq!(bytes.len(), 2 * UNIT, "{CHANGED}");
        for copy in [&bytes[..UNIT], &bytes[UNIT..]] {
            let text = str::from_utf8(copy).expect("text").trim_end_matches('\0');
            assert_eq!(text, recorded, "{CHANGED}");
        }
    }

    #[test]
    fn a_definition_has_the_bytes_that_other_versions_read() {
        for definition in parts::<DefinedVolume>(golden!("volume-definitions.jsonl")) {
            definition.definition.parse().expect(CHANGED);
        }
        let recorded = golden!("volume-definitions.jsonl").lines().next().expect("a line");
        let text =
            format!(r#"{{"pid":7,"run":[],"directories":[],"definitions":[{recorded},{{"of":"a later version"}}]}}"#);
        let record = PodLockRecord::parse(text.as_bytes()).expect("the paths in it can be read");
        DefinedVolume::of_record(record.definitions).expect_err("the second one is unknown");
    }

    #[test]
    fn a_record_of_another_version_is_refused_whichever_copy_has_it() {
        let recorded = golden!("pod-lock.txt");
        let later = recorded.replacen('{', r#"{"version":2,"#, 1);
        let file = |copies: [&str; 2]| {
            let mut bytes = vec![0; 2 * UNIT];
            copies
                .iter()
                .zip([0, UNIT])
                .for_each(|(copy, at)| bytes[at..at + copy.len()].copy_from_slice(copy.as_bytes()));
            bytes
        };
        for copies in [[&later[..], &later], [&later, recorded], [recorded, &later], [&later, ""]] {
            let refused = PodLockRecord::parse(&file(copies)).expect_err("it has another version").to_string();
            assert_eq!(refused, "it has version 2, and this podfs reads version 1; use the podfs that wrote it");
        }
        assert!(PodLockRecord::parse(&file([recorded, recorded])).is_ok());
    }
}
