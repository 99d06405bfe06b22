//! ONC RPC (RFC 5531) over TCP: records, calls and replies.

use std::io::{self, ErrorKind, Read, Write};

use super::xdr::{Reader, Writer};

pub const CALL: u32 = 0;
pub const REPLY: u32 = 1;

/// The authentication flavours `AUTH_NONE` and `AUTH_SYS`.
const NONE: u32 = 0;
const SYS: u32 = 1;

/// The bit in the header of a record's last fragment.
const LAST: u32 = 1 << 31;

/// The caller's identity, by `AUTH_SYS`.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Identity {
    pub uid: u32,
    pub gid: u32,
    pub groups: Vec<u32>,
}

/// A call.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Call {
    pub xid: u32,
    pub program: u32,
    pub version: u32,
    pub procedure: u32,
    /// The identity with `AUTH_SYS`; `None` with `AUTH_NONE`.
    pub identity: Option<Identity>,
    pub arguments: Vec<u8>,
}

impl Call {
    pub fn write(&self) -> Vec<u8> {
        let head = Writer::default().u32(self.xid).u32(CALL).u32(2);
        let head = head.u32(self.program).u32(self.version).u32(self.procedure);
        let credential = match &self.identity {
            None => head.u32(NONE).opaque(&[]),
            Some(Identity { uid, gid, groups }) => {
                let (machine, count) = (b"test".as_slice(), u32::try_from(groups.len()).expect("few groups"));
                let body = Writer::default().u32(0).opaque(machine).u32(*uid).u32(*gid).u32(count);
                head.u32(SYS).opaque(&groups.iter().fold(body, |body, group| body.u32(*group)).bytes())
            }
        };
        credential.u32(NONE).opaque(&[]).fixed(&self.arguments).bytes()
    }

    /// Parses a record, if it is a call.
    pub fn read(record: &[u8]) -> Option<Self> {
        let mut reader = Reader::new(record);
        let xid = reader.u32()?;
        if (reader.u32()?, reader.u32()?) != (CALL, 2) {
            return None;
        }
        let (program, version, procedure) = (reader.u32()?, reader.u32()?, reader.u32()?);
        let (flavour, body) = (reader.u32()?, reader.opaque()?);
        let identity = if flavour == SYS { Some(read_identity(body)?) } else { None };
        let (_verifier, _body) = (reader.u32()?, reader.opaque()?);
        Some(Self { xid, program, version, procedure, identity, arguments: reader.remaining().to_vec() })
    }
}

fn read_identity(body: &[u8]) -> Option<Identity> {
    let mut reader = Reader::new(body);
    let (_stamp, _machine) = (reader.u32()?, reader.opaque()?);
    let (uid, gid, count) = (reader.u32()?, reader.u32()?, reader.u32()?);
    let groups = (0..count).map(|_| reader.u32()).collect::<Option<_>>()?;
    Some(Identity { uid, gid, groups })
}

/// The reply of a server that accepts a call (`MSG_ACCEPTED`); `status` is zero if there are results.
pub fn accepted(xid: u32, status: u32, results: &[u8]) -> Vec<u8> {
    Writer::default().u32(xid).u32(REPLY).u32(0).u32(NONE).opaque(&[]).u32(status).fixed(results).bytes()
}

/// The reply of a server that denies a call because of its credential (`MSG_DENIED`, with an `auth_stat`).
pub fn denied(xid: u32, reason: u32) -> Vec<u8> {
    Writer::default().u32(xid).u32(REPLY).u32(1).u32(1).u32(reason).bytes()
}

/// The xid and the results of a successful reply.
pub fn results(record: &[u8]) -> Option<(u32, &[u8])> {
    let mut reader = Reader::new(record);
    let xid = reader.u32()?;
    if (reader.u32()?, reader.u32()?) != (REPLY, 0) {
        return None;
    }
    let (_verifier, _body, status) = (reader.u32()?, reader.opaque()?, reader.u32()?);
    (status == 0).then_some((xid, reader.remaining()))
}

/// The next record, its fragments joined; `None` if the connection ends between two records.
pub fn read_record(from: &mut impl Read) -> io::Result<Option<Vec<u8>>> {
    let mut record = Vec::new();
    loop {
        let mut header = [0; 4];
        if record.is_empty() && from.read(&mut header[..1])? == 0 {
            return Ok(None);
        }
        let bytes_read = usize::from(record.is_empty());
        from.read_exact(&mut header[bytes_read..])?;
        let header = u32::from_be_bytes(header);
        let length = u64::from(header & !LAST);
        if from.by_ref().take(length).read_to_end(&mut record)? as u64 != length {
            return Err(ErrorKind::UnexpectedEof.into());
        }
        if header & LAST != 0 {
            return Ok(Some(record));
        }
    }
}

/// The record as one fragment.
pub fn framed(record: &[u8]) -> Vec<u8> {
    [&header(record.len(), true), record].concat()
}

/// The record in fragments of at most `size` bytes.
pub fn in_fragments(record: &[u8], size: usize) -> Vec<u8> {
    let count = record.len().div_ceil(size);
    let parts = record.chunks(size).enumerate();
    parts.flat_map(|(index, part)| [&header(part.len(), index + 1 == count), part].concat()).collect()
}

/// The header of a fragment of this length.
pub fn header(length: usize, last: bool) -> [u8; 4] {
    let length = u32::try_from(length).expect("a short fragment");
    (length | if last { LAST } else { 0 }).to_be_bytes()
}

pub fn write_record(to: &mut impl Write, record: &[u8]) -> io::Result<()> {
    to.write_all(&framed(record))
}
