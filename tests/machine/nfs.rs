//! The kernel's NFS server and client in the guest.
//!
//! The server (knfsd) exports `/export`, a tmpfs, to all clients: as `/export` in version 3, as the root in version 4. Its
//! programs are Debian's, among them rpcbind, on port 111.

use std::path::{Path, PathBuf};

use super::Guest;

/// The program that starts the server. The guest's script runs it.
pub const START_SERVER: &str = "/nfs-server";

/// The port of the server's MOUNT service.
pub const MOUNT_PORT: u16 = 20_048;

const SERVER: &str = include_str!("nfs-server");

/// The files in which the programs look up names and exports.
const FILES: [(&str, &str); 6] = [
    ("/etc/exports", "/export *(rw,no_root_squash,no_subtree_check,insecure,fsid=0)\n"),
    (
        "/etc/netconfig",
        "udp tpi_clts v inet udp - -\ntcp tpi_cots_ord v inet tcp - -\nlocal tpi_cots_ord - loopback - - -\n",
    ),
    (
        "/etc/nsswitch.conf",
        "passwd: files\ngroup: files\nhosts: files\nservices: files\nprotocols: files\nrpc: files\n",
    ),
    ("/etc/services", "sunrpc 111/tcp portmapper\nsunrpc 111/udp portmapper\nnfs 2049/tcp\n"),
    ("/etc/protocols", "tcp 6 TCP\nudp 17 UDP\n"),
    ("/etc/hosts", "127.0.0.1 localhost\n"),
];

/// Adds the modules with which the guest's kernel can mount NFS exports.
pub fn add_client(guest: &mut Guest) {
    ["nfsv3", "nfsv4"].iter().for_each(|module| guest.module(module));
}

/// Adds the programs, modules and files of the server to the guest.
///
/// # Errors
/// The name of a missing program.
pub fn add_server(guest: &mut Guest) -> Result<(), String> {
    guest.module("nfsd");
    for program in ["/usr/sbin/rpc.nfsd", "/usr/sbin/rpc.mountd", "/usr/sbin/exportfs", "/sbin/rpcbind"] {
        let from = find(program).ok_or_else(|| format!("there is no {program}"))?;
        guest.program(&from, program);
    }
    FILES.iter().for_each(|(path, text)| guest.write(path, text, 0o644));
    guest.write("/etc/passwd", "root:x:0:0::/:/bin/sh\n_rpc:x:101:65534::/run/rpcbind:/bin/false\n", 0o644);
    guest.write("/etc/group", "root:x:0:\nnogroup:x:65534:\n", 0o644);
    guest.write(START_SERVER, SERVER, 0o755);
    Ok(())
}

/// The program that `tests/run` has unpacked into the target directory, or else the installed program.
fn find(program: &str) -> Option<PathBuf> {
    let target = Path::new(env!("CARGO_TARGET_TMPDIR")).parent().expect("it is in the target directory");
    let unpacked = target.join("nfs-server").join(program.trim_start_matches('/'));
    [unpacked, program.into()].into_iter().find(|place| place.exists())
}
