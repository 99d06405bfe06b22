//! The private mount: where commits happen, attached nowhere.

use std::ffi::CStr;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::path::Path;
use std::thread;

use rustix::fs::{CWD, Mode, OFlags};
use rustix::io::Errno;
use rustix::mount::{
    FsMountFlags, FsOpenFlags, MountAttrFlags, MountPropagationFlags, MoveMountFlags, OpenTreeFlags, UnmountFlags,
    fsconfig_create, fsconfig_set_flag, fsconfig_set_string, fsmount, fsopen, mount_change, move_mount, open_tree,
    unmount,
};
use rustix::thread::UnshareFlags;

use super::MountError;

const DEVICE: &str = "/dev/fuse";

/// A new FUSE connection: what the server reads requests from.
///
/// # Errors
/// When there is no `/dev/fuse` or it may not be opened.
pub fn open_device() -> Result<OwnedFd, MountError> {
    rustix::fs::open(DEVICE, OFlags::RDWR | OFlags::CLOEXEC, Mode::empty()).map_err(|errno| match errno {
        Errno::NOENT => MountError::Unsupported { what: format!("cannot open {DEVICE}"), cause: errno.into() },
        _ => MountError::at("open", Path::new(DEVICE), errno),
    })
}

/// How a mount differs from others.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct MountOptions {
    /// SELinux label of everything in it (`context=`), for hosts that run SELinux. Labels cannot be
    /// set later: the visible mount is read-only.
    pub selinux_context: Option<String>,
}

/// A mounted file system that only its holder can reach.
pub struct PrivateMount {
    tree: OwnedFd,
}

impl PrivateMount {
    /// Mounts the file system that `device` serves. The kernel asks for the handshake at once; calls on
    /// the mount wait until the server has answered it.
    ///
    /// # Errors
    /// When the process may not mount, or the kernel cannot.
    pub fn new(device: BorrowedFd<'_>, options: &MountOptions) -> Result<Self, MountError> {
        let failed = |errno: Errno| MountError::new("cannot mount a FUSE file system", errno);
        let context = fsopen("fuse", FsOpenFlags::FSOPEN_CLOEXEC).map_err(failed)?;
        let settings = [
            ("source", "podfs"),
            ("subtype", "podfs"),
            ("fd", &device.as_raw_fd().to_string()),
            ("rootmode", "40000"),
            ("user_id", "0"),
            ("group_id", "0"),
        ];
        for (key, value) in settings {
            fsconfig_set_string(context.as_fd(), key, value).map_err(failed)?;
        }
        // All users may enter (FU-03); the kernel checks modes and owners.
        for key in ["allow_other", "default_permissions"] {
            fsconfig_set_flag(context.as_fd(), key).map_err(failed)?;
        }
        if let Some(label) = &options.selinux_context {
            fsconfig_set_string(context.as_fd(), "context", label.as_str()).map_err(failed)?;
        }
        fsconfig_create(context.as_fd()).map_err(failed)?;
        let attributes = MountAttrFlags::MOUNT_ATTR_NOSUID | MountAttrFlags::MOUNT_ATTR_NODEV;
        let tree = fsmount(context.as_fd(), FsMountFlags::FSMOUNT_CLOEXEC, attributes).map_err(failed)?;
        Ok(Self { tree })
    }

    /// A read-only clone, attached nowhere yet. The flags are set before anybody can see it, so that
    /// copies that propagate into containers carry them too.
    ///
    /// There is no `noexec`: scripts in configMaps are run from their volume, as on the kubelet's
    /// tmpfs.
    ///
    /// # Errors
    /// When the kernel refuses the clone or its flags.
    pub fn read_only_clone(&self) -> Result<OwnedFd, MountError> {
        let clone = match clone_detached(self.tree.as_fd()) {
            // A detached mount can be cloned since Linux 6.15.
            Err(Errno::INVAL) => clone_in_own_namespace(self.tree.as_fd()),
            cloned => cloned,
        };
        let failed = |cause: io::Error| MountError::new("cannot clone the private mount", cause);
        let clone = clone.map_err(|errno| failed(errno.into()))?;
        set_read_only(&clone).map_err(failed)?;
        Ok(clone)
    }

    /// As [`Self::read_only_clone`] on a kernel before 6.15, whatever this kernel can do.
    ///
    /// # Errors
    /// When the kernel refuses.
    #[doc(hidden)]
    pub fn read_only_clone_before_6_15(&self) -> Result<OwnedFd, MountError> {
        let failed = |cause: io::Error| MountError::new("cannot clone the private mount", cause);
        let clone = clone_in_own_namespace(self.tree.as_fd()).map_err(|errno| failed(errno.into()))?;
        set_read_only(&clone).map_err(failed)?;
        Ok(clone)
    }
}

impl AsFd for PrivateMount {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.tree.as_fd()
    }
}

const CLONE: OpenTreeFlags = OpenTreeFlags::OPEN_TREE_CLONE.union(OpenTreeFlags::OPEN_TREE_CLOEXEC);

fn clone_detached(tree: BorrowedFd<'_>) -> Result<OwnedFd, Errno> {
    open_tree(tree, c"", CLONE | OpenTreeFlags::AT_EMPTY_PATH)
}

/// Attaches the mount in a mount namespace that nobody else sees, clones it there, and detaches it.
fn clone_in_own_namespace(tree: BorrowedFd<'_>) -> Result<OwnedFd, Errno> {
    /// Any directory does: it is covered in the thread's own namespace only.
    const STAGE: &CStr = c"/proc";
    let clone = || {
        // SAFETY: only this thread's mount namespace and working directory become its own; it ends
        // with this closure and shares neither.
        unsafe { rustix::thread::unshare_unsafe(UnshareFlags::NEWNS) }?;
        mount_change(c"/", MountPropagationFlags::REC | MountPropagationFlags::PRIVATE)?;
        move_mount(tree, c"", CWD, STAGE, MoveMountFlags::MOVE_MOUNT_F_EMPTY_PATH)?;
        let clone = open_tree(CWD, STAGE, CLONE);
        unmount(STAGE, UnmountFlags::DETACH)?;
        clone
    };
    thread::scope(|scope| scope.spawn(clone).join()).unwrap_or(Err(Errno::NOMEM))
}

fn set_read_only(clone: &OwnedFd) -> io::Result<()> {
    let attributes = libc::mount_attr {
        attr_set: libc::MOUNT_ATTR_RDONLY | libc::MOUNT_ATTR_NOSUID | libc::MOUNT_ATTR_NODEV,
        attr_clr: 0,
        propagation: 0,
        userns_fd: 0,
    };
    // SAFETY: the path is an empty C string, the struct outlives the call, and its size is given.
    let result = unsafe {
        libc::syscall(
            libc::SYS_mount_setattr,
            clone.as_raw_fd(),
            c"".as_ptr(),
            libc::AT_EMPTY_PATH,
            &raw const attributes,
            size_of::<libc::mount_attr>(),
        )
    };
    if result == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}
