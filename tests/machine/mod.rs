//! Debian's Linux in a virtual machine, for tests with another kernel.
//!
//! `tests/run` fetches the kernels and QEMU; without them, the tests are skipped with a message ([`Machine::find_or_skip`]). A
//! guest consists of programs and kernel modules, runs one script, and switches itself off. It is ten times slower than the
//! host, and tests nothing of real hardware.
//!
//! | module | owns |
//! |---|---|
//! | `qemu` | the kernel and QEMU: finds, boots and ends them |
//! | `tree` | the initial files of the guest |
//! | `modules` | kernel modules and their dependencies |
//! | [`nfs`] | the kernel's NFS server and client in the guest |
//! | [`kerberos`] | a Kerberos realm in the guest |
//! | [`tls`] | TLS for NFS in the guest |
#![allow(dead_code, reason = "each test program uses its part")]

pub mod kerberos;
mod modules;
pub mod nfs;
mod qemu;
pub mod tls;
mod tree;

use std::env::current_exe;
use std::io::{Write, stderr};
use std::path::Path;
use std::process::Command;

use tempfile::TempDir;

use crate::common::turn::Turn;

pub use qemu::{Linux, Machine};
use tree::Tree;

/// The first program that the kernel runs.
const INIT: &str = include_str!("init");

/// The prefix of the last line of a report.
const RESULT: &str = "RESULT ";

/// A guest that has not been booted yet.
pub struct Guest<'a> {
    machine: &'a Machine,
    tree: Tree,
    /// The names of the kernel modules, in the order in which the guest loads them.
    modules: Vec<String>,
    network: bool,
}

/// The outcome of the script of a guest.
pub struct GuestOutcome {
    /// The output of the script.
    pub report: String,
    /// The script's exit code; `None` if the guest did not finish it.
    pub code: Option<i32>,
    /// The last lines of the console.
    pub console: String,
}

impl Machine {
    /// The machine with this kernel. Without it, prints that the test is skipped.
    pub fn find_or_skip(linux: Linux, test: &str) -> Option<Self> {
        Self::find(linux).inspect_err(|missing| skipped(test, missing)).ok()
    }
}

/// Prints that a test is skipped. This bypasses the test harness, which captures the output of `eprintln!` and shows it only if
/// the test fails.
pub fn skipped(test: &str, missing: &str) {
    let _ = writeln!(stderr(), "skipped: {test}: {missing}; tests/run fetches it");
}

impl<'a> Guest<'a> {
    /// A guest with a shell and the usual file systems.
    pub fn new(machine: &'a Machine) -> Self {
        let tree = Tree::default();
        for directory in ["/dev", "/etc", "/modules", "/new-root", "/proc", "/run", "/sys", "/tmp"] {
            tree.directory(Path::new(directory));
        }
        tree.copy(&machine.busybox, "/bin/busybox");
        tree.write("/init", INIT, 0o755);
        Self { machine, tree, modules: Vec::new(), network: false }
    }

    /// Makes the guest load a kernel module and its dependencies.
    pub fn module(&mut self, name: &str) {
        modules::add(&self.machine.modules, name, &mut self.modules);
    }

    /// Gives the guest a network, in which the host's 127.0.0.1 has the address 10.0.2.2.
    pub fn network(&mut self) {
        self.network = true;
        ["virtio_pci", "virtio_net"].iter().for_each(|module| self.module(module));
    }

    /// Adds a program with its libraries.
    pub fn program(&mut self, from: &Path, to: &str) {
        self.tree.program(from, to, None);
    }

    /// Adds a program with its libraries, which it takes from `unpacked` if they are there.
    pub fn unpacked_program(&mut self, from: &Path, to: &str, unpacked: &Path) {
        self.tree.program(from, to, Some(unpacked));
    }

    /// Adds this test program as `/tests`, so that the guest can run its ignored tests.
    pub fn test_program(&mut self) {
        self.program(&current_exe().expect("the path of this program"), "/tests");
    }

    pub fn directory(&mut self, path: &Path) {
        self.tree.directory(path);
    }

    pub fn copy(&mut self, from: &Path, to: &str) {
        self.tree.copy(from, to);
    }

    pub fn write(&mut self, to: &str, text: &str, mode: u32) {
        self.tree.write(to, text, mode);
    }

    /// Boots the guest, which runs a shell script, and waits until the guest has switched itself off.
    pub fn run(self, script: &str) -> GuestOutcome {
        self.tree.write("/script", script, 0o644);
        for (position, name) in self.modules.iter().enumerate() {
            let file = modules::find(&self.machine.modules, name).expect("`module` has found it before");
            self.tree.copy(&file, &format!("/modules/{position:02}-{name}.ko"));
        }
        let _turn = Turn::of_guest();
        let directory = TempDir::with_prefix("podfs-test-").expect("a directory");
        let initrd = directory.path().join("initrd");
        self.tree.pack(&self.machine.busybox, &initrd);
        let (output, console) = self.machine.boot(&initrd, &directory.path().join("console"), self.network);
        let (report, code) = match output.rsplit_once(RESULT) {
            Some((report, code)) => (report.to_owned(), code.trim().parse().ok()),
            None => (output, None),
        };
        GuestOutcome { report, code, console }
    }
}

impl GuestOutcome {
    /// Panics unless each of the tests of [`tests_of_the_guest`] has passed.
    #[track_caller]
    pub fn assert_all_passed(&self, module: &str) {
        self.assert_all_passed_but(module, &[]);
    }

    /// As [`Self::assert_all_passed`], without the tests whose names begin with one of `skipped`.
    #[track_caller]
    pub fn assert_all_passed_but(&self, module: &str, skipped: &[&str]) {
        let mut tests = tests_of_the_guest(module);
        tests.retain(|test| !skipped.iter().any(|skipped| test.starts_with(skipped)));
        let outcomes: Vec<_> = tests.iter().map(|test| (test, self.outcome(test))).collect();
        outcomes.iter().for_each(|(test, outcome)| println!("{test}: {outcome}"));
        let failing = outcomes.iter().filter(|(_, outcome)| *outcome != "ok").count();
        let Self { report, console, .. } = self;
        assert_eq!(failing, 0, "tests that fail in the guest; its report:\n{report}\nits console:\n{console}");
    }

    /// The outcome of a test in the report: `ok`, `FAILED`, or `no outcome`.
    fn outcome(&self, test: &str) -> &str {
        let start = format!("test {test} ... ");
        let outcome = self.report.lines().find_map(|line| line.strip_prefix(&*start)).map(str::trim_end);
        outcome.filter(|outcome| !outcome.is_empty()).unwrap_or("no outcome")
    }
}

/// The names of the ignored tests of a module, which only the guest runs.
fn tests_of_the_guest(module: &str) -> Vec<String> {
    let mut list = Command::new(current_exe().expect("the path of this program"));
    let list = list.args([module, "--list", "--ignored", "--format", "terse"]).output().expect("this program runs");
    let list = String::from_utf8(list.stdout).expect("text");
    let tests: Vec<_> = list.lines().filter_map(|line| line.strip_suffix(": test")).map(str::to_owned).collect();
    assert!(!tests.is_empty(), "no test of {module} is for the guest");
    tests
}
