//! The mount table, from `/proc/thread-self/mountinfo` (`proc(5)`).

use std::ffi::OsString;
use std::fs::File;
use std::io::{self, Read, Seek};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::ffi::OsStringExt;
use std::path::{Path, PathBuf};
use std::sync::Mutex;

use rustix::fs::{AtFlags, StatxFlags, statx};
use rustix::io::Errno;

/// The type of the file systems of this crate.
pub const FS_TYPE: &str = "fuse.podfs";

/// The mount table of the calling thread's namespace.
const TABLE: &str = "/proc/thread-self/mountinfo";

/// An open mount table. Each read has the present mounts of the namespace in which it was opened. The namespace exists as long as
/// a process has the table open.
#[derive(Debug)]
pub struct MountTable {
    file: File,
    /// Locked while a thread uses the file's offset: it reads the file from its beginning to its end.
    offset: Mutex<()>,
}

impl MountTable {
    /// Opens the mount table of the calling thread's namespace.
    ///
    /// # Errors
    /// When it cannot be opened.
    pub fn open() -> io::Result<Self> {
        Ok(OwnedFd::from(File::open(TABLE)?).into())
    }

    /// The mount with the id of statx(2) and name_to_handle_at(2).
    ///
    /// # Errors
    /// When the table cannot be read.
    pub fn mount_with_id(&self, id: u64) -> io::Result<Option<MountTableEntry>> {
        let table = self.read()?;
        let id = format!("{id} ");
        let line = table.split(|byte| *byte == b'\n').find(|line| line.starts_with(id.as_bytes()));
        Ok(line.and_then(parse))
    }

    /// All mounts of the namespace, in the order of the table.
    ///
    /// # Errors
    /// When the table cannot be read.
    pub fn mounts(&self) -> io::Result<Vec<MountTableEntry>> {
        Ok(parse_all(&self.read()?))
    }

    fn read(&self) -> io::Result<Vec<u8>> {
        let _locked = self.offset.lock().expect("a thread that panics ends the process");
        let (mut file, mut table) = (&self.file, Vec::new());
        file.rewind()?;
        file.read_to_end(&mut table)?;
        Ok(table)
    }
}

impl From<OwnedFd> for MountTable {
    fn from(file: OwnedFd) -> Self {
        Self { file: file.into(), offset: Mutex::default() }
    }
}

impl AsFd for MountTable {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }
}

/// One mount.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MountTableEntry {
    /// The id of statx(2) and name_to_handle_at(2).
    pub id: u64,
    /// The id of the mount on which it is mounted.
    pub parent: u64,
    /// Whether it is read-only.
    pub read_only: bool,
    /// The flags that restrict its files.
    pub restrictions: Restrictions,
    /// Whether it gets and sends no mount events (`MS_PRIVATE`).
    pub is_private: bool,
    /// The mount point.
    pub at: PathBuf,
    /// Its file system type.
    pub fs_type: String,
    /// The device number of the file system.
    pub device: String,
    /// The directory of the file system that it shows.
    pub root: PathBuf,
    /// Its source. The format depends on the file system.
    pub source: String,
}

/// The flags of a mount that restrict its files (`mount(8)`).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Restrictions {
    /// Setuid, setgid and file capabilities have no effect.
    pub nosuid: bool,
    /// Devices cannot be opened.
    pub nodev: bool,
    /// Programs cannot be run.
    pub noexec: bool,
}

impl Restrictions {
    /// All restrictions.
    pub const ALL: Self = Self { nosuid: true, nodev: true, noexec: true };

    /// Parses the options of a mount: `rw,nosuid,relatime`.
    fn of_options(options: &[u8]) -> Self {
        Self { nosuid: has(options, "nosuid"), nodev: has(options, "nodev"), noexec: has(options, "noexec") }
    }
}

fn has(options: &[u8], name: &str) -> bool {
    options.split(|byte| *byte == b',').any(|option| option == name.as_bytes())
}

/// The mounts at `path`, which must have no symbolic links. The topmost one comes last.
///
/// # Errors
/// When the table cannot be read.
pub fn mounts_at(path: &Path) -> io::Result<Vec<MountTableEntry>> {
    Ok(mounts()?.into_iter().filter(|mounted| mounted.at == path).collect())
}

