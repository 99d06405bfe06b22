//! Pods with their own user namespace (`hostUsers: false`): an id in the pod is the same id on the NFS server.

use std::fs::{self, Permissions};
use std::os::unix::fs::{MetadataExt, PermissionsExt, chown};

use super::kerberos::{Gssd, KEYTAB, Ticket};
use super::{DIRECTORY, Emptied, ExportedWith, assert_stops_clean, exported, fixture_at, version_3, volume_path};
use crate::common::caller::Caller;
use crate::common::idmap::Inside;
use crate::common::{Fixture, Running};
use crate::machine::kerberos::SERVER;

const ROOT: Caller = Caller::new(0);
const USER: Caller = Caller::new(1000);
const MEMBER: Caller = Caller::with_groups(1001, &[3000]);

/// A running pod with a volume of the guest's NFS server, and the volume as the pod's containers see it.
fn start(path: &str, options: &str) -> (Fixture, Running, Inside) {
    let fixture = fixture_at(SERVER, path, options);
    let pod = fs::read_to_string(fixture.pod()).expect("a pod");
    fixture.write("pod.yaml", &pod.replace("spec:\n", "spec:\n  hostUsers: false\n"));
    let running = fixture.run();
    let inside = Inside::of(&volume_path(&running));
    (fixture, running, inside)
}

fn export(name: &str, (uid, gid): (u32, u32), mode: u32) {
    let file = exported(name);
    fs::write(&file, name).expect("written");
    chown(&file, Some(uid), Some(gid)).expect("given");
    fs::set_permissions(&file, Permissions::from_mode(mode)).expect("a mode");
}

/// Asserts that on the NFS server, new files of the volume belong to the caller.
fn assert_makes(inside: &Inside, caller: Caller, directory: &str) {
    inside.get(caller, &format!("mkdir {directory} && echo text >{directory}/file && ln -s file {directory}/link"));
    for entry in ["", "file", "link"] {
        let created = fs::symlink_metadata(exported(directory).join(entry)).expect("on the server");
        assert_eq!((created.uid(), created.gid()), (caller.uid, caller.gid), "{directory}/{entry}");
    }
    assert_eq!(fs::read_to_string(exported(directory).join("file")).expect("on the server"), "text\n");
}

#[test]
#[ignore = "runs in the guest"]
fn ids_of_the_pod_are_those_of_the_server() {
    for (path, options) in [("/", "nfsvers=4.1".to_owned()), ("/export", version_3())] {
        let _emptied = Emptied(DIRECTORY);
        export("of-root", (0, 0), 0o600);
        export("of-user", (1000, 1000), 0o600);
        export("of-group", (1, 3000), 0o640);
        let (fixture, running, inside) = start(path, &options);
        let read = |caller, name| inside.run(caller, &format!("cat {name}")).stdout;
        assert_eq!(read(ROOT, "of-user"), b"of-user", "{options}");
        assert_eq!(read(USER, "of-user"), b"of-user", "{options}");
        assert_eq!(read(MEMBER, "of-group"), b"of-group", "{options}");
        for (caller, name) in [(USER, "of-root"), (USER, "of-group"), (MEMBER, "of-user")] {
            assert_eq!(read(caller, name), b"", "{options}: {caller:?} reads {name}");
        }
        assert_eq!(inside.get(ROOT, "stat -c %u:%g of-root of-user of-group"), "0:0\n1000:1000\n1:3000\n", "{options}");
        assert_makes(&inside, ROOT, "by-root");
        assert_makes(&inside, USER, "by-user");
        assert_stops_clean(running, &fixture);
    }
}

#[test]
#[ignore = "runs in the guest"]
fn a_user_of_the_pod_has_the_ticket_of_its_id_in_the_pod() {
    let _gssd = Gssd::start(KEYTAB);
    let _ticket = Ticket::of_alice();
    let _strict = ExportedWith::options("sec=krb5");
    let _emptied = Emptied(DIRECTORY);
    export("of-user", (1000, 1000), 0o600);
    let (fixture, running, inside) = start("/", "nfsvers=4.1,sec=krb5");
    assert_eq!(inside.get(USER, "cat of-user"), "of-user");
    assert_makes(&inside, USER, "by-user");
    // No other user has a ticket.
    assert_eq!(inside.run(MEMBER, "ls").stdout, b"");
    assert_stops_clean(running, &fixture);
}
