//! Kills of podfs during a cleaning, at many of its system calls: podfs never offers an entry that is only partly
//! clean.

use std::fs;
use std::path::Path;

use nix::mount::{MsFlags, mount};

use super::{Rig, is_empty, write};
use crate::common::eventually;
use crate::common::loop_device::LoopDevice;
use crate::common::tracer::killed_at;

/// The distance between the stops at which podfs is killed. [`killed_at`] counts two stops for each system call.
const STRIDE: usize = 97;

#[test]
fn at_whichever_step_of_a_cleaning_podfs_is_killed_nothing_half_clean_is_offered() {
    let mut rig = Rig::new("Delete");
    let path = rig.mount("one");
    kill_at_each_step_of_a_cleaning(&rig, &path, || write(&path), || is_empty(&path));
}

#[test]
fn at_whichever_step_of_an_erasure_of_a_device_podfs_is_killed_nothing_half_erased_is_offered() {
    let mut rig = Rig::new("Delete");
    let disk = LoopDevice::new(8);
    let path = rig.directory.join("disk");
    fs::write(&path, "").expect("a file");
    mount(Some(disk.path()), &path, None::<&str>, MsFlags::MS_BIND, None::<&str>).expect("bound");
    rig.mounted.push(path.clone());
    let write = || [0, 4 << 20, (8 << 20) - 4096].into_iter().for_each(|offset| disk.write(b"secret", offset));
    let is_erased = || fs::read(disk.path()).expect("it can be read").iter().all(|byte| *byte == 0);
    kill_at_each_step_of_a_cleaning(&rig, &path, write, is_erased);
}

/// Kills podfs while it cleans an entry and offers it again. Does that again and again, each time with a later kill,
/// until podfs completes the work before the kill.
#[track_caller]
fn kill_at_each_step_of_a_cleaning(rig: &Rig, path: &Path, write: impl Fn(), is_clean: impl Fn() -> bool) {
    for kills in 0.. {
        let mut daemon = rig.start();
        rig.wait_offered(path);
        rig.set_phase(path, "Bound");
        write();
        let pid = daemon.pid();
        let is_offered_again = |uid: &str| rig.volume(path).is_some_and(|volume| volume["metadata"]["uid"] != uid);
        let (uid, killed) = killed_at(pid, kills * STRIDE, || {
            let uid = rig.set_phase(path, "Released");
            eventually("it is offered again, or podfs is killed", || is_offered_again(&uid) || has_ended(pid));
            uid
        });
        assert!(!is_offered_again(&uid) || is_clean(), "it is offered, and not clean: kill {kills}");
        if !killed {
            assert!(kills > 3, "there are that many steps: {kills}");
            daemon.signal(nix::sys::signal::Signal::SIGKILL);
            daemon.wait();
            break;
        }
        daemon.was_reaped();
        let _next = rig.start();
        rig.wait_offered_again(path, &uid);
        assert!(is_clean(), "kill {kills}");
        eventually("no record is left", || rig.records().is_empty());
    }
}

/// Whether a process has ended, though its parent may not know yet.
fn has_ended(pid: nix::unistd::Pid) -> bool {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    stat.rsplit_once(") ").is_none_or(|(_, fields)| fields.starts_with(['Z', 'X']))
}
