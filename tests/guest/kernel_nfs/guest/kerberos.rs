//! Kerberos: each security flavour at an export that accepts only this flavour, the ticket that the kernel uses for a caller,
//! and the errors without a ticket.

use std::fs::{self, Permissions};
use std::net::TcpStream;
use std::os::unix::fs::{MetadataExt, PermissionsExt, chown};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use super::refused::{wait_long, wait_ready_long};
use super::{DIRECTORY, Emptied, ExportedWith, assert_stops_clean, backend, exported, fixture_at, volume_path};
use crate::common::caller::{Caller, in_thread};
use crate::common::eventually;
use crate::common::outcome::finish;
use crate::machine::kerberos::{PRIVATE, PRIVATE_PORT, SERVER, USER_KEYTAB};

const ALICE: Caller = Caller::new(1000);
/// A user that the realm does not know.
const BOB: Caller = Caller::new(1001);
/// The id that the server gives to unknown callers, such as the root user of the node.
const NOBODY: u32 = 65_534;

/// A running rpc.gssd, which gets tickets for the kernel. Dropping it kills rpc.gssd.
pub(super) struct Gssd(Child);

impl Gssd {
    pub(super) fn start(keytab: &str) -> Self {
        let mut gssd = Command::new("/usr/sbin/rpc.gssd");
        let gssd = Self(gssd.args(["-f", "-k", keytab]).stderr(Stdio::null()).spawn().expect("rpc.gssd"));
        let descriptors = PathBuf::from(format!("/proc/{}/fd", gssd.0.id()));
        eventually("rpc.gssd waits for requests of the kernel", || {
            let open = fs::read_dir(&descriptors).into_iter().flatten().flatten();
            open.filter_map(|entry| fs::read_link(entry.path()).ok()).any(|file| file.ends_with("clntXX/gssd"))
        });
        gssd
    }
}

