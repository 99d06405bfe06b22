//! The setuid and setgid bits and the capabilities of programs: files lose them through a mount as on the disk.

use std::fs::{self, File, Permissions};
use std::os::unix::fs::{FileExt, MetadataExt, OpenOptionsExt, PermissionsExt, chown};
use std::path::Path;
use std::process::Command;

use nix::sys::stat::{SFlag, mknod};
use rustix::fs::{CWD, FallocateFlags, RenameFlags, copy_file_range, fallocate, renameat_with};

use super::attributes::mode;
use crate::common::caller::{Caller, in_thread};
use crate::common::twins::{attribute_names, the_mount_does_as_the_disk};

const USER: Caller = Caller::new(4711);
const OWNER: Caller = Caller::new(4712);
const ROOT: Caller = Caller::new(0);

#[test]
fn root_keeps_setuid_and_setgid_by_writing() {
    the_mount_does_as_the_disk(|root, answers| {
        let file = root.join("file");
        fs::write(&file, "a program").expect("written");
        for (name, change) in CHANGES {
            fs::set_permissions(&file, Permissions::from_mode(0o6755)).expect("the mode is set");
            answers.note(name, change(&file));
            answers.see("mode", mode(&file));
        }
    });
}

#[test]
fn chown_without_ids_does_as_on_the_disk() {
    const MEMBER: Caller = Caller::with_groups(4711, &[100]);
    the_mount_does_as_the_disk(|root, answers| {
        for bits in [0o644, 0o4755, 0o4700, 0o2755, 0o2767, 0o6766] {
            for (who, caller) in [("a user", USER), ("the owner", OWNER), ("a member of the group", MEMBER)] {
                // Made without an open file: while one is open for writing, the kernel sends the same request before each write.
                let name = format!("{who} {bits:o}");
                let path = root.join(&name);
                mknod(&path, SFlag::S_IFREG, nix::sys::stat::Mode::S_IRWXU, 0).expect("a file");
                chown(&path, Some(4712), Some(100)).expect("root may");
                fs::set_permissions(&path, Permissions::from_mode(bits)).expect("the mode is set");
                caller.run(root, || answers.note(who, chown(&name, None, None)));
                answers.see("mode", mode(&path));
                answers.note("root", chown(&path, None, None));
                answers.see("mode", mode(&path));
            }
        }
        let directory = root.join("directory");
        fs::create_dir(&directory).expect("made");
        fs::set_permissions(&directory, Permissions::from_mode(0o6777)).expect("the mode is set");
        USER.run(root, || answers.note("of a directory", chown("directory", None, None)));
        answers.see("mode", mode(&directory));
    });
}

#[test]
fn chown_in_a_user_namespace_does_as_on_the_disk() {
    the_mount_does_as_the_disk(|root, answers| {
        for (bits, ids) in [(0o4755, "-1, -1"), (0o2755, "-1, -1"), (0o2644, "0, 0")] {
            let path = root.join("file");
            let _none_at_first = fs::remove_file(&path);
            mknod(&path, SFlag::S_IFREG, nix::sys::stat::Mode::S_IRWXU, 0).expect("a file");
            chown(&path, Some(4711), Some(4711)).expect("root may");
            fs::set_permissions(&path, Permissions::from_mode(bits)).expect("the mode is set");
            let mut command = Command::new("setpriv");
            command.args(["--reuid=4711", "--regid=4711", "--clear-groups", "unshare", "--user", "--map-root-user"]);
            command.args(["python3", "-c", &format!("import os; os.chown('file', {ids})")]).current_dir(root);
            answers.see("it succeeds", command.status().expect("setpriv runs").success());
            answers.see("mode", mode(&path));
        }
    });
}

#[test]
fn setgid_goes_with_the_old_group_of_a_file_if_its_owner_is_not_in_it() {
    the_mount_does_as_the_disk(|root, answers| {
        for bits in [0o2767, 0o6644, 0o2755, 0o644] {
            for group in [100, 300] {
                let path = root.join("file");
                fs::write(&path, "a program").expect("written");
                chown(&path, Some(4711), Some(group)).expect("root may");
                fs::set_permissions(&path, Permissions::from_mode(bits)).expect("the mode is set");
                let owner = Caller::with_groups(4711, &[100, 200]);
                owner.run(root, || answers.note("to another group", chown("file", None, Some(200))));
                answers.see("mode", mode(&path));
            }
        }
    });
}

type Change = fn(&Path) -> std::io::Result<()>;
/// The ways to change a file. Each may remove the setuid and setgid bits of the file.
const CHANGES: [(&str, Change); 9] = [
    ("write", |path| File::options().write(true).open(path)?.write_all_at(b"x", 0)),
    ("write nothing", |path| File::options().write(true).open(path)?.write_at(b"", 0).map(drop)),
    ("append", |path| File::options().append(true).open(path)?.write_at(b"x", 0).map(drop)),
    ("truncate", |path| Ok(nix::unistd::truncate(path, 1)?)),
    ("ftruncate", |path| File::options().write(true).open(path)?.set_len(2)),
    ("O_TRUNC", |path| File::create(path).map(drop)),
    ("O_TRUNC for reading", |path| File::options().read(true).custom_flags(libc::O_TRUNC).open(path).map(drop)),
    ("fallocate", |path| {
        let file = File::options().write(true).open(path)?;
        Ok(fallocate(file, FallocateFlags::empty(), 0, 8192)?)
    }),
    ("copy", |path| {
        let file = File::options().read(true).write(true).open(path)?;
        Ok(copy_file_range(&file, Some(&mut 0), &file, Some(&mut 10), 5).map(drop)?)
    }),
];

