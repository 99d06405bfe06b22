//! Attributes of files, changes of them, and the attributes before and after a change.

use serde::{Deserialize, Serialize};

use crate::xdr::{Malformed, XdrReader, XdrWriter, unknown};

/// The type of a file.
#[derive(Clone, Copy, Debug, Eq, PartialEq, Serialize, Deserialize)]
pub enum FileType {
    /// A regular file.
    File,
    /// A directory.
    Directory,
    /// A block device.
    Block,
    /// A character device.
    Character,
    /// A symbolic link.
    Symlink,
    /// A socket.
    Socket,
    /// A named pipe.
    Pipe,
}

/// A time, from 1970 to 2106.
#[derive(Clone, Copy, Debug, Default, Eq, Ord, PartialEq, PartialOrd, Serialize, Deserialize)]
pub struct Time {
    /// Seconds since 1970.
    pub seconds: u32,
    /// Nanoseconds, less than a second.
    pub nanoseconds: u32,
}

/// The attributes of a file (`fattr3`).
#[derive(Clone, Copy, Debug, Eq, PartialEq, Serialize, Deserialize)]
pub struct Attributes {
    /// Its type.
    pub kind: FileType,
    /// Permissions, with the set-id and sticky bits.
    pub mode: u32,
    /// The number of its names.
    pub links: u32,
    /// The id of the user that owns the file.
    pub uid: u32,
    /// The id of the group that owns the file.
    pub gid: u32,
    /// Its size in bytes.
    pub size: u64,
    /// Its space on disk, in bytes.
    pub used: u64,
    /// Major and minor number of a device.
    pub device: (u32, u32),
    /// The number of the file system.
    pub fsid: u64,
    /// The number of the file in its file system.
    pub fileid: u64,
    /// The time of the last access.
    pub atime: Time,
    /// The time of the last change of the content.
    pub mtime: Time,
    /// The time of the last change of content or attributes.
    pub ctime: Time,
}

/// A change of a file's time.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub enum TimeChange {
    /// The time stays as it is.
    #[default]
    Keep,
    /// The time at which the server executes the call.
    ServerTime,
    /// This time.
    To(Time),
}

/// Changes of attributes (`sattr3`); `None` changes nothing.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub struct AttributeChanges {
    /// See [`Attributes`].
    pub mode: Option<u32>,
    /// See [`Attributes`].
    pub uid: Option<u32>,
    /// See [`Attributes`].
    pub gid: Option<u32>,
    /// See [`Attributes`].
    pub size: Option<u64>,
    /// See [`Attributes`].
    pub atime: TimeChange,
    /// See [`Attributes`].
    pub mtime: TimeChange,
}

/// The attributes by which a client sees that a file was changed.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct WccAttributes {
    /// See [`Attributes`].
    pub size: u64,
    /// See [`Attributes`].
    pub mtime: Time,
    /// See [`Attributes`].
    pub ctime: Time,
}

/// Attributes before and after a change, as far as the server sends them (`wcc_data`). If the attributes before the change are
/// those that the client knows, no other client has changed the file.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub struct WccData {
    /// The attributes just before the change.
    pub before: Option<WccAttributes>,
    /// The attributes just after the change.
    pub after: Option<Attributes>,
}

impl FileType {
    fn read(reader: &mut XdrReader<'_>) -> Result<Self, Malformed> {
        Ok(match reader.u32()? {
            1 => Self::File,
            2 => Self::Directory,
            3 => Self::Block,
            4 => Self::Character,
            5 => Self::Symlink,
            6 => Self::Socket,
            7 => Self::Pipe,
            _ => return unknown(),
        })
    }

    /// The kind's number (`ftype3`).
    pub fn number(self) -> u32 {
        match self {
            Self::File => 1,
            Self::Directory => 2,
            Self::Block => 3,
            Self::Character => 4,
            Self::Symlink => 5,
            Self::Socket => 6,
            Self::Pipe => 7,
        }
    }
}

impl Time {
    fn read(reader: &mut XdrReader<'_>) -> Result<Self, Malformed> {
        // Some servers have had files with more nanoseconds than there are.
        Ok(Self { seconds: reader.u32()?, nanoseconds: reader.u32()?.min(999_999_999) })
    }

    /// Writes the time.
    pub fn write(self, writer: &mut XdrWriter) {
        writer.u32(self.seconds).u32(self.nanoseconds);
    }
}

impl Attributes {
    /// Reads attributes.
    ///
    /// # Errors
    /// [`Malformed`]
    pub fn read(reader: &mut XdrReader<'_>) -> Result<Self, Malformed> {
        Ok(Self {
            kind: FileType::read(reader)?,
            mode: reader.u32()?,
            links: reader.u32()?,
            uid: reader.u32()?,
            gid: reader.u32()?,
            size: reader.u64()?,
            used: reader.u64()?,
            device: (reader.u32()?, reader.u32()?),
            fsid: reader.u64()?,
            fileid: reader.u64()?,
            atime: Time::read(reader)?,
            mtime: Time::read(reader)?,
            ctime: Time::read(reader)?,
        })
    }

    /// Reads attributes that the server may leave out.
    ///
    /// # Errors
    /// [`Malformed`]
    pub fn read_optional(reader: &mut XdrReader<'_>) -> Result<Option<Self>, Malformed> {
        reader.optional(Self::read)
    }
}

impl TimeChange {
    fn write(self, writer: &mut XdrWriter) {
        match self {
            Self::Keep => {
                writer.u32(0);
            }
            Self::ServerTime => {
                writer.u32(1);
            }
            Self::To(time) => time.write(writer.u32(2)),
        }
    }
}

impl AttributeChanges {
    /// Writes the changes.
    pub fn write(&self, writer: &mut XdrWriter) {
        let number = |writer: &mut XdrWriter, value| {
            writer.u32(value);
        };
        writer.optional(self.mode, number).optional(self.uid, number).optional(self.gid, number);
        writer.optional(self.size, |writer, value| {
            writer.u64(value);
        });
        self.atime.write(writer);
        self.mtime.write(writer);
    }
}

impl WccData {
    /// Reads attributes around a change.
    ///
    /// # Errors
    /// [`Malformed`]
    pub fn read(reader: &mut XdrReader<'_>) -> Result<Self, Malformed> {
        let before = reader.optional(|reader| {
            Ok(WccAttributes { size: reader.u64()?, mtime: Time::read(reader)?, ctime: Time::read(reader)? })
        })?;
        Ok(Self { before, after: Attributes::read_optional(reader)? })
    }
}
