//! A Kerberos realm in the guest: its KDC, and the programs and files with which NFS servers and the kernel's client use it.
//!
//! The realm has the user alice (1000), whose key is in [`USER_KEYTAB`], and the service of the guest's NFS servers; it does
//! not have bob (1001). The guest's host name is [`SERVER`]; its servers and its client use the same keytab.
//!
//! The kernel's NFS server cannot be used with `sec=krb5p` in Debian's 6.1.192: that kernel has the `svcauth_gss_unwrap_priv`
//! of
//! 6.3, but its `nfsd_dispatch` then sets the decoder back to the encrypted data. The server answers `GARBAGE_ARGS`, which the
//! client reports as `EIO`. So there is a second server, nfs-ganesha, which exports [`PRIVATE`] with `krb5p` alone, on port
//! [`PRIVATE_PORT`].

use std::path::{Path, PathBuf};

use super::Guest;

/// The program that creates the realm and starts its daemons and the second NFS server, but not rpc.gssd. The guest's script
/// runs it, and then starts the kernel's NFS server.
pub const START: &str = "/kerberos";

/// The host name in the principal of the NFS servers.
pub const SERVER: &str = "nfs.podfs.test";

/// The export of the second server.
pub const PRIVATE: &str = "/private";

/// The port of the second server.
pub const PRIVATE_PORT: u16 = 20_490;

/// The keytab with the key of alice.
pub const USER_KEYTAB: &str = "/etc/alice.keytab";

const SCRIPT: &str = include_str!("kerberos");

/// Modules that the kernel would load automatically on a machine with modprobe.
const MODULES: [&str; 2] = ["rpcsec_gss_krb5", "cts"];

const PROGRAMS: [&str; 8] = [
    "/usr/bin/ganesha.nfsd",
    "/usr/bin/kinit",
    "/usr/sbin/kadmin.local",
    "/usr/sbin/kdb5_util",
    "/usr/sbin/krb5kdc",
    "/usr/sbin/rpc.gssd",
    "/usr/sbin/rpc.idmapd",
    "/usr/sbin/rpc.svcgssd",
];

/// Plugins that these programs load at run time, so that `ldd` does not list them.
const PLUGINS: [&str; 4] =
    ["ganesha/libfsalvfs.so", "krb5/plugins/kdb/db2.so", "libnfsidmap/nsswitch.so", "libverto-libev.so.1"];

const LIBRARIES: &str = "/usr/lib/x86_64-linux-gnu";

const FILES: [(&str, &str); 4] = [
    (
        "/etc/krb5.conf",
        "[libdefaults]\n default_realm = PODFS.TEST\n dns_lookup_realm = false\n dns_lookup_kdc = false\n \
         dns_canonicalize_hostname = false\n rdns = false\n permitted_enctypes = aes256-cts-hmac-sha1-96\n\
         [realms]\n PODFS.TEST = {\n  kdc = 127.0.0.1\n }\n\
         [domain_realm]\n .podfs.test = PODFS.TEST\n",
    ),
    (
        "/etc/krb5kdc/kdc.conf",
        "[realms]\n PODFS.TEST = {\n  database_name = /var/lib/krb5kdc/principal\n  key_stash_file = /etc/krb5kdc/stash\n  \
         supported_enctypes = aes256-cts-hmac-sha1-96:normal\n  master_key_type = aes256-cts-hmac-sha1-96\n }\n",
    ),
    (
        "/etc/idmapd.conf",
        "[General]\nDomain = podfs.test\nLocal-Realms = PODFS.TEST\n[Mapping]\nNobody-User = nobody\nNobody-Group = nogroup\n\
         [Translation]\nMethod = nsswitch\n",
    ),
    (
        "/etc/ganesha.conf",
        "NFS_CORE_PARAM { NFS_Port = 20490; Protocols = 4; Enable_UDP = false; Enable_NLM = false; Enable_RQUOTA = false;\n \
         Plugins_Dir = \"/usr/lib/x86_64-linux-gnu/ganesha\"; }\n\
         NFSv4 { Graceless = true; RecoveryBackend = fs; RecoveryRoot = \"/var/lib/nfs/ganesha\"; }\n\
         NFS_KRB5 { Active_krb5 = true; PrincipalName = \"nfs\"; KeytabPath = \"/etc/krb5.keytab\"; CCacheDir = \"/tmp\"; }\n\
         EXPORT { Export_Id = 1; Path = \"/private\"; Pseudo = \"/private\"; Access_Type = RW; Squash = No_Root_Squash;\n \
         SecType = krb5p; Protocols = 4; Transports = TCP; FSAL { Name = VFS; } }\n",
    ),
];

/// Adds the programs, modules and files of the realm to a guest that already has the kernel's NFS server.
///
/// # Errors
/// The name of a missing program or plugin.
pub fn add(guest: &mut Guest) -> Result<(), String> {
    let plugins = PLUGINS.map(|plugin| format!("{LIBRARIES}/{plugin}"));
    let programs: Vec<_> = PROGRAMS.into_iter().chain(plugins.iter().map(String::as_str)).collect();
    // Look for all programs before the first is added: without one of them, the guest gets none.
    let find_or_report = |program: &&str| find(program).ok_or_else(|| format!("there is no {program}"));
    let sources = programs.iter().map(find_or_report).collect::<Result<Vec<_>, _>>()?;
    sources.iter().zip(&programs).for_each(|(from, program)| guest.unpacked_program(from, program, &unpacked()));
    MODULES.iter().for_each(|module| guest.module(module));
    FILES.iter().for_each(|(path, text)| guest.write(path, text, 0o644));
    guest.write(START, SCRIPT, 0o755);
    Ok(())
}

/// The program that `tests/run` has unpacked into the target directory, or else the installed program.
fn find(program: &str) -> Option<PathBuf> {
    let unpacked = unpacked().join(program.trim_start_matches('/'));
    [unpacked, program.into()].into_iter().find(|place| place.exists())
}

fn unpacked() -> PathBuf {
    let target = Path::new(env!("CARGO_TARGET_TMPDIR")).parent().expect("it is in the target directory");
    target.join("kerberos")
}
