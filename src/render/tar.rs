//! A rendering as a tar archive with exact owners and modes: the format ustar, with pax records for values that do not fit.
//!
//! Equal renderings give equal archives: entries come in one order, times are those of 1970, owners have no names.

use std::io::{self, Write};

use super::model::{EntryKind, RenderedEntry, Rendering, visible};

const BLOCK: usize = 512;
/// The longest name and target of a header, in bytes.
const MAX_NAME: usize = 100;
/// The largest number in the seven octal digits of an owner.
const MAX_ID: u32 = 0o777_7777;

/// Writes the archive. Secret files are empty unless they are to be revealed.
///
/// # Errors
/// Those of `out`.
pub fn write(rendering: &Rendering<'_>, reveal: bool, out: &mut impl Write) -> io::Result<()> {
    for (place, entries) in rendering.with_entries() {
        for entry in entries {
            write_entry(&place.path, entry, reveal, out)?;
        }
    }
    // The end of an archive.
    out.write_all(&[0; 2 * BLOCK])?;
    out.flush()
}

fn write_entry(place: &str, entry: &RenderedEntry<'_>, reveal: bool, out: &mut impl Write) -> io::Result<()> {
    let mut path = match (place, entry.path.as_str()) {
        ("", "") => ".".to_owned(),
        ("", path) | (path, "") => path.to_owned(),
        (place, path) => format!("{place}/{path}"),
    };
    let (kind, target, content) = match &entry.kind {
        EntryKind::Directory => (b'5', "", &b""[..]),
        EntryKind::Link(target) => (b'2', target.as_str(), &b""[..]),
        EntryKind::File { content, is_secret } => (b'0', "", visible(content, *is_secret, reveal).unwrap_or_default()),
    };
    if kind == b'5' {
        path.push('/');
    }
    let mut records = Vec::new();
    for (key, text, fits) in [("path", &*path, path.len() <= MAX_NAME), ("linkpath", target, target.len() <= MAX_NAME)]
    {
        if !fits {
            records.extend(record(key, text));
        }
    }
    for (key, id) in [("uid", entry.uid), ("gid", entry.gid)] {
        if id > MAX_ID {
            records.extend(record(key, &id.to_string()));
        }
    }
    if !records.is_empty() {
        let header =
            TarHeader { path: "pax", target: "", mode: 0o644, uid: 0, gid: 0, kind: b'x', size: records.len() };
        header.write(out)?;
        write_padded(&records, out)?;
    }
    let (uid, gid) = (entry.uid.min(MAX_ID), entry.gid.min(MAX_ID));
    TarHeader { path: &path, target, mode: entry.mode, uid, gid, kind, size: content.len() }.write(out)?;
    write_padded(content, out)
}

/// The fields of the header block.
struct TarHeader<'a> {
    path: &'a str,
    target: &'a str,
    mode: u16,
    uid: u32,
    gid: u32,
    kind: u8,
    size: usize,
}

impl TarHeader<'_> {
    fn write(&self, out: &mut impl Write) -> io::Result<()> {
        let mut block = [0_u8; BLOCK];
        let mut put = |at: usize, bytes: &[u8]| block[at..at + bytes.len()].copy_from_slice(bytes);
        put(0, &self.path.as_bytes()[..self.path.len().min(MAX_NAME)]);
        put(100, format!("{:07o}\0", self.mode).as_bytes());
        put(108, format!("{:07o}\0", self.uid).as_bytes());
        put(116, format!("{:07o}\0", self.gid).as_bytes());
        put(124, format!("{:011o}\0", self.size).as_bytes());
        put(136, format!("{:011o}\0", 0).as_bytes());
        // The sum is made with blanks in the place of the checksum.
        put(148, b"        ");
        put(156, &[self.kind]);
        put(157, &self.target.as_bytes()[..self.target.len().min(MAX_NAME)]);
        put(257, b"ustar\x0000");
        let sum: u32 = block.iter().map(|byte| u32::from(*byte)).sum();
        block[148..156].copy_from_slice(format!("{sum:06o}\0 ").as_bytes());
        out.write_all(&block)
    }
}

/// A pax record: its own length, a key and a value.
fn record(key: &str, value: &str) -> Vec<u8> {
    let rest = format!(" {key}={value}\n");
    let mut length = rest.len();
    while rest.len() + length.to_string().len() != length {
        length = rest.len() + length.to_string().len();
    }
    format!("{length}{rest}").into_bytes()
}

fn write_padded(content: &[u8], out: &mut impl Write) -> io::Result<()> {
    out.write_all(content)?;
    out.write_all(&[0; BLOCK][..content.len().next_multiple_of(BLOCK) - content.len()])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_record_counts_its_own_digits() {
        assert_eq!(record("uid", "2097152"), b"15 uid=2097152\n");
        for length in 1..2000 {
            let record = record("path", &"x".repeat(length));
            let written = record.split(|byte| *byte == b' ').next().expect("a length");
            assert_eq!(str::from_utf8(written).expect("digits").parse(), Ok(record.len()));
        }
    }
}
