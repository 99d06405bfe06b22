//! TLS for NFS in the guest: tlshd, which shakes hands for the kernel's client and for Linux' own server alike.
//!
//! Needs Linux 6.5. Debian 12 has no tlshd; that of Debian 13 runs with its own libraries. Everybody has the same
//! certificate, which is good for [`SERVER`] and which everybody trusts.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use tempfile::TempDir;

use super::Guest;

/// The command that serves the handshakes of the kernel, until it is killed.
pub const TLSHD: [&str; 6] =
    ["/tlshd/ld-linux-x86-64.so.2", "--library-path", "/tlshd", "/tlshd/tlshd", "-c", "/etc/tlshd.conf"];

/// The name that the certificate is good for.
pub const SERVER: &str = "127.0.0.1";

/// Modules that the kernel would load by itself on a machine with modprobe.
const MODULES: [&str; 3] = ["tls", "gcm", "ghash_generic"];

const CONFIGURATION: &str = "\
[authenticate.client]
x509.truststore=/etc/tls.crt
x509.certificate=/etc/tls.crt
x509.private_key=/etc/tls.key
[authenticate.server]
x509.truststore=/etc/tls.crt
x509.certificate=/etc/tls.crt
x509.private_key=/etc/tls.key
";

/// Gives the guest what TLS needs.
///
/// # Errors
/// The name of a missing program.
pub fn add(guest: &mut Guest) -> Result<(), String> {
    let target = Path::new(env!("CARGO_TARGET_TMPDIR")).parent().expect("it is in the target directory");
    let unpacked = target.join("tlshd");
    let program = unpacked.join("usr/sbin/tlshd");
    if !program.exists() {
        return Err(format!("there is no {}", program.display()));
    }
    let libraries = libraries(&unpacked.join("usr/lib/x86_64-linux-gnu"), &program);
    for file in libraries.iter().chain([&program]) {
        let name = file.file_name().expect("a name").to_string_lossy();
        guest.copy(file, &format!("/tlshd/{name}"));
    }
    MODULES.iter().for_each(|module| guest.module(module));
    guest.write("/etc/tlshd.conf", CONFIGURATION, 0o644);
    let made = certificate();
    for name in ["tls.crt", "tls.key"] {
        guest.copy(&made.path().join(name), &format!("/etc/{name}"));
    }
    Ok(())
}

/// The libraries that a program loads from a directory, and the dynamic loader.
fn libraries(directory: &Path, program: &Path) -> Vec<PathBuf> {
    let loader = directory.join("ld-linux-x86-64.so.2");
    let list = Command::new(&loader).arg("--library-path").arg(directory).arg("--list").arg(program).output();
    let list = String::from_utf8(list.expect("it lists").stdout).expect("text");
    let paths = list.split_whitespace().map(PathBuf::from).filter(|path| path.starts_with(directory));
    paths.chain([loader.clone()]).collect()
}

/// A certificate and its key.
fn certificate() -> TempDir {
    let directory = TempDir::with_prefix("podfs-test-").expect("a directory");
    let mut make = Command::new("openssl");
    make.args(["req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "7"]);
    make.args(["-subj", "/CN=podfs test", "-addext", &format!("subjectAltName=IP:{SERVER}")]);
    make.args(["-keyout", "tls.key", "-out", "tls.crt"]).current_dir(&directory);
    let made = make.stderr(Stdio::null()).status().expect("openssl runs");
    assert!(made.success(), "no certificate was made");
    directory
}
