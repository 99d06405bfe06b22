//! The answers of a correct server.

use super::attributes::{Settings, after, changes, created, full, is_directory};
use super::files::{Files, Node, now};
use super::{ReceivedCall, Reply, directory};
use crate::nfs_rig::protocol::procedure::*;
use crate::nfs_rig::protocol::{MOUNT, NFS, PORTMAP, error, kind};
use crate::nfs_rig::rpc::{Call, accepted};
use crate::nfs_rig::xdr::{Reader, Writer};

/// Values of `accept_stat` in a reply: the server does not have the program or the procedure, or cannot parse the
/// arguments.
const NO_PROGRAM: u32 = 1;
const NO_PROCEDURE: u32 = 3;
const GARBAGE_ARGUMENTS: u32 = 4;

/// Results or an error; `None` if the arguments end too early.
type Answer = Option<Result<Writer, u32>>;

/// Parses a call for the rules.
pub fn parse(call: Call, count: usize) -> ReceivedCall {
    let mut reader = Reader::new(&call.arguments);
    let (mut handle, mut name, mut at) = Default::default();
    if (call.program, call.version) == NFS && call.procedure != NULL {
        handle = reader.opaque().unwrap_or_default().to_vec();
        match call.procedure {
            LOOKUP | CREATE | MKDIR | SYMLINK | MKNOD | REMOVE | RMDIR | RENAME => {
                name = reader.opaque().unwrap_or_default().to_vec();
            }
            READ | WRITE | COMMIT | READDIR | READDIRPLUS => at = reader.u64().unwrap_or_default(),
            _ => {}
        }
    } else if (call.program, call.procedure) == (MOUNT.0, MNT) {
        name = reader.opaque().unwrap_or_default().to_vec();
    }
    ReceivedCall { call, count, handle, name, at }
}

/// The answer of the file system.
pub fn answer(received: &ReceivedCall, files: &mut Files, port: u16) -> Reply {
    let Call { xid, program, version, procedure, ref arguments, .. } = received.call;
    let reader = &mut Reader::new(arguments);
    let head = |status: u32| Reply::Record(accepted(xid, status, &[]));
    let answer = match (program, version) {
        _ if procedure == NULL => Some(Ok(Writer::default())),
        NFS => nfs(procedure, reader, files),
        MOUNT => mount(procedure, reader, files),
        PORTMAP if procedure == GETPORT => Some(Ok(Writer::default().u32(port.into()))),
        _ => return head(NO_PROGRAM),
    };
    match answer {
        Some(Ok(results)) => Reply::Results(results.bytes()),
        Some(Err(NO_SUCH)) => head(NO_PROCEDURE),
        Some(Err(error)) => Reply::Error(error),
        None => head(GARBAGE_ARGUMENTS),
    }
}

/// The results of a failed call: the error, without the optional attributes.
pub fn failed((program, procedure): (u32, u32), error: u32) -> Vec<u8> {
    let absent = match procedure {
        _ if program != NFS.0 => 0,
        GETATTR => 0,
        LOOKUP | ACCESS | READLINK | READ | READDIR | READDIRPLUS | FSSTAT | FSINFO | PATHCONF => 1,
        LINK => 3,
        RENAME => 4,
        _ => 2,
    };
    (0..absent).fold(Writer::default().u32(error), |writer, _| writer.u32(0)).bytes()
}

/// The program has no such procedure. This is no error of NFS.
const NO_SUCH: u32 = u32::MAX;

fn mount(procedure: u32, reader: &mut Reader, files: &mut Files) -> Answer {
    const SYS: u32 = 1;
    Some(match procedure {
        MNT => {
            let path = String::from_utf8_lossy(reader.opaque()?).into_owned();
            match path.strip_prefix("/export") {
                Some(path) if files.exists(path) => {
                    Ok(Writer::default().u32(0).opaque(&files.handle(path)).u32(1).u32(SYS))
                }
                _ => Err(error::NOENT),
            }
        }
        UMNT => Ok(Writer::default()),
        EXPORT => Ok(Writer::default().u32(1).opaque(b"/export").u32(0).u32(0)),
        _ => Err(NO_SUCH),
    })
}

