//! The results of each procedure, which follow a status of `OK`.
//!
//! The client ignores attributes in the results of a failed call: a caller that needs them calls GETATTR.

use super::arguments::Stability;
use super::attributes::{Attributes, Time, WccData};
use super::handle::NfsFileHandle;
use crate::rpc::Slice;
use crate::xdr::{Malformed, XdrReader, unknown};

/// The result of LOOKUP.
#[derive(Clone, Copy, Debug)]
pub struct LookupReply {
    /// The file's handle.
    pub handle: NfsFileHandle,
    /// The file's attributes.
    pub attributes: Option<Attributes>,
    /// The directory's attributes.
    pub directory: Option<Attributes>,
}

/// The result of ACCESS.
#[derive(Clone, Copy, Debug)]
pub struct AccessReply {
    /// The granted rights, of those that the call asked for.
    pub granted: u32,
    /// The file's attributes.
    pub attributes: Option<Attributes>,
}

/// The result of READLINK.
#[derive(Clone, Debug)]
pub struct LinkTarget {
    /// The target of the link.
    pub target: Slice,
    /// The link's attributes.
    pub attributes: Option<Attributes>,
}

/// The result of READ.
#[derive(Clone, Debug)]
pub struct ReadReply {
    /// The data. It keeps the whole reply in memory.
    pub data: Slice,
    /// The file ends with the data.
    pub is_end: bool,
    /// The file's attributes.
    pub attributes: Option<Attributes>,
}

/// The result of WRITE.
#[derive(Clone, Copy, Debug)]
pub struct WriteReply {
    /// The number of bytes written.
    pub count: u32,
    /// The place that the data has reached.
    pub stability: Stability,
    /// The server's write verifier. It changes when the server may have lost data that was not committed.
    pub verifier: [u8; 8],
    /// The file's attributes.
    pub file: WccData,
}

/// The result of COMMIT.
#[derive(Clone, Copy, Debug)]
pub struct CommitReply {
    /// See [`WriteReply::verifier`].
    pub verifier: [u8; 8],
    /// The file's attributes.
    pub file: WccData,
}

/// The result of CREATE, MKDIR, SYMLINK and MKNOD.
#[derive(Clone, Copy, Debug)]
pub struct CreateReply {
    /// The file's handle; without it, the caller has to look the file up.
    pub handle: Option<NfsFileHandle>,
    /// The file's attributes.
    pub attributes: Option<Attributes>,
    /// The directory's attributes.
    pub directory: WccData,
}

/// The result of LINK.
#[derive(Clone, Copy, Debug)]
pub struct LinkReply {
    /// The file's attributes.
    pub attributes: Option<Attributes>,
    /// The directory's attributes.
    pub directory: WccData,
}

/// The result of FSSTAT, in bytes and files.
#[derive(Clone, Copy, Debug)]
#[expect(missing_docs, reason = "they are what statfs tells")]
pub struct FsStat {
    pub total_bytes: u64,
    pub free_bytes: u64,
    pub available_bytes: u64,
    pub total_files: u64,
    pub free_files: u64,
    pub available_files: u64,
    /// The attributes of the object that the call named.
    pub attributes: Option<Attributes>,
}

/// The result of FSINFO, without preferred sizes: podfs uses the largest sizes, see [`Limits`](crate::export::Limits).
#[derive(Clone, Copy, Debug)]
pub struct FsInfo {
    /// Most bytes of a READ.
    pub read_max: u32,
    /// Most bytes of a WRITE.
    pub write_max: u32,
    /// The largest file, in bytes.
    pub file_max: u64,
    /// The smallest step between two times.
    pub time_step: Time,
    /// The features of the file system (`FSF3_LINK`, …).
    pub properties: u32,
    /// The attributes of the object that the call named.
    pub attributes: Option<Attributes>,
}

/// The result of PATHCONF.
#[derive(Clone, Copy, Debug)]
pub struct PathConf {
    /// Most names of a file.
    pub links_max: u32,
    /// Most bytes of a name.
    pub name_max: u32,
    /// Names that are too long are refused, not cut.
    pub refuses_long_names: bool,
    /// Only the superuser may give files away.
    pub restricts_chown: bool,
    /// The attributes of the object that the call named.
    pub attributes: Option<Attributes>,
}

/// Parses the result of LOOKUP.
///
/// # Errors
/// [`Malformed`], like all of these.
pub fn lookup(reader: &mut XdrReader<'_>) -> Result<LookupReply, Malformed> {
    Ok(LookupReply {
        handle: NfsFileHandle::read(reader)?,
        attributes: Attributes::read_optional(reader)?,
        directory: Attributes::read_optional(reader)?,
    })
}

/// Parses the result of ACCESS.
///
/// # Errors
/// [`Malformed`]
pub fn access(reader: &mut XdrReader<'_>) -> Result<AccessReply, Malformed> {
    let attributes = Attributes::read_optional(reader)?;
    Ok(AccessReply { granted: reader.u32()?, attributes })
}

