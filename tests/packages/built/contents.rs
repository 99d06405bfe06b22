//! The files and dependencies of each package.

use std::collections::BTreeSet;
use std::process::Command;

use crate::built::unpacked::Unpacked;
use crate::common::packages::{PROGRAMS, packages, stdout_of};

/// The files of both packages.
const COMMON: &[&str] = &[
    "/etc/podfs/podfs.toml",
    "/usr/bin/kubectl-podfs-render",
    "/usr/bin/kubectl-podfs-view",
    "/usr/bin/kubectl-podfs_render",
    "/usr/bin/kubectl-podfs_view",
    "/usr/bin/podfs",
    "/usr/libexec/podfs/podfs-fuse",
    "/usr/libexec/podfs/podfs-supervisor",
    "/usr/lib/modprobe.d/podfs.conf",
    "/usr/lib/systemd/system/podfs-node.service",
    "/usr/lib/systemd/system/podfs.slice",
    "/usr/lib/systemd/system/podfs@.service",
    "/usr/lib/tmpfiles.d/podfs.conf",
    "/usr/share/bash-completion/completions/podfs",
    "/usr/share/doc/podfs/changelog.gz",
    "/usr/share/doc/podfs/examples/agent.sh",
    "/usr/share/doc/podfs/examples/objects/web-config.yaml",
    "/usr/share/doc/podfs/examples/objects/web-secret.yaml",
    "/usr/share/doc/podfs/examples/pod.yaml",
    "/usr/share/doc/podfs/examples/pods/web.yaml",
    "/usr/share/doc/podfs/examples/rbac/run.yaml",
    "/usr/share/doc/podfs/examples/single/agent.sh",
    "/usr/share/doc/podfs/rust-library.html.gz",
    "/usr/share/fish/vendor_completions.d/podfs.fish",
    "/usr/share/man/man1/kubectl-podfs-render.1.gz",
    "/usr/share/man/man1/kubectl-podfs-view.1.gz",
    "/usr/share/man/man1/kubectl-podfs_render.1.gz",
    "/usr/share/man/man1/kubectl-podfs_view.1.gz",
    "/usr/share/man/man5/podfs-pod.5.gz",
    "/usr/share/man/man5/podfs.toml.5.gz",
    "/usr/share/man/man7/podfs-agent.7.gz",
    "/usr/share/man/man8/podfs-node.8.gz",
    "/usr/share/man/man8/podfs-run.8.gz",
    "/usr/share/man/man8/podfs.8.gz",
    "/usr/share/podfs/proto/podfs/volumemanager/v1/volumemanager.proto",
];

/// Prefixes of the paths of further files: units, manuals of other commands, examples.
const FURTHER_PREFIXES: &[&str] =
    &["/usr/lib/systemd/system/podfs", "/usr/share/man/man8/podfs-", "/usr/share/doc/podfs/examples/"];

/// The files that only the .deb has.
const DEB_ONLY: &[&str] = &[
    "/usr/share/doc/podfs/changelog.Debian.gz",
    "/usr/share/doc/podfs/copyright",
    "/usr/share/lintian/overrides/podfs",
    "/usr/share/zsh/vendor-completions/_podfs",
];
/// The files that only the .rpm has.
const RPM_ONLY: &[&str] = &[
    "/usr/share/licenses/podfs/LICENSE",
    "/usr/share/licenses/podfs/copyright",
    "/usr/share/zsh/site-functions/_podfs",
];

/// The prefix of the line of a directory with the usual mode and owner.
const DIRECTORY: &str = "drwxr-xr-x root/root /";

#[test]
fn the_deb_has_all_files_and_no_others() {
    let files = files_of_deb(&packages().deb);
    assert_files(&files, DEB_ONLY);
}

#[test]
fn the_rpm_has_all_files_and_no_others() {
    assert_files(&files_of_rpm(&packages().rpm), RPM_ONLY);
}

#[test]
fn packages_of_symbols_have_nothing_else() {
    let is_symbols =
        |file: &str| file.starts_with("-rw-r--r-- root/root /usr/lib/debug/.build-id/") && file.ends_with(".debug");
    let debuginfo = files_of_rpm(&packages().debuginfo);
    assert!(debuginfo.len() == PROGRAMS.len() && debuginfo.iter().all(|file| is_symbols(file)), "{debuginfo:?}");
    let mut dbgsym = files_of_deb(&packages().dbgsym);
    assert!(dbgsym.remove("lrwxrwxrwx root/root /usr/share/doc/podfs-dbgsym"), "{dbgsym:?}");
    assert_eq!(dbgsym, debuginfo);
}

