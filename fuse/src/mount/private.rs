//! The private mount: detached, and used for commits.

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::path::Path;
use std::thread;

use rustix::fs::{
    AtFlags, CWD, FileType, Mode, OFlags, Stat, StatVfsMountFlags, StatxFlags, fstatvfs, getxattr, major, makedev,
    minor, statx,
};
use rustix::io::Errno;
use rustix::mount::{
    FsMountFlags, FsOpenFlags, MountAttrFlags, MountPropagationFlags, MoveMountFlags, OpenTreeFlags, UnmountFlags,
    fsconfig_create, fsconfig_set_flag, fsconfig_set_string, fsmount, fsopen, mount_change, move_mount, open_tree,
    unmount,
};
use rustix::thread::UnshareFlags;

use super::MountError;

const DEVICE: &str = "/dev/fuse";

/// The source of projections in the mount table.
pub(crate) const PROJECTION_SOURCE: &str = "podfs";
/// The source of passthrough volumes in the mount table.
pub const PASSTHROUGH_SOURCE: &str = "podfs-passthrough";
/// The source of NFS volumes in the mount table.
pub(crate) const NFS_SOURCE: &str = "podfs-nfs";

/// Opens `/dev/fuse`, from which the server reads requests.
///
/// # Errors
/// When `/dev/fuse` does not exist, is something else than the FUSE device, or the process may not open it.
pub fn open_device() -> Result<OwnedFd, MountError> {
    let is_fuse =
        |found: &Stat| FileType::from_raw_mode(found.st_mode).is_char_device() && found.st_rdev == makedev(10, 229);
    // podfs does not open another device or a pipe: that may wait, or have an effect.
    if let Some(found) = rustix::fs::stat(DEVICE).ok().filter(|found| !is_fuse(found)) {
        return Err(MountError::NotFuse { found: name_of_type(&found) });
    }
    rustix::fs::open(DEVICE, OFlags::RDWR | OFlags::CLOEXEC, Mode::empty()).map_err(|errno| match errno {
        Errno::NOENT => MountError::Unsupported { what: format!("cannot open {DEVICE}"), cause: errno.into() },
        _ => MountError::at("open", Path::new(DEVICE), errno),
    })
}

/// The type of a file, in words.
fn name_of_type(found: &Stat) -> String {
    let device = format!("{}:{}", major(found.st_rdev), minor(found.st_rdev));
    match FileType::from_raw_mode(found.st_mode) {
        FileType::RegularFile => "a regular file".to_owned(),
        FileType::Directory => "a directory".to_owned(),
        FileType::Fifo => "a FIFO".to_owned(),
        FileType::Socket => "a socket".to_owned(),
        FileType::CharacterDevice => format!("the character device {device}"),
        FileType::BlockDevice => format!("the block device {device}"),
        _ => "a file of another type".to_owned(),
    }
}

/// The file that shows that SELinux is in use.
pub const SELINUX: &str = "/sys/fs/selinux/enforce";

/// The options of a private mount.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct MountOptions {
    /// The SELinux label of all its files (`context=`), for hosts with SELinux. In a projection, they cannot be relabelled
    /// later, because its visible mount is read-only.
    pub selinux_context: Option<String>,
    /// The type of its root.
    pub shape: MountPointType,
}

/// The type of a mount point. The kernel mounts only files on files and directories on directories.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum MountPointType {
    /// A directory with its content.
    #[default]
    Directory,
    /// One file.
    File,
}

/// Who checks whether a caller may use a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PermissionCheck {
    /// The kernel, by modes, owners and ACLs (`default_permissions`). Id-mapped mounts need this (`FUSE_ALLOW_IDMAP`).
    Kernel,
    /// The file system, at each request. The kernel checks nothing, not even the search of a directory whose names it has cached: only for
    /// file systems that give all callers the same rights.
    FileSystem,
}

/// The rights of containers in a visible mount.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ContainerAccess {
    /// Read-only: the kernel refuses every change with `EROFS`.
    ReadOnly,
    /// Read-write, as modes and owners allow.
    ReadWrite,
}

/// A mounted file system that is reachable only by this descriptor.
pub struct PrivateMount {
    tree: OwnedFd,
    /// The source of its clones in the mount table.
    source: &'static str,
    /// The SELinux label of the mount, if this process made it.
    selinux_context: Option<String>,
}

