//! Permissions: podfs calls the NFS server with the identity of the caller.

use std::fs::{self, File};
use std::io;
use std::os::unix::fs::{MetadataExt, PermissionsExt, chown};
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Command, Output};

use crate::mounted::{Mounted, Shown};
use crate::nfs_rig::Ganesha;
use crate::nfs_rig::ganesha::{Access, Export, Setup, Squash};

/// Runs a shell command as a user.
fn run(uid: u32, groups: &[u32], command: &str, place: &Path) -> Output {
    let (groups, gid) = (groups.to_vec(), groups[0]);
    let mut shell = Command::new("sh");
    shell.args(["-c", command, "sh"]).arg(place);
    // SAFETY: the closure makes system calls only, with numbers and with memory that belongs to it.
    unsafe {
        shell.pre_exec(move || {
            let is_set =
                libc::setgroups(groups.len(), groups.as_ptr()) == 0 && libc::setgid(gid) == 0 && libc::setuid(uid) == 0;
            if is_set { Ok(()) } else { Err(io::Error::last_os_error()) }
        });
    }
    shell.output().expect("a shell")
}

/// The export of a server at a path, writable for all users.
fn shown(server: &Ganesha) -> Shown {
    let shown = Mounted::new(server).shown();
    fs::set_permissions(server.exported(), fs::Permissions::from_mode(0o777)).expect("set");
    shown
}

#[test]
fn a_new_file_belongs_to_its_caller() {
    let server = Ganesha::start();
    let shown = shown(&server);
    let output = run(1234, &[4321, 5000], "mkdir $1/directory && echo x > $1/file", shown.path());
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    for name in ["directory", "file"] {
        let created = fs::metadata(server.exported().join(name)).expect("there");
        assert_eq!((created.uid(), created.gid()), (1234, 4321));
    }
}

#[test]
fn supplementary_groups_decide_too() {
    let server = Ganesha::start();
    let shown = shown(&server);
    let file = server.exported().join("file");
    fs::write(&file, "content").expect("written");
    chown(&file, Some(0), Some(3000)).expect("set");
    fs::set_permissions(&file, fs::Permissions::from_mode(0o640)).expect("set");
    assert!(run(1234, &[4321, 3000], "cat $1/file", shown.path()).status.success());
    assert!(!run(1234, &[4321], "cat $1/file", shown.path()).status.success());
    // `AUTH_SYS` allows sixteen groups; podfs sends no more.
    let many: Vec<u32> = (3000..3040).collect();
    assert!(run(1234, &many, "cat $1/file", shown.path()).status.success());
}

#[test]
fn an_open_file_stays_usable_when_its_mode_changes() {
    let server = Ganesha::start();
    let shown = shown(&server);
    let command = "exec 3> $1/file; echo one >&3; chmod 400 $1/file; echo two >&3; cat $1/file";
    let output = run(1234, &[4321], command, shown.path());
    assert_eq!(String::from_utf8_lossy(&output.stdout), "one\ntwo\n", "{}", String::from_utf8_lossy(&output.stderr));
}

#[test]
fn root_may_do_what_the_server_lets_it() {
    let exports = vec![Export { squash: Squash::Root, ..Export::named("/export") }];
    let server = Ganesha::with(Setup { exports, ..Setup::default() });
    let secret = server.exported().join("secret");
    fs::write(&secret, "content").expect("written");
    fs::set_permissions(&secret, fs::Permissions::from_mode(0o600)).expect("set");
    let shown = shown(&server);
    let error = File::open(shown.path().join("secret")).expect_err("the server squashes root");
    assert_eq!(error.raw_os_error(), Some(libc::EACCES));
    fs::write(shown.path().join("own"), "content").expect("written");
    assert_ne!(fs::metadata(server.exported().join("own")).expect("there").uid(), 0);
    assert_eq!(fs::read_to_string(shown.path().join("own")).expect("read"), "content");
}

#[test]
fn changes_of_a_read_only_export_fail() {
    let server = Ganesha::start();
    fs::write(server.exported().join("file"), "content").expect("written");
    let mounted = Mounted::with(&server, |options| options.read_only = true);
    let refused = |error: io::Error| assert_eq!(error.raw_os_error(), Some(libc::EROFS));
    refused(File::create(mounted.at("new")).expect_err("refused"));
    refused(File::options().write(true).open(mounted.at("file")).expect_err("refused"));
    refused(fs::remove_file(mounted.at("file")).expect_err("refused"));
    refused(fs::create_dir(mounted.at("directory")).expect_err("refused"));
    assert_eq!(fs::read_to_string(mounted.at("file")).expect("read"), "content");
    let exports = vec![Export { access: Access::ReadOnly, ..Export::named("/export") }];
    let server = Ganesha::with(Setup { exports, ..Setup::default() });
    let mounted = Mounted::new(&server);
    refused(File::create(mounted.at("new")).expect_err("the server refuses"));
}
