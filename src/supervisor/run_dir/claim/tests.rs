//! Tests: one claim for each pod, whatever happens to its files.

use std::os::unix::fs::PermissionsExt;

use super::*;
use podfs_fuse::mount::visible::detach;

use crate::host::memory::mount_tmpfs;
use crate::manifest::pod::PodIdentity;
use crate::supervisor::run_dir::mount_points::MountPoints;
use crate::types::golden::golden;

/// A root directory without volumes.
const ROOT: &str = "/nonexistent";

#[test]
fn a_pod_has_one_supervisor_at_a_time() {
    let run = tempfile::tempdir().expect("a directory");
    let pod = PodIdentity::placeholder();
    let (first, _) = PodLock::take(run.path(), ROOT.as_ref(), &pod).expect("the pod is free");
    let error = PodLock::take(run.path(), ROOT.as_ref(), &pod).expect_err("the pod is taken").to_string();
    assert!(error.contains(&format!("(pid {})", std::process::id())), "{error}");
    drop(first);
    assert_eq!(std::fs::read_dir(run.path()).expect("a listing").count(), 0, "nothing stays behind");
    PodLock::take(run.path(), ROOT.as_ref(), &pod).expect("the pod is free again");
}

#[test]
fn directories_of_a_killed_supervisor_are_removed_by_the_next() {
    let (run, root) = (tempfile::tempdir().expect("a directory"), tempfile::tempdir().expect("a directory"));
    let pod = PodIdentity::placeholder();
    let made = [root.path().join("pods"), root.path().join("pods/a")];
    made.iter().for_each(|path| std::fs::create_dir(path).expect("a directory"));
    let directory = run.path().join(pod.uid.as_str());
    std::fs::create_dir(&directory).expect("a directory");
    let record =
        PodLockRecord { pid: 1, run: vec![directory.clone()], directories: made.to_vec(), ..PodLockRecord::default() };
    std::fs::write(directory.join("lock"), serde_json::to_vec(&record).expect("JSON")).expect("written");
    let (claim, leftovers) = PodLock::take(run.path(), root.path(), &pod).expect("no process holds the lock");
    MountPoints::new(Some(claim), leftovers).take_back(true);
    for directory in [&run, &root] {
        assert_eq!(std::fs::read_dir(directory.path()).expect("a listing").count(), 0);
    }
}

#[test]
fn a_supervisor_that_fails_before_it_serves_leaves_the_record_of_the_one_before() {
    let (run, root) = (tempfile::tempdir().expect("a directory"), tempfile::tempdir().expect("a directory"));
    let pod = PodIdentity::placeholder();
    let directory = run.path().join(pod.uid.as_str());
    let (mut claim, _) = PodLock::take(run.path(), root.path(), &pod).expect("the pod is free");
    let mounts = [root.path().join("pods/u/volumes/p/v")];
    claim.record(&Directories::default(), &mounts, &[]).expect("written");
    claim.leave_record();
    for _ in 0..2 {
        let (claim, leftovers) = PodLock::take(run.path(), root.path(), &pod).expect("no process holds the lock");
        assert_eq!(leftovers.mounts, mounts);
        drop(MountPoints::new(Some(claim), leftovers));
        assert_eq!(PodLockRecord::read(&directory).expect("a record").mounts, mounts);
    }
}

