//! The virtual machine: its kernel and QEMU are found, booted without acceleration, and ended.

use std::env::{join_paths, split_paths, var_os};
use std::fs;
use std::io::Read;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::channel;
use std::thread;
use std::time::Duration;

use tempfile::TempDir;

use crate::initramfs;

/// How long the guest may run; it takes half a minute on a busy machine.
const PATIENCE: Duration = Duration::from_secs(300);

/// Lines of the console that are worth showing.
const TAIL: usize = 60;

const QEMU: &str = "qemu-system-x86_64";

/// What is needed to boot.
pub struct Machine {
    qemu: PathBuf,
    /// Where packages are unpacked.
    packages: PathBuf,
    kernel: PathBuf,
    pub fuse_module: PathBuf,
    pub busybox: PathBuf,
}

/// What a guest leaves behind.
pub struct Ended {
    /// What the tests print.
    pub report: String,
    /// The end of what the kernel prints.
    pub console: String,
}

impl Machine {
    /// What `tests/run` has unpacked beside the build.
    ///
    /// # Errors
    /// What is missing.
    pub fn find() -> Result<Self, String> {
        let target = Path::new(env!("CARGO_TARGET_TMPDIR")).parent().expect("it is in the target directory");
        let packages = target.join("guest");
        let missing = |what: &str| format!("there is no {what} in {}", packages.display());
        let kernel = newest(&packages.join("boot"), "vmlinuz-6.1.").ok_or_else(|| missing("Linux 6.1"))?;
        let modules = newest(&packages.join("lib/modules"), "6.1.").ok_or_else(|| missing("module of Linux 6.1"))?;
        let fuse_module = modules.join("kernel/fs/fuse/fuse.ko");
        let busybox = packages.join("bin/busybox");
        if !busybox.exists() {
            return Err(missing("busybox"));
        }
        let qemu = qemu(&packages).ok_or_else(|| format!("there is no {QEMU}"))?;
        Ok(Self { qemu, packages, kernel, fuse_module, busybox })
    }

    /// Runs the guest until it switches itself off.
    pub fn boot(&self) -> Ended {
        let directory = TempDir::with_prefix("podfs-test-").expect("a directory");
        let (initrd, console) = (directory.path().join("initrd"), directory.path().join("console"));
        initramfs::build(self, &initrd);
        let mut command = Command::new(&self.qemu);
        // Nested KVM hangs on some hosts. Two CPUs are enough for races.
        command.args(["-accel", "tcg,thread=multi", "-cpu", "qemu64,+rdrand", "-smp", "2", "-m", "1G"]);
        command.args(["-M", "pc", "-nodefaults", "-display", "none", "-no-reboot"]);
        command.arg("-kernel").arg(&self.kernel).arg("-initrd").arg(&initrd);
        command.args(["-append", "console=ttyS0 quiet panic=-1 rdinit=/init"]);
        command.arg("-serial").arg(format!("file:{}", console.display())).args(["-serial", "stdio"]);
        self.add_unpacked(&mut command);
        let report = Guest::start(&mut command).report();
        let console = fs::read(&console).unwrap_or_default();
        Ended { report, console: tail(&String::from_utf8_lossy(&console)) }
    }

    /// An unpacked QEMU has its libraries and firmware beside it.
    fn add_unpacked(&self, command: &mut Command) {
        if !self.qemu.starts_with(&self.packages) {
            return;
        }
        let libraries = ["usr/lib/x86_64-linux-gnu", "lib/x86_64-linux-gnu"].map(|path| self.packages.join(path));
        command.env("LD_LIBRARY_PATH", join_paths(libraries).expect("paths without colons"));
        for firmware in ["usr/share/qemu", "usr/share/seabios"] {
            command.arg("-L").arg(self.packages.join(firmware));
        }
    }
}

impl Ended {
    /// `ok`, `FAILED`, or that there was none.
    pub fn outcome(&self, test: &str) -> &str {
        let start = format!("test {test} ... ");
        let outcome = self.report.lines().find_map(|line| line.strip_prefix(&*start)).map(str::trim_end);
        outcome.filter(|outcome| !outcome.is_empty()).unwrap_or("no outcome")
    }
}

/// A running QEMU, killed at the end.
struct Guest(Child);

impl Guest {
    fn start(command: &mut Command) -> Self {
        Self(command.stdin(Stdio::null()).stdout(Stdio::piped()).spawn().expect("QEMU starts"))
    }

    /// All that comes until it ends, or until patience does.
    fn report(mut self) -> String {
        let mut output = self.0.stdout.take().expect("a pipe");
        let (end, ended) = channel();
        let reader = thread::spawn(move || {
            let mut report = Vec::new();
            let read = output.read_to_end(&mut report);
            let _ = end.send(());
            read.map(|_| report)
        });
        let in_time = ended.recv_timeout(PATIENCE).is_ok();
        drop(self);
        let report = reader.join().expect("it does not panic").expect("QEMU's output");
        let late = if in_time { "" } else { "\nthe guest did not end by itself\n" };
        // The serial line ends lines with both characters.
        String::from_utf8_lossy(&report).replace('\r', "") + late
    }
}

impl Drop for Guest {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// The one that is unpacked, or else the one that is installed.
fn qemu(packages: &Path) -> Option<PathBuf> {
    let installed = var_os("PATH").map(|path| split_paths(&path).collect::<Vec<_>>()).unwrap_or_default();
    let mut places = [packages.join("usr/bin")].into_iter().chain(installed).map(|directory| directory.join(QEMU));
    places.find(|program| program.exists())
}

/// The last of the directory's entries that begin like this.
fn newest(directory: &Path, prefix: &str) -> Option<PathBuf> {
    let entries = fs::read_dir(directory).ok()?.flatten();
    entries.filter(|entry| entry.file_name().to_string_lossy().starts_with(prefix)).map(|entry| entry.path()).max()
}

fn tail(text: &str) -> String {
    let lines: Vec<_> = text.lines().collect();
    lines[lines.len().saturating_sub(TAIL)..].join("\n")
}