/// Parses the result of READLINK. `part` returns a range of the results as a slice, here and below.
///
/// # Errors
/// [`Malformed`]
pub fn readlink(
    reader: &mut XdrReader<'_>,
    part: impl FnOnce(std::ops::Range<usize>) -> Slice,
) -> Result<LinkTarget, Malformed> {
    let attributes = Attributes::read_optional(reader)?;
    Ok(LinkTarget { target: part(reader.opaque_range(super::MAX_LINK)?), attributes })
}

/// Parses the result of READ and takes at most `most` bytes. Some servers send more than they say, or more than the
/// client asked for.
///
/// # Errors
/// [`Malformed`]
pub fn read(
    reader: &mut XdrReader<'_>,
    most: u32,
    part: impl FnOnce(std::ops::Range<usize>) -> Slice,
) -> Result<ReadReply, Malformed> {
    let attributes = Attributes::read_optional(reader)?;
    let (count, is_end) = (reader.u32()?, reader.flag()?);
    let data = reader.opaque_range(usize::MAX)?;
    let length = data.len().min(count.min(most) as usize);
    // If the server sends more than `most` bytes, the end of the file lies beyond the bytes that are taken.
    Ok(ReadReply { data: part(data.start..data.start + length), is_end: is_end && count <= most, attributes })
}

/// Parses the result of WRITE.
///
/// # Errors
/// [`Malformed`]
pub fn write(reader: &mut XdrReader<'_>) -> Result<WriteReply, Malformed> {
    let file = WccData::read(reader)?;
    let count = reader.u32()?;
    let stability = match reader.u32()? {
        0 => Stability::Unstable,
        1 => Stability::DataSync,
        2 => Stability::FileSync,
        _ => return unknown(),
    };
    Ok(WriteReply { count, stability, verifier: reader.fixed()?, file })
}

/// Parses the result of COMMIT.
///
/// # Errors
/// [`Malformed`]
pub fn commit(reader: &mut XdrReader<'_>) -> Result<CommitReply, Malformed> {
    let file = WccData::read(reader)?;
    Ok(CommitReply { verifier: reader.fixed()?, file })
}

/// Parses the result of CREATE, MKDIR, SYMLINK and MKNOD.
///
/// # Errors
/// [`Malformed`]
pub fn created(reader: &mut XdrReader<'_>) -> Result<CreateReply, Malformed> {
    Ok(CreateReply {
        handle: reader.optional(NfsFileHandle::read)?,
        attributes: Attributes::read_optional(reader)?,
        directory: WccData::read(reader)?,
    })
}

/// Parses the result of LINK.
///
/// # Errors
/// [`Malformed`]
pub fn link(reader: &mut XdrReader<'_>) -> Result<LinkReply, Malformed> {
    Ok(LinkReply { attributes: Attributes::read_optional(reader)?, directory: WccData::read(reader)? })
}

/// Parses the result of RENAME: the attributes of the old and of the new directory.
///
/// # Errors
/// [`Malformed`]
pub fn rename(reader: &mut XdrReader<'_>) -> Result<(WccData, WccData), Malformed> {
    Ok((WccData::read(reader)?, WccData::read(reader)?))
}

/// Parses the result of FSSTAT.
///
/// # Errors
/// [`Malformed`]
pub fn fsstat(reader: &mut XdrReader<'_>) -> Result<FsStat, Malformed> {
    let attributes = Attributes::read_optional(reader)?;
    let stat = FsStat {
        total_bytes: reader.u64()?,
        free_bytes: reader.u64()?,
        available_bytes: reader.u64()?,
        total_files: reader.u64()?,
        free_files: reader.u64()?,
        available_files: reader.u64()?,
        attributes,
    };
    let _stays_for_seconds = reader.u32()?;
    Ok(stat)
}

/// Parses the result of FSINFO.
///
/// # Errors
/// [`Malformed`]
pub fn fsinfo(reader: &mut XdrReader<'_>) -> Result<FsInfo, Malformed> {
    let attributes = Attributes::read_optional(reader)?;
    let (read_max, _preferred, _multiple) = (reader.u32()?, reader.u32()?, reader.u32()?);
    let (write_max, _preferred, _multiple) = (reader.u32()?, reader.u32()?, reader.u32()?);
    let _listing_preferred = reader.u32()?;
    Ok(FsInfo {
        read_max,
        write_max,
        file_max: reader.u64()?,
        time_step: Time { seconds: reader.u32()?, nanoseconds: reader.u32()? },
        properties: reader.u32()?,
        attributes,
    })
}

/// Parses the result of PATHCONF.
///
/// # Errors
/// [`Malformed`]
pub fn pathconf(reader: &mut XdrReader<'_>) -> Result<PathConf, Malformed> {
    let attributes = Attributes::read_optional(reader)?;
    let conf = PathConf {
        links_max: reader.u32()?,
        name_max: reader.u32()?,
        refuses_long_names: reader.flag()?,
        restricts_chown: reader.flag()?,
        attributes,
    };
    let (_case_insensitive, _case_preserving) = (reader.flag()?, reader.flag()?);
    Ok(conf)
}
