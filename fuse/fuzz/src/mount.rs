//! Answers of mountd and the portmapper. The first byte of an input chooses the kind of answer.

use podfs_nfs::mountd::{self, MountdError};
use podfs_nfs::portmap;
use podfs_nfs::rpc::Slice;
use podfs_nfs::v3::handle::MAX_HANDLE;
use podfs_nfs::xdr::{XdrReader, XdrWriter};

use super::decoded::{self, Checked, Kept};
use super::server;

/// Checks an input. Returns whether the whole input is a valid answer.
pub fn look(data: &[u8]) -> bool {
    let Some((&kind, data)) = data.split_first() else { return false };
    let bytes = &Slice::from(data.to_vec());
    match kind {
        0 => mounted(bytes),
        1 => refused(bytes),
        2 => port(bytes),
        _ => false,
    }
}

fn mounted(bytes: &Slice) -> bool {
    // While a list grows, the memory of the old list and of the new one are allocated at the same time.
    let most = 3 * bytes.len() + 16;
    let read = |from: &mut XdrReader<'_>, _: &Slice| mountd::mounted(from);
    let checked = decoded::check(bytes, most, Kept::All, read, server::mounted);
    let Some(Checked { value: mounted, is_all }) = checked else { return false };
    assert!(mounted.root.as_bytes().len() <= MAX_HANDLE);
    assert!(4 * mounted.flavors.len() < bytes.len(), "{} flavors in {} bytes", mounted.flavors.len(), bytes.len());
    is_all
}

fn refused(bytes: &[u8]) -> bool {
    let Ok(status) = XdrReader::new(bytes).u32() else { return false };
    assert!(!MountdError::Status(status).to_string().is_empty());
    bytes.len() == 4
}

fn port(bytes: &Slice) -> bool {
    let write = |to: &mut XdrWriter, port: &Option<u16>| {
        to.u32(port.map_or(0, u32::from));
    };
    let checked = decoded::check(bytes, 0, Kept::All, |from, _| portmap::port(from), write);
    let Some(Checked { value: port, is_all }) = checked else { return false };
    let number = XdrReader::new(bytes).u32().expect("it was just read");
    assert_eq!(port.map(u32::from), (1..=0xffff).contains(&number).then_some(number));
    is_all
}
