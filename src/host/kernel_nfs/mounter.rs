//! The process that mounts one export with the kernel's NFS client.

use std::io;
use std::net::{IpAddr, SocketAddr, TcpStream};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::time::Duration;

use podfs_fuse::protocol::{receive, send};
use podfs_nfs::address::resolve;
use rustix::io::Errno;
use rustix::mount::{
    FsMountFlags, FsOpenFlags, MountAttrFlags, fsconfig_create, fsconfig_set_flag, fsconfig_set_string, fsmount, fsopen,
};
use rustix::process::Signal;
use rustix::system::uname;

use super::KernelMount;

/// The port of NFS.
const NFS_PORT: u16 = 2049;
/// How long an address of the server may take to accept a TCP connection before podfs tries the next address.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);

/// Reads a request from `socket`, mounts the requested export, and sends the mount or an error back.
///
/// # Errors
/// When the other end of the socket is closed.
pub fn answer(socket: OwnedFd) -> io::Result<()> {
    // Without the parent, which waits for the answer, the mount is of no use.
    rustix::process::set_parent_process_death_signal(Some(Signal::KILL))?;
    let socket = UnixStream::from(socket);
    let Some((export, _)) = receive::<KernelMount>(&socket)? else { return Ok(()) };
    match mount(&export) {
        Ok(mounted) => send(&socket, &Ok::<(), String>(()), &[mounted.as_fd()]),
        Err(error) => send(&socket, &Err::<(), String>(error.to_string()), &[]),
    }
}

/// Why an export is not mounted, in one sentence.
#[derive(Debug, thiserror::Error)]
enum MounterError {
    #[error("{host}: its address cannot be found: {cause}")]
    Unresolved {
        host: String,
        #[source]
        cause: io::Error,
    },
    #[error("{0} has no address")]
    NoAddress(String),
    #[error("podfs knows no version of NFS to try")]
    NoVersion,
    #[error("{sentence}")]
    Kernel {
        sentence: String,
        #[source]
        errno: Errno,
    },
}

/// Mounts the export with the first version of NFS that works.
fn mount(export: &KernelMount) -> Result<OwnedFd, MounterError> {
    let address = reachable(&addresses(&export.address.server)?, export.port.unwrap_or(NFS_PORT));
    let mount_address = export.mount_host.as_deref().map(addresses).transpose()?;
    let mount_address = mount_address.and_then(|addresses| addresses.first().copied());
    let mut best: Option<KernelMountFailure> = None;
    for version in &export.versions {
        match attempt(export, address, mount_address, version) {
            Ok(mounted) => return Ok(mounted),
            Err(failure) if failure.may_be_the_version() => {
                best = Some(best.map_or(failure.clone(), |best| best.or(failure)))
            }
            Err(failure) => return Err(failure.into_error(export)),
        }
    }
    Err(best.map_or(MounterError::NoVersion, |failure| failure.into_error(export)))
}

fn addresses(host: &str) -> Result<Vec<IpAddr>, MounterError> {
    let addresses = resolve(host).map_err(|cause| MounterError::Unresolved { host: host.to_owned(), cause })?;
    if addresses.is_empty() { Err(MounterError::NoAddress(host.to_owned())) } else { Ok(addresses) }
}

/// The first address that accepts a connection. If no address does, or if there is only one, the first address.
fn reachable(addresses: &[IpAddr], port: u16) -> IpAddr {
    let listens = |ip: &&IpAddr| TcpStream::connect_timeout(&SocketAddr::new(**ip, port), CONNECT_TIMEOUT).is_ok();
    match addresses {
        [only] => *only,
        several => *several.iter().find(listens).unwrap_or(&several[0]),
    }
}

/// Mounts with one version of the protocol.
fn attempt(
    export: &KernelMount,
    address: IpAddr,
    mount_address: Option<IpAddr>,
    version: &str,
) -> Result<OwnedFd, KernelMountFailure> {
    let failed = |errno, messages| KernelMountFailure { errno, messages, version: version.to_owned() };
    let context = fsopen("nfs", FsOpenFlags::FSOPEN_CLOEXEC).map_err(|errno| failed(errno, Vec::new()))?;
    configure(&context, export, address, mount_address, version)
        .and_then(|()| fsmount(context.as_fd(), FsMountFlags::FSMOUNT_CLOEXEC, attributes(export)))
        .map_err(|errno| failed(errno, messages(&context)))
}

