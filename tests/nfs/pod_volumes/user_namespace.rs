//! Pods with their own user namespace (`hostUsers: false`): the container runtime gives them ID-mapped mounts of their volumes.
//! Mounts of the kernel's NFS client cannot be ID-mapped; those of podfs can.

use std::fs::{self, Permissions};
use std::os::unix::fs::{MetadataExt, PermissionsExt, chown};

use crate::common::Fixture;
use crate::common::caller::Caller;
use crate::common::idmap::Inside;
use crate::nfs_rig::Ganesha;
use crate::pod_volumes::pods::{VOLUMES, fixture, named, volume_path};

const ROOT: Caller = Caller::new(0);
const USER: Caller = Caller::new(1000);
const MEMBER: Caller = Caller::with_groups(1001, &[3000]);

fn in_user_namespace(uid: &str, ganesha: &Ganesha) -> Fixture {
    let fixture = fixture(uid, ganesha, "");
    fixture.write("pod.yaml", &named(uid, VOLUMES).replace("spec:\n", "spec:\n  hostUsers: false\n"));
    fixture
}

#[test]
fn ids_of_the_pod_are_those_of_the_server() {
    // FU-04
    let ganesha = Ganesha::start();
    for (name, uid, gid, mode) in
        [("of-root", 0, 0, 0o600), ("of-user", 1000, 1000, 0o600), ("of-group", 1, 3000, 0o640)]
    {
        let file = ganesha.exported().join(name);
        fs::write(&file, name).expect("written");
        chown(&file, Some(uid), Some(gid)).expect("given");
        fs::set_permissions(&file, Permissions::from_mode(mode)).expect("a mode");
    }
    fs::set_permissions(ganesha.exported(), Permissions::from_mode(0o777)).expect("a mode");

    let fixture = in_user_namespace("nfs-ids", &ganesha);
    let mut running = fixture.run();
    let inside = Inside::of(&volume_path(&running));
    let refused = |caller, script: &str, reason: &str| {
        let output = inside.run(caller, script);
        let error = String::from_utf8_lossy(&output.stderr);
        assert!(!output.status.success() && error.contains(reason), "{caller:?}: {script}: {error}");
    };
    assert_eq!(inside.get(ROOT, "cat of-root of-user of-group"), "of-rootof-userof-group");
    assert_eq!(inside.get(USER, "cat of-user"), "of-user");
    assert_eq!(inside.get(MEMBER, "cat of-group"), "of-group");
    assert_eq!(inside.get(ROOT, "stat -c '%u %g' of-root of-user of-group"), "0 0\n1000 1000\n1 3000\n");
    refused(USER, "cat of-root", "Permission denied");
    refused(USER, "cat of-group", "Permission denied");
    refused(MEMBER, "cat of-user", "Permission denied");
    refused(USER, "chown 0 of-user", "Operation not permitted");
    for (caller, directory) in [(ROOT, "by-root"), (USER, "by-user")] {
        let create = "mkdir $D; echo text >$D/file; ln -s file $D/link; mkfifo $D/pipe; mv $D/file $D/moved; echo more >>$D/moved";
        inside.get(caller, &format!("D={directory}; {create}"));
        for entry in ["", "moved", "link", "pipe"] {
            let created = fs::symlink_metadata(ganesha.exported().join(directory).join(entry)).expect("on the server");
            assert_eq!((created.uid(), created.gid()), (caller.uid, caller.gid), "{directory}/{entry}");
        }
        let moved = ganesha.exported().join(directory).join("moved");
        assert_eq!(fs::read_to_string(moved).expect("on the server"), "text\nmore\n");
    }
    inside.get(ROOT, "chown 1000:3000 of-root");
    let changed = fs::metadata(ganesha.exported().join("of-root")).expect("on the server");
    assert_eq!((changed.uid(), changed.gid()), (1000, 3000));
    assert_eq!(running.stop().code(), Some(0), "{}", running.log());
}

#[test]
fn root_of_a_namespace_made_within_the_pod_is_not_root() {
    let ganesha = Ganesha::start();
    let secret = ganesha.exported().join("secret");
    fs::write(&secret, "of root").expect("written");
    fs::set_permissions(&secret, Permissions::from_mode(0o600)).expect("a mode");
    let fixture = in_user_namespace("nfs-nested", &ganesha);
    let mut running = fixture.run();
    let inside = Inside::of(&volume_path(&running));
    // podfs learns the pod's user namespace from the first request of the pod, so test before and after it.
    for _ in 0..2 {
        assert_eq!(inside.get(USER, "unshare --user --map-root-user id -u"), "0\n");
        let nested = inside.run(USER, "unshare --user --map-root-user cat secret");
        assert!(!nested.status.success() && nested.stdout.is_empty(), "{nested:?}");
        assert_eq!(inside.get(ROOT, "cat secret"), "of root");
    }
    assert_eq!(running.stop().code(), Some(0), "{}", running.log());
}
