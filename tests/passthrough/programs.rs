//! Programs that use many features of a file system, such as databases, Git and tar, work through a mount.

use std::ffi::OsStr;
use std::fs::{self, File, Permissions};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{FileExt, PermissionsExt, chown, symlink};
use std::os::unix::net::UnixListener;
use std::path::Path;
use std::process::{Child, Command, Output, Stdio};

use nix::sys::stat::{Mode, SFlag, makedev, mknod};
use rustix::fs::{XattrFlags, lsetxattr};
use tempfile::TempDir;

use crate::common::passthrough::{Mounted, disk_directory};
use crate::common::twins::snapshot;

/// Runs a command. Panics if it fails.
#[track_caller]
fn run(command: &mut Command) -> Output {
    let output = command.output().unwrap_or_else(|error| panic!("{command:?}: {error}"));
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{command:?}:\n{}{errors}", String::from_utf8_lossy(&output.stdout));
    output
}

#[test]
fn fio_reads_back_what_it_wrote() {
    let jobs: [&[&str]; 5] = [
        &["--rw=write", "--bs=1m", "--ioengine=psync"],
        &["--rw=randwrite", "--bs=4k", "--ioengine=psync", "--norandommap"],
        &["--rw=randrw", "--bsrange=512-64k", "--ioengine=psync", "--numjobs=2"],
        &["--rw=randwrite", "--bs=4k", "--ioengine=mmap"],
        &["--rw=randwrite", "--bs=4k", "--ioengine=psync", "--direct=1"],
    ];
    let mounted = Mounted::new();
    for (number, job) in jobs.into_iter().enumerate() {
        let mut fio = Command::new("fio");
        fio.args(["--verify=crc32c", "--verify_fatal=1", "--size=32m", "--randseed=7", "--fallocate=none"]);
        fio.arg(format!("--name=job{number}")).arg(format!("--directory={}", mounted.path().display())).args(job);
        run(fio.current_dir(mounted.source()));
    }
}

#[test]
fn two_pods_write_to_one_sqlite_database_in_wal_mode() {
    const ROWS: usize = 200;
    let first = Mounted::new();
    let second = first.second();
    let sqlite = |mounted: &Mounted| {
        let mut command = Command::new("sqlite3");
        command.args(["-bail", "-cmd", ".timeout 60000"]).arg(mounted.path().join("data.db"));
        command
    };
    let schema = "PRAGMA journal_mode=WAL; CREATE TABLE rows (writer INTEGER, number INTEGER);";
    assert_eq!(String::from_utf8_lossy(&run(sqlite(&first).arg(schema)).stdout).trim(), "wal");

    let statements = |writer: usize| {
        let inserts =
            (0..ROWS).map(|row| format!("BEGIN IMMEDIATE; INSERT INTO rows VALUES ({writer}, {row}); COMMIT;\n"));
        inserts.collect::<String>() + "PRAGMA wal_checkpoint;\n"
    };
    let writers = [&first, &second, &first, &second].into_iter().enumerate();
    let writers: Vec<Child> = writers
        .map(|(writer, mounted)| {
            let mut command = sqlite(mounted);
            command
                .arg(statements(writer))
                .stdout(Stdio::null())
                .stderr(Stdio::piped())
                .spawn()
                .expect("sqlite3 starts")
        })
        .collect();
    for writer in writers {
        let output = writer.wait_with_output().expect("a child");
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    }
    let queries = "PRAGMA integrity_check; SELECT count(*), count(DISTINCT writer * 1000 + number) FROM rows;";
    let expected = format!("ok\n{0}|{0}\n", 4 * ROWS);
    for mounted in [&first, &second] {
        assert_eq!(String::from_utf8_lossy(&run(sqlite(mounted).arg(queries)).stdout), expected);
    }
}

