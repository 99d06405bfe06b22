//! Mount options of NFS volumes, in the words of nfs(5) and mount(8).
//!
//! podfs honours an option, ignores it for a stated reason, or refuses it by its name. It ignores none that would make the
//! volume more secure or more durable.

mod error;
mod parse;

use std::time::Duration;

pub use podfs_fuse::nfs::options::{LocalLocks, LookupCache, RetryPolicy};

pub use error::{BackendError, NfsOptionsError, OptionProblem};

/// The parsed mount options of a volume, with the defaults of Linux (nfs(5)).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NfsOptions {
    /// The NFS client; podfs chooses if there is none.
    pub backend: Option<Backend>,
    /// The version of the protocol; podfs chooses if there is none.
    pub version: Option<NfsVersion>,
    /// The authentication of callers.
    pub security: Security,
    /// Whether the connection is encrypted (`xprtsec`, Linux 6.5).
    pub transport_security: TransportSecurity,
    /// The server's port; that of the protocol if there is none.
    pub port: Option<u16>,
    /// The port of its MOUNT service; without one, podfs asks the server's portmapper.
    pub mount_port: Option<u16>,
    /// The host of the MOUNT service, if it is not the server.
    pub mount_host: Option<String>,
    /// The result of a call that the server does not answer.
    pub retry_policy: RetryPolicy,
    /// The time that podfs waits for an answer before it sends a call again.
    pub timeout: Duration,
    /// The number of repetitions after which a call counts as not answered.
    pub retransmissions: u32,
    /// Most bytes of one READ; as many as the server likes if there is none.
    pub rsize: Option<u32>,
    /// Most bytes of one WRITE; as many as the server likes if there is none.
    pub wsize: Option<u32>,
    /// The number of connections to the server, 1 to 16.
    pub connections: u8,
    /// Whether the connections come from a port below 1024.
    pub reserved_port: bool,
    /// Locks that hold on this node only.
    pub local_locks: LocalLocks,
    /// The cache times of attributes.
    pub attributes: AttributeCache,
    /// The results of lookups that are cached.
    pub lookup_cache: LookupCache,
    /// Whether an opened file shows the writes of clients that have closed it (close-to-open consistency).
    pub close_to_open: bool,
    /// Whether each write is on the server's disk before it is answered.
    pub sync: bool,
    /// Whether a listing also fetches the attributes of the entries (READDIRPLUS).
    pub readdirplus: bool,
    /// Whether containers can only read the volume.
    pub read_only: bool,
    /// Whether setuid has no effect: programs from the volume run as their callers.
    pub no_suid: bool,
    /// Whether device files in the volume cannot be opened.
    pub no_dev: bool,
    /// Whether no program may be run from the volume.
    pub no_exec: bool,
    /// The SELinux label of all its files.
    pub selinux_context: Option<String>,
    /// The options for the kernel's client, in order: without those of mount(8), and without those that podfs handles itself.
    pub words: Vec<String>,
}

/// The NFS client of a volume.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Backend {
    /// The kernel's client.
    Kernel,
    /// podfs's client, in a process without privileges.
    User,
}

/// A version of NFS.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NfsVersion {
    /// RFC 1813.
    V3,
    /// Version 4 with this minor version; without one, the highest that client and server support.
    V4(Option<u8>),
}

/// The authentication of callers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Security {
    /// The client sends the caller's uid and gids, and the server trusts it (AUTH_SYS).
    Sys,
    /// No authentication: to the server, all callers are anonymous (AUTH_NONE).
    None,
    /// Another value of `sec=`: one or more flavours separated by `:`, such as `krb5p`.
    Flavors(String),
}

/// Whether a connection is encrypted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TransportSecurity {
    /// No encryption.
    None,
    /// TLS, with a certificate of the server.
    Tls,
    /// TLS, with certificates of server and client.
    MutualTls,
}

/// The shortest and longest time for which attributes are cached (`nfs(5)`, `acregmin` and others).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AttributeCache {
    /// Shortest time for files.
    pub file_min: Duration,
    /// Longest time for files.
    pub file_max: Duration,
    /// Shortest time for directories.
    pub directory_min: Duration,
    /// Longest time for directories.
    pub directory_max: Duration,
}

impl Default for NfsOptions {
    fn default() -> Self {
        let seconds = Duration::from_secs;
        Self {
            backend: None,
            version: None,
            security: Security::Sys,
            transport_security: TransportSecurity::None,
            port: None,
            mount_port: None,
            mount_host: None,
            retry_policy: RetryPolicy::default(),
            timeout: seconds(60),
            retransmissions: 2,
            rsize: None,
            wsize: None,
            connections: 1,
            reserved_port: true,
            local_locks: LocalLocks::default(),
            attributes: AttributeCache {
                file_min: seconds(3),
                file_max: seconds(60),
                directory_min: seconds(30),
                directory_max: seconds(60),
            },
            lookup_cache: LookupCache::default(),
            close_to_open: true,
            sync: false,
            readdirplus: true,
            read_only: false,
            no_suid: false,
            no_dev: false,
            no_exec: false,
            selinux_context: None,
            words: Vec::new(),
        }
    }
}

impl NfsOptions {
    /// Parses options as a PersistentVolume has them. Each may be a list with commas.
    ///
    /// # Errors
    /// The first option that podfs does not know or cannot honour, or two that contradict each other.
    pub fn parse<'a>(options: impl IntoIterator<Item = &'a str>) -> Result<NfsOptions, NfsOptionsError> {
        parse::parse(options)
    }

    /// Chooses the NFS client. `wish` is the client that the pod's annotation names; it overrides the mount options.
    ///
    /// # Errors
    /// When an option needs the kernel's client and the volume names podfs's, or when the kernel has no NFS client and the volume
    /// needs it.
    pub fn choose_backend(&self, wish: Option<Backend>, kernel_has_nfs: bool) -> Result<Backend, BackendError> {
        let needs_kernel = self.needs_kernel();
        match (wish.or(self.backend), needs_kernel) {
            (Some(Backend::User), Some(option)) => Err(BackendError::NeedsOtherThanAskedFor { option }),
            (Some(Backend::User) | None, None) => Ok(Backend::User),
            (Some(Backend::Kernel), _) if !kernel_has_nfs => Err(BackendError::AskedForAbsent),
            (None, Some(option)) if !kernel_has_nfs => Err(BackendError::NeedsAbsent { option }),
            (Some(Backend::Kernel), _) | (None, Some(_)) => Ok(Backend::Kernel),
        }
    }

    /// The first option that only the kernel's client supports.
    fn needs_kernel(&self) -> Option<String> {
        match (&self.version, &self.security, self.transport_security) {
            (Some(NfsVersion::V4(None)), ..) => Some("nfsvers=4".to_owned()),
            (Some(NfsVersion::V4(Some(minor))), ..) => Some(format!("nfsvers=4.{minor}")),
            (_, Security::Flavors(flavors), _) => Some(format!("sec={flavors}")),
            (.., TransportSecurity::Tls) => Some("xprtsec=tls".to_owned()),
            (.., TransportSecurity::MutualTls) => Some("xprtsec=mtls".to_owned()),
            _ => None,
        }
    }
}

impl Backend {
    /// The client that a mount option or an annotation names; none for `auto`.
    ///
    /// # Errors
    /// For any other word.
    pub fn parse(word: &str) -> Result<Option<Backend>, &'static str> {
        match word {
            "auto" => Ok(None),
            "kernel" => Ok(Some(Backend::Kernel)),
            "user" => Ok(Some(Backend::User)),
            _ => Err("must be auto, kernel or user"),
        }
    }
}