impl PrivateMount {
    /// Mounts the file system of `device`. The kernel sends FUSE_INIT at once; calls on the mount wait until the server has
    /// answered it.
    ///
    /// # Errors
    /// When the process may not mount, or the kernel refuses.
    pub fn new(device: BorrowedFd<'_>, options: &MountOptions) -> Result<Self, MountError> {
        let attributes = MountAttrFlags::MOUNT_ATTR_NOSUID | MountAttrFlags::MOUNT_ATTR_NODEV;
        Self::mount(device, PROJECTION_SOURCE, attributes, PermissionCheck::Kernel, options)
    }

    /// Like [`Self::new`], for a file system that shows `source`. It allows programs, setuid and devices if the mount of the
    /// source does.
    ///
    /// # Errors
    /// Those of [`Self::new`], and when the source's attributes cannot be read.
    pub fn of_source(
        device: BorrowedFd<'_>,
        source: BorrowedFd<'_>,
        options: &MountOptions,
    ) -> Result<Self, MountError> {
        let attributes = attributes(source).map_err(|errno| MountError::new("cannot look at the source", errno))?;
        Self::mount(device, PASSTHROUGH_SOURCE, attributes, PermissionCheck::Kernel, options)
    }

    /// Another private mount of the mounted file system of `device` (since Linux 5.15). Before 6.15, a private mount can be cloned
    /// only once.
    ///
    /// # Errors
    /// Those of [`Self::new`], and when the server does not answer.
    pub(crate) fn mount_again(&self, device: BorrowedFd<'_>) -> Result<Self, MountError> {
        let attributes =
            attributes(self.as_fd()).map_err(|errno| MountError::new("cannot look at the private mount", errno))?;
        let shape = self.shape();
        // The kernel keeps the permission check of the first mount.
        let mount = |selinux_context| {
            let options = MountOptions { selinux_context, shape };
            Self::mount(device, self.source, attributes, PermissionCheck::Kernel, &options)
        };
        match mount(self.selinux_context.clone()) {
            // SELinux refuses a mount without the label of the first one. Another process may have made that.
            Err(error) if error.is_invalid() && self.selinux_context.is_none() => {
                mount(Some(selinux_label(self.as_fd()).ok_or(error)?))
            }
            mounted => mounted,
        }
    }

    /// Like [`Self::new`], for an NFS export. `attributes` say whether it allows setuid and devices.
    ///
    /// # Errors
    /// Those of [`Self::new`].
    pub fn of_export(
        device: BorrowedFd<'_>,
        attributes: MountAttrFlags,
        permissions: PermissionCheck,
        options: &MountOptions,
    ) -> Result<Self, MountError> {
        Self::mount(device, NFS_SOURCE, attributes, permissions, options)
    }

    /// Sets the kernel's read-ahead for sequential reads, in KiB, so that the kernel sends several requests at once. FUSE_INIT
    /// resets the read-ahead, so the supervisor sets it after that.
    ///
    /// # Errors
    /// When this process does not see the host's `/sys`.
    pub fn set_read_ahead(&self, kib: u32) -> io::Result<()> {
        let found = statx(&self.tree, c"", AtFlags::EMPTY_PATH | AtFlags::STATX_DONT_SYNC, StatxFlags::empty())?;
        let device = format!("{}:{}", found.stx_dev_major, found.stx_dev_minor);
        std::fs::write(format!("/sys/class/bdi/{device}/read_ahead_kb"), kib.to_string())
    }

    /// A private mount that another process made, with this source in the mount table.
    pub(crate) fn adopt(tree: OwnedFd, source: &'static str) -> Self {
        Self { tree, source, selinux_context: None }
    }

    fn mount(
        device: BorrowedFd<'_>,
        source: &'static str,
        attributes: MountAttrFlags,
        permissions: PermissionCheck,
        options: &MountOptions,
    ) -> Result<Self, MountError> {
        let failed = |errno: Errno| MountError::new("cannot mount a FUSE file system", errno);
        let context = fsopen("fuse", FsOpenFlags::FSOPEN_CLOEXEC).map_err(failed)?;
        let rootmode = match options.shape {
            MountPointType::Directory => "40000",
            MountPointType::File => "100000",
        };
        let settings = [
            ("source", source),
            ("subtype", "podfs"),
            ("fd", &device.as_raw_fd().to_string()),
            ("rootmode", rootmode),
            ("user_id", "0"),
            ("group_id", "0"),
        ];
        for (key, value) in settings {
            fsconfig_set_string(context.as_fd(), key, value).map_err(failed)?;
        }
        // All users may enter (FU-03).
        fsconfig_set_flag(context.as_fd(), "allow_other").map_err(failed)?;
        if permissions == PermissionCheck::Kernel {
            fsconfig_set_flag(context.as_fd(), "default_permissions").map_err(failed)?;
        }
        if let Some(label) = &options.selinux_context {
            fsconfig_set_string(context.as_fd(), "context", label.as_str()).map_err(failed)?;
        }
        fsconfig_create(context.as_fd()).map_err(failed)?;
        let tree = fsmount(context.as_fd(), FsMountFlags::FSMOUNT_CLOEXEC, attributes).map_err(failed)?;
        Ok(Self { tree, source, selinux_context: options.selinux_context.clone() })
    }

