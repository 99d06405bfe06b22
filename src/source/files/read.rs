//! Reads one manifest file, without ever waiting for a writer.

use std::fs::{self, File, Metadata, OpenOptions};
use std::io::{self, ErrorKind, Read};
use std::os::unix::fs::{FileTypeExt, MetadataExt, OpenOptionsExt};
use std::path::Path;

use super::SourceError;

/// Most bytes of a file. An object has at most 1 MiB, see the Kubernetes documentation of ConfigMap and Secret; so a
/// file may hold many of them.
const MAX_LEN: u64 = 256 << 20;

/// Identifies a file and its state, as far as the kernel shows them without reading.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub(super) struct Stamp {
    file: FileId,
    pub(super) len: u64,
    modified: (i64, i64),
}

/// A file or directory under any name: device and inode.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub(super) struct FileId(u64, u64);

impl FileId {
    pub(super) fn of(metadata: &Metadata) -> Self {
        Self(metadata.dev(), metadata.ino())
    }
}

impl Stamp {
    fn of(metadata: &Metadata) -> Self {
        Self { file: FileId::of(metadata), len: metadata.len(), modified: (metadata.mtime(), metadata.mtime_nsec()) }
    }

    pub(super) fn file(&self) -> FileId {
        self.file
    }

    /// Whether the file was changed in place since `earlier`.
    pub(super) fn changed_in_place(&self, earlier: &Self) -> bool {
        self.file == earlier.file && self != earlier
    }
}

/// The result of reading a file.
pub(super) enum FileReading {
    /// The whole file.
    Bytes(Stamp, Vec<u8>),
    /// The stamp is the known one, so the file was not read.
    Same(Stamp),
    /// The file changed while it was read.
    Torn(Stamp),
}

/// Reads the file at `path`, unless it still has the stamp `known`. Does not even open a pipe, socket or device.
pub(super) fn read(path: &Path, known: Option<Stamp>) -> Result<FileReading, SourceError> {
    let unreadable = |reason| SourceError::Unreadable { path: path.to_owned(), reason };
    let metadata = fs::metadata(path).map_err(|reason| match reason.kind() {
        ErrorKind::NotFound if fs::symlink_metadata(path).is_ok() => SourceError::Dangling(path.to_owned()),
        ErrorKind::NotFound => SourceError::Missing(path.to_owned()),
        _ => unreadable(reason),
    })?;
    regular(path, &metadata)?;
    if known == Some(Stamp::of(&metadata)) {
        return Ok(FileReading::Same(Stamp::of(&metadata)));
    }
    // Another kind of file may have taken the name meanwhile; it must not block the open.
    let mut file =
        OpenOptions::new().read(true).custom_flags(libc::O_NONBLOCK | libc::O_NOCTTY).open(path).map_err(unreadable)?;
    let metadata = file.metadata().map_err(unreadable)?;
    regular(path, &metadata)?;
    if metadata.len() > MAX_LEN {
        return Err(SourceError::TooLarge { path: path.to_owned(), limit: MAX_LEN });
    }
    let before = Stamp::of(&metadata);
    let bytes = contents(&mut file, before.len).map_err(unreadable)?;
    let after = Stamp::of(&file.metadata().map_err(unreadable)?);
    match before == after && bytes.len() as u64 == before.len {
        true => Ok(FileReading::Bytes(before, bytes)),
        false => Ok(FileReading::Torn(after)),
    }
}

fn contents(file: &mut File, len: u64) -> io::Result<Vec<u8>> {
    let mut bytes = Vec::with_capacity(usize::try_from(len).unwrap_or_default() + 1);
    file.take(len + 1).read_to_end(&mut bytes)?;
    Ok(bytes)
}

fn regular(path: &Path, metadata: &Metadata) -> Result<(), SourceError> {
    let kind = metadata.file_type();
    let found = match kind {
        _ if kind.is_file() => return Ok(()),
        _ if kind.is_dir() => "a directory",
        _ if kind.is_fifo() => "a pipe",
        _ if kind.is_socket() => "a socket",
        _ => "a device",
    };
    Err(SourceError::WrongType { path: path.to_owned(), found })
}