impl Drop for Gssd {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// The keytab with the key of the node.
pub(super) const KEYTAB: &str = "/etc/krb5.keytab";

/// A ticket of alice in the directory in which rpc.gssd looks for tickets, until this is dropped.
pub(super) struct Ticket;

const TICKET: &str = "/tmp/krb5cc_1000";

impl Ticket {
    pub(super) fn of_alice() -> Self {
        let ticket = Self;
        let outcome = finish(Command::new("kinit").args(["-k", "-t", USER_KEYTAB, "-c", TICKET, "alice"]));
        assert_eq!(outcome.code, Some(0), "{}", outcome.stderr);
        chown(TICKET, Some(ALICE.uid), Some(ALICE.gid)).expect("given");
        ticket
    }
}

impl Drop for Ticket {
    fn drop(&mut self) {
        let _ = fs::remove_file(TICKET);
    }
}

/// Waits until the kernel has no NFS mount.
fn assert_nothing_mounted() {
    eventually("the kernel has no NFS mount", || {
        let volumes = fs::read_to_string("/proc/fs/nfsfs/volumes").expect("the kernel's client is there");
        // The first line has the titles of the columns.
        volumes.lines().count() <= 1
    });
}

#[test]
#[ignore = "runs in the guest"]
fn a_claim_is_served_with_each_flavour() {
    let _gssd = Gssd::start(KEYTAB);
    let _ticket = Ticket::of_alice();
    eventually("the second server listens", || TcpStream::connect(("127.0.0.1", PRIVATE_PORT)).is_ok());
    for (flavor, options) in [
        ("krb5", "nfsvers=4.1,sec=krb5".to_owned()),
        ("krb5", "sec=krb5".to_owned()),
        ("krb5i", "nfsvers=4.2,sec=krb5i".to_owned()),
        ("krb5p", format!("nfsvers=4.1,sec=krb5p,port={PRIVATE_PORT}")),
    ] {
        // The second server accepts krb5p only, without a further option.
        let _strict = (flavor != "krb5p").then(|| ExportedWith::options(&format!("sec={flavor}")));
        let (path, directory) = if flavor == "krb5p" { (PRIVATE, PRIVATE) } else { ("/", DIRECTORY) };
        let _emptied = Emptied(directory);
        let [of_alice, of_server] = ["of-alice", "of-server"].map(|name| Path::new(directory).join(name));
        fs::write(of_server, &options).expect("written");

        let fixture = fixture_at(SERVER, path, &options);
        let running = fixture.run();
        assert_eq!(backend(&fixture), "kernel", "{options}");
        let volume = volume_path(&running);
        let bytes: Vec<u8> = (0..300_000_u32).map(|index| (index % 251) as u8).collect();
        ALICE.run(&volume, || {
            assert_eq!(fs::read_to_string("of-server").expect("read"), options);
            fs::write("of-alice", &bytes).expect("written");
            assert_eq!(fs::metadata("of-alice").expect("there").uid(), ALICE.uid, "{options}");
            assert!(fs::read("of-alice").expect("read") == bytes, "{options}");
        });
        assert!(fs::read(&of_alice).expect("there") == bytes, "{options}");
        assert_eq!(fs::metadata(of_alice).expect("there").uid(), ALICE.uid, "{options}");
        assert_stops_clean(running, &fixture);
    }
    assert_nothing_mounted();
}

#[test]
#[ignore = "runs in the guest"]
fn a_user_without_a_ticket_gets_eacces_and_root_uses_the_nodes_key() {
    let _gssd = Gssd::start(KEYTAB);
    let _ticket = Ticket::of_alice();
    // Without Kerberos, bob could read the public file, and root could do everything.
    let _lenient = ExportedWith::options("sec=sys:krb5,no_root_squash");
    let _emptied = Emptied(DIRECTORY);
    for (name, mode) in [("public", 0o644), ("private", 0o600)] {
        let file = exported(name);
        fs::write(&file, "of alice").expect("written");
        fs::set_permissions(&file, Permissions::from_mode(mode)).expect("a mode");
        chown(file, Some(ALICE.uid), Some(ALICE.gid)).expect("given");
    }

    let fixture = fixture_at(SERVER, "/", "nfsvers=4.1,sec=krb5");
    let running = fixture.run();
    let volume = volume_path(&running);
    let read = |name: &str| fs::read_to_string(name).map_err(|error| error.raw_os_error());
    let write = |name: &str| fs::write(name, "new").map_err(|error| error.raw_os_error());
    let content = || Ok("of alice".to_owned());
    let denied = Some(libc::EACCES);
    ALICE.run(&volume, || assert_eq!((read("public"), read("private")), (content(), content())));
    // bob gets nothing, although the node's kernel has the data in its cache: alice has read it.
    BOB.run(&volume, || {
        assert_eq!((read("public"), read("private"), write("of-bob")), (Err(denied), Err(denied), Err(denied)));
        assert_eq!(fs::read_dir(".").map(drop).map_err(|error| error.raw_os_error()), Err(denied));
    });
    assert!(!exported("of-bob").exists());
    in_thread(&volume, || {
        assert_eq!((read("public"), read("private"), write("of-root")), (content(), Err(denied), Ok(())));
    });
    assert_eq!(fs::metadata(exported("of-root")).expect("there").uid(), NOBODY);
    assert_stops_clean(running, &fixture);
}

#[test]
#[ignore = "runs in the guest"]
fn podfs_names_what_kerberos_lacks_and_waits_for_it() {
    let _strict = ExportedWith::options("sec=krb5:krb5i");
    let fixture = fixture_at(SERVER, "/", "nfsvers=4.1,sec=krb5");
    let mut running = fixture.start();
    wait_long(
        &running,
        "nfs.podfs.test:/: Kerberos needs rpc.gssd on this node and the kernel's module rpcsec_gss_krb5; ",
    );
    assert_nothing_mounted();
    let without_key = Gssd::start("/nowhere");
    wait_long(
        &running,
        "nfs.podfs.test:/: this node has no Kerberos ticket for NFS server nfs.podfs.test, or is not let in ",
    );
    assert_nothing_mounted();
    drop(without_key);
    let _gssd = Gssd::start(KEYTAB);
    wait_ready_long(&mut running);
    assert_stops_clean(running, &fixture);
    assert_nothing_mounted();
}

#[test]
#[ignore = "runs in the guest"]
fn an_export_is_never_mounted_with_less_than_it_asks_for() {
    let _gssd = Gssd::start(KEYTAB);
    let _strict = ExportedWith::options("sec=krb5i");
    for (options, sentence) in [
        ("nfsvers=4.1,sec=sys", "nfs.podfs.test:/: NFS server nfs.podfs.test does not let this node mount it; "),
        (
            "nfsvers=4.1,sec=krb5",
            "nfs.podfs.test:/: this node has no Kerberos ticket for NFS server nfs.podfs.test, or is not ",
        ),
    ] {
        let fixture = fixture_at(SERVER, "/", options);
        let mut running = fixture.start();
        wait_long(&running, sentence);
        assert_eq!(running.stop().code(), Some(0), "{}", running.log());
        fixture.assert_nothing_left();
    }
    assert_nothing_mounted();
}