    /// The number of the connection, below `/sys/fs/fuse/connections`. It needs no request to the server.
    pub(crate) fn connection(&self) -> Option<u32> {
        let flags = AtFlags::EMPTY_PATH | AtFlags::STATX_DONT_SYNC;
        statx(&self.tree, c"", flags, StatxFlags::empty()).ok().map(|found| found.stx_dev_minor)
    }

    /// The device number of the file system, in the format of the mount table. It needs no request to the server.
    pub(crate) fn device(&self) -> Option<String> {
        self.connection().map(|minor| format!("0:{minor}"))
    }

    /// The type of its root. It needs no request to the server.
    pub(crate) fn shape(&self) -> MountPointType {
        match root_type(self.tree.as_fd()) {
            Ok(FileType::RegularFile) => MountPointType::File,
            _ => MountPointType::Directory,
        }
    }

    /// A detached, read-only clone. Its flags are set before it is attached, so that its copies in containers have them, too.
    ///
    /// It is not `noexec`: containers may run scripts in their configMaps, as on the kubelet's tmpfs.
    ///
    /// # Errors
    /// When the kernel refuses the clone or its flags.
    pub fn read_only_clone(&self) -> Result<OwnedFd, MountError> {
        let clone = self.read_write_clone()?;
        set_read_only(&clone).map_err(|cause| MountError::new("cannot clone the private mount", cause))?;
        Ok(clone)
    }

    /// A detached clone with the flags of this mount.
    ///
    /// # Errors
    /// When the kernel refuses the clone.
    pub fn read_write_clone(&self) -> Result<OwnedFd, MountError> {
        let clone = match clone_detached(self.tree.as_fd()) {
            // A detached mount can be cloned since Linux 6.15.
            Err(Errno::INVAL) => clone_in_own_namespace(self.tree.as_fd(), ""),
            cloned => cloned,
        };
        clone.map_err(|errno| MountError::new("cannot clone the private mount", errno))
    }

    /// Like [`Self::read_only_clone`], of the entry `name` of its root.
    ///
    /// # Errors
    /// When there is no such entry, or the kernel refuses.
    pub fn read_only_part(&self, name: &str) -> Result<OwnedFd, MountError> {
        let failed = |cause: io::Error| MountError::new("cannot clone a part of the private mount", cause);
        let clone = match open_tree(&self.tree, name, CLONE | OpenTreeFlags::AT_SYMLINK_NOFOLLOW) {
            Err(Errno::INVAL) => clone_in_own_namespace(self.tree.as_fd(), name),
            cloned => cloned,
        };
        let clone = clone.map_err(|errno| failed(errno.into()))?;
        set_read_only(&clone).map_err(failed)?;
        Ok(clone)
    }

    /// Like [`Self::read_only_clone`] on a kernel before 6.15, on any kernel.
    ///
    /// # Errors
    /// When the kernel refuses.
    #[doc(hidden)]
    pub fn read_only_clone_before_6_15(&self) -> Result<OwnedFd, MountError> {
        let failed = |cause: io::Error| MountError::new("cannot clone the private mount", cause);
        let clone = clone_in_own_namespace(self.tree.as_fd(), "").map_err(|errno| failed(errno.into()))?;
        set_read_only(&clone).map_err(failed)?;
        Ok(clone)
    }
}

impl AsFd for PrivateMount {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.tree.as_fd()
    }
}

/// Longest SELinux label that podfs reads.
const LABEL_MAX: usize = 4096;
const CLONE: OpenTreeFlags = OpenTreeFlags::OPEN_TREE_CLONE.union(OpenTreeFlags::OPEN_TREE_CLOEXEC);

fn clone_detached(tree: BorrowedFd<'_>) -> Result<OwnedFd, Errno> {
    open_tree(tree, c"", CLONE | OpenTreeFlags::AT_EMPTY_PATH)
}

