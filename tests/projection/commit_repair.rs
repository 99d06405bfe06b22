//! If a commit cannot remove the old generation, a later commit removes it.

use crate::common::namespace::mount_tmpfs;
use crate::common::tree::{files, names, parse};
use crate::common::{Served, generation};
use nix::mount::{MntFlags, umount2};
use podfs_fuse::client::Commit;

#[test]
fn a_generation_that_cannot_be_removed_yet_delays_no_update() {
    // AW-17, AW-19: another process has mounted on the directory of the old generation.
    let mut served = Served::with(&[("a", "1")]);
    let old = served.path().join(generation(served.path()));
    mount_tmpfs(&old);
    let two = [("a", "2"), ("b", "2")];
    served.commit(&two);
    let left = served.projection.take_left().expect("the old generation stays");
    assert!(left.contains("rmdir") && left.ends_with("podfs tries again"), "{left}");
    assert!(served.projection.next_removal().is_some(), "podfs will try again to remove the old generation");
    assert_eq!(files(served.path()), parse("a=2; b=2"), "the switch has happened");

    assert_eq!(served.commit(&two), Commit::Unchanged, "the payload is shown already");
    served.commit(&[("a", "3")]);
    assert_eq!(files(served.path()), parse("a=3"), "updates go on");
    assert!(old.exists(), "the mount point stays");
    assert_eq!(served.projection.take_left(), None, "podfs reports this once");

    umount2(&old, MntFlags::MNT_DETACH).expect("unmounted");
    served.commit(&[("a", "4")]);
    assert_eq!(files(served.path()), parse("a=4"));
    let generations = names(served.path()).into_iter().filter(|name| name.starts_with("..2")).count();
    assert_eq!(generations, 1, "the old generation is removed");
}
