//! The mount of a volume for the node. A driver makes it once, and the pods' mounts are made from it.
//!
//! Its users are recorded as those of a [`GlobalMount`], whose module says why no supervisor unmounts a volume of another pod,
//! even if a supervisor is killed. The records are in the directory in which the driver stages the volume. In addition:
//!
//! 1. Before podfs calls the driver to mount, it writes into the file `staged` that the driver may have mounted, and after the
//!    call, that the driver has mounted. Before it calls the driver to unmount, it writes that the driver may have unmounted:
//!    if podfs is killed during that call, the next podfs has the driver mount or unmount once more. The file names the boot of
//!    the node, because no mount outlives a boot. podfs holds the lock of the mount while it reads or writes the file, and during
//!    the call.
//! 2. Each user is the home of a pod's volume. A user counts as long as its home has a record, so files that a killed supervisor
//!    has left do not matter.
//! 3. After a call that has failed, the home is no user. After a call that may have mounted, the home is still a user.

use std::fs::{self, OpenOptions};
use std::io;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use tracing::warn;

use super::home::{absent_is_fine, is_mount, remove_record};
use super::unfinished::CallRecord;
use super::{DriverError, DriverHome, LeaveError};
use crate::host::HostError;
use crate::host::global_mount::{GlobalMount, GlobalMountUser, LockedGlobalMount, boot_id, write_whole};
use crate::types::is_blank;

const MOUNT: &str = "globalmount";
const STAGED: &str = "staged";

/// A mount of the node.
#[derive(Clone, Debug)]
pub struct NodeMount(PathBuf);

/// The state of the driver's mount.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum NodeMountState {
    Unmounted,
    /// The driver may have mounted the volume.
    Uncertain,
    Mounted,
}

impl NodeMount {
    /// The mount of this directory.
    pub fn at(directory: PathBuf) -> NodeMount {
        NodeMount(directory)
    }

    /// Its directory.
    pub fn directory(&self) -> &Path {
        &self.0
    }

    /// The directory on which the driver mounts.
    pub fn path(&self) -> PathBuf {
        self.0.join(MOUNT)
    }

    /// Whether a file system is mounted at [`Self::path`].
    ///
    /// # Errors
    /// When the mount table cannot be read.
    pub fn is_mounted(&self) -> io::Result<bool> {
        is_mount(&self.path())
    }

    /// Whether the driver may have mounted the volume since the node has started. The caller holds the lock of the mount.
    pub fn may_be_mounted(&self) -> bool {
        !matches!(self.state(), Ok(NodeMountState::Unmounted))
    }

    /// Makes a pod's home a user, and calls `stage` unless the driver has mounted the volume already.
    ///
    /// # Errors
    /// Those of `stage`. The home stays a user if the driver may have mounted.
    pub fn enter(
        &self,
        home: &DriverHome,
        stage: impl FnOnce(&Path) -> Result<(), DriverError>,
    ) -> Result<(), DriverError> {
        let failed = |error: io::Error| DriverError::of_node("use", &self.0, error);
        let mount = self.global();
        let held = mount.hold()?;
        let (uid, claim) = (home.user_name(), home.record_file());
        let state = self.state()?;
        held.add(GlobalMountUser { uid: &uid, claim: &claim })?;
        if state == NodeMountState::Mounted {
            return Ok(());
        }
        self.set_state(NodeMountState::Uncertain).map_err(failed)?;
        match stage(&self.path()) {
            Ok(()) => self.set_state(NodeMountState::Mounted).map_err(failed),
            Err(error) => {
                if !error.is_uncertain {
                    let removed =
                        self.set_state(NodeMountState::Unmounted).and_then(|()| self.remove_user(home, &held));
                    removed.unwrap_or_else(|error| warn!("cannot remove the records in {}: {error}", self.0.display()));
                }
                Err(error)
            }
        }
    }

