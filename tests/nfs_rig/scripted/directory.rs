//! READDIR and READDIRPLUS.

use super::attributes::{after, is_directory};
use super::files::Files;
use crate::nfs_rig::protocol::error;
use crate::nfs_rig::xdr::{Reader, Writer};

/// The most bytes of a reply without its entries.
const FRAME: usize = 128;

/// The entries after a cookie that fit into the reply.
pub fn list(reader: &mut Reader, files: &mut Files, plus: bool) -> Option<Result<Writer, u32>> {
    let (handle, cookie, _verifier) = (reader.opaque()?.to_vec(), reader.u64()?, reader.u64()?);
    // READDIRPLUS has two limits: one of the names and cookies, one of the whole reply.
    let _limit_of_names = if plus { reader.u32()? } else { 0 };
    let most = reader.u32()? as usize;
    Some(files.resolve(&handle).and_then(|directory| page(files, directory, cookie, most, plus)))
}

fn page(files: &mut Files, directory: u64, cookie: u64, most: usize, plus: bool) -> Result<Writer, u32> {
    let node = files.get(directory).clone();
    if !is_directory(&node) {
        return Err(error::NOTDIR);
    }
    let dots = [(1, b".".to_vec(), directory), (2, b"..".to_vec(), node.parent)];
    let named = node.entries.iter().map(|entry| (entry.cookie, entry.name.clone(), entry.node));
    let remaining: Vec<_> = dots.into_iter().chain(named).filter(|entry| entry.0 > cookie).collect();
    let mut writer = after(Writer::default().u32(0), files, directory).u64(0);
    for (index, (cookie, name, number)) in remaining.iter().enumerate() {
        let fileid = files.get(*number).fileid;
        let mut longer = writer.clone().u32(1).u64(fileid).opaque(name).u64(*cookie);
        if plus {
            let handle = files.handle_of(*number);
            longer = after(longer, files, *number);
            longer = if files.sparse { longer.u32(0) } else { longer.u32(1).opaque(&handle) };
        }
        if longer.clone().bytes().len() + FRAME > most {
            return if index == 0 { Err(error::TOOSMALL) } else { Ok(writer.u32(0).u32(0)) };
        }
        writer = longer;
    }
    Ok(writer.u32(0).u32(1))
}