#[test]
fn a_record_that_was_partly_written_over_is_read_or_kept() {
    let run = tempfile::tempdir().expect("a directory");
    let pod = PodIdentity::placeholder();
    let directory = run.path().join(pod.uid.as_str());
    std::fs::create_dir(&directory).expect("a directory");
    let record = |mounts: &[&str]| {
        let mounts = mounts.iter().map(PathBuf::from).collect();
        serde_json::to_vec(&PodLockRecord { pid: 1, mounts, ..PodLockRecord::default() }).expect("JSON")
    };
    let (short, long) = (record(&["/nonexistent/a"]), record(&["/nonexistent/a", "/nonexistent/b"]));
    // A podfs was killed before it cut the file to the length of the record.
    std::fs::write(directory.join(LOCK), [&short, &long[short.len()..]].concat()).expect("written");
    assert_eq!(PodLockRecord::read(&directory).expect("a record").mounts, [Path::new("/nonexistent/a")]);
    let (claim, leftovers) = PodLock::take(run.path(), ROOT.as_ref(), &pod).expect("no process holds the lock");
    assert_eq!(leftovers.mounts, [Path::new("/nonexistent/a")]);
    claim.remove_record();
    // A podfs was killed within a record.
    std::fs::create_dir_all(&directory).expect("a directory");
    std::fs::write(directory.join(LOCK), &long[..long.len() - 9]).expect("written");
    assert!(PodLockRecord::read(&directory).is_none());
    drop(PodLock::take(run.path(), ROOT.as_ref(), &pod).expect("no process holds the lock"));
    assert_eq!(std::fs::read(directory.join(UNREADABLE)).expect("it is kept"), long[..long.len() - 9]);
}

#[test]
fn a_full_disk_leaves_the_record() {
    let run = tempfile::tempdir().expect("a directory");
    mount_tmpfs(run.path(), 64 << 10).expect("mounted");
    std::fs::set_permissions(run.path(), std::fs::Permissions::from_mode(0o755)).expect("its mode");
    let pod = PodIdentity::placeholder();
    let (mut claim, _) = PodLock::take(run.path(), ROOT.as_ref(), &pod).expect("the pod is free");
    let directory = claim.directory().to_owned();
    let mounts = |count: usize| {
        (0..count).map(|n| format!("{ROOT}/pods/u/volumes/p/volume-{n}").into()).collect::<Vec<PathBuf>>()
    };
    claim.record(&Directories::default(), &mounts(1), &[]).expect("written");
    // The file of an earlier version has no space for two copies.
    let earlier = run.path().join("earlier");
    std::fs::create_dir(&earlier).expect("a directory");
    let one = serde_json::to_vec(&PodLockRecord { mounts: mounts(1), ..PodLockRecord::default() }).expect("JSON");
    std::fs::write(earlier.join(LOCK), one).expect("written");
    let mut filler = File::create(run.path().join("filler")).expect("a file");
    io::copy(&mut io::repeat(0), &mut filler).expect_err("the disk is full");
    let refused = claim.record(&Directories::default(), &mounts(200), &[]);
    let left = PodLockRecord::read(&directory).map(|record| record.mounts);
    let of_same_size = claim.record(&Directories::default(), &mounts(2), &[]);
    let next = PodLockRecord::read(&directory).map(|record| record.mounts);
    claim.leave_record();
    let file = OpenOptions::new().read(true).write(true).open(earlier.join(LOCK)).expect("a file");
    let two = PodLockRecord { mounts: mounts(2), ..PodLockRecord::default() };
    let in_earlier = RecordWriter::default().write(&file, two);
    let after_earlier = PodLockRecord::read(&earlier).map(|record| record.mounts);
    drop((filler, file));
    detach(run.path()).expect("unmounted");
    assert_eq!(refused.expect_err("the disk is full").kind(), io::ErrorKind::StorageFull);
    assert_eq!(left.expect("a record"), mounts(1));
    of_same_size.expect("the file has the space for it");
    assert_eq!(next.expect("a record"), mounts(2));
    in_earlier.expect("the record fits in its page");
    assert_eq!(after_earlier.expect("a record"), mounts(2));
}

#[test]
fn a_claim_waits_for_the_process_that_cleans_up_after_a_dead_supervisor() {
    let run = tempfile::tempdir().expect("a directory");
    let pod = PodIdentity::placeholder();
    let directory = run.path().join(pod.uid.as_str());
    std::fs::create_dir(&directory).expect("a directory");
    std::fs::write(directory.join(LOCK), "").expect("written");
    let (cleaner, _) = PodLock::take_leftovers(&directory).expect("no process holds the lock");
    assert!(is_held(&directory));
    std::thread::scope(|scope| {
        let next = scope.spawn(|| PodLock::take(run.path(), ROOT.as_ref(), &pod).map(drop));
        drop(cleaner);
        next.join().expect("no panic").expect("the pod is free by now");
    });
    assert!(!is_held(&directory) && !directory.exists());
}

