//! The kernel and QEMU: this module finds them, boots a guest without acceleration, and ends it.

use std::env::{join_paths, split_paths, var_os};
use std::fs;
use std::io::Read;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::channel;
use std::thread;
use std::time::Duration;

/// The kernels of Debian that guests run.
#[derive(Clone, Copy, Debug)]
pub enum Linux {
    /// Linux 6.1, the oldest kernel of the tests: it lacks the features that came later.
    V6_1,
    /// Linux 6.12, which has TLS for NFS and ID-mapped mounts of FUSE.
    V6_12,
}

/// The longest run of a guest. The guest with the most tests takes eight minutes beside another guest and other test programs.
const TIMEOUT: Duration = Duration::from_secs(1200);

/// The number of lines of the console that a failure shows.
const TAIL: usize = 60;

const QEMU: &str = "qemu-system-x86_64";

/// The files that a boot needs.
pub struct Machine {
    qemu: PathBuf,
    /// The directory with QEMU's unpacked package.
    packages: PathBuf,
    kernel: PathBuf,
    pub(super) modules: PathBuf,
    pub(super) busybox: PathBuf,
}

impl Machine {
    /// The files that `tests/run` has unpacked into the target directory, with this kernel.
    ///
    /// # Errors
    /// The name of a missing file.
    pub fn find(linux: Linux) -> Result<Self, String> {
        let target = Path::new(env!("CARGO_TARGET_TMPDIR")).parent().expect("it is in the target directory");
        let packages = target.join("guest");
        let kernels = target.join(match linux {
            Linux::V6_1 => "linux-6.1",
            Linux::V6_12 => "linux-6.12",
        });
        let missing = |name: &str, place: &Path| format!("there is no {name} in {}", place.display());
        let kernel = only(&kernels.join("boot"), "vmlinuz-").ok_or_else(|| missing("kernel", &kernels))?;
        let modules = only(&kernels.join("modules"), "").ok_or_else(|| missing("module", &kernels))?;
        let busybox = packages.join("bin/busybox");
        if !busybox.exists() {
            return Err(missing("busybox", &packages));
        }
        let qemu = qemu(&packages).ok_or_else(|| format!("there is no {QEMU}"))?;
        Ok(Self { qemu, packages, kernel, modules, busybox })
    }

    /// Runs a guest until it switches itself off. Returns the output of its second serial line, and the end of its console.
    pub(super) fn boot(&self, initrd: &Path, console: &Path, network: bool) -> (String, String) {
        let mut command = Command::new(&self.qemu);
        // Nested KVM hangs on some hosts. Two CPUs are enough for races. QEMU 7.2 corrupts registers in the instruction
        // cmpxchg16b; a kernel on a CPU with this instruction crashes in `kmalloc`, so the CPU has no `cx16`.
        command.args(["-accel", "tcg,thread=multi", "-cpu", "qemu64,+rdrand,-cx16", "-smp", "2", "-m", "1G"]);
        command.args(["-M", "pc", "-nodefaults", "-display", "none", "-no-reboot"]);
        command.arg("-kernel").arg(&self.kernel).arg("-initrd").arg(initrd);
        // QEMU translates the code of a program again at each other address, so programs always have the same addresses.
        command.args(["-append", "console=ttyS0 quiet panic=-1 norandmaps rdinit=/init"]);
        command.arg("-serial").arg(format!("file:{}", console.display())).args(["-serial", "stdio"]);
        if network {
            // The guest does not boot from the network, so the card needs no firmware.
            command.args(["-netdev", "user,id=net", "-device", "virtio-net-pci,netdev=net,romfile="]);
        }
        self.add_unpacked(&mut command);
        let report = Running::start(&mut command).report();
        let console = fs::read(console).unwrap_or_default();
        (report, tail(&String::from_utf8_lossy(&console)))
    }

    /// Names the directories of the libraries and firmware of an unpacked QEMU. (An installed QEMU finds its own.)
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

/// A running QEMU. Dropping it kills QEMU.
struct Running(Child);

impl Running {
    fn start(command: &mut Command) -> Self {
        Self(command.stdin(Stdio::null()).stdout(Stdio::piped()).spawn().expect("QEMU starts"))
    }

    /// QEMU's output until QEMU ends, or until [`TIMEOUT`].
    fn report(mut self) -> String {
        let mut output = self.0.stdout.take().expect("a pipe");
        let (end_sender, end) = channel();
        let reader = thread::spawn(move || {
            let mut report = Vec::new();
            let read = output.read_to_end(&mut report);
            let _ = end_sender.send(());
            read.map(|_| report)
        });
        let in_time = end.recv_timeout(TIMEOUT).is_ok();
        drop(self);
        let report = reader.join().expect("the thread does not panic").expect("QEMU's output");
        let late = if in_time { "" } else { "\nthe guest did not end by itself\n" };
        // The serial line ends lines with a carriage return and a newline.
        String::from_utf8_lossy(&report).replace('\r', "") + late
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// The QEMU that `tests/run` has unpacked, or else the installed one.
fn qemu(packages: &Path) -> Option<PathBuf> {
    let installed = var_os("PATH").map(|path| split_paths(&path).collect::<Vec<_>>()).unwrap_or_default();
    let mut places = [packages.join("usr/bin")].into_iter().chain(installed).map(|directory| directory.join(QEMU));
    places.find(|program| program.exists())
}

/// The directory's only entry whose name begins with `prefix`.
fn only(directory: &Path, prefix: &str) -> Option<PathBuf> {
    let mut entries = fs::read_dir(directory).ok()?.flatten();
    entries.find(|entry| entry.file_name().to_string_lossy().starts_with(prefix)).map(|entry| entry.path())
}

fn tail(text: &str) -> String {
    let lines: Vec<_> = text.lines().collect();
    lines[lines.len().saturating_sub(TAIL)..].join("\n")
}
