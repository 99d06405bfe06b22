//! TLS for NFS in the guest: tlshd, which does the TLS handshakes for the kernel's client and for the kernel's server.
//!
//! This needs Linux 6.5. Debian 12 has no tlshd; the tlshd of Debian 13 runs with its own libraries. The client and the
//! server use the same certificate, which is valid for [`SERVER`] and which both trust.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use tempfile::TempDir;

use super::Guest;

/// The command that serves the handshakes of the kernel, until it is killed.
pub const TLSHD: [&str; 6] =
    ["/tlshd/ld-linux-x86-64.so.2", "--library-path", "/tlshd", "/tlshd/tlshd", "-c", "/etc/tlshd.conf"];

/// The address for which the certificate is valid.
pub const SERVER: &str = "127.0.0.1";

/// Modules that the kernel would load automatically on a machine with modprobe.
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

/// Adds tlshd, its configuration, its certificate and the kernel's modules to the guest.
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
    let certificate = certificate();
    for name in ["tls.crt", "tls.key"] {
        guest.copy(&certificate.path().join(name), &format!("/etc/{name}"));
    }
    Ok(())
}

/// The libraries that a program loads from a directory, and the dynamic loader.
fn libraries(directory: &Path, program: &Path) -> Vec<PathBuf> {
    let loader = directory.join("ld-linux-x86-64.so.2");
    let list = Command::new(&loader).arg("--library-path").arg(directory).arg("--list").arg(program).output();
    let list = String::from_utf8(list.expect("the loader runs").stdout).expect("text");
    let paths = list.split_whitespace().map(PathBuf::from).filter(|path| path.starts_with(directory));
    paths.chain([loader.clone()]).collect()
}

/// A directory with a certificate and its key.
fn certificate() -> TempDir {
    let directory = TempDir::with_prefix("podfs-test-").expect("a directory");
    let mut openssl = Command::new("openssl");
    openssl.args(["req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "7"]);
    openssl.args(["-subj", "/CN=podfs test", "-addext", &format!("subjectAltName=IP:{SERVER}")]);
    openssl.args(["-keyout", "tls.key", "-out", "tls.crt"]).current_dir(&directory);
    let status = openssl.stderr(Stdio::null()).status().expect("openssl runs");
    assert!(status.success(), "openssl has made no certificate");
    directory
}
