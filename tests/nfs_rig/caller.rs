//! An NFS client that makes one call at a time. With it, tests see what a server answers without podfs' client. It is simple:
//! it waits for every reply, caches nothing, and sends a call again only if a test does so.

use std::io::{Error, ErrorKind, Result};
use std::net::{SocketAddr, TcpStream};

use super::TIMEOUT;
use super::protocol::procedure::*;
use super::protocol::{MOUNT, NFS};
use super::rpc::{Call, Identity, read_record, results, write_record};
use super::xdr::{Reader, Writer};

/// A connection to a server.
pub struct Caller {
    stream: TcpStream,
    xid: u32,
    pub identity: Option<Identity>,
}

/// A file handle.
pub type Handle = Vec<u8>;

/// A server's answer: results, or the number of an NFS error.
pub type Answer<T> = std::result::Result<T, u32>;

/// The attributes of a file that tests compare.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Attributes {
    pub kind: u32,
    pub mode: u32,
    pub uid: u32,
    pub gid: u32,
    pub size: u64,
    pub fileid: u64,
    /// The time of the last change of content, in seconds and nanoseconds.
    pub mtime: (u32, u32),
}

/// A page of a directory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Page {
    /// Cookies and names.
    pub entries: Vec<(u64, Vec<u8>)>,
    /// Whether the directory ends with this page.
    pub last: bool,
}

impl Caller {
    pub fn connect(to: SocketAddr) -> Result<Self> {
        let stream = TcpStream::connect(to)?;
        stream.set_nodelay(true)?;
        stream.set_read_timeout(Some(TIMEOUT))?;
        Ok(Self { stream, xid: 0x7000_0000, identity: Some(Identity::default()) })
    }

    /// The root handle of an export, from the MOUNT service at this address.
    pub fn mount(to: SocketAddr, export: &str) -> Result<Answer<Handle>> {
        let mut caller = Self::connect(to)?;
        let results = caller.call(MOUNT, MNT, Writer::default().opaque(export.as_bytes()))?;
        answer(&results, |reader| reader.opaque().map(<[u8]>::to_vec))
    }

    pub fn getattr(&mut self, file: &[u8]) -> Result<Answer<Attributes>> {
        let results = self.call(NFS, GETATTR, Writer::default().opaque(file))?;
        answer(&results, attributes)
    }

    pub fn lookup(&mut self, directory: &[u8], name: &str) -> Result<Answer<Handle>> {
        let results = self.call(NFS, LOOKUP, place(directory, name))?;
        answer(&results, |reader| reader.opaque().map(<[u8]>::to_vec))
    }

    pub fn read(&mut self, file: &[u8], offset: u64, count: u32) -> Result<Answer<Vec<u8>>> {
        let results = self.call(NFS, READ, Writer::default().opaque(file).u64(offset).u32(count))?;
        answer(&results, |reader| {
            optional_attributes(reader)?;
            let (_count, _end) = (reader.u32()?, reader.u32()?);
            reader.opaque().map(<[u8]>::to_vec)
        })
    }

    /// Writes without committing. Returns the server's verifier.
    pub fn write(&mut self, file: &[u8], offset: u64, bytes: &[u8]) -> Result<Answer<u64>> {
        let count = u32::try_from(bytes.len()).expect("few bytes");
        let results =
            self.call(NFS, WRITE, Writer::default().opaque(file).u64(offset).u32(count).u32(0).opaque(bytes))?;
        answer(&results, |reader| {
            changes(reader)?;
            let (_count, _committed) = (reader.u32()?, reader.u32()?);
            reader.u64()
        })
    }

    /// Commits a whole file. Returns the server's verifier.
    pub fn commit(&mut self, file: &[u8]) -> Result<Answer<u64>> {
        let results = self.call(NFS, COMMIT, Writer::default().opaque(file).u64(0).u32(0))?;
        answer(&results, |reader| changes(reader).and_then(|()| reader.u64()))
    }

    /// Creates a file, or opens the existing file of this name.
    pub fn create(&mut self, directory: &[u8], name: &str) -> Result<Answer<Handle>> {
        let results = self.call(NFS, CREATE, unset(place(directory, name).u32(0)))?;
        answer(&results, created_handle)
    }

    pub fn mkdir(&mut self, directory: &[u8], name: &str) -> Result<Answer<Handle>> {
        let results = self.call(NFS, MKDIR, unset(place(directory, name)))?;
        answer(&results, created_handle)
    }

    pub fn remove(&mut self, directory: &[u8], name: &str) -> Result<Answer<()>> {
        let results = self.call(NFS, REMOVE, place(directory, name))?;
        answer(&results, |_| Some(()))
    }

