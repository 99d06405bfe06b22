//! What is mounted where, from `/proc/self/mountinfo` (`proc(5)`).

use std::ffi::OsString;
use std::io;
use std::os::unix::ffi::OsStringExt;
use std::path::{Path, PathBuf};

/// The type of the file systems this crate mounts.
pub const FS_TYPE: &str = "fuse.podfs";

/// One mount.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Mounted {
    /// Where it is mounted.
    pub at: PathBuf,
    /// Its file system type.
    pub fs_type: String,
    /// What it is a mount of, in the file system's own words.
    pub source: String,
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
    let table = std::fs::read("/proc/self/mountinfo")?;
    let id = format!("{id} ");
    let line = table.split(|byte| *byte == b'\n').find(|line| line.starts_with(id.as_bytes()));
    Ok(line.and_then(parse))
}

/// All mounts of this mount namespace, in the order of the table.
///
/// # Errors
/// When the table cannot be read.
pub fn mounts() -> io::Result<Vec<Mounted>> {
    let table = std::fs::read("/proc/self/mountinfo")?;
    Ok(table.split(|byte| *byte == b'\n').filter_map(parse).collect())
}

/// `36 35 98:0 /mnt1 /mnt2 rw,noatime master:1 - ext3 /dev/root rw,errors=continue`
fn parse(line: &[u8]) -> Option<Mounted> {
    let mut fields = line.split(|byte| *byte == b' ');
    let at = unescape(fields.nth(4)?);
    fields.find(|field| *field == b"-")?;
    let fs_type = String::from_utf8_lossy(fields.next()?).into_owned();
    let source = String::from_utf8_lossy(&unescape(fields.next()?)).into_owned();
    Some(Mounted { at: PathBuf::from(OsString::from_vec(at)), fs_type, source })
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
        let line = br"36 35 98:0 / /var/with\040blank\134 rw,noatime master:1 shared:2 - fuse.podfs podfs rw";
        let expected =
            Mounted { at: PathBuf::from(r"/var/with blank\"), fs_type: FS_TYPE.to_owned(), source: "podfs".to_owned() };
        assert_eq!(parse(line), Some(expected));
        assert_eq!(parse(b""), None);
    }

    #[test]
    fn the_root_is_mounted() {
        assert!(!mounts_at(Path::new("/")).expect("a table").is_empty());
    }
}
