//! A stream that is read in pieces.

use podfs_nfs::rpc::Slice;
use podfs_nfs::rpc::pool::LARGE;
use podfs_nfs::rpc::record::{Incoming, StreamError};

/// Gives `stream` to `incoming` in pieces of at most these sizes, and calls `each` with each record.
///
/// # Errors
/// Those of [`Incoming::read`].
pub fn feed(
    incoming: &mut Incoming,
    stream: &[u8],
    mut pieces: impl Iterator<Item = usize>,
    mut each: impl FnMut(Slice),
) -> Result<(), StreamError> {
    let mut rest = stream;
    while !rest.is_empty() {
        let room = incoming.read_buffer();
        let count = pieces.next().expect("pieces are endless").min(room.len()).min(rest.len());
        assert!(count > 0 && room.len() <= LARGE, "there is room for {} bytes", room.len());
        let (piece, behind) = rest.split_at(count);
        room[..count].copy_from_slice(piece);
        rest = behind;
        incoming.read(count, |record| {
            each(record);
            Ok(())
        })?;
    }
    Ok(())
}
