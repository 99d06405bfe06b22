//! The form in which containers get a source: podfs serves it through FUSE, or the kernel alone shows it by a bind mount.
//!
//! The kernel finds the other end of a socket, a FIFO or a device by its inode. A file system between container and source has
//! inodes of its own, so these files do not work through FUSE. podfs shows them, the directories that have them, and the kernel's own
//! file systems by a bind mount, unless the pod asks for FUSE.

use std::fmt;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use rustix::fs::{Dir, FileType, Mode, OFlags, fstat, fstatfs, openat, stat};

use super::memory::HUGETLBFS;
use super::{FileKind, HostError, HostSource};
use crate::volume::ServedBy;

/// Directories of the node in which containers mainly use sockets and devices.
const LIVE: [&str; 5] = ["/run", "/var/run", "/dev", "/proc", "/sys"];

/// The name of a kubelet's directory, such as `/var/lib/kubelet`.
const KUBELET: &str = "kubelet";
/// The directories there in which plugins make sockets, also after the pod's start.
const OF_KUBELET: [&str; 4] = ["plugins", "plugins_registry", "device-plugins", "pod-resources"];

/// How many entries of a directory podfs looks at for a socket, and for how long: a directory can have millions of them, on a slow file
/// system.
const LOOKS: (usize, Duration) = (1024, Duration::from_millis(100));

/// The magic numbers (`statfs(2)`) of file systems that are no storage: proc, sysfs, cgroup, cgroup2, devpts, debugfs, tracefs,
/// securityfs, bpf, mqueue, hugetlbfs.
const KERNEL: [u32; 11] = [
    0x9fa0,
    0x6265_6572,
    0x0027_e0eb,
    0x6367_7270,
    0x1cd1,
    0x6462_6720,
    0x7472_6163,
    0x7363_6673,
    0xcafe_4a11,
    0x1980_0202,
    HUGETLBFS,
];

/// The form in which containers get a source.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SourceForm {
    /// A server answers the requests.
    Fuse,
    /// The kernel alone shows the source, for this reason.
    Bind(BindReason),
}

/// Why a bind mount shows a source.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BindReason {
    /// The pod asks for it by an annotation.
    Asked,
    /// The source is a socket, a FIFO or a device.
    Special,
    /// The source is in a directory with sockets and devices.
    Live,
    /// The source is a kubelet's directory, or one in which plugins of the kubelet make sockets.
    Kubelet,
    /// A socket or a FIFO was in the source when the pod started.
    Socket,
    /// The source contains the volume's mount point.
    Around,
    /// The source has huge pages, which programs map.
    HugePages,
}

/// The reason, as `podfs status` shows it.
impl fmt::Display for BindReason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            BindReason::Asked => "the annotation podfs.io/host-path asks for it",
            BindReason::Special => "the source is a socket, FIFO or device",
            BindReason::Live => "the source is in a directory or file system with sockets and devices",
            BindReason::Kubelet => "the source is a directory in which plugins of a kubelet have sockets",
            BindReason::Socket => "the source had a socket or FIFO at its mount",
            BindReason::Around => "the source contains the mount point of the volume",
            BindReason::HugePages => "the source has huge pages",
        })
    }
}