/// Attaches the mount in a new mount namespace, clones the mount there, or the entry `part` of its root, and detaches the mount.
/// The kernel cannot attach the mount a second time.
fn clone_in_own_namespace(tree: BorrowedFd<'_>, part: &str) -> Result<OwnedFd, Errno> {
    // Any directory or file can be the mount point, because only the thread's own namespace changes.
    let stage = match root_type(tree)? {
        FileType::Directory => "/proc",
        _ => "/proc/version",
    };
    let part = if part.is_empty() { stage.to_owned() } else { format!("{stage}/{part}") };
    let clone = || {
        // SAFETY: this affects only the mount namespace and working directory of this thread, which ends with this closure.
        unsafe { rustix::thread::unshare_unsafe(UnshareFlags::NEWNS) }?;
        mount_change(c"/", MountPropagationFlags::REC | MountPropagationFlags::PRIVATE)?;
        move_mount(tree, c"", CWD, stage, MoveMountFlags::MOVE_MOUNT_F_EMPTY_PATH)?;
        let clone = open_tree(CWD, part.as_str(), CLONE | OpenTreeFlags::AT_SYMLINK_NOFOLLOW);
        unmount(stage, UnmountFlags::DETACH)?;
        clone
    };
    thread::scope(|scope| {
        let started = thread::Builder::new().spawn_scoped(scope, clone);
        started.map_err(|_no_thread| Errno::AGAIN)?.join().unwrap_or(Err(Errno::NOMEM))
    })
}

/// The flags of the mount of `file`.
fn attributes(file: BorrowedFd<'_>) -> Result<MountAttrFlags, Errno> {
    let mount_flags = fstatvfs(file)?.f_flag;
    let flags = [
        (StatVfsMountFlags::NOSUID, MountAttrFlags::MOUNT_ATTR_NOSUID),
        (StatVfsMountFlags::NODEV, MountAttrFlags::MOUNT_ATTR_NODEV),
        (StatVfsMountFlags::NOEXEC, MountAttrFlags::MOUNT_ATTR_NOEXEC),
        (StatVfsMountFlags::RDONLY, MountAttrFlags::MOUNT_ATTR_RDONLY),
    ];
    let flags = flags.into_iter().filter(|(flag, _)| mount_flags.contains(*flag));
    Ok(flags.fold(MountAttrFlags::empty(), |all, (_, attribute)| all | attribute))
}

/// The type of the root. The kernel gets it from the mount, without a request to the server.
fn root_type(tree: BorrowedFd<'_>) -> Result<FileType, Errno> {
    let root = statx(tree, c"", AtFlags::EMPTY_PATH | AtFlags::STATX_DONT_SYNC, StatxFlags::TYPE)?;
    Ok(FileType::from_raw_mode(root.stx_mode.into()))
}

/// The SELinux label of the root, where SELinux is in use. Then the kernel gets it from the mount, without a request to the server.
fn selinux_label(tree: BorrowedFd<'_>) -> Option<String> {
    if !Path::new(SELINUX).exists() {
        return None;
    }
    let mut label = [0; LABEL_MAX];
    // The descriptor of a mount has no attributes of its own.
    let length = getxattr(format!("/proc/self/fd/{}", tree.as_raw_fd()), "security.selinux", &mut label).ok()?;
    let label = label.get(..length)?;
    Some(std::str::from_utf8(label).ok()?.trim_end_matches('\0').to_owned())
}

fn set_read_only(clone: &OwnedFd) -> io::Result<()> {
    set_attributes(clone, libc::MOUNT_ATTR_RDONLY, AttributeScope::Itself)
}

/// The mounts on which attributes are set.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum AttributeScope {
    /// One mount.
    Itself,
    /// The mount and all mounts below it. They also get this propagation type (such as `MS_SLAVE`).
    AllBelow {
        /// The type.
        propagation: libc::c_ulong,
    },
}

/// Adds `MOUNT_ATTR_*` flags to mounts (`mount_setattr(2)`).
pub(crate) fn set_attributes(clone: &OwnedFd, flags: u64, scope: AttributeScope) -> io::Result<()> {
    let (recursive, propagation) = match scope {
        AttributeScope::Itself => (0, 0),
        AttributeScope::AllBelow { propagation } => (libc::AT_RECURSIVE, propagation),
    };
    let attributes = libc::mount_attr { attr_set: flags, attr_clr: 0, propagation, userns_fd: 0 };
    // SAFETY: the path is an empty C string, the struct outlives the call, and its size is given.
    let result = unsafe {
        libc::syscall(
            libc::SYS_mount_setattr,
            clone.as_raw_fd(),
            c"".as_ptr(),
            libc::AT_EMPTY_PATH | recursive,
            &raw const attributes,
            size_of::<libc::mount_attr>(),
        )
    };
    if result == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}