    /// Removes a pod's home from the users. For the last user, calls `unstage` first if the driver may have mounted the volume, or
    /// if `is_attached`.
    ///
    /// # Errors
    /// Those of `unstage`, after which the home is still a user.
    pub fn leave(
        &self,
        home: &DriverHome,
        is_attached: bool,
        unstage: impl FnOnce(&Path) -> Result<(), LeaveError>,
    ) -> Result<(), LeaveError> {
        if !is_attached && !self.0.exists() {
            return Ok(());
        }
        let failed = |cause: io::Error| LeaveError::Leave { directory: self.0.clone(), cause };
        let mount = self.global();
        let held = mount.hold()?;
        let others = held.other_users(&home.user_name())?;
        let state = self.state()?;
        if others.is_empty() && (is_attached || state != NodeMountState::Unmounted) {
            self.begin_unstage().map_err(failed)?;
            unstage(&self.path())?;
            self.set_state(NodeMountState::Unmounted).map_err(failed)?;
        }
        self.remove_user(home, &held).map_err(failed)
    }

    fn global(&self) -> GlobalMount {
        GlobalMount::with_records(self.0.clone(), self.path())
    }

    /// Removes a home from the users, and the directory of the mount if there is no user and no mount.
    fn remove_user(&self, home: &DriverHome, held: &LockedGlobalMount<'_>) -> io::Result<()> {
        held.forget(&home.user_name());
        if !self.global().has_no_user() || self.may_be_mounted() {
            return Ok(());
        }
        absent_is_fine(fs::remove_dir(self.path()))?;
        CallRecord::of_node_mount(&self.0, home.path()).end();
        remove_record(&self.0.join("vol_data.json"))?;
        remove_record(&self.0.join(STAGED))?;
        held.remove_records();
        Ok(())
    }

    /// The recorded state. Without a file, or if the file was not written to the disk when the machine stopped, nothing is mounted.
    ///
    /// # Errors
    /// When this version of podfs does not know the recorded state.
    fn state(&self) -> Result<NodeMountState, HostError> {
        let path = self.0.join(STAGED);
        let bytes = match fs::read(&path) {
            Err(cause) if cause.kind() == io::ErrorKind::NotFound => return Ok(NodeMountState::Unmounted),
            read => read.map_err(|cause| HostError::system("read", &path, cause))?,
        };
        if is_blank(&bytes) {
            return Ok(NodeMountState::Unmounted);
        }
        let text = String::from_utf8_lossy(&bytes);
        match text.split_once(' ') {
            Some(("done" | "begun" | "undo", boot)) if Some(boot) != boot_id().ok().as_deref() => {
                Ok(NodeMountState::Unmounted)
            }
            Some(("done", _)) => Ok(NodeMountState::Mounted),
            Some(("begun" | "undo", _)) => Ok(NodeMountState::Uncertain),
            _ => Err(HostError::Refused(format!(
                "podfs does not know whether the driver has mounted the volume, because {} says {text:?}, which another version of \
                 podfs wrote; use that version, or unmount the volume with the driver's tools and remove the file",
                path.display()
            ))),
        }
    }

    /// Writes that the driver may have unmounted: over the word `done`, which needs no space on most full disks.
    fn begin_unstage(&self) -> io::Result<()> {
        if matches!(self.state(), Ok(NodeMountState::Mounted)) {
            OpenOptions::new().write(true).open(self.0.join(STAGED))?.write_all_at(b"undo", 0)?;
        }
        Ok(())
    }