#[test]
fn git_clones_changes_and_finds_everything_in_order() {
    let mounted = Mounted::new();
    let upstream = disk_directory();
    let git = |directory: &Path, arguments: &[&str]| {
        let identity = ["-c", "user.name=Test", "-c", "user.email=test@example.org", "-c", "init.defaultBranch=main"];
        let mut command = Command::new("git");
        command.env("GIT_CONFIG_GLOBAL", "/dev/null").env("GIT_CONFIG_SYSTEM", "/dev/null");
        String::from_utf8_lossy(&run(command.args(identity).args(arguments).current_dir(directory)).stdout).into_owned()
    };
    git(upstream.path(), &["init", "--quiet"]);
    for number in 0..200 {
        let directory = upstream.path().join(format!("directory{}", number % 10));
        fs::create_dir_all(&directory).expect("a directory");
        fs::write(directory.join(format!("file{number}")), format!("{number}\n").repeat(number * 10)).expect("written");
    }
    symlink("directory0/file0", upstream.path().join("link")).expect("a link");
    git(upstream.path(), &["add", "."]);
    git(upstream.path(), &["commit", "--quiet", "--message", "one"]);

    let from = upstream.path().to_str().expect("text");
    git(mounted.path(), &["clone", "--quiet", "--no-local", from, "clone"]);
    let clone = mounted.path().join("clone");
    git(&clone, &["fsck", "--full", "--strict"]);
    assert_eq!(git(&clone, &["status", "--porcelain"]), "");
    for round in 0..5 {
        fs::write(clone.join("changed"), format!("{round}\n")).expect("written");
        git(&clone, &["add", "changed"]);
        git(&clone, &["commit", "--quiet", "--message", "more"]);
        git(&clone, &["checkout", "--quiet", "-b", &format!("branch{round}")]);
    }
    git(&clone, &["gc", "--quiet"]);
    git(&clone, &["push", "--quiet", "origin", "branch4"]);
    // The host has the same repository in the source of the mount.
    let in_source = mounted.source().join("clone");
    for directory in [&*clone, &in_source, upstream.path()] {
        git(directory, &["fsck", "--full", "--strict"]);
    }
    assert_eq!(git(&in_source, &["status", "--porcelain"]), "");
    assert_eq!(git(upstream.path(), &["rev-parse", "branch4"]), git(&clone, &["rev-parse", "HEAD"]));
}

#[test]
fn a_program_is_compiled_linked_and_run() {
    let mounted = Mounted::new();
    let root = mounted.path();
    let modules: Vec<_> = (0..20).map(|number| format!("module{number}")).collect();
    for (number, module) in modules.iter().enumerate() {
        fs::write(root.join(format!("{module}.c")), format!("int {module}(void) {{ return {number}; }}\n"))
            .expect("written");
    }
    let declarations: String = modules.iter().map(|module| format!("int {module}(void);\n")).collect();
    let calls: Vec<_> = modules.iter().map(|module| format!("{module}()")).collect();
    let main = format!("{declarations}int main(void) {{ return {} == 190 ? 0 : 1; }}\n", calls.join(" + "));
    fs::write(root.join("main.c"), main).expect("written");
    let makefile = "objects = $(patsubst %.c,%.o,$(wildcard *.c))\n\
                    program: library.a main.o\n\tgcc -o $@ main.o library.a\n\
                    library.a: $(filter-out main.o,$(objects))\n\tar rcs $@ $^\n\
                    %.o: %.c\n\tgcc -c -O1 -g -o $@ $<\n";
    fs::write(root.join("Makefile"), makefile).expect("written");
    let make = |arguments: &[&str]| {
        let output = run(Command::new("make").arg("-j4").args(arguments).current_dir(root));
        String::from_utf8_lossy(&output.stdout).into_owned()
    };
    make(&[]);
    run(&mut Command::new(root.join("program")));
    run(&mut Command::new(mounted.source().join("program")));
    // make compares the times of files: it builds again only what depends on a changed file.
    assert!(make(&[]).contains("up to date"), "nothing changed");
    fs::write(root.join("module3.c"), "int module3(void) { return 3; }\n").expect("written");
    let again = make(&[]);
    assert!(again.contains("module3.c") && !again.contains("module4.c"), "{again}");
}