#[test]
fn both_packages_have_the_same_programs() {
    let tree = Unpacked::debian();
    let digests_of_rpm = query_rpm(&packages().rpm, "[%{FILENAMES} %{FILEDIGESTS}\n]");
    for program in PROGRAMS {
        let digest_of_deb = stdout_of(Command::new("sha256sum").arg(tree.path(program)));
        let mut lines = digests_of_rpm.lines().filter_map(|line| line.strip_prefix(&format!("/{program} ")));
        assert_eq!(digest_of_deb.split(' ').next(), Some(lines.next().expect("the program")), "{program}");
    }
}

#[test]
fn the_settings_are_a_file_that_upgrades_leave_alone() {
    let conffiles = stdout_of(Command::new("dpkg-deb").arg("--info").arg(&packages().deb).arg("conffiles"));
    assert_eq!(conffiles, "/etc/podfs/podfs.toml\n");
    let configuration =
        stdout_of(Command::new("rpm").args(["--query", "--configfiles", "--package"]).arg(&packages().rpm));
    assert_eq!(configuration, "/etc/podfs/podfs.toml\n");
}

#[test]
fn the_deb_needs_the_c_library_and_no_other() {
    let field =
        |name| stdout_of(Command::new("dpkg-deb").arg("--field").arg(&packages().deb).arg(name)).trim().to_owned();
    let depends = field("Depends");
    let names: BTreeSet<_> = depends.split(", ").filter_map(|dependency| dependency.split(' ').next()).collect();
    assert_eq!(names, BTreeSet::from(["libc6", "libgcc-s1"]), "{depends}");
    assert!(depends.contains("libc6 (>= 2."), "{depends}");
    for (name, expected) in [("Package", "podfs"), ("Section", "admin"), ("Priority", "optional")] {
        assert_eq!(field(name), expected, "{name}");
    }
}

#[test]
fn the_rpm_needs_the_c_library_and_no_other() {
    let requires = stdout_of(Command::new("rpm").args(["--query", "--requires", "--package"]).arg(&packages().rpm));
    let known =
        ["/bin/sh", "config(podfs)", "ld-linux-", "libc.so.6(", "libgcc_s.so.1(", "libm.so.6(", "rpmlib(", "rtld("];
    let unknown: Vec<_> = requires.lines().filter(|line| !known.iter().any(|known| line.starts_with(known))).collect();
    assert_eq!(unknown, Vec::<&str>::new());
    assert!(requires.contains("libc.so.6(GLIBC_2."), "{requires}");
}

#[test]
fn the_rpm_runs_its_scripts_after_installing_and_around_removing() {
    let scripts = stdout_of(Command::new("rpm").args(["--query", "--scripts", "--package"]).arg(&packages().rpm));
    for script in ["postinstall scriptlet", "preuninstall scriptlet", "postuninstall scriptlet"] {
        assert!(scripts.contains(script), "no {script}:\n{scripts}");
    }
}

/// Asserts that a package has the files of both packages, those of `package_only`, and no others except further files
/// with a known prefix. A file is `MODE OWNER PATH`.
#[track_caller]
fn assert_files(files: &BTreeSet<String>, package_only: &[&str]) {
    let with_mode = |path: &str| {
        let is_program = path.starts_with("/usr/bin/") || PROGRAMS.contains(&&path[1..]);
        let mode = if is_program { "-rwxr-xr-x" } else { "-rw-r--r--" };
        format!("{mode} root/root {path}")
    };
    let mut unexpected = files.clone();
    for path in COMMON.iter().chain(package_only) {
        assert!(unexpected.remove(&with_mode(path)), "{} is not among {files:#?}", with_mode(path));
    }
    unexpected.retain(|file| !FURTHER_PREFIXES.iter().any(|prefix| file.starts_with(&with_mode(prefix))));
    assert_eq!(unexpected, BTreeSet::new());
}

/// The files of a Debian package, without the directories that have the usual mode and owner.
#[track_caller]
fn files_of_deb(package: &std::path::Path) -> BTreeSet<String> {
    let files = stdout_of(Command::new("dpkg-deb").arg("--contents").arg(package));
    let mut files: BTreeSet<_> = files
        .lines()
        .map(|line| {
            let words: Vec<_> = line.split_whitespace().collect();
            let owner = words[1].replace("0/0", "root/root");
            format!("{} {owner} {}", words[0], words[5].trim_start_matches('.'))
        })
        .collect();
    files.retain(|file| !file.starts_with(DIRECTORY));
    files
}

/// The files of an rpm, without the directories that have the usual mode and owner.
fn files_of_rpm(package: &std::path::Path) -> BTreeSet<String> {
    let files = query_rpm(package, "[%{FILEMODES:perms} %{FILEUSERNAME}/%{FILEGROUPNAME} %{FILENAMES}\n]");
    files.lines().filter(|file| !file.starts_with(DIRECTORY)).map(str::to_owned).collect()
}

fn query_rpm(package: &std::path::Path, format: &str) -> String {
    stdout_of(Command::new("rpm").args(["--query", "--queryformat", format, "--package"]).arg(package))
}
