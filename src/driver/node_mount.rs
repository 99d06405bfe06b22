//! The mount of a volume for the node. A driver makes it once, and the pods' mounts are made from it.
//!
//! Its users are those of a [`GlobalMount`], which describes why no supervisor unmounts a volume of another pod, even if one is
//! killed. Its
//! records are in the directory that the driver stages in. In addition:
//!
//! 1. `staged` records before a call that the driver may have mounted, and after it that it has. Before the call that unmounts, it
//!    records again that the driver may have mounted: if podfs is killed in that call, the next podfs has the driver mount or unmount
//!    once more. It names the boot of the node, because no mount outlives that. podfs reads and writes it under the lock of the
//!    mount, which it holds during the call, too.
//! 2. A user is a home. It counts as long as its record is there, so leftovers of a killed supervisor do not matter.
//! 3. After a call that failed, the home is no user. After one that may have mounted, it is one still.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use super::home::{absent_is_fine, is_mount, remove_replaced, replace};
use super::{DriverError, DriverHome, LeaveError};
use crate::host::global_mount::{GlobalMount, GlobalMountUser, LockedGlobalMount, boot_id};

const MOUNT: &str = "globalmount";
const STAGED: &str = "staged";

/// A mount of the node.
#[derive(Clone, Debug)]
pub struct NodeMount(PathBuf);

/// The state of the driver's mount.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum NodeMountState {
    No,
    /// The driver may have mounted it.
    Begun,
    Yes,
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

    /// Whether a file system is mounted there.
    ///
    /// # Errors
    /// When the mount table cannot be read.
    pub fn is_mounted(&self) -> io::Result<bool> {
        is_mount(&self.path())
    }

    /// Makes a pod a user, and calls `stage` unless the driver has mounted the volume already.
    ///
    /// # Errors
    /// Those of `stage`. The pod stays a user if the driver may have mounted.
    pub fn enter(
        &self,
        home: &DriverHome,
        stage: impl FnOnce(&Path) -> Result<(), DriverError>,
    ) -> Result<(), DriverError> {
        let failed = |error: io::Error| DriverError::of_node("use", &self.0, error);
        let mount = self.global();
        let held = mount.hold()?;
        let (uid, claim) = (home.user_name(), home.record_file());
        held.add(GlobalMountUser { uid: &uid, claim: &claim })?;
        if self.staged() == NodeMountState::Yes {
            return Ok(());
        }
        self.mark(NodeMountState::Begun).map_err(failed)?;
        match stage(&self.path()) {
            Ok(()) => self.mark(NodeMountState::Yes).map_err(failed),
            Err(error) => {
                if !error.is_uncertain {
                    self.mark(NodeMountState::No).map_err(failed)?;
                    self.give_up(home, &held).map_err(failed)?;
                }
                Err(error)
            }
        }
    }

    /// Removes a pod from the users. For the last one, calls `unstage` first.
    ///
    /// # Errors
    /// Those of `unstage`. Then the pod stays a user.
    pub fn leave(
        &self,
        home: &DriverHome,
        unstage: impl FnOnce(&Path) -> Result<(), LeaveError>,
    ) -> Result<(), LeaveError> {
        if !self.0.exists() {
            return Ok(());
        }
        let failed = |cause: io::Error| LeaveError::Leave { directory: self.0.clone(), cause };
        let mount = self.global();
        let held = mount.hold()?;
        let others = held.other_users(&home.user_name())?;
        if others.is_empty() && self.staged() != NodeMountState::No {
            self.mark(NodeMountState::Begun).map_err(failed)?;
            unstage(&self.path())?;
            self.mark(NodeMountState::No).map_err(failed)?;
        }
        self.give_up(home, &held).map_err(failed)
    }

    fn global(&self) -> GlobalMount {
        GlobalMount::with_records(self.0.clone(), self.path())
    }

    /// Removes a pod from the users, and the directory if there is no user and no mount.
    fn give_up(&self, home: &DriverHome, held: &LockedGlobalMount<'_>) -> io::Result<()> {
        held.forget(&home.user_name());
        if !self.global().has_no_user() || self.staged() != NodeMountState::No {
            return Ok(());
        }
        absent_is_fine(fs::remove_dir(self.path()))?;
        remove_replaced(&self.0.join("vol_data.json"))?;
        remove_replaced(&self.0.join(STAGED))?;
        held.remove_records();
        Ok(())
    }

    fn staged(&self) -> NodeMountState {
        let text = fs::read_to_string(self.0.join(STAGED)).unwrap_or_default();
        match text.split_once(' ') {
            Some((state, boot)) if Some(boot) == boot_id().ok().as_deref() => match state {
                "done" => NodeMountState::Yes,
                _ => NodeMountState::Begun,
            },
            _ => NodeMountState::No,
        }
    }

    fn mark(&self, staged: NodeMountState) -> io::Result<()> {
        let path = self.0.join(STAGED);
        let word = match staged {
            NodeMountState::No => return remove_replaced(&path),
            NodeMountState::Begun => "begun",
            NodeMountState::Yes => "done",
        };
        replace(&path, format!("{word} {}", boot_id()?).as_bytes())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::driver::DriverRecord;
    use crate::driver::home::make_directory;

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
        mount.leave(&a, |_| panic!("it is in use")).expect("left");
        let busy = mount.leave(&b, |_| Err(DriverError::refused("busy").into())).expect_err("busy");
        assert_eq!(busy.to_string(), "busy");
        mount.leave(&b, |_| Ok(())).expect("left");
        assert!(!mount.directory().exists());
        mount.leave(&b, |_| panic!("nothing is staged")).expect("left already");
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
        mount.leave(&a, unstage).expect("left");
        assert_eq!(undone, 1, "timeout: it has to be undone");
    }

    #[test]
    fn files_of_a_process_that_was_killed_while_it_wrote_go_with_the_last_user() {
        let node = node();
        let (mount, a) = (node.mount(), node.home("a"));
        mount.enter(&a, |_| Ok(())).expect("staged");
        fs::write(mount.directory().join("staged.next"), "be").expect("written");
        mount.leave(&a, |_| Ok(())).expect("left");
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
        mount.leave(&b, unstage).expect("left");
        assert_eq!(undone, 1);
        assert!(!mount.directory().exists());
    }
}