    fn set_state(&self, state: NodeMountState) -> io::Result<()> {
        let path = self.0.join(STAGED);
        let word = match state {
            NodeMountState::Unmounted => return remove_record(&path),
            NodeMountState::Uncertain => "begun",
            NodeMountState::Mounted => "done",
        };
        // No mount outlives the machine, so the file need not reach the disk.
        write_whole(&path, format!("{word} {}", boot_id()?).as_bytes())
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write;
    use std::process::Command;

    use super::*;
    use crate::driver::DriverRecord;
    use crate::driver::home::make_directory;
    use crate::types::golden::{CHANGED, golden};

    struct TestNode(tempfile::TempDir);

    impl TestNode {
        fn home(&self, pod: &str) -> DriverHome {
            let home = DriverHome::of(&self.0.path().join("pods").join(pod), "kind", "v");
            home.make_target().expect("made");
            home.write(&DriverRecord::default()).expect("written");
            home
        }

        fn mount(&self) -> NodeMount {
            NodeMount::at(self.0.path().join("plugins/d/h"))
        }
    }

    fn node() -> TestNode {
        TestNode(tempfile::tempdir().expect("a directory"))
    }

    #[test]
    fn the_first_user_mounts_and_the_last_one_unmounts() {
        let node = node();
        let (mount, a, b) = (node.mount(), node.home("a"), node.home("b"));
        mount.enter(&a, |path| make_directory(path).map_err(|_| DriverError::refused("no"))).expect("staged");
        for home in [&b, &a] {
            mount.enter(home, |_| panic!("it is staged")).expect("entered");
        }
        mount.leave(&a, false, |_| panic!("it is in use")).expect("left");
        let busy = mount.leave(&b, false, |_| Err(DriverError::refused("busy").into())).expect_err("busy");
        assert_eq!(busy.to_string(), "busy");
        mount.leave(&b, false, |_| Ok(())).expect("left");
        assert!(!mount.directory().exists());
        mount.leave(&b, false, |_| panic!("nothing is staged")).expect("left already");
    }

    #[test]
    fn vm_04_uncertain_calls_are_undone_and_failed_ones_are_not() {
        let node = node();
        let (mount, a) = (node.mount(), node.home("a"));
        mount.enter(&a, |_| Err(DriverError::uncertain("late"))).expect_err("late");
        mount.enter(&a, |_| Err(DriverError::refused("no"))).expect_err("refused");
        assert!(!mount.directory().exists(), "timeout, then failure: not mounted");
        mount.enter(&a, |_| Err(DriverError::uncertain("late"))).expect_err("late");
        let mut undone = 0;
        let unstage = |_: &Path| {
            undone += 1;
            Ok(())
        };
        mount.leave(&a, false, unstage).expect("left");
        assert_eq!(undone, 1, "timeout: it has to be undone");
    }

    #[test]
    fn the_error_of_a_driver_is_reported_although_its_mount_directory_cannot_be_removed() {
        let node = node();
        let (mount, a) = (node.mount(), node.home("a"));
        let stage = |path: &Path| {
            make_directory(path).and_then(|()| fs::write(path.join("file"), "")).expect("written");
            Err(DriverError::refused("no such disk"))
        };
        let error = mount.enter(&a, stage).expect_err("refused");
        assert_eq!(error.to_string(), "no such disk");
    }

    #[test]
    fn files_of_a_process_that_was_killed_while_it_wrote_go_with_the_last_user() {
        let node = node();
        let (mount, a) = (node.mount(), node.home("a"));
        mount.enter(&a, |_| Ok(())).expect("staged");
        for unfinished in [".staged.new", "staged.next"] {
            fs::write(mount.directory().join(unfinished), "be").expect("written");
        }
        mount.leave(&a, false, |_| Ok(())).expect("left");
        assert!(!mount.directory().exists());
    }

    #[test]
    fn a_user_whose_supervisor_was_killed_after_its_last_step_is_none() {
        let node = node();
        let (mount, a, b) = (node.mount(), node.home("a"), node.home("b"));
        mount.enter(&a, |_| Ok(())).expect("staged");
        mount.enter(&b, |_| Ok(())).expect("entered");
        a.remove().expect("removed");
        let mut undone = 0;
        let unstage = |_: &Path| {
            undone += 1;
            Ok(())
        };
        mount.leave(&b, false, unstage).expect("left");
        assert_eq!(undone, 1);
        assert!(!mount.directory().exists());
    }

    #[test]
    fn a_full_disk_keeps_no_volume_from_being_unmounted() {
        let full =
            |path: &Path| Command::new("mount").args(["-t", "tmpfs", "-o", "size=64k", "tmpfs"]).arg(path).status();
        if !rustix::process::geteuid().is_root() {
            return;
        }
        let node = node();
        assert!(full(node.0.path()).expect("mount").success());
        let _unmounted = Unmounted(node.0.path().to_owned());
        let (mount, a) = (node.mount(), node.home("a"));
        mount.enter(&a, |_| Ok(())).expect("staged");
        let file = fs::File::create(node.0.path().join("data")).expect("a file");
        while (&file).write_all(&[1; 512]).is_ok() {}
        let mut seen = None;
        let unstage = |_: &Path| {
            seen = Some(mount.state().expect("known"));
            Ok(())
        };
        mount.leave(&a, false, unstage).expect("left");
        assert_eq!(seen, Some(NodeMountState::Uncertain), "after a kill, the volume is unmounted once more");
        assert!(!mount.directory().exists());
    }

    /// Unmounts a file system when it is dropped.
    struct Unmounted(PathBuf);

    impl Drop for Unmounted {
        fn drop(&mut self) {
            let _ = rustix::mount::unmount(&self.0, rustix::mount::UnmountFlags::DETACH);
        }
    }

    #[test]
    fn an_attached_volume_that_could_not_be_mounted_is_left_once() {
        let node = node();
        let (mount, a) = (node.mount(), node.home("a"));
        mount.enter(&a, |_| Err(DriverError::refused("no such disk"))).expect_err("refused");
        let mut calls = 0;
        let unstage = |_: &Path| {
            calls += 1;
            Ok(())
        };
        mount.leave(&a, true, unstage).expect("left");
        assert_eq!((calls, mount.directory().exists()), (1, false));
    }

    #[test]
    fn the_state_has_the_words_that_other_versions_read() {
        let base = node();
        let mount = base.mount();
        make_directory(mount.directory()).expect("made");
        let boot = boot_id().expect("a boot");
        let states = [NodeMountState::Uncertain, NodeMountState::Mounted, NodeMountState::Uncertain];
        for (recorded, state) in golden!("node-mount-staged.txt").lines().zip(states) {
            let recorded = recorded.replace("b1", &boot);
            match recorded.starts_with("undo") {
                true => mount.begin_unstage().expect("written"),
                false => mount.set_state(state).expect("written"),
            }
            let staged = mount.directory().join(STAGED);
            assert_eq!(fs::read_to_string(&staged).expect("a state"), recorded, "{CHANGED}");
            assert_eq!(mount.state().expect(CHANGED), state, "{CHANGED}");
        }
    }

    #[test]
    fn a_state_that_only_another_version_knows_is_refused_and_stays() {
        let base = node();
        let (home, mount) = (base.home("a"), base.mount());
        mount
            .enter(&home, |path| make_directory(path).map_err(|error| DriverError::of_node("make", path, error)))
            .expect("mounted");
        let staged = mount.directory().join(STAGED);
        let boot = boot_id().expect("a boot");
        for unknown in [format!("paused {boot}"), "{\"version\":2}".to_owned(), "done".to_owned()] {
            fs::write(&staged, &unknown).expect("written");
            let entered = mount.enter(&home, |_| panic!("the driver is not called")).expect_err("unknown").to_string();
            let left =
                mount.leave(&home, false, |_| panic!("the driver is not called")).expect_err("unknown").to_string();
            for refused in [entered, left] {
                assert!(refused.contains(&format!("{} says {unknown:?}", staged.display())), "{refused}");
            }
            assert_eq!(fs::read_to_string(&staged).expect("it stays"), unknown);
            assert!(mount.may_be_mounted());
        }
        fs::write(&staged, "\0\0").expect("written");
        assert!(!mount.may_be_mounted(), "it was not written to the disk when the machine stopped");
    }
}