#[test]
fn a_claim_whose_directory_was_deleted_is_taken_again_unless_another_supervisor_has_the_pod() {
    let run = tempfile::tempdir().expect("a directory");
    let pod = PodIdentity::placeholder();
    let (mut claim, _) = PodLock::take(run.path(), ROOT.as_ref(), &pod).expect("the pod is free");
    let directory = claim.directory().to_owned();
    assert!(claim.is_in_place());
    std::fs::remove_dir_all(&directory).expect("deleted");
    assert!(!claim.is_in_place() && !is_held(&directory));
    claim.take_again().expect("the pod is free");
    claim.record(&Directories::default(), &[], &[]).expect("written");
    assert!(claim.is_in_place() && is_held(&directory));
    assert_eq!(PodLockRecord::read(&directory).expect("a record").pid, std::process::id());

    std::fs::remove_dir_all(&directory).expect("deleted");
    let (other, _) = PodLock::take(run.path(), ROOT.as_ref(), &pod).expect("the lock file is another one");
    let refused = claim.take_again().expect_err("the other one has it").to_string();
    assert!(refused.contains("is already served by podfs"), "{refused}");
    std::fs::write(directory.join(CONTROL), "").expect("a file of the other one");
    drop(claim);
    assert!(other.is_in_place() && directory.join(CONTROL).exists());
    drop(other);
    assert_eq!(std::fs::read_dir(run.path()).expect("a listing").count(), 0);
}

#[test]
fn claims_that_come_and_go_never_meet_a_missing_directory() {
    let run = tempfile::tempdir().expect("a directory");
    let pod = PodIdentity::placeholder();
    let come_and_go = || {
        for _ in 0..200 {
            match PodLock::take(run.path(), ROOT.as_ref(), &pod) {
                Ok(claim) => drop(claim),
                Err(PodLockError::Taken { .. }) => {}
                Err(error) => panic!("{error}"),
            }
        }
    };
    std::thread::scope(|scope| (0..4).for_each(|_| drop(scope.spawn(come_and_go))));
    assert_eq!(std::fs::read_dir(run.path()).expect("a listing").count(), 0);
}

#[test]
fn a_record_that_only_another_version_knows_is_refused_and_stays() {
    let run = tempfile::tempdir().expect("a directory");
    let pod = PodIdentity::placeholder();
    let directory = run.path().join(pod.uid.as_str());
    std::fs::create_dir(&directory).expect("a directory");
    let recorded = golden!("pod-lock.txt");
    let later = recorded.replacen('{', r#"{"version":2,"#, 1);
    let defines = recorded.replacen(r#"{"annotations":"#, r#"{"of":"a later version"},{"annotations":"#, 1);
    for (record, reason, is_cleaned_up) in [
        (&later, "it has version 2, and this podfs reads version 1; use the podfs that wrote it", false),
        (&defines, "it cannot read the definition of a volume in", true),
    ] {
        std::fs::write(directory.join(LOCK), record).expect("written");
        let refused = PodLock::take(run.path(), ROOT.as_ref(), &pod).expect_err("unknown").to_string();
        assert!(refused.contains(reason), "{refused}");
        match PodLock::take_leftovers(&directory) {
            Ok((claim, found)) => {
                assert!(is_cleaned_up && found.mounts.len() == 1);
                claim.leave_record();
            }
            Err(refused) => assert!(!is_cleaned_up && refused.to_string().contains(reason), "{refused}"),
        }
        assert_eq!(std::fs::read_to_string(directory.join(LOCK)).expect("it stays"), *record);
        assert_eq!(std::fs::read_dir(&directory).expect("a listing").count(), 1, "nothing is beside it");
        assert!(!is_held(&directory));
    }
}
