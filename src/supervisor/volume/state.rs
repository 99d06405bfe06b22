//! The states of a volume, and their words in the status.

use podfs_fuse::projection::GenerationName;

use crate::host::serve::BindReason;
use crate::volume::nfs_options::Backend;
use crate::volume::{Volume, VolumeSource};

/// The life of a volume.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum VolumeLife {
    /// Not mounted, for this reason: the first payload is not complete, or the source cannot be used. A mounted volume
    /// leads here if its mount was given up, and podfs cannot mount it anew. The first refresh that succeeds leads to
    /// [`VolumeLife::Live`].
    Waiting(String),
    /// Mounted, and current. Every refresh that succeeds leads here.
    Live(ShownContent),
    /// Mounted, and showing the content of the last refresh that succeeded, because the last refresh failed for this
    /// reason (VM-08, VM-09). A later refresh that succeeds leads to [`VolumeLife::Live`].
    Behind(ShownContent, String),
    /// Served, but not visible at its path, for this reason: another process has unmounted the volume, or mounted a
    /// file system over it. Containers that use the volume already still see it. A refresh that finds the volume at its
    /// path, or mounts it there again, leads to [`VolumeLife::Live`].
    Hidden(ShownContent, String),
}

impl VolumeLife {
    /// The state before the first refresh.
    pub(in crate::supervisor) fn before_first_refresh(volume: &Volume) -> VolumeLife {
        let awaited = match volume.source {
            VolumeSource::Projection(_) => "its first payload is not complete yet",
            _ => "its source is not ready yet",
        };
        VolumeLife::Waiting(awaited.to_owned())
    }

    /// Why the volume is not live.
    pub fn reason(&self) -> Option<&str> {
        match self {
            VolumeLife::Waiting(reason) | VolumeLife::Behind(_, reason) | VolumeLife::Hidden(_, reason) => Some(reason),
            VolumeLife::Live(_) => None,
        }
    }

    /// The shown content, if the volume is mounted.
    pub fn shown(&self) -> Option<&ShownContent> {
        match self {
            VolumeLife::Waiting(_) => None,
            VolumeLife::Live(shown) | VolumeLife::Behind(shown, _) | VolumeLife::Hidden(shown, _) => Some(shown),
        }
    }

    /// The generation that is shown, if there is one.
    pub fn generation(&self) -> Option<&GenerationName> {
        self.shown().and_then(ShownContent::generation)
    }
}

/// The content that a volume shows.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ShownContent {
    /// A generation of files, which the kernel serves from its cache.
    Generation(GenerationName),
    /// A generation of files with an access log: the kernel asks the server at each open, and the server logs the
    /// process.
    Audited(GenerationName),
    /// A source of the node; the kernel reads and writes it without the server.
    Passthrough,
    /// A source of the node; the server reads and writes it.
    ReadWrite,
    /// A source of the node, in a bind mount, without the server, for this reason.
    Bind(BindReason),
    /// A block device with these major and minor numbers, which containers get as it is.
    Device((u32, u32)),
    /// An export of an NFS server, served by this client.
    Nfs(Backend),
}

impl ShownContent {
    /// The mode of the volume, as the status reports it.
    pub fn mode(&self) -> &'static str {
        match self {
            ShownContent::Generation(_) => "zero-message",
            ShownContent::Audited(_) => "audited",
            ShownContent::Passthrough => "passthrough",
            ShownContent::ReadWrite => "read-write",
            ShownContent::Bind(_) => "bind",
            ShownContent::Device(_) => "device",
            ShownContent::Nfs(_) => "nfs",
        }
    }

    /// Why the volume has this mode, if the mode depends on its source.
    pub fn mode_reason(&self) -> Option<String> {
        match self {
            ShownContent::Bind(reason) => Some(reason.to_string()),
            _ => None,
        }
    }

    /// The NFS client, if one is used, as the status reports it.
    pub fn backend(&self) -> Option<&'static str> {
        match self {
            ShownContent::Nfs(Backend::User) => Some("user"),
            ShownContent::Nfs(Backend::Kernel) => Some("kernel"),
            _ => None,
        }
    }

    /// The generation, if there is one.
    pub fn generation(&self) -> Option<&GenerationName> {
        match self {
            ShownContent::Generation(generation) | ShownContent::Audited(generation) => Some(generation),
            _ => None,
        }
    }
}