/// The mount with this id in this mount namespace.
///
/// # Errors
/// When the table cannot be read.
pub fn mount_with_id(id: u64) -> io::Result<Option<MountTableEntry>> {
    MountTable::open()?.mount_with_id(id)
}

/// All mounts of this mount namespace, in the order of the table.
///
/// # Errors
/// When the table cannot be read.
pub fn mounts() -> io::Result<Vec<MountTableEntry>> {
    Ok(parse_all(&std::fs::read(TABLE)?))
}

/// The id of the mount of `file`. It needs no request to the file system, whose server this process may be.
pub(crate) fn mount_id(file: BorrowedFd<'_>) -> Result<u64, Errno> {
    let flags = AtFlags::EMPTY_PATH | AtFlags::STATX_DONT_SYNC;
    Ok(statx(file, c"", flags, StatxFlags::MNT_ID)?.stx_mnt_id)
}

fn parse_all(table: &[u8]) -> Vec<MountTableEntry> {
    table.split(|byte| *byte == b'\n').filter_map(parse).collect()
}

/// `36 35 98:0 /mnt1 /mnt2 rw,noatime master:1 - ext3 /dev/root rw,errors=continue`
fn parse(line: &[u8]) -> Option<MountTableEntry> {
    let mut fields = line.split(|byte| *byte == b' ');
    let mut number = || str::from_utf8(fields.next()?).ok()?.parse().ok();
    let (id, parent) = (number()?, number()?);
    let device = String::from_utf8_lossy(fields.next()?).into_owned();
    let root = path(fields.next()?);
    let at = path(fields.next()?);
    let options = fields.next()?;
    let (restrictions, read_only) = (Restrictions::of_options(options), has(options, "ro"));
    let optional: Vec<_> = fields.by_ref().take_while(|field| *field != b"-").collect();
    let is_private = !optional.iter().any(|field| field.starts_with(b"shared:") || field.starts_with(b"master:"));
    let fs_type = String::from_utf8_lossy(fields.next()?).into_owned();
    let source = String::from_utf8_lossy(&unescape(fields.next()?)).into_owned();
    Some(MountTableEntry { id, parent, read_only, restrictions, is_private, at, fs_type, device, root, source })
}

fn path(field: &[u8]) -> PathBuf {
    PathBuf::from(OsString::from_vec(unescape(field)))
}

/// Decodes blanks, tabs, newlines and backslashes, which are a backslash with three octal digits.
fn unescape(field: &[u8]) -> Vec<u8> {
    let mut plain = Vec::with_capacity(field.len());
    let mut rest = field;
    while let Some((&byte, after)) = rest.split_first() {
        let escaped = (byte == b'\\').then(|| after.get(..3).and_then(octal)).flatten();
        plain.push(escaped.unwrap_or(byte));
        rest = if escaped.is_some() { &after[3..] } else { after };
    }
    plain
}

fn octal(digits: &[u8]) -> Option<u8> {
    u8::from_str_radix(str::from_utf8(digits).ok()?, 8).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_gives_mount_point_and_type() {
        let line =
            br"36 35 98:0 / /var/with\040blank\134 rw,nosuid,noatime,noexec master:1 shared:2 - fuse.podfs podfs rw";
        let expected = MountTableEntry {
            id: 36,
            parent: 35,
            read_only: false,
            restrictions: Restrictions { nosuid: true, nodev: false, noexec: true },
            is_private: false,
            at: PathBuf::from(r"/var/with blank\"),
            fs_type: FS_TYPE.to_owned(),
            device: "98:0".to_owned(),
            root: PathBuf::from("/"),
            source: "podfs".to_owned(),
        };
        assert_eq!(parse(line), Some(expected));
        assert_eq!(parse(b""), None);
        assert_eq!(parse(b"36 35 98:0 / / rw master:1 shared:2"), None);
        let is_private = |line: &[u8]| parse(line).expect("a mount").is_private;
        assert!(is_private(b"36 35 98:0 / / rw - ext4 /dev/root rw"));
        assert!(is_private(b"36 35 98:0 / / rw unbindable - ext4 /dev/root rw"));
        assert!(!is_private(b"36 35 98:0 / / rw master:1 - ext4 /dev/root rw"));
    }

    #[test]
    fn the_root_is_mounted() {
        assert!(!mounts_at(Path::new("/")).expect("a table").is_empty());
    }
}
