//! What mountd and the portmapper answer. The first byte chooses which of them.

#![no_main]

use libfuzzer_sys::fuzz_target;
use podfs_fuse::nfs::mountd::{self, Refusal};
use podfs_fuse::nfs::portmap;
use podfs_fuse::nfs::rpc::Slice;
use podfs_fuse::nfs::v3::handle::MAX_HANDLE;
use podfs_fuse::nfs::xdr::{Reader, Writer};
use podfs_fuse_fuzz::decoded::{self, Kept};
use podfs_fuse_fuzz::server;

fuzz_target!(|data: &[u8]| {
    let Some((&which, data)) = data.split_first() else { return };
    let bytes = &Slice::from(data.to_vec());
    match which {
        0 => mounted(bytes),
        1 => refused(bytes),
        2 => port(bytes),
        _ => {}
    }
});

fn mounted(bytes: &Slice) {
    // A list that grows has the old one beside the new one while it is copied.
    let most = 3 * bytes.len() + 16;
    let read = |from: &mut Reader<'_>, _: &Slice| mountd::mounted(from);
    let Some(mounted) = decoded::check(bytes, most, Kept::All, read, server::mounted) else { return };
    assert!(mounted.root.as_bytes().len() <= MAX_HANDLE);
    assert!(4 * mounted.flavors.len() < bytes.len(), "{} flavors in {} bytes", mounted.flavors.len(), bytes.len());
}

fn refused(bytes: &[u8]) {
    let Ok(status) = Reader::new(bytes).u32() else { return };
    assert!(!Refusal::Status(status).to_string().is_empty());
}

fn port(bytes: &Slice) {
    let write = |to: &mut Writer, port: &Option<u16>| {
        to.u32(port.map_or(0, u32::from));
    };
    let Some(port) = decoded::check(bytes, 0, Kept::All, |from, _| portmap::port(from), write) else { return };
    let said = Reader::new(bytes).u32().expect("it was just read");
    assert_eq!(port.map(u32::from), (1..=0xffff).contains(&said).then_some(said));
}
