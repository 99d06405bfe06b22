//! Finding out whether a server takes all users for one (`all_squash`). NFSv3 does not say so.
//!
//! podfs asks for the rights of a user that no server knows to files whose owner may do more than others. If the server grants such a user
//! what only the owner may do, it takes every user for the owner. Without such a file in the root, the question stays open, and the result
//! is "no".

use std::collections::HashSet;
use std::time::Duration;

use tokio::time::timeout;

use crate::error::Error;
use crate::export::{CallOptions, Export};
use crate::rpc::{Credential, Policy};
use crate::v3::{Attributes, FileType, NfsFileHandle, access};

/// A user and group that no server knows.
const STRANGER: u32 = 0x7000_0001;
/// Most owners whose files podfs asks about.
const OWNERS: usize = 4;
/// The longest time that podfs asks.
const BUDGET: Duration = Duration::from_secs(2);

/// Whether the server takes all users of an export for one.
pub(crate) async fn takes_all_for_one(export: &Export, attributes: &Attributes) -> bool {
    // Without an answer, the kernel checks permissions by owner and mode, which is never too much.
    matches!(timeout(BUDGET, ask(export, attributes)).await, Ok(Ok(true)))
}

async fn ask(export: &Export, attributes: &Attributes) -> Result<bool, Error> {
    let root = export.root();
    if stranger_is_owner(export, &root, attributes).await? {
        return Ok(true);
    }
    let root_user = Credential::root();
    let options = CallOptions { policy: Some(Policy::within(BUDGET)), ..CallOptions::new(&root_user) };
    let page = export.readdirplus(options, &root, 0, [0; 8]).await?;
    let mut owners = HashSet::from([attributes.uid]);
    for entry in page.entries().filter(|entry| entry.name != b"." && entry.name != b"..") {
        let (Some(handle), Some(found)) = (entry.handle, entry.attributes) else { continue };
        if of_owner_alone(&found) == 0 || !owners.insert(found.uid) {
            continue;
        }
        if stranger_is_owner(export, &handle, &found).await? {
            return Ok(true);
        }
        if owners.len() > OWNERS {
            break;
        }
    }
    Ok(false)
}

/// Whether the server grants a user that it does not know all rights that only the owner of the file has.
async fn stranger_is_owner(export: &Export, file: &NfsFileHandle, found: &Attributes) -> Result<bool, Error> {
    let wanted = of_owner_alone(found);
    if wanted == 0 {
        return Ok(false);
    }
    let stranger = Credential::User { uid: STRANGER, gid: STRANGER, groups: Vec::new() };
    let options = CallOptions { policy: Some(Policy::within(BUDGET)), ..CallOptions::new(&stranger) };
    Ok(export.access(options, file, wanted).await?.granted & wanted == wanted)
}

/// The rights to a file that its owner has by its mode, and others have not.
fn of_owner_alone(found: &Attributes) -> u32 {
    let execute = match found.kind {
        FileType::Directory => access::LOOKUP,
        FileType::File => access::EXECUTE,
        _ => return 0,
    };
    let rights = [(0o4, access::READ), (0o2, access::MODIFY), (0o1, execute)];
    let alone = rights.into_iter().filter(|(bit, _)| found.mode >> 6 & bit != 0 && found.mode & bit == 0);
    alone.fold(0, |all, (_, right)| all | right)
}