/// Creates a tree with each kind of file and attribute that tar can store.
fn make_tree(root: &Path) {
    let path = |name: &str| root.join(name);
    fs::create_dir_all(path("directory/deep")).expect("directories");
    fs::write(path("directory/file"), "content").expect("written");
    fs::write(path("empty"), "").expect("written");
    fs::hard_link(path("directory/file"), path("directory/deep/hard link")).expect("a link");
    fs::hard_link(path("directory/file"), path("another")).expect("a link");
    symlink("../absent", path("directory/link")).expect("a link");
    let name: Vec<u8> = (1..=255).map(|byte| if byte == b'/' { 0xfe } else { byte }).collect();
    fs::write(root.join(OsStr::from_bytes(&name)), "a name of 255 bytes").expect("written");
    fs::write(path("large"), (0..300_000_u32).flat_map(u32::to_le_bytes).collect::<Vec<_>>()).expect("written");
    let sparse = File::create(path("sparse")).expect("created");
    sparse.write_all_at(b"in the middle", 50 << 20).expect("written");
    sparse.set_len(5 << 30).expect("sized");

    for (name, kind, device) in [("null", SFlag::S_IFCHR, makedev(1, 3)), ("loop", SFlag::S_IFBLK, makedev(7, 9))] {
        mknod(&path(name), kind, Mode::from_bits_truncate(0o640), device).expect("a device");
    }
    nix::unistd::mkfifo(&path("fifo"), Mode::from_bits_truncate(0o604)).expect("a FIFO");
    lsetxattr(path("directory/file"), "user.comment", b"bytes \0 \xff", XattrFlags::empty()).expect("set");
    lsetxattr(path("directory"), "trusted.kept", b"yes", XattrFlags::empty()).expect("set");
    run(Command::new("setcap").arg("cap_net_raw+ep").arg(path("empty")));
    run(Command::new("setfacl").args(["-m", "u:4711:rwx,g:300:r"]).arg(path("large")));
    run(Command::new("setfacl").args(["-d", "-m", "u:4712:rx"]).arg(path("directory/deep")));
    for (name, uid, gid) in [("directory", 4711, 300), ("large", 4712, 0), ("null", 0, 6)] {
        chown(path(name), Some(uid), Some(gid)).expect("root may");
    }
    chown(path("another"), Some(1), Some(2)).expect("root may");
    for (name, mode) in [("directory", 0o3751), ("another", 0o4711)] {
        fs::set_permissions(path(name), Permissions::from_mode(mode)).expect("set");
    }
}

const TAR: [&str; 5] = ["--xattrs", "--xattrs-include=*", "--acls", "--sparse", "--numeric-owner"];

fn pack(directory: &Path, archive: &Path) {
    // The archive must not contain times that reading changes, nor tar's PID, which is in the other formats of sparse
    // files.
    let mut tar = Command::new("tar");
    tar.args(TAR).args(["--sort=name", "--format=posix", "--pax-option=delete=atime,delete=ctime"]);
    tar.args(["--sparse-version=0.0", "--create"]);
    run(tar.arg("--file").arg(archive).arg("--directory").arg(directory).arg("."));
}

fn unpack(archive: &Path, directory: &Path) {
    let mut tar = Command::new("tar");
    tar.args(TAR).args(["--same-permissions", "--same-owner", "--extract"]);
    run(tar.arg("--file").arg(archive).arg("--directory").arg(directory));
}

#[track_caller]
fn assert_same_bytes(one: &Path, other: &Path) {
    run(Command::new("cmp").arg(one).arg(other));
}

#[test]
fn tar_packs_the_same_bytes_through_the_mount_as_on_the_disk() {
    let (mounted, archives) = (Mounted::new(), TempDir::new().expect("a directory"));
    make_tree(mounted.source());
    let _socket = UnixListener::bind(mounted.source().join("socket")).expect("a socket");
    let (native, through) = (archives.path().join("native.tar"), archives.path().join("through.tar"));
    pack(mounted.source(), &native);
    pack(mounted.path(), &through);
    assert_same_bytes(&native, &through);
}

#[test]
fn tar_unpacks_the_same_tree_through_the_mount_as_on_the_disk() {
    let (tree, archives) = (disk_directory(), TempDir::new().expect("a directory"));
    make_tree(tree.path());
    let archive = archives.path().join("tree.tar");
    pack(tree.path(), &archive);
    let (native, mounted) = (disk_directory(), Mounted::new());
    unpack(&archive, native.path());
    unpack(&archive, mounted.path());
    let again = ["native", "source", "mount"].map(|name| archives.path().join(name));
    for (directory, archive) in [native.path(), mounted.source(), mounted.path()].into_iter().zip(&again) {
        pack(directory, archive);
        assert_same_bytes(&again[0], archive);
    }
}

#[test]
fn a_tree_made_through_the_mount_is_the_tree_made_on_the_disk() {
    let (native, mounted) = (disk_directory(), Mounted::new());
    for directory in [native.path(), mounted.path()] {
        make_tree(directory);
        // `snapshot` would read all 5 GiB of this file. The tests with tar compare its content.
        fs::remove_file(directory.join("sparse")).expect("removed");
    }
    let expected = snapshot(native.path());
    assert_eq!(snapshot(mounted.source()), expected);
    assert_eq!(snapshot(mounted.path()), expected);
}
