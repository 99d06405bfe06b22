//! What is mounted where, from `/proc/self/mountinfo` (`proc(5)`).

use std::ffi::OsString;
use std::fs::File;
use std::io::{self, Read, Seek};
use std::os::unix::ffi::OsStringExt;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, OnceLock};

/// The type of the file systems this crate mounts.
pub const FS_TYPE: &str = "fuse.podfs";

const TABLE: &str = "/proc/self/mountinfo";

/// A table that is kept open, for a process that leaves its mount namespace.
static KEPT: OnceLock<Mutex<File>> = OnceLock::new();

/// From now on, this process sees the mounts of the namespace it is in now, wherever it goes: an open table shows the
/// namespace it was opened in, as it is when it is read.
///
/// # Errors
/// When the table cannot be opened.
pub fn keep() -> io::Result<()> {
    let table = Mutex::new(File::open(TABLE)?);
    // One that is kept already is an older one, so it is what was asked for first.
    let _kept = KEPT.set(table);
    Ok(())
}

/// One mount.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Mounted {
    /// The kernel's number for it, as `statx(2)` and `name_to_handle_at(2)` report it.
    pub id: u64,
    /// The number of the mount that it is mounted on.
    pub parent: u64,
    /// Nothing on it can be changed.
    pub read_only: bool,
    /// What it denies to the files on it.
    pub restrictions: Restrictions,
    /// Where it is mounted.
    pub at: PathBuf,
    /// Its file system type.
    pub fs_type: String,
    /// The file system, by its device number.
    pub device: String,
    /// Which directory of the file system it shows.
    pub root: PathBuf,
    /// What it is a mount of, in the file system's own words.
    pub source: String,
}

/// What a mount denies to the files on it (`mount(8)`).
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
    /// All of them.
    pub const ALL: Self = Self { nosuid: true, nodev: true, noexec: true };

    /// Reads the options of a mount: `rw,nosuid,relatime`.
    fn of_options(options: &[u8]) -> Self {
        Self { nosuid: has(options, "nosuid"), nodev: has(options, "nodev"), noexec: has(options, "noexec") }
    }
}

fn has(options: &[u8], name: &str) -> bool {
    options.split(|byte| *byte == b',').any(|option| option == name.as_bytes())
}

/// The mounts exactly at `path`, which holds no symbolic links; the topmost comes last.
///
/// # Errors
/// When the table cannot be read.
pub fn mounts_at(path: &Path) -> io::Result<Vec<Mounted>> {
    Ok(mounts()?.into_iter().filter(|mounted| mounted.at == path).collect())
}

/// The mount of that id, as `statx(2)` and `name_to_handle_at(2)` tell it.
///
/// # Errors
/// When the table cannot be read.
pub fn mount_with_id(id: u64) -> io::Result<Option<Mounted>> {
    let table = read()?;
    let id = format!("{id} ");
    let line = table.split(|byte| *byte == b'\n').find(|line| line.starts_with(id.as_bytes()));
    Ok(line.and_then(parse))
}

/// All mounts of this mount namespace, in the order of the table.
///
/// # Errors
/// When the table cannot be read.
pub fn mounts() -> io::Result<Vec<Mounted>> {
    let table = read()?;
    Ok(table.split(|byte| *byte == b'\n').filter_map(parse).collect())
}

fn read() -> io::Result<Vec<u8>> {
    let Some(kept) = KEPT.get() else { return std::fs::read(TABLE) };
    // One reader at a time: each part that is read begins where the last one ended.
    let mut kept = kept.lock().expect("a thread that panics ends the process");
    kept.rewind()?;
    let mut table = Vec::new();
    kept.read_to_end(&mut table)?;
    Ok(table)
}

/// `36 35 98:0 /mnt1 /mnt2 rw,noatime master:1 - ext3 /dev/root rw,errors=continue`
fn parse(line: &[u8]) -> Option<Mounted> {
    let mut fields = line.split(|byte| *byte == b' ');
    let mut number = || str::from_utf8(fields.next()?).ok()?.parse().ok();
    let (id, parent) = (number()?, number()?);
    let device = String::from_utf8_lossy(fields.next()?).into_owned();
    let root = path(fields.next()?);
    let at = path(fields.next()?);
    let options = fields.next()?;
    let (restrictions, read_only) = (Restrictions::of_options(options), has(options, "ro"));
    fields.find(|field| *field == b"-")?;
    let fs_type = String::from_utf8_lossy(fields.next()?).into_owned();
    let source = String::from_utf8_lossy(&unescape(fields.next()?)).into_owned();
    Some(Mounted { id, parent, read_only, restrictions, at, fs_type, device, root, source })
}

fn path(field: &[u8]) -> PathBuf {
    PathBuf::from(OsString::from_vec(unescape(field)))
}

/// Blanks, tabs, newlines and backslashes stand as three octal digits.
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
        let expected = Mounted {
            id: 36,
            parent: 35,
            read_only: false,
            restrictions: Restrictions { nosuid: true, nodev: false, noexec: true },
            at: PathBuf::from(r"/var/with blank\"),
            fs_type: FS_TYPE.to_owned(),
            device: "98:0".to_owned(),
            root: PathBuf::from("/"),
            source: "podfs".to_owned(),
        };
        assert_eq!(parse(line), Some(expected));
        assert_eq!(parse(b""), None);
    }

    #[test]
    fn the_root_is_mounted() {
        assert!(!mounts_at(Path::new("/")).expect("a table").is_empty());
    }
}
