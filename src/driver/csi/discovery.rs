//! The socket of a CSI driver: the endpoint that its registration names, or its usual socket.
//!
//! A driver registers with a socket in `<root>/plugins_registry`, at which it answers `GetInfo`. The socket may have any name, so
//! podfs calls all sockets at the same time, and ignores those that do not answer within two seconds. Without a registration, podfs
//! uses the usual socket, `<root>/plugins/<driver>/csi.sock`.

use std::fs;
use std::io;
use std::os::unix::fs::FileTypeExt;
use std::path::{Path, PathBuf};

use tokio::task::JoinSet;

use super::client::runtime;
use super::registration::registered;
use crate::driver::DriverError;

/// The directory below the root directory in which drivers register.
pub const REGISTRY: &str = "plugins_registry";

/// The socket of the driver of this name.
///
/// # Errors
/// When there is none. The error names the directories.
pub(super) fn find(root: &Path, driver: &str) -> Result<PathBuf, DriverError> {
    let registry = root.join(REGISTRY);
    let endpoint = runtime()?.block_on(endpoint(sockets_in(&registry).unwrap_or_default(), driver));
    let usual = root.join("plugins").join(driver).join("csi.sock");
    endpoint.or_else(|| is_socket(&usual).then(|| usual.clone())).ok_or_else(|| {
        DriverError::refused(format!(
            "CSI driver {driver} is not registered on this node: no socket in {} names it, and there is no {}; podfs looks \
             for it again",
            registry.display(),
            usual.display()
        ))
    })
}

/// The endpoint in the driver's registration: of several, the first that answers.
async fn endpoint(sockets: Vec<PathBuf>, driver: &str) -> Option<PathBuf> {
    let call = |socket: PathBuf| async move { registered(&socket).await.ok().flatten() };
    let mut calls: JoinSet<_> = sockets.into_iter().map(call).collect();
    while let Some(answer) = calls.join_next().await {
        if let Ok(Some(plugin)) = answer
            && plugin.name == driver
        {
            return Some(plugin.endpoint);
        }
    }
    None
}

/// The sockets of a registry. A registry that does not exist has none.
///
/// # Errors
/// When the directory cannot be read.
pub fn sockets_in(directory: &Path) -> io::Result<Vec<PathBuf>> {
    let entries = match fs::read_dir(directory) {
        Ok(entries) => entries.flatten(),
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        Err(error) => return Err(error),
    };
    let is_visible = |path: &PathBuf| path.file_name().is_some_and(|name| !name.as_encoded_bytes().starts_with(b"."));
    Ok(entries.map(|entry| entry.path()).filter(|path| is_visible(path) && is_socket(path)).collect())
}

fn is_socket(path: &Path) -> bool {
    fs::metadata(path).is_ok_and(|found| found.file_type().is_socket())
}
