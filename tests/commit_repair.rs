//! A commit that cannot finish is finished by a later one.

mod common;

use common::namespace::mount_tmpfs;
use common::tree::{files, names, parse};
use common::{DIRECTORIES, Served, generation, layout};
use nix::mount::{MntFlags, umount2};
use podfs_fuse::projection::Commit;

#[test]
fn a_generation_that_cannot_be_removed_yet_holds_up_no_update() {
    // AW-17, AW-19: somebody has mounted on the directory of the old generation.
    let mut served = Served::with(&[("a", "1")]);
    let old = served.path().join(generation(served.path()));
    mount_tmpfs(&old);
    let two = [("a", "2"), ("b", "2")];
    let failed = served.projection.commit(&layout(&two), DIRECTORIES).expect_err("the old one stays");
    assert!(failed.to_string().contains("rmdir"), "{failed}");
    assert_eq!(files(served.path()), parse("a=2; b=2"), "the switch has happened");

    assert_eq!(served.commit(&two), Commit::Unchanged, "the payload is shown already");
    served.commit(&[("a", "3")]);
    assert_eq!(files(served.path()), parse("a=3"), "updates go on");
    assert!(old.exists(), "what is mounted on stays");

    umount2(&old, MntFlags::MNT_DETACH).expect("unmounted");
    served.commit(&[("a", "4")]);
    assert_eq!(files(served.path()), parse("a=4"));
    let generations = names(served.path()).into_iter().filter(|name| name.starts_with("..2")).count();
    assert_eq!(generations, 1, "the old one is collected");
}