    pub fn rename(&mut self, directory: &[u8], from: &str, to: &str) -> Result<Answer<()>> {
        let results = self.call(NFS, RENAME, place(directory, from).opaque(directory).opaque(to.as_bytes()))?;
        answer(&results, |_| Some(()))
    }

    /// The entries behind a cookie, by READDIRPLUS.
    pub fn page(&mut self, directory: &[u8], cookie: u64, most: u32) -> Result<Answer<Page>> {
        let arguments = Writer::default().opaque(directory).u64(cookie).u64(0).u32(most).u32(most);
        let results = self.call(NFS, READDIRPLUS, arguments)?;
        answer(&results, |reader| {
            optional_attributes(reader)?;
            let _verifier = reader.u64()?;
            let mut entries = Vec::new();
            while reader.u32()? == 1 {
                let (_fileid, name, cookie) = (reader.u64()?, reader.opaque()?.to_vec(), reader.u64()?);
                optional_attributes(reader)?;
                if reader.u32()? == 1 {
                    reader.opaque()?;
                }
                entries.push((cookie, name));
            }
            Some(Page { entries, last: reader.u32()? == 1 })
        })
    }

    /// Sends a call and waits for its reply. Returns the results.
    pub fn call(&mut self, (program, version): (u32, u32), procedure: u32, arguments: Writer) -> Result<Vec<u8>> {
        self.xid += 1;
        let (xid, identity) = (self.xid, self.identity.clone());
        let record = Call { xid, program, version, procedure, identity, arguments: arguments.bytes() };
        self.send(&record.write())?;
        let record = self.receive()?;
        match results(&record) {
            Some((reply_xid, results)) if reply_xid == xid => Ok(results.to_vec()),
            _ => Err(Error::new(ErrorKind::InvalidData, format!("no results of call {xid}: {record:?}"))),
        }
    }

    /// Sends a record without looking at its content.
    pub fn send(&mut self, record: &[u8]) -> Result<()> {
        write_record(&mut self.stream, record)
    }

    /// The next record.
    pub fn receive(&mut self) -> Result<Vec<u8>> {
        read_record(&mut self.stream)?.ok_or_else(|| ErrorKind::UnexpectedEof.into())
    }

    /// Whether a reply, or its beginning, has come.
    pub fn has_reply(&self) -> bool {
        self.stream.set_nonblocking(true).expect("a socket");
        let peeked = self.stream.peek(&mut [0]);
        self.stream.set_nonblocking(false).expect("a socket");
        peeked.is_ok_and(|count| count > 0)
    }

    /// The connection, through which a test can send bytes that are no record.
    pub fn stream(&self) -> &TcpStream {
        &self.stream
    }

    pub fn local_port(&self) -> u16 {
        self.stream.local_addr().expect("the socket is connected").port()
    }
}

/// A directory and a name in it (`diropargs3`).
fn place(directory: &[u8], name: &str) -> Writer {
    Writer::default().opaque(directory).opaque(name.as_bytes())
}

/// Adds attributes of which none is set (`sattr3`).
fn unset(writer: Writer) -> Writer {
    (0..6).fold(writer, |writer, _| writer.u32(0))
}

/// Parses the status of an answer, and with `parse` the results after it.
fn answer<T>(results: &[u8], parse: impl FnOnce(&mut Reader) -> Option<T>) -> Result<Answer<T>> {
    let mut reader = Reader::new(results);
    let answer = match reader.u32() {
        Some(0) => parse(&mut reader).map(Ok),
        Some(error) => Some(Err(error)),
        None => None,
    };
    answer.ok_or_else(|| Error::new(ErrorKind::InvalidData, format!("results that end too early: {results:?}")))
}

fn attributes(reader: &mut Reader) -> Option<Attributes> {
    let (kind, mode, _links) = (reader.u32()?, reader.u32()?, reader.u32()?);
    let (uid, gid, size) = (reader.u32()?, reader.u32()?, reader.u64()?);
    let (_used, _device, _fsid, fileid) = (reader.u64()?, reader.u64()?, reader.u64()?, reader.u64()?);
    let (_atime, mtime, _ctime) = (reader.u64()?, (reader.u32()?, reader.u32()?), reader.u64()?);
    Some(Attributes { kind, mode, uid, gid, size, fileid, mtime })
}

fn optional_attributes(reader: &mut Reader) -> Option<()> {
    if reader.u32()? == 1 {
        attributes(reader)?;
    }
    Some(())
}

/// Skips the attributes before and after a change (`wcc_data`).
fn changes(reader: &mut Reader) -> Option<()> {
    if reader.u32()? == 1 {
        reader.fixed(24)?;
    }
    optional_attributes(reader)
}

/// The handle of a created file (`post_op_fh3`).
fn created_handle(reader: &mut Reader) -> Option<Handle> {
    if reader.u32()? == 1 { reader.opaque().map(<[u8]>::to_vec) } else { None }
}
