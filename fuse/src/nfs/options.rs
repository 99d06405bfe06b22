//! The options of a served export: the result of a volume's mount options.

use std::net::SocketAddr;
use std::time::Duration;

use podfs_nfs::ExportAddress;
use podfs_nfs::export::Limits;
use podfs_nfs::rpc::{Persistence, Policy};
use podfs_nfs::v3::{Attributes, FileType};
use serde::{Deserialize, Serialize};

use crate::caller::credentials::ActAs;
use crate::label::VolumeLabel;
use crate::mount::private::PermissionCheck;

/// The options of a served export.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ExportOptions {
    /// The volume's name, for log lines.
    pub name: VolumeLabel,
    /// The export, as the volume names it.
    #[serde(flatten)]
    pub export: ExportAddress,
    /// The address of the server's NFS service.
    pub nfs: SocketAddr,
    /// The address of its MOUNT service. podfs asks it for the root again when the root's handle becomes stale.
    pub mountd: Option<SocketAddr>,
    /// The parameters for a new search for the server by its name when it is silent; none if the address cannot change.
    #[serde(default)]
    pub search: Option<PortOptions>,
    /// The root's file handle, as the MOUNT service returned it.
    pub root: Vec<u8>,
    /// The root's attributes, as podfs found them before the mount. A server process with them begins to serve a new volume without a
    /// call: meanwhile it could answer no request about another volume.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub root_attributes: Option<Attributes>,
    /// Changes fail with `EROFS` (`ro`).
    pub read_only: bool,
    /// The result of a call that the server does not answer (`hard`, `soft`, `softerr`).
    #[serde(rename = "patience")]
    pub retry_policy: RetryPolicy,
    /// The time after which podfs sends a call again, in tenths of a second (`timeo`).
    pub timeo: u32,
    /// The number of repetitions after which a call counts as not answered (`retrans`).
    pub retrans: u32,
    /// The largest READ and WRITE of the server.
    pub limits: Limits,
    /// The cached attributes and names, and the cache times.
    pub caching: Caching,
    /// Each write is on the server's disk before it is answered (`sync`, `noac`).
    pub stable: bool,
    /// Directories are listed with the attributes of their entries (`rdirplus`).
    pub with_attributes: bool,
    /// Locks that the kernel keeps for this mount alone (`local_lock`, `nolock`).
    pub local_locks: LocalLocks,
    /// The user as which podfs makes calls.
    pub callers: ActAs,
    /// The NFS server takes all users for one (`all_squash`).
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub one_user: bool,
    /// podfs reports every request on standard output.
    pub trace: bool,
}

/// The addresses of a server.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct NfsAddress {
    /// Its NFS service.
    pub nfs: SocketAddr,
    /// Its MOUNT service.
    pub mountd: SocketAddr,
}

/// The mount options about the ports of a server's services. Without them, the server's portmapper decides.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PortOptions {
    /// The port of NFS (`port`).
    pub port: Option<u16>,
    /// The name of the machine with the MOUNT service (`mounthost`).
    pub mount_host: Option<String>,
    /// The port of the MOUNT service (`mountport`).
    pub mount_port: Option<u16>,
    /// Whether podfs asks from a port below 1024 (`resvport`).
    pub reserved_port: bool,
}

/// The result of a call that the server does not answer.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum RetryPolicy {
    /// Calls wait until the server answers.
    #[default]
    Hard,
    /// Calls fail with `EIO`.
    Soft,
    /// Calls fail with `ETIMEDOUT`.
    SoftErr,
}

/// The cached attributes and names, and the cache times in seconds (`nfs(5)`).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Caching {
    /// Shortest time for attributes of files.
    pub acregmin: u32,
    /// Longest time for attributes of files.
    pub acregmax: u32,
    /// Shortest time for attributes of directories.
    pub acdirmin: u32,
    /// Longest time for attributes of directories.
    pub acdirmax: u32,
    /// The results of lookups that are cached.
    pub lookups: LookupCache,
    /// An open sees the content of the last close, by any client (`cto`).
    pub close_to_open: bool,
}

/// The results of lookups that are cached (`lookupcache`).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum LookupCache {
    /// Names that exist, and names that do not (`all`).
    #[default]
    All,
    /// Names that exist (`positive`).
    Positive,
    /// None.
    None,
}

/// The types of locks that the kernel keeps for this mount alone. Other locks fail with `ENOLCK`, because podfs locks nothing
/// at the server.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct LocalLocks {
    /// Locks of `fcntl(2)`.
    pub posix: bool,
    /// Locks of `flock(2)`.
    pub flock: bool,
}

impl Default for Caching {
    /// The defaults of Linux.
    fn default() -> Self {
        Self {
            acregmin: 3,
            acregmax: 60,
            acdirmin: 30,
            acdirmax: 60,
            lookups: LookupCache::default(),
            close_to_open: true,
        }
    }
}

impl Caching {
    /// The shortest time for which attributes of a file of this type are valid.
    pub fn shortest(&self, kind: FileType) -> Duration {
        let seconds = if kind == FileType::Directory { self.acdirmin } else { self.acregmin };
        Duration::from_secs(seconds.into())
    }

    /// The longest time for which attributes of a file of this type are valid.
    pub fn longest(&self, kind: FileType) -> Duration {
        let seconds = if kind == FileType::Directory { self.acdirmax } else { self.acregmax };
        Duration::from_secs(seconds.into()).max(self.shortest(kind))
    }
}

impl ExportOptions {
    /// An export with the defaults of Linux' own client.
    pub fn new(export: ExportAddress, nfs: SocketAddr, root: &[u8], limits: Limits) -> Self {
        Self {
            name: VolumeLabel::default(),
            export,
            nfs,
            mountd: None,
            search: None,
            root: root.to_vec(),
            root_attributes: None,
            read_only: false,
            retry_policy: RetryPolicy::default(),
            timeo: 600,
            retrans: 2,
            limits,
            caching: Caching::default(),
            stable: false,
            with_attributes: true,
            local_locks: LocalLocks::default(),
            callers: ActAs::default(),
            one_user: false,
            trace: false,
        }
    }

    /// The options of the same export, after its server has moved.
    #[must_use]
    pub fn at(self, place: NfsAddress) -> Self {
        Self { nfs: place.nfs, mountd: Some(place.mountd), ..self }
    }

    /// Who checks permissions. Where the NFS server takes all users for one, the kernel cannot know what a user may do. A pod with ids of
    /// its own needs id-mapped mounts, so the kernel always checks there.
    pub fn permission_check(&self) -> PermissionCheck {
        match self.callers {
            ActAs::CallerInItsNamespace => PermissionCheck::Kernel,
            ActAs::Nobody => PermissionCheck::FileSystem,
            ActAs::Caller if self.one_user => PermissionCheck::FileSystem,
            ActAs::Caller => PermissionCheck::Kernel,
        }
    }

    /// The retry policy of calls to the server.
    pub fn policy(&self) -> Policy {
        let persistence = match self.retry_policy {
            RetryPolicy::Hard => Persistence::Hard,
            RetryPolicy::Soft => Persistence::Soft,
            RetryPolicy::SoftErr => Persistence::SoftErr,
        };
        let timeo = Duration::from_millis(u64::from(self.timeo) * 100);
        Policy { persistence, timeo, retrans: self.retrans, ..Policy::default() }
    }
}