fn nfs(procedure: u32, reader: &mut Reader, files: &mut Files) -> Answer {
    if matches!(procedure, READDIR | READDIRPLUS) {
        return directory::list(reader, files, procedure == READDIRPLUS);
    }
    if procedure > COMMIT {
        return Some(Err(NO_SUCH));
    }
    let number = match files.resolve(reader.opaque()?) {
        Ok(number) => number,
        Err(error) => return Some(Err(error)),
    };
    match procedure {
        GETATTR => Some(Ok(full(Writer::default().u32(0), files.get(number)))),
        SETATTR => {
            Settings::read(reader)?.apply(files.get(number));
            Some(Ok(changes(Writer::default().u32(0), files, number)))
        }
        LOOKUP => look_up(number, reader, files),
        ACCESS => {
            let wanted = reader.u32()?;
            Some(Ok(after(Writer::default().u32(0), files, number).u32(wanted)))
        }
        READLINK => {
            let target = files.get(number).content.clone();
            Some(Ok(after(Writer::default().u32(0), files, number).opaque(&target)))
        }
        READ => read(number, reader, files),
        WRITE => write(number, reader, files),
        CREATE => create(number, reader, files),
        MKDIR => {
            let (name, settings) = (reader.opaque()?, Settings::read(reader)?);
            Some(new(number, name, kind::DIRECTORY, files, |node| settings.apply(node)))
        }
        SYMLINK => {
            let (name, settings, target) = (reader.opaque()?, Settings::read(reader)?, reader.opaque()?);
            let link = |node: &mut Node| {
                settings.apply(node);
                node.content = target.to_vec();
            };
            Some(new(number, name, kind::LINK, files, link))
        }
        REMOVE | RMDIR => Some(remove(number, reader.opaque()?, procedure == RMDIR, files)),
        RENAME => {
            let (from, to, name) = (reader.opaque()?, reader.opaque()?, reader.opaque()?);
            Some(rename(number, from, to, name, files))
        }
        LINK => {
            let (to, name) = (reader.opaque()?, reader.opaque()?);
            Some(link(number, to, name, files))
        }
        FSSTAT => {
            let head = after(Writer::default().u32(0), files, number);
            Some(Ok((0..6).fold(head, |writer, _| writer.u64(1 << 30)).u32(0)))
        }
        FSINFO => {
            let most = files.most;
            let head = after(Writer::default().u32(0), files, number);
            let sizes = head.u32(most).u32(most).u32(1).u32(most).u32(most).u32(1).u32(most);
            // The largest size of a file, the granularity of times, and the properties: the server has links, symbolic
            // links and settable times, and its PATHCONF is the same for all files.
            Some(Ok(sizes.u64(u64::MAX >> 1).u32(0).u32(1).u32(0x1b)))
        }
        PATHCONF => {
            let head = after(Writer::default().u32(0), files, number).u32(1000).u32(255);
            Some(Ok(head.u32(1).u32(1).u32(0).u32(1)))
        }
        COMMIT => {
            let node = files.get(number);
            node.committed.clone_from(&node.content);
            let verifier = files.verifier;
            Some(Ok(changes(Writer::default().u32(0), files, number).u64(verifier)))
        }
        _ => Some(Err(error::NOTSUPP)),
    }
}

fn look_up(directory: u64, reader: &mut Reader, files: &mut Files) -> Answer {
    let number = match reader.opaque()? {
        b"." => Ok(directory),
        b".." => Ok(files.get(directory).parent),
        name => files.look_up(directory, name),
    };
    Some(number.map(|number| {
        let handle = files.handle_of(number);
        let results = after(Writer::default().u32(0).opaque(&handle), files, number);
        after(results, files, directory)
    }))
}

fn read(number: u64, reader: &mut Reader, files: &mut Files) -> Answer {
    let (offset, count) = (reader.u64()?, reader.u32()?.min(files.most));
    let node = files.get(number);
    if is_directory(node) {
        return Some(Err(error::ISDIR));
    }
    let start = usize::try_from(offset).expect("64 bits").min(node.content.len());
    let end = start.saturating_add(count as usize).min(node.content.len());
    let (bytes, at_end) = (node.content[start..end].to_vec(), end == node.content.len());
    let length = u32::try_from(bytes.len()).expect("at most the requested count");
    Some(Ok(after(Writer::default().u32(0), files, number).u32(length).u32(at_end.into()).opaque(&bytes)))
}