/// Sets the options of the mount, and makes the superblock.
fn configure(
    context: &OwnedFd,
    export: &KernelMount,
    address: IpAddr,
    mount_address: Option<IpAddr>,
    version: &str,
) -> Result<(), Errno> {
    let context = context.as_fd();
    fsconfig_set_string(context, "source", export.address.mount_source())?;
    for word in &export.words {
        match word.split_once('=') {
            Some((key, value)) => fsconfig_set_string(context, key, value)?,
            None => fsconfig_set_flag(context, word.as_str())?,
        }
    }
    fsconfig_set_string(context, "vers", version)?;
    let tcp = if address.is_ipv6() { "tcp6" } else { "tcp" };
    if !export.has("proto") {
        fsconfig_set_string(context, "proto", tcp)?;
    }
    // With TLS and NFS version 3, Linux 6.12 chooses no protocol for the MOUNT service, and stops at a `BUG`.
    if export.is_with_tls() && !export.has("mountproto") {
        fsconfig_set_string(context, "mountproto", tcp)?;
    }
    fsconfig_set_string(context, "addr", address.to_string())?;
    if let Some(mount_address) = mount_address {
        fsconfig_set_string(context, "mountaddr", mount_address.to_string())?;
    }
    if export.read_only {
        fsconfig_set_flag(context, "ro")?;
    }
    fsconfig_create(context)
}

fn attributes(export: &KernelMount) -> MountAttrFlags {
    let wanted = [
        (export.read_only, MountAttrFlags::MOUNT_ATTR_RDONLY),
        (export.no_suid, MountAttrFlags::MOUNT_ATTR_NOSUID),
        (export.no_dev, MountAttrFlags::MOUNT_ATTR_NODEV),
        (export.no_exec, MountAttrFlags::MOUNT_ATTR_NOEXEC),
    ];
    wanted.into_iter().filter(|(wanted, _)| *wanted).map(|(_, attribute)| attribute).collect()
}

/// The kernel's messages about the mount (`fsconfig(2)`): each read returns one.
fn messages(context: &OwnedFd) -> Vec<String> {
    let mut messages = Vec::new();
    let mut line = [0; 1024];
    while let Ok(length @ 1..) = rustix::io::read(context, &mut line) {
        let text = String::from_utf8_lossy(&line[..length]).trim().to_owned();
        // The first letter is the severity.
        messages.push(text.split_once(' ').map_or(text.clone(), |(_, text)| text.to_owned()));
    }
    messages
}

/// Why the kernel did not mount.
#[derive(Clone, Debug)]
struct KernelMountFailure {
    errno: Errno,
    messages: Vec<String>,
    version: String,
}

impl KernelMountFailure {
    /// Whether another version may work: the error is one of servers that do not support the version, as for mount.nfs.
    fn may_be_the_version(&self) -> bool {
        matches!(self.errno, Errno::PROTONOSUPPORT | Errno::INVAL | Errno::NOENT | Errno::ACCESS | Errno::PERM)
    }

    /// The failure that says more about the cause. That the server does not support a version says least.
    fn or(self, later: KernelMountFailure) -> KernelMountFailure {
        if self.errno == Errno::PROTONOSUPPORT { later } else { self }
    }

    fn into_error(self, export: &KernelMount) -> MounterError {
        MounterError::Kernel { sentence: self.sentence(export), errno: self.errno }
    }