/// The owner, who is in the group of the files, changes files with this mode in every way.
#[track_caller]
fn changed_by_the_owner(bits: u32) {
    const MEMBER: Caller = Caller::with_groups(4711, &[100]);
    the_mount_does_as_the_disk(|root, answers| {
        for (name, change) in CHANGES {
            fs::write(root.join(name), "a program").expect("written");
            chown(root.join(name), Some(MEMBER.uid), Some(100)).expect("root may");
            fs::set_permissions(root.join(name), Permissions::from_mode(bits)).expect("the mode is set");
            MEMBER.run(root, || answers.note(name, change(Path::new(name))));
            answers.see("mode", mode(&root.join(name)));
        }
    });
}

#[test]
fn setgid_without_group_execute_stays_when_a_member_of_the_group_changes_the_file() {
    changed_by_the_owner(0o2644);
    changed_by_the_owner(0o6644);
    changed_by_the_owner(0o6654);
}

/// A user that is not the owner changes files with this mode in every way.
#[track_caller]
fn changed_by_other_user(bits: u32) {
    the_mount_does_as_the_disk(|root, answers| {
        for (name, change) in CHANGES {
            fs::write(root.join(name), "a program").expect("written");
            fs::set_permissions(root.join(name), Permissions::from_mode(bits)).expect("the mode is set");
            USER.run(root, || answers.note(name, change(Path::new(name))));
            answers.see("mode", mode(&root.join(name)));
        }
    });
}

#[test]
fn setuid_and_setgid_go_when_the_program_changes() {
    changed_by_other_user(0o6777);
    changed_by_other_user(0o4777);
    changed_by_other_user(0o2777);
}

#[test]
fn setgid_without_group_execute_goes_too() {
    changed_by_other_user(0o2767);
    changed_by_other_user(0o6666);
}

#[test]
fn capabilities_of_a_program_go_when_it_is_written_to() {
    the_mount_does_as_the_disk(|root, answers| {
        let path = root.join("program");
        fs::write(&path, "#!/bin/sh").expect("written");
        fs::set_permissions(&path, Permissions::from_mode(0o777)).expect("the mode is set");
        let status = Command::new("setcap").arg("cap_net_raw+ep").arg(&path).status().expect("setcap runs");
        assert!(status.success());
        answers.note("there", attribute_names(&path));
        USER.run(root, || answers.note("write", fs::write("program", "other")));
        answers.note("gone", attribute_names(&path));
    });
}

/// Makes a program with this mode and with capabilities, of the user 4712. It is not open for writing.
fn make_capable(path: &Path, bits: u32) {
    mknod(path, SFlag::S_IFREG, nix::sys::stat::Mode::S_IRWXU, 0).expect("a file");
    chown(path, Some(4712), Some(4712)).expect("root may");
    fs::set_permissions(path, Permissions::from_mode(bits)).expect("the mode is set");
    let status = Command::new("setcap").arg("cap_net_raw+ep").arg(path).status().expect("setcap runs");
    assert!(status.success());
}

#[test]
fn capabilities_stay_if_a_chown_without_ids_is_refused() {
    the_mount_does_as_the_disk(|root, answers| {
        for bits in [0o755, 0o4755, 0o2755, 0o6777] {
            for (who, caller) in [("a user", USER), ("the owner", OWNER), ("root", ROOT)] {
                let name = format!("{who} {bits:o}");
                make_capable(&root.join(&name), bits);
                caller.run(root, || answers.note(&name, chown(&name, None, None)));
                answers.see("mode", mode(&root.join(&name)));
                answers.note("attributes", attribute_names(&root.join(&name)));
            }
        }
    });
}

#[test]
fn capabilities_go_with_each_change_and_root_keeps_the_bits() {
    the_mount_does_as_the_disk(|root, answers| {
        for bits in [0o755, 0o4777, 0o6777, 0o2767] {
            for (who, caller) in [("a user", USER), ("the owner", OWNER), ("root", ROOT)] {
                for (what, change) in CHANGES {
                    let name = format!("{who} {bits:o} {what}");
                    make_capable(&root.join(&name), bits);
                    caller.run(root, || answers.note(&name, change(Path::new(&name))));
                    answers.see("mode", mode(&root.join(&name)));
                    answers.note("attributes", attribute_names(&root.join(&name)));
                }
            }
        }
    });
}

#[test]
fn capabilities_are_removed_by_those_who_may() {
    the_mount_does_as_the_disk(|root, answers| {
        make_capable(&root.join("program"), 0o755);
        let remove = || rustix::fs::removexattr("program", c"security.capability");
        USER.run(root, || answers.note("a user", remove()));
        OWNER.run(root, || answers.note("the owner", remove()));
        answers.note("there", attribute_names(&root.join("program")));
        in_thread(root, || answers.note("root", remove()));
        answers.note("gone", attribute_names(&root.join("program")));
    });
}

#[test]
fn a_whiteout_belongs_to_the_caller() {
    the_mount_does_as_the_disk(|root, answers| {
        // Only the owner of a name may remove it.
        let shared = root.join("shared");
        fs::create_dir(&shared).expect("made");
        fs::set_permissions(&shared, Permissions::from_mode(0o1777)).expect("the mode is set");
        USER.run(&shared, || {
            fs::write("old", "x").expect("written");
            answers.note("rename", renameat_with(CWD, "old", CWD, "new", RenameFlags::WHITEOUT));
            let found = fs::symlink_metadata("old").expect("a whiteout");
            answers.see("whiteout", (found.uid(), found.gid(), found.mode(), found.rdev()));
            answers.note("remove", fs::remove_file("old"));
        });
    });
}
