//! Permissions: podfs calls the NFS server with the identity of the caller.

use std::fs::{self, File};
use std::io;
use std::net::SocketAddr;
use std::os::unix::fs::{MetadataExt, PermissionsExt, chown};
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Command, Output};

use crate::common::eventually;
use crate::mounted::{Mounted, Serves, Shown, options};
use crate::nfs_rig::ganesha::{Access, Export, Setup, Squash};
use crate::nfs_rig::{Ganesha, Proxy};

/// A server behind a proxy, which counts calls.
struct Proxied {
    proxy: Proxy,
    mountd: SocketAddr,
}

impl Serves for Proxied {
    fn addresses(&self) -> (SocketAddr, SocketAddr) {
        (self.proxy.address(), self.mountd)
    }
}

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

/// Runs a shell command as a user with a group of the same number, and checks that the command succeeds.
#[track_caller]
fn may(uid: u32, command: &str, place: &Path) {
    let output = run(uid, &[uid], command, place);
    assert!(output.status.success(), "{uid}: {command}: {}", String::from_utf8_lossy(&output.stderr));
}

/// Runs a shell command as a user, and checks that it fails for want of a permission.
#[track_caller]
fn may_not(uid: u32, command: &str, place: &Path) {
    let output = run(uid, &[uid], command, place);
    let error = String::from_utf8_lossy(&output.stderr);
    assert!(!output.status.success() && error.contains("Permission denied"), "{uid}: {command}: {error}");
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
fn users_of_an_export_that_squashes_everybody_may_do_what_the_server_lets_them() {
    let exports = vec![Export { squash: Squash::Everybody, anonymous: (65534, 65534), ..Export::named("/export") }];
    let server = Ganesha::with(Setup { exports, ..Setup::default() });
    // A directory in the root shows that an unknown user is its owner to the server. The root itself is for everybody.
    let exported = &server.exported();
    fs::set_permissions(exported, fs::Permissions::from_mode(0o777)).expect("set");
    fs::create_dir(exported.join("there")).expect("made");
    chown(exported.join("there"), Some(65534), Some(65534)).expect("given");
    let shown = Mounted::new(&server).shown();
    fs::remove_dir(exported.join("there")).expect("removed");
    for uid in [1234, 0] {
        for command in [
            "mkdir $1/own && echo one > $1/own/file && echo two >> $1/own/file && grep -q two $1/own/file",
            "umask 077; echo secret > $1/own/secret && cat $1/own/secret && mkdir $1/own/private && echo x > $1/own/private/x",
            "test -w $1/own && test -w $1/own/file && test -r $1/own/secret && test -x $1/own && ! test -x $1/own/file",
            "cd $1/own/private && cat x && ls -l && mv x y && ln -s y z && cat z && chmod 600 y && touch y",
            "cp -r $1/own $1/copy && diff -r $1/own $1/copy",
            "cd $1/own && export HOME=$PWD GIT_CONFIG_COUNT=1 GIT_CONFIG_KEY_0=safe.directory GIT_CONFIG_VALUE_0='*' && git init -q && git add file && git -c user.name=a -c user.email=b commit -qm a && git fsck",
            "printf '#!/bin/sh\nexit 0\n' > $1/own/program && chmod 700 $1/own/program && $1/own/program",
            "rm -r $1/own $1/copy",
        ] {
            may(uid, command, shown.path());
        }
    }
    assert_eq!(fs::read_dir(server.exported()).expect("listed").count(), 0);
}

#[test]
fn a_user_cannot_use_names_that_another_one_has_cached_below_a_private_directory() {
    const OWNER: u32 = 1000;
    const OTHER: u32 = 2000;
    let server = Ganesha::start();
    let shown = shown(&server);
    let uses = [
        "stat $1/private/file",
        "cat $1/private/file",
        "stat $1/private/absent",
        "ls $1/private",
        "cd $1/private || { echo Permission denied >&2; false; }",
        "stat $1/private/below/file",
        "echo more >> $1/private/file",
        "chmod 600 $1/private/file",
        "mv $1/private/file $1/moved",
        "rm $1/private/file",
        "$1/private/program",
        "test -e $1/private/file || { echo Permission denied >&2; false; }",
    ];
    may(OWNER, "mkdir -m 700 $1/private && mkdir $1/private/below", shown.path());
    may(OWNER, "for name in file below/file program; do echo content > $1/private/$name; done", shown.path());
    may(OWNER, "chmod 666 $1/private/file $1/private/below/file; chmod 755 $1/private/program", shown.path());
    for _ in 0..2 {
        may(OWNER, "stat $1/private/below/file && cat $1/private/file && ls -l $1/private/below", shown.path());
        may(OWNER, "! stat $1/private/absent", shown.path());
        uses.iter().for_each(|command| may_not(OTHER, command, shown.path()));
    }
    // The same names in a directory that is open for a while. The kernel caches them for all users.
    may(OWNER, "chmod 755 $1/private", shown.path());
    may(OTHER, "cat $1/private/file && stat $1/private/below/file", shown.path());
    may(OWNER, "chmod 700 $1/private", shown.path());
    uses.iter().for_each(|command| may_not(OTHER, command, shown.path()));
    may(OWNER, "cat $1/private/file", shown.path());
}

#[test]
fn an_export_in_which_users_differ_is_not_taken_for_one_that_squashes_them() {
    for squash in [Squash::Nobody, Squash::Root] {
        let exports = vec![Export { squash, ..Export::named("/export") }];
        let server = Ganesha::with(Setup { exports, ..Setup::default() });
        for (name, uid, mode) in [("a", 65534, 0o755), ("b", 1000, 0o700), ("c", 0, 0o755), ("d", 1001, 0o777)] {
            fs::create_dir(server.exported().join(name)).expect("made");
            fs::set_permissions(server.exported().join(name), fs::Permissions::from_mode(mode)).expect("set");
            chown(server.exported().join(name), Some(uid), Some(uid)).expect("given");
        }
        assert!(!options(&server).one_user);
    }
}

#[test]
fn a_user_whom_the_server_refuses_a_name_does_not_disturb_those_who_use_it() {
    let server = Ganesha::start();
    let shown = shown(&server);
    may(1000, "mkdir -p $1/private/below && chmod 700 $1/private", shown.path());
    // The owner works there, and another file system is mounted there.
    let below = shown.path().join("private/below");
    let nested = below.join("nested");
    may(1000, "mkdir $1/private/below/nested", shown.path());
    nix::mount::mount(Some("none"), &nested, Some("tmpfs"), nix::mount::MsFlags::empty(), None::<&str>)
        .expect("mounted");
    let fifo = "cd $1/private/below && touch $1/ready && while [ ! -e $1/go ]; do sleep 0.01; done; /bin/pwd";
    let place = shown.path().to_owned();
    let owner = std::thread::spawn(move || run(1000, &[1000], fifo, &place));
    eventually("the owner is there", || server.exported().join("ready").exists());
    may_not(2000, "stat $1/private/below", shown.path());
    may_not(2000, "stat $1/private/below/nested", shown.path());
    fs::write(shown.path().join("go"), "").expect("written");
    let output = owner.join().expect("no panic");
    let is_mounted = fs::read_to_string("/proc/self/mountinfo").expect("a table").contains(&*nested.to_string_lossy());
    let _ = nix::mount::umount2(&nested, nix::mount::MntFlags::MNT_DETACH);
    assert!(output.status.success() && is_mounted, "{output:?} {is_mounted}");
}

#[test]
fn names_below_a_private_directory_need_no_call_while_the_kernel_knows_them() {
    let server = Ganesha::start();
    let proxied = Proxied { proxy: Proxy::start(server.address()), mountd: server.mount_address() };
    let shown = Mounted::new(&proxied).shown();
    fs::set_permissions(server.exported(), fs::Permissions::from_mode(0o777)).expect("set");
    may(1000, "mkdir -m 700 $1/private && echo content > $1/private/file", shown.path());
    let stat = || may(1000, "for i in 1 2 3 4 5 6 7 8 9 10; do test -f $1/private/file || exit 1; done", shown.path());
    stat();
    proxied.proxy.forget();
    stat();
    // The rights of the user are valid for some seconds, and may end meanwhile.
    let calls: Vec<_> = proxied.proxy.traffic().calls.iter().map(|call| call.procedure).collect();
    assert!(calls.len() <= 4, "{calls:?}");
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
