//! The results of every procedure of NFSv3. The first byte of an input is the procedure's number. The other bytes are the results
//! after the status.

use podfs_nfs::rpc::Slice;
use podfs_nfs::v3::{Attributes, DirectoryPage, MAX_LINK, NfsStatus, WccData, results};
use podfs_nfs::xdr::{Malformed, XdrReader, XdrWriter};

use super::decoded::{self, Checked, Kept, assert_within};
use super::server;

/// Checks an input. Returns whether the whole input is valid.
pub fn look(data: &[u8]) -> bool {
    let Some((&number, data)) = data.split_first() else { return false };
    let bytes = &Slice::from(data.to_vec());
    match number {
        // NULL has no results. Its number stands for the status of a call that has failed.
        0 => status(bytes),
        1 => all(bytes, Attributes::read, server::attributes),
        // SETATTR, REMOVE and RMDIR
        2 | 12 | 13 => all(bytes, WccData::read, server::around),
        3 => all(bytes, results::lookup, server::lookup),
        4 => all(bytes, results::access, server::access),
        5 => readlink(bytes),
        6 => [0, 1, 100, 4096, u32::MAX].map(|most| read(bytes, most)).contains(&true),
        7 => all(bytes, results::write, server::write),
        // CREATE, MKDIR, SYMLINK and MKNOD
        8..=11 => all(bytes, results::created, server::created),
        14 => all(bytes, results::rename, server::rename),
        15 => all(bytes, results::link, server::link),
        16 => listing(bytes, false),
        17 => listing(bytes, true),
        18 => all(bytes, results::fsstat, server::fsstat),
        19 => all(bytes, results::fsinfo, server::fsinfo),
        20 => all(bytes, results::pathconf, server::pathconf),
        21 => all(bytes, results::commit, server::commit),
        _ => false,
    }
}

/// Checks results that the decoded value contains completely.
fn all<T>(
    bytes: &Slice,
    read: impl Fn(&mut XdrReader<'_>) -> Result<T, Malformed>,
    write: impl Fn(&mut XdrWriter, &T),
) -> bool {
    decoded::check(bytes, 0, Kept::All, |reader, _| read(reader), write).is_some_and(|checked| checked.is_all)
}

fn status(bytes: &[u8]) -> bool {
    let Ok(number) = XdrReader::new(bytes).u32() else { return false };
    assert!((1..=133).contains(&NfsStatus(number).errno().raw_os_error()), "the status {number}");
    bytes.len() == 4
}

fn readlink(bytes: &Slice) -> bool {
    let read = |from: &mut XdrReader<'_>, whole: &Slice| results::readlink(from, |range| whole.part(range));
    let checked = decoded::check(bytes, 0, Kept::All, read, server::readlink);
    let Some(Checked { value: link, is_all }) = checked else { return false };
    assert_within(&link.target, bytes);
    assert!(link.target.len() <= MAX_LINK);
    is_all
}

fn read(bytes: &Slice, most: u32) -> bool {
    let read = |from: &mut XdrReader<'_>, whole: &Slice| results::read(from, most, |range| whole.part(range));
    let checked = decoded::check(bytes, 0, Kept::Usable, read, server::read);
    let Some(Checked { value: read, is_all }) = checked else { return false };
    assert_within(&read.data, bytes);
    assert!(read.data.len() <= most as usize, "{} bytes instead of {most}", read.data.len());
    is_all
}

fn listing(bytes: &Slice, plus: bool) -> bool {
    let read = |from: &mut XdrReader<'_>, whole: &Slice| DirectoryPage::read(from, plus, |range| whole.part(range));
    let write = |to: &mut XdrWriter, listing: &DirectoryPage| server::listing(to, listing, plus);
    let checked = decoded::check(bytes, 0, Kept::Usable, read, write);
    let Some(Checked { value: listing, is_all }) = checked else { return false };
    for entry in listing.entries() {
        assert_within(entry.name, bytes);
        assert!(!entry.name.is_empty() && !entry.name.iter().any(|byte| [0, b'/'].contains(byte)));
        assert!(plus || (entry.attributes.is_none() && entry.handle.is_none()));
    }
    is_all
}