/// Chooses the form of `source` at `mount_point`. `wish` is the choice of the pod's annotation. `may_have_sockets` is whether other
/// processes than the pod's may have made sockets in the source.
///
/// # Errors
/// When the annotation asks for FUSE, and the source is a socket, a FIFO or a device.
pub fn choose(
    source: &HostSource,
    wish: Option<ServedBy>,
    mount_point: &Path,
    may_have_sockets: bool,
) -> Result<SourceForm, HostError> {
    let special = !matches!(source.kind(), FileKind::Directory | FileKind::File);
    match wish {
        Some(ServedBy::Fuse) if special => Err(HostError::Refused(
            "a socket, FIFO or device cannot be served through FUSE; set the annotation podfs.io/host-path.VOLUME of this \
             volume to bind, or remove it"
                .to_owned(),
        )),
        Some(ServedBy::Fuse) => Ok(SourceForm::Fuse),
        Some(ServedBy::Bind) => Ok(SourceForm::Bind(BindReason::Asked)),
        None if special => Ok(SourceForm::Bind(BindReason::Special)),
        None if is_live(source) => Ok(SourceForm::Bind(BindReason::Live)),
        None if contains(source, mount_point) => Ok(SourceForm::Bind(BindReason::Around)),
        None if may_have_sockets && is_of_kubelet(source) => Ok(SourceForm::Bind(BindReason::Kubelet)),
        None if may_have_sockets && has_sockets(source) => Ok(SourceForm::Bind(BindReason::Socket)),
        None => Ok(SourceForm::Fuse),
    }
}

/// Whether the source is a kubelet's directory, or one below it in which plugins make sockets.
fn is_of_kubelet(source: &HostSource) -> bool {
    let Ok(path) = source.real_path() else { return false };
    let mut names = path.iter().skip_while(|name| *name != KUBELET).skip(1);
    match names.next() {
        None => path.ends_with(KUBELET),
        Some(name) => OF_KUBELET.iter().any(|known| name == *known),
    }
}

/// Whether a socket or a FIFO is among the entries of the source, as far as podfs [looks](LOOKS).
fn has_sockets(source: &HostSource) -> bool {
    if source.kind() != FileKind::Directory {
        return false;
    }
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let opened = openat(source, c".", flags, Mode::empty()).and_then(Dir::new);
    let (Ok(directory), (entries, time)) = (opened, LOOKS) else { return false };
    let began = Instant::now();
    let looked_at = directory.take(entries).map_while(Result::ok).take_while(|_| began.elapsed() < time);
    // A file system that does not tell the type in its listing is no local disk, where the node's daemons have their sockets.
    looked_at.into_iter().any(|entry| matches!(entry.file_type(), FileType::Socket | FileType::Fifo))
}

/// Whether the source is in a directory with sockets and devices, or on one of the kernel's own file systems.
fn is_live(source: &HostSource) -> bool {
    let below = |path: &Path| {
        LIVE.iter().any(|live| {
            let real = Path::new(live).canonicalize();
            path.starts_with(live) || real.is_ok_and(|real| path.starts_with(real))
        })
    };
    source.real_path().is_ok_and(|path| below(&path)) || is_kernels(source)
}

/// Whether the source is on one of the kernel's own file systems.
fn is_kernels(source: &HostSource) -> bool {
    // Truncated on purpose: the magic numbers have 32 bits, and their type differs between architectures.
    let magic = fstatfs(source).map_or(0, |found| found.f_type as u32);
    // devtmpfs has the magic number of tmpfs. The kernel has one devtmpfs, so podfs compares the device number with that of /dev.
    let is_devtmpfs = match (fstat(source), stat("/dev"), stat("/")) {
        (Ok(source), Ok(dev), Ok(root)) => dev.st_dev != root.st_dev && source.st_dev == dev.st_dev,
        _ => false,
    };
    KERNEL.contains(&magic) || is_devtmpfs
}

