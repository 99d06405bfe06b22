//! Where a CSI driver listens: at the endpoint that its registration names, or at its usual socket.
//!
//! A driver registers with a socket in `<root>/plugins_registry`, which answers `GetInfo`. It may have any name, so all are asked,
//! at the same time; one that does not answer within [`ANSWER`] is left out. Without a registration, the socket
//! `<root>/plugins/<driver>/csi.sock` will do, where drivers listen by custom.

use std::fs;
use std::os::unix::fs::FileTypeExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use tokio::task::JoinSet;
use tokio::time::timeout;

use super::client::{channel, runtime};
use crate::csi::registration::InfoRequest;
use crate::csi::registration::registration_client::RegistrationClient;
use crate::driver::DriverError;

/// How long a registration may take to answer.
const ANSWER: Duration = Duration::from_secs(2);
/// What a CSI driver registers as.
const CSI_PLUGIN: &str = "CSIPlugin";

/// The socket of the driver of this name.
///
/// # Errors
/// When it is not there, with where podfs has looked.
pub(super) fn find(root: &Path, driver: &str) -> Result<PathBuf, DriverError> {
    let registry = root.join("plugins_registry");
    let sockets = sockets_in(&registry);
    let registered = runtime()?.block_on(registered(sockets, driver));
    let usual = root.join("plugins").join(driver).join("csi.sock");
    registered.or_else(|| is_socket(&usual).then(|| usual.clone())).ok_or_else(|| {
        DriverError::refused(format!(
            "CSI driver {driver} is not registered on this node: no socket in {} names it, and there is no {}; podfs looks \
             for it again",
            registry.display(),
            usual.display()
        ))
    })
}

/// The endpoint that the driver has registered; the first one that answers.
async fn registered(sockets: Vec<PathBuf>, driver: &str) -> Option<PathBuf> {
    let mut asked: JoinSet<Option<(String, PathBuf)>> = sockets.into_iter().map(ask).collect();
    while let Some(answer) = asked.join_next().await {
        if let Ok(Some((name, endpoint))) = answer
            && name == driver
        {
            return Some(endpoint);
        }
    }
    None
}

/// The name and endpoint of the CSI driver that is registered by a socket.
async fn ask(socket: PathBuf) -> Option<(String, PathBuf)> {
    let info = async {
        let mut registration = RegistrationClient::new(channel(&socket).await.ok()?);
        let info = registration.get_info(InfoRequest {}).await.ok()?.into_inner();
        (info.r#type == CSI_PLUGIN).then(|| (info.name, PathBuf::from(info.endpoint.trim_start_matches("unix://"))))
    };
    timeout(ANSWER, info).await.ok().flatten()
}

fn sockets_in(directory: &Path) -> Vec<PathBuf> {
    let entries = fs::read_dir(directory).into_iter().flatten().flatten();
    let is_visible = |path: &PathBuf| path.file_name().is_some_and(|name| !name.as_encoded_bytes().starts_with(b"."));
    entries.map(|entry| entry.path()).filter(|path| is_visible(path) && is_socket(path)).collect()
}

fn is_socket(path: &Path) -> bool {
    fs::metadata(path).is_ok_and(|found| found.file_type().is_socket())
}
