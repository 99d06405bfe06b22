//! Pages of directories, read in place in the reply.

use super::attributes::Attributes;
use super::handle::NfsFileHandle;
use crate::rpc::Slice;
use crate::xdr::{Malformed, XdrReader};

/// Most bytes of a name that a server may send. Linux refuses longer ones.
const MAX_RECEIVED_NAME: usize = 1024;

/// A page of a directory.
#[derive(Clone, Debug)]
pub struct DirectoryPage {
    /// The directory's attributes.
    pub directory: Option<Attributes>,
    /// The verifier that the call for the next page must have.
    pub verifier: [u8; 8],
    /// The directory ends with this page.
    pub is_last: bool,
    plus: bool,
    entries: Slice,
}

/// A name in a directory.
#[derive(Clone, Copy, Debug)]
pub struct ListedEntry<'a> {
    /// The file's number.
    pub fileid: u64,
    /// The name: not empty, and without slashes and zeros.
    pub name: &'a [u8],
    /// The position of the next entry.
    pub cookie: u64,
    /// The attributes, if this is READDIRPLUS and the server sends them.
    pub attributes: Option<Attributes>,
    /// The handle, if this is READDIRPLUS and the server sends it.
    pub handle: Option<NfsFileHandle>,
}

impl DirectoryPage {
    /// Reads a page; with `plus`, of READDIRPLUS. `part` returns a range of the results as a slice.
    ///
    /// # Errors
    /// [`Malformed`]
    pub fn read(
        reader: &mut XdrReader<'_>,
        plus: bool,
        part: impl FnOnce(std::ops::Range<usize>) -> Slice,
    ) -> Result<Self, Malformed> {
        let directory = Attributes::read_optional(reader)?;
        let verifier = reader.fixed()?;
        let begin = reader.position();
        // Parses all entries once now, so that `entries` cannot fail later.
        while entry(reader, plus)?.is_some() {}
        let end = reader.position();
        let is_last = reader.flag()?;
        Ok(Self { directory, verifier, is_last, plus, entries: part(begin..end) })
    }

    /// The entries, without those whose name no file can have.
    pub fn entries(&self) -> impl Iterator<Item = ListedEntry<'_>> {
        let mut reader = XdrReader::new(&self.entries);
        let all = std::iter::from_fn(move || entry(&mut reader, self.plus).expect("it has been read before"));
        all.filter(|entry| !entry.name.is_empty() && !entry.name.iter().any(|byte| matches!(byte, b'/' | 0)))
    }
}

fn entry<'a>(reader: &mut XdrReader<'a>, plus: bool) -> Result<Option<ListedEntry<'a>>, Malformed> {
    if !reader.flag()? {
        return Ok(None);
    }
    let (fileid, name, cookie) = (reader.u64()?, reader.opaque(MAX_RECEIVED_NAME)?, reader.u64()?);
    let (attributes, handle) =
        if plus { (Attributes::read_optional(reader)?, reader.optional(NfsFileHandle::read)?) } else { (None, None) };
    Ok(Some(ListedEntry { fileid, name, cookie, attributes, handle }))
}