/// Whether the source contains the volume's mount point. Through FUSE, a request for the mount point would make the server wait for
/// itself.
fn contains(source: &HostSource, mount_point: &Path) -> bool {
    let existing = |path: &Path| path.ancestors().find_map(|ancestor| ancestor.canonicalize().ok());
    let inside: Option<PathBuf> = std::path::absolute(mount_point).ok().and_then(|path| existing(&path));
    source.kind() == FileKind::Directory
        && matches!((source.real_path(), inside), (Ok(outer), Some(inner)) if inner.starts_with(&outer))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::net::UnixListener;

    fn chosen(path: &Path, wish: Option<ServedBy>) -> Result<SourceForm, String> {
        let source = HostSource::open(path).expect("it is there");
        choose(&source, wish, Path::new("/nowhere/podfs"), true).map_err(|error| error.to_string())
    }

    #[test]
    fn storage_is_served_through_fuse_and_live_directories_are_bound() {
        let base = tempfile::tempdir().expect("a directory");
        let (file, socket) = (base.path().join("file"), base.path().join("sockets/socket"));
        std::fs::write(&file, "").expect("a file");
        std::fs::create_dir(base.path().join("sockets")).expect("a directory");
        drop(UnixListener::bind(&socket).expect("a socket"));
        for storage in [base.path(), &file] {
            assert_eq!(chosen(storage, None), Ok(SourceForm::Fuse));
            assert_eq!(chosen(storage, Some(ServedBy::Bind)), Ok(SourceForm::Bind(BindReason::Asked)));
        }
        for (live, reason) in [
            (socket.as_path(), BindReason::Special),
            (Path::new("/dev"), BindReason::Live),
            (Path::new("/proc/sys"), BindReason::Live),
            (Path::new("/sys"), BindReason::Live),
            (Path::new("/run"), BindReason::Live),
            (&base.path().join("sockets"), BindReason::Socket),
        ] {
            assert_eq!(chosen(live, None), Ok(SourceForm::Bind(reason)), "{}", live.display());
        }
        assert_eq!(chosen(Path::new("/proc/sys"), Some(ServedBy::Fuse)), Ok(SourceForm::Fuse));
        assert_eq!(chosen(&base.path().join("sockets"), Some(ServedBy::Fuse)), Ok(SourceForm::Fuse));
        let error = chosen(&socket, Some(ServedBy::Fuse)).expect_err("a socket");
        assert!(error.contains("cannot be served through FUSE"), "{error}");
        let source = HostSource::open(&base.path().join("sockets")).expect("a directory");
        let of_pod = choose(&source, None, Path::new("/nowhere/podfs"), false).expect("chosen");
        assert_eq!(of_pod, SourceForm::Fuse, "only the pod can have made the socket");
    }

    #[test]
    fn directories_of_a_kubelet_in_which_plugins_make_sockets_are_bound_before_the_sockets_are_there() {
        let base = tempfile::tempdir().expect("a directory");
        for (name, form) in [
            ("lib/kubelet", SourceForm::Bind(BindReason::Kubelet)),
            ("lib/kubelet/plugins/driver.example.com", SourceForm::Bind(BindReason::Kubelet)),
            ("lib/kubelet/plugins_registry", SourceForm::Bind(BindReason::Kubelet)),
            ("lib/kubelet/device-plugins", SourceForm::Bind(BindReason::Kubelet)),
            ("lib/kubelet/pod-resources", SourceForm::Bind(BindReason::Kubelet)),
            ("lib/kubelet/pods", SourceForm::Fuse),
            ("lib/kubelet/logs", SourceForm::Fuse),
            ("lib/plugins", SourceForm::Fuse),
        ] {
            let path = base.path().join(name);
            std::fs::create_dir_all(&path).expect("a directory");
            assert_eq!(chosen(&path, None), Ok(form), "{name}");
        }
    }

    #[test]
    fn a_directory_with_very_many_entries_is_looked_at_only_for_a_while() {
        let base = tempfile::tempdir().expect("a directory");
        for number in 0..3 * LOOKS.0 {
            std::fs::write(base.path().join(number.to_string()), "").expect("a file");
        }
        assert_eq!(chosen(base.path(), None), Ok(SourceForm::Fuse));
    }

    #[test]
    fn a_source_around_its_own_mount_point_is_bound() {
        let base = tempfile::tempdir().expect("a directory");
        let source = HostSource::open(base.path()).expect("a directory");
        let inside = base.path().join("not/yet/there");
        let around = SourceForm::Bind(BindReason::Around);
        assert_eq!(choose(&source, None, &inside, true).expect("chosen"), around);
        let root = HostSource::open(Path::new("/")).expect("a directory");
        assert_eq!(choose(&root, None, Path::new("/var/lib/podfs"), true).expect("chosen"), around);
    }
}