fn write(number: u64, reader: &mut Reader, files: &mut Files) -> Answer {
    const UNSTABLE: u32 = 0;
    let (offset, count, stable, bytes) = (reader.u64()?, reader.u32()?, reader.u32()?, reader.opaque()?);
    let count = count.min(files.most);
    let (start, bytes) = (usize::try_from(offset).expect("64 bits"), bytes.get(..count as usize)?);
    let node = files.get(number);
    put(&mut node.content, start, bytes);
    if stable != UNSTABLE {
        put(&mut node.committed, start, bytes);
    }
    (node.mtime, node.ctime) = (now(), now());
    let verifier = files.verifier;
    let head = changes(Writer::default().u32(0), files, number);
    Some(Ok(head.u32(count).u32(stable).u64(verifier)))
}

fn put(content: &mut Vec<u8>, start: usize, bytes: &[u8]) {
    let end = start + bytes.len();
    content.resize(content.len().max(end), 0);
    content[start..end].copy_from_slice(bytes);
}

fn create(directory: u64, reader: &mut Reader, files: &mut Files) -> Answer {
    const GUARDED: u32 = 1;
    const EXCLUSIVE: u32 = 2;
    let (name, mode) = (reader.opaque()?, reader.u32()?);
    let (mut settings, mut verifier) = (Settings::default(), None);
    if mode == EXCLUSIVE {
        verifier = Some(reader.array()?);
    } else {
        settings = Settings::read(reader)?;
    }
    let Ok(number) = files.look_up(directory, name) else {
        let file = |node: &mut Node| {
            settings.apply(node);
            node.verifier = verifier;
        };
        return Some(new(directory, name, kind::FILE, files, file));
    };
    let existing = files.get(number);
    if mode == GUARDED || (mode == EXCLUSIVE && existing.verifier != verifier) {
        return Some(Err(error::EXIST));
    }
    settings.apply(existing);
    Some(Ok(created(files, number, directory)))
}

/// Creates a node, unless the name exists.
fn new(directory: u64, name: &[u8], kind: u32, files: &mut Files, set: impl FnOnce(&mut Node)) -> Result<Writer, u32> {
    match files.look_up(directory, name) {
        Ok(_) => return Err(error::EXIST),
        Err(error::NOENT) if name.len() > 255 => return Err(error::NAMETOOLONG),
        Err(error::NOENT) => {}
        Err(error) => return Err(error),
    }
    let number = files.make(kind, if kind == kind::FILE { 0o644 } else { 0o755 });
    set(files.get(number));
    files.enter(directory, name, number);
    Ok(created(files, number, directory))
}

fn remove(directory: u64, name: &[u8], is_rmdir: bool, files: &mut Files) -> Result<Writer, u32> {
    let number = files.look_up(directory, name)?;
    let node = files.get(number);
    match (is_rmdir, is_directory(node)) {
        (true, false) => return Err(error::NOTDIR),
        (false, true) => return Err(error::ISDIR),
        (true, true) if !node.entries.is_empty() => return Err(error::NOTEMPTY),
        _ => {}
    }
    files.leave(directory, name)?;
    files.forget_nameless(number);
    Ok(changes(Writer::default().u32(0), files, directory))
}

fn rename(directory: u64, from: &[u8], to: &[u8], name: &[u8], files: &mut Files) -> Result<Writer, u32> {
    let target = files.resolve(to)?;
    let number = files.look_up(directory, from)?;
    match files.look_up(target, name) {
        Ok(same) if same == number => {}
        existing => {
            if let Ok(replaced) = existing {
                let (old, new) = (files.get(replaced).clone(), is_directory(files.get(number)));
                match (is_directory(&old), new) {
                    (true, false) => return Err(error::ISDIR),
                    (false, true) => return Err(error::NOTDIR),
                    (true, true) if !old.entries.is_empty() => return Err(error::NOTEMPTY),
                    _ => {}
                }
                files.leave(target, name)?;
                files.forget_nameless(replaced);
            }
            files.leave(directory, from)?;
            files.enter(target, name, number);
        }
    }
    let head = changes(Writer::default().u32(0), files, directory);
    Ok(changes(head, files, target))
}

fn link(number: u64, to: &[u8], name: &[u8], files: &mut Files) -> Result<Writer, u32> {
    let directory = files.resolve(to)?;
    if files.look_up(directory, name).is_ok() {
        return Err(error::EXIST);
    }
    files.enter(directory, name, number);
    let head = after(Writer::default().u32(0), files, number);
    Ok(changes(head, files, directory))
}
