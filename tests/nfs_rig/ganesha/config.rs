//! The settings of a server, and ganesha's configuration file, which is made from them.

use std::net::Ipv4Addr;
use std::path::Path;

/// The configuration of a server.
#[derive(Clone, Debug)]
pub struct Setup {
    pub exports: Vec<Export>,
    /// The grace period in seconds: after a restart, clients of NFSv4 may only reclaim their state for so long. `None`
    /// for no grace period.
    pub grace: Option<u32>,
    /// The server's limit of open files (`ulimit -n`). With 200, CREATE fails with `NFS3ERR_IO` after some 175 files.
    pub descriptors: Option<u64>,
    /// Versions of the protocol, such as `3, 4`.
    pub protocols: &'static str,
}

/// A directory that is exported.
#[derive(Clone, Debug)]
pub struct Export {
    /// The name of the export in all versions of the protocol, with a slash at its beginning.
    pub name: String,
    pub access: Access,
    pub squash: Squash,
    /// The user and group of squashed callers.
    pub anonymous: (u32, u32),
    /// The most bytes of a READ, and of a WRITE.
    pub max_read: u32,
    pub max_write: u32,
    pub storage: Storage,
}

#[derive(Clone, Copy, Debug)]
pub enum Access {
    ReadWrite,
    ReadOnly,
    /// No client may mount it.
    None,
}

/// The callers that the server maps to the anonymous user.
#[derive(Clone, Copy, Debug)]
pub enum Squash {
    Nobody,
    Root,
    Everybody,
}

/// The storage of the files.
#[derive(Clone, Copy, Debug)]
pub enum Storage {
    /// The server's temporary directory.
    Disk,
    /// A separate tmpfs with these mount options, such as `size=8m`.
    Tmpfs(&'static str),
}

/// The directory and the addresses of an instance.
pub struct Place<'a> {
    pub directory: &'a Path,
    pub host: Ipv4Addr,
    pub nfs_port: u16,
    pub mount_port: u16,
    /// The number of the first export. The number of an export is part of its file handles.
    pub first_export: u16,
}

impl Default for Setup {
    fn default() -> Self {
        Self { exports: vec![Export::default()], grace: None, descriptors: None, protocols: "3, 4" }
    }
}

impl Default for Export {
    fn default() -> Self {
        Self {
            name: "/export".to_owned(),
            access: Access::ReadWrite,
            squash: Squash::Nobody,
            anonymous: (65534, 65534),
            max_read: 1 << 20,
            max_write: 1 << 20,
            storage: Storage::Disk,
        }
    }
}

impl Export {
    /// A default export with this name.
    pub fn named(name: &str) -> Self {
        Self { name: name.to_owned(), ..Self::default() }
    }

    /// The local directory of the export.
    pub fn directory(&self, directory: &Path) -> std::path::PathBuf {
        directory.join("exports").join(self.name.trim_start_matches('/'))
    }

    fn config(&self, id: u16, directory: &Path) -> String {
        let Self { name, anonymous: (uid, gid), max_read, max_write, .. } = self;
        let path = self.directory(directory);
        let access = match self.access {
            Access::ReadWrite => "RW",
            Access::ReadOnly => "RO",
            Access::None => "None",
        };
        let squash = match self.squash {
            Squash::Nobody => "No_Root_Squash",
            Squash::Root => "Root_Squash",
            Squash::Everybody => "All_Squash",
        };
        format!(
            "EXPORT {{
                Export_Id = {id}; Path = \"{path}\"; Pseudo = \"{name}\";
                Access_Type = {access}; Squash = {squash}; Anonymous_Uid = {uid}; Anonymous_Gid = {gid};
                SecType = sys; Protocols = 3, 4; Transports = TCP;
                MaxRead = {max_read}; PrefRead = {max_read}; MaxWrite = {max_write}; PrefWrite = {max_write};
                FSAL {{ Name = VFS; }}
            }}\n",
            path = path.display(),
        )
    }
}

impl Setup {
    /// The content of ganesha's configuration file.
    pub fn config(&self, place: &Place) -> String {
        let Place { directory, host, nfs_port, mount_port, first_export } = place;
        let grace = match self.grace {
            Some(seconds) => format!("Graceless = false; Grace_Period = {seconds};"),
            None => "Graceless = true; Grace_Period = 3;".to_owned(),
        };
        let exports: String =
            (*first_export..).zip(&self.exports).map(|(id, export)| export.config(id, directory)).collect();
        // `Plugins_Dir` is needed: ganesha's default is a directory in which Debian has no plugins.
        format!(
            "NFS_CORE_PARAM {{
                NFS_Port = {nfs_port}; MNT_Port = {mount_port}; Bind_addr = {host}; Protocols = {protocols};
                Enable_UDP = false; Enable_NLM = false; Enable_RQUOTA = false;
                mount_path_pseudo = true;
                Plugins_Dir = \"/usr/lib/{arch}-linux-gnu/ganesha\";
            }}
            NFSv4 {{
                Minor_Versions = 0, 1, 2; {grace} Lease_Lifetime = 5;
                RecoveryBackend = fs; RecoveryRoot = \"{directory}/recovery\";
                Only_Numeric_Owners = true; pnfs_mds = false; pnfs_ds = false;
            }}
            NFS_KRB5 {{ Active_krb5 = false; }}
            LOG {{ Default_Log_Level = EVENT; }}
            {exports}",
            protocols = self.protocols,
            arch = std::env::consts::ARCH,
            directory = directory.display(),
        )
    }
}