    fn sentence(&self, export: &KernelMount) -> String {
        let Self { errno, messages, version } = self;
        let server = &export.address.server;
        let problem = match *errno {
            Errno::NODEV => "this kernel has no NFS client; load the module nfs".to_owned(),
            Errno::NOENT => format!("NFS server {server} has no such export; correct the path"),
            Errno::ACCESS | Errno::PERM if export.is_with_kerberos() => format!(
                "this node has no Kerberos ticket for NFS server {server}, or is not let in with it; see what rpc.gssd \
                 says of /etc/krb5.keytab, or correct the server's exports, the path, or the mount option sec"
            ),
            Errno::ACCESS if export.is_with_tls() => format!(
                "NFS server {server} has no TLS, is not the one that its certificate names, or does not let this node \
                 mount it; see what tlshd says on both, or correct the server's exports, the path, or the mount option \
                 xprtsec"
            ),
            Errno::ACCESS => {
                format!("NFS server {server} does not let this node mount it; correct its exports, or the path")
            }
            Errno::PERM => format!(
                "NFS server {server} does not let this node mount it; correct its exports, the path, or the mount option sec"
            ),
            Errno::CONNREFUSED => format!("NFS server {server} refuses the connection; start it, or correct the port"),
            Errno::TIMEDOUT | Errno::HOSTUNREACH | Errno::NETUNREACH | Errno::HOSTDOWN => {
                format!("NFS server {server} does not answer ({errno}); see that it runs and can be reached")
            }
            Errno::PROTONOSUPPORT => format!("NFS server {server}, or this kernel, does not speak NFS {version}"),
            Errno::INVAL if messages.iter().any(|message| message.contains("'xprtsec'")) => {
                let release = uname().release().to_string_lossy().into_owned();
                format!("the mount option xprtsec needs Linux 6.5, and this node has {release}; nothing is encrypted without it")
            }
            Errno::SRCH if export.is_with_tls() => {
                "TLS needs tlshd on this node; start it (Debian: ktls-utils)".to_owned()
            }
            // For wrong options, the kernel has another message.
            Errno::INVAL
                if export.is_with_kerberos()
                    && messages.iter().all(|message| message.ends_with("Couldn't follow remote path")) =>
            {
                "Kerberos needs rpc.gssd on this node and the kernel's module rpcsec_gss_krb5; start the one, and load the other".to_owned()
            }
            Errno::INVAL => "the kernel's NFS client does not take these mount options; correct them".to_owned(),
            _ => format!("the kernel's NFS client cannot mount it: {errno}"),
        };
        if messages.is_empty() { problem } else { format!("{problem} (the kernel says: {})", messages.join("; ")) }
    }
}

#[cfg(test)]
mod tests {
    use super::super::tests::export;
    use super::*;

    fn failure(errno: Errno, version: &str) -> KernelMountFailure {
        KernelMountFailure { errno, messages: Vec::new(), version: version.to_owned() }
    }

    #[test]
    fn an_error_beyond_an_unsupported_version_is_reported() {
        let all =
            |failures: [KernelMountFailure; 2]| failures.into_iter().reduce(KernelMountFailure::or).expect("one").errno;
        assert_eq!(all([failure(Errno::PROTONOSUPPORT, "4.2"), failure(Errno::ACCESS, "3")]), Errno::ACCESS);
        assert_eq!(all([failure(Errno::NOENT, "4.2"), failure(Errno::PROTONOSUPPORT, "3")]), Errno::NOENT);
    }

    #[test]
    fn a_sentence_has_the_kernels_message() {
        let messages = vec!["nfs: Unknown parameter 'wombat'".to_owned()];
        let invalid = KernelMountFailure { messages, ..failure(Errno::INVAL, "4.1") };
        for options in ["soft", "sec=krb5p"] {
            let sentence = invalid.sentence(&export(&[options]));
            assert!(
                sentence.ends_with("correct them (the kernel says: nfs: Unknown parameter 'wombat')"),
                "{sentence}"
            );
        }
        let refused = failure(Errno::CONNREFUSED, "3").sentence(&export(&[]));
        assert!(refused.contains("nas refuses the connection; start it"), "{refused}");
    }

    #[test]
    fn a_sentence_names_what_tls_lacks() {
        for (errno, missing) in [
            (Errno::SRCH, "TLS needs tlshd on this node; start it"),
            (Errno::ACCESS, "NFS server nas has no TLS, is not "),
        ] {
            let of = |options: &str| failure(errno, "4.1").sentence(&export(&[options]));
            for options in ["xprtsec=tls", "soft,xprtsec=mtls"] {
                assert!(of(options).contains(missing), "{}", of(options));
            }
            assert!(!of("xprtsec=none").contains(missing), "{}", of("xprtsec=none"));
        }
    }

    #[test]
    fn a_sentence_names_what_kerberos_lacks() {
        for (errno, missing) in
            [(Errno::INVAL, "needs rpc.gssd on this node"), (Errno::ACCESS, "no Kerberos ticket for NFS server nas")]
        {
            let of = |options: &str| failure(errno, "4.1").sentence(&export(&[options]));
            for options in ["sec=krb5", "soft,sec=sys:krb5i"] {
                assert!(of(options).contains(missing), "{}", of(options));
            }
            assert!(!of("sec=sys").contains(missing), "{}", of("sec=sys"));
        }
    }

    #[test]
    fn the_first_address_that_accepts_a_connection_is_used() {
        let listener = std::net::TcpListener::bind("127.0.0.1:0").expect("a listener");
        let port = listener.local_addr().expect("an address").port();
        let [away, here] = ["127.0.0.2", "127.0.0.1"].map(|ip| ip.parse().expect("an address"));
        assert_eq!(reachable(&[away, here], port), here);
        drop(listener);
        assert_eq!(reachable(&[away, here], port), away);
    }
}
