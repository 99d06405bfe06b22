//! Messages of RPC. The first byte of an input chooses: the other bytes are a record of a server, which must be decoded exactly,
//! or they describe a call of podfs, which a server must decode as that call.

use podfs_nfs::rpc::credential::MAX_GROUPS;
use podfs_nfs::rpc::message::{RecordKind, receive};
use podfs_nfs::rpc::record::Incoming;
use podfs_nfs::rpc::{Credential, Denial, Pool, Procedure, RpcCall, RpcError, Slice};
use podfs_nfs::xdr::{Malformed, XdrReader, XdrWriter};

use super::{memory, stream};

/// Checks an input. Returns whether the whole input is a valid record or description.
pub fn look(data: &[u8]) -> bool {
    match data.split_first() {
        Some((0, record)) => from_a_server(record),
        Some((1, of_call)) => {
            let mut reader = XdrReader::new(of_call);
            call(&mut reader).is_ok() && reader.position() == of_call.len()
        }
        _ => false,
    }
}

fn from_a_server(record: &[u8]) -> bool {
    let (received, peak) = memory::peak(|| receive(record));
    assert_eq!(peak, 0, "looking at a record allocates nothing");
    let Ok(RecordKind::Reply { xid, results }) = received else { return received.is_ok() };
    assert_eq!(record.first_chunk(), Some(&xid.to_be_bytes()));
    if let Ok(begin) = results {
        assert!(begin <= record.len() && begin.is_multiple_of(4), "results begin at the byte {begin}");
        assert_eq!(receive(&record[..begin]), Ok(RecordKind::Reply { xid, results: Ok(begin) }));
        assert!(receive(&record[..begin - 1]).is_err(), "the last byte before the results is not needed");
    }
    if let Err(failure) = results {
        assert!(failure.errno().raw_os_error() > 0);
    }
    let written = reply(xid, results.map(|_| ()));
    let results = results.map(|_| written.len());
    assert_eq!(receive(&written), Ok(RecordKind::Reply { xid, results }));
    true
}

/// A reply as a server writes it, without results.
fn reply(xid: u32, outcome: Result<(), RpcError>) -> Vec<u8> {
    let mut writer = XdrWriter::default();
    writer.u32(xid).u32(1);
    let accepted = |writer: &mut XdrWriter, status| {
        writer.u32(0).u32(0).opaque(&[]).u32(status);
    };
    match outcome {
        Ok(()) => accepted(&mut writer, 0),
        Err(RpcError::ProgramUnavailable) => accepted(&mut writer, 1),
        Err(RpcError::VersionUnsupported { lowest, highest }) => {
            accepted(&mut writer, 2);
            writer.u32(lowest).u32(highest);
        }
        Err(RpcError::ProcedureUnavailable) => accepted(&mut writer, 3),
        Err(RpcError::GarbageArguments) => accepted(&mut writer, 4),
        Err(RpcError::SystemError) => accepted(&mut writer, 5),
        Err(RpcError::OtherRpc) => {
            writer.u32(1).u32(0).u32(2).u32(2);
        }
        Err(RpcError::Denied(denial)) => {
            let number = match denial {
                Denial::Credential => 1,
                Denial::Verifier => 3,
                Denial::TooWeak => 5,
                Denial::Other => 7,
            };
            writer.u32(1).u32(1).u32(number);
        }
        Err(RpcError::NoAnswer | RpcError::NoAnswerInTime | RpcError::Malformed(_)) => {
            panic!("a reply does not say {outcome:?}")
        }
    }
    writer.into_bytes()
}

/// Makes the call that `data` describes, and reads it as a server does.
fn call(data: &mut XdrReader<'_>) -> Result<(), Malformed> {
    let (xid, program, version, number) = (data.u32()?, data.u32()?, data.u32()?, data.u32()?);
    let credential = data.optional(|data| {
        let (uid, gid) = (data.u32()?, data.u32()?);
        let groups = data.opaque(128)?.iter().map(|group| u32::from(*group)).collect();
        Ok(Credential::User { uid, gid, groups })
    })?;
    let credential = credential.unwrap_or_default();
    let arguments = data.opaque(usize::MAX)?;
    let payload = data.optional(|data| data.opaque(usize::MAX))?;

    let procedure = Procedure { program, version, number };
    let write = |to: &mut XdrWriter| {
        to.opaque(arguments);
    };
    let message =
        RpcCall::call_with(xid, procedure, &credential, write, payload.map(|bytes| Slice::from(bytes.to_vec())));
    let sent = bytes_from(&message, 0);
    for skip in (0..=sent.len()).step_by(1 + sent.len() / 16) {
        assert_eq!(bytes_from(&message, skip), sent[skip..], "what is sent after the first {skip} bytes");
    }

    let mut records = Vec::new();
    let read = stream::feed(&mut Incoming::new(Pool::default()), &sent, std::iter::repeat(sent.len()), |record| {
        records.push(record);
    });
    assert_eq!(read, Ok(()));
    let [record] = &records[..] else { panic!("it is {} records", records.len()) };
    assert_eq!(**record, sent[4..]);
    assert_eq!(receive(record), Ok(RecordKind::Call));

    let mut reader = XdrReader::new(record);
    for known in [xid, 0, 2, program, version, number] {
        assert_eq!(reader.u32(), Ok(known));
    }
    assert_eq!(reader.u32(), Ok(credential.flavor()));
    let body = reader.opaque(400).expect("it is a credential");
    match &credential {
        Credential::Anonymous => assert!(body.is_empty()),
        Credential::User { uid, gid, groups } => is_user(body, *uid, *gid, groups).expect("it is a user's"),
    }
    assert_eq!((reader.u32(), reader.u32()), (Ok(0), Ok(0)), "the verifier is none");
    assert_eq!(reader.opaque(usize::MAX), Ok(arguments));
    if let Some(payload) = payload {
        assert_eq!(reader.opaque(usize::MAX), Ok(payload));
    }
    assert_eq!(reader.position(), record.len());
    Ok(())
}

/// `authsys_parms`
fn is_user(body: &[u8], uid: u32, gid: u32, groups: &[u32]) -> Result<(), Malformed> {
    let mut reader = XdrReader::new(body);
    let (_stamp, _machine) = (reader.u32()?, reader.opaque(255)?);
    assert_eq!((reader.u32()?, reader.u32()?), (uid, gid));
    let sent = &groups[..groups.len().min(MAX_GROUPS)];
    assert_eq!(reader.u32()? as usize, sent.len());
    for group in sent {
        assert_eq!(reader.u32()?, *group);
    }
    assert_eq!(reader.position(), body.len());
    Ok(())
}

/// The bytes of a message that podfs sends after the first `skip` ones.
fn bytes_from(message: &RpcCall, skip: usize) -> Vec<u8> {
    message.parts(skip).flat_map(|part| part.to_vec()).collect()
}
