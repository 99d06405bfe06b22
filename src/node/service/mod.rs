//! The gRPC service of the daemon on `RUN/node.sock`, and its client. The messages are in `proto/podfs/volumemanager/v1`.
//!
//! The service uses a [`NodeHandle`] alone: it reads the state that the manager publishes, and sends commands.
//!
//! | module | owns |
//! |---|---|
//! | [`socket`] | one daemon for each run directory, and a socket for root only |
//! | [`wait`] | waiting for volumes, with the kubelet's texts |
//! | `containers` | requests about the containers of a pod |
//! | `methods` | the methods of the service |
//! | `convert` | the state as messages, and back |
//! | [`client`] | the client, for commands |

pub mod client;
mod containers;
mod convert;
#[cfg(test)]
mod fabricated;
mod methods;
pub mod socket;
#[cfg(test)]
mod tests;
pub mod wait;

use std::collections::BTreeSet;
use std::io;
use std::os::unix::net::UnixListener;
use std::path::PathBuf;
use std::time::Duration;

use tokio::net::UnixStream;
use tokio::time::sleep;
use tokio_stream::wrappers::UnixListenerStream;
use tokio_stream::{Stream, StreamExt};
use tonic::transport::Server;

pub use client::{AskFailure, DaemonClient, DaemonClientError};
pub use socket::{DaemonError, DaemonLock};

use super::{MountState, NodeHandle, NodeState, VolumeEntry};
use proto::volume_manager_server::VolumeManagerServer;

/// The pause after accept(2) has failed, because the process has no free descriptor. The client waits in the socket's queue.
const PAUSE: Duration = Duration::from_millis(100);

/// The code that the build generates from the `.proto` file of the service, which has the documentation.
#[allow(missing_docs, clippy::all)]
pub mod proto {
    tonic::include_proto!("podfs.volumemanager.v1");
}

/// Answers clients on the socket until the future is dropped. Finds the supervisors of pods in the run directory.
///
/// # Errors
/// When the socket cannot be used.
pub async fn serve(listener: UnixListener, node: NodeHandle, run_directory: PathBuf) -> io::Result<()> {
    let clients = clients(listener)?;
    let service = VolumeManagerServer::new(methods::Methods::new(node, run_directory));
    Server::builder().add_service(service).serve_with_incoming(clients).await.map_err(io::Error::other)
}

/// The clients that connect, except those of other users.
///
/// # Errors
/// When the socket cannot be used.
pub(super) fn clients(listener: UnixListener) -> io::Result<impl Stream<Item = io::Result<UnixStream>>> {
    let listener = tokio::net::UnixListener::from_std(listener)?;
    let clients = UnixListenerStream::new(listener).then(async |client| {
        if client.is_err() {
            sleep(PAUSE).await;
        }
        client
    });
    Ok(clients.filter_map(|client| client.ok().filter(is_of_this_user).map(Ok)))
}

/// Whether the process at the other end runs as this user.
fn is_of_this_user(client: &UnixStream) -> bool {
    client.peer_cred().is_ok_and(|peer| peer.uid() == rustix::process::geteuid().as_raw())
}

/// The unique names, sorted, of the volumes in use that a controller of the cluster attaches to the node: a volume is
/// in use from the moment a pod wants it until it is unmounted. The controller detaches none of them.
pub fn volumes_in_use(state: &NodeState) -> Vec<String> {
    let attached = in_use(state).filter(|volume| volume.attachable == Some(true));
    let names: BTreeSet<String> = attached.map(|volume| volume.unique_name.clone()).collect();
    names.into_iter().collect()
}

/// The volumes for the status of the Node object, which has `known` already: those of [`volumes_in_use`]. While the daemon does not know
/// all volumes in use, or what is behind them, the known ones stay.
pub fn volumes_to_report(state: &NodeState, known: &[String]) -> Vec<String> {
    let mut names = volumes_in_use(state);
    if !state.states_synced || in_use(state).any(|volume| volume.attachable.is_none()) {
        names.extend_from_slice(known);
        names.sort();
        names.dedup();
    }
    names
}

/// The volumes that pods want, and those that are, or may be, still mounted.
pub(super) fn in_use(state: &NodeState) -> impl Iterator<Item = &VolumeEntry> {
    let all = state.pods.values().flat_map(|pod| &pod.volumes);
    all.filter(|volume| volume.desired || volume.mount != MountState::NotMounted)
}
