//! Searches for NFS servers that do not answer: their host name may now lead to another machine. In this module, a
//! server is an NFS server, and not the pod's server process.
//!
//! 1. podfs searches for a server that has not answered a call for some seconds, and again after pauses that grow,
//!    until it answers. The watchdog of the server process soon notices an NFS server that does not answer, and the
//!    supervisor starts the search then: a search has no timer of its own.
//! 2. A blocking thread resolves the name and asks the machines. There is at most one such thread for each server.
//! 3. A machine qualifies if its address is of the family that the client's sockets are bound to, if it offers the
//!    export, and if it accepts reads and writes as large as those that the volume was mounted with. Then all volumes
//!    that share the server move to that machine.
//! 4. The search does not check whether the files of the machine are the same. A different file has another number
//!    there, and calls with the old number fail with `ESTALE`.
//! 5. podfs does not search for a server that volumes name by its address.

use std::collections::HashMap;
use std::net::IpAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use podfs_fuse::caller::credentials::ActAs;
use podfs_fuse::client::ServerClient;
use podfs_fuse::nfs::options::{ExportOptions, NfsAddress, PortOptions};
use podfs_fuse::protocol::VolumeNumber;
use podfs_fuse::{Backoff, DoublingPause};
use podfs_nfs::mount::{MountRequest, MountedExport, reach};
use podfs_nfs::rpc::Credential;
use tokio::task::{JoinHandle, spawn_blocking};
use tracing::{debug, info};

use super::nfs::{BUDGET, mount_address, question, resolve};

/// How long a server may be silent before podfs searches for it.
const TIMEOUT: Duration = Duration::from_secs(5);
/// The pauses between searches.
const PAUSE: DoublingPause = DoublingPause::new(Duration::from_secs(5), Duration::from_secs(30));

/// The searches, one for each server. The key is one of the server's volumes.
#[derive(Default)]
pub struct Searches(HashMap<VolumeNumber, RunningSearch>);

/// The last search for a server.
struct RunningSearch {
    work: JoinHandle<()>,
    began: Instant,
    /// The pause after `began` before the next search.
    pause: Duration,
    backoff: Backoff,
}

impl RunningSearch {
    /// Whether the next search for the server is due.
    fn is_due(&self) -> bool {
        self.work.is_finished() && self.began.elapsed() >= self.pause
    }
}

impl Searches {
    /// Starts searches for the servers that are silent now. Forgets the searches for servers that answer again. Never
    /// blocks.
    pub fn start(&mut self, client: &Arc<ServerClient>) {
        let silent = client.silent_exports(TIMEOUT);
        self.0.retain(|volume, _| silent.iter().any(|(silent_volume, _)| silent_volume == volume));
        for (volume, options) in silent {
            let Some(search) = options.search.clone() else { continue };
            let mut backoff = match self.0.get(&volume) {
                None => PAUSE.backoff(),
                Some(last) if last.is_due() => last.backoff,
                Some(_) => continue,
            };
            let client = Arc::clone(client);
            let work = spawn_blocking(move || search_once(&client, volume, &options, &search));
            self.0.insert(volume, RunningSearch { work, began: Instant::now(), pause: backoff.fail(), backoff });
        }
    }
}

/// Searches once for the server of a volume. If the server has moved, moves all of its volumes to the new address.
fn search_once(client: &ServerClient, volume: VolumeNumber, options: &ExportOptions, search: &PortOptions) {
    let server = &options.export.server;
    let Some(address) = find(options, search) else { return };
    match client.move_nfs(volume, address) {
        Ok(()) => info!("NFS server {server} has moved from {} to {}", options.nfs.ip(), address.nfs.ip()),
        // The volume or the pod has ended.
        Err(error) => {
            debug!("podfs cannot move the volume to {}, where NFS server {server} is now: {error}", address.nfs.ip())
        }
    }
}

/// Another address of the server's name, at which a machine has the export.
fn find(options: &ExportOptions, search: &PortOptions) -> Option<NfsAddress> {
    let current = options.nfs.ip();
    let is_candidate = |address: &IpAddr| *address != current && address.is_ipv4() == current.is_ipv4();
    let candidates: Vec<_> = resolve(&options.export.server).ok()?.into_iter().filter(is_candidate).collect();
    if candidates.is_empty() {
        return None;
    }
    let mount_address = mount_address(search).ok()?;
    let budget = BUDGET / u32::try_from(candidates.len()).unwrap_or(u32::MAX);
    let credential = match options.callers {
        ActAs::Nobody => Credential::Anonymous,
        ActAs::Caller | ActAs::CallerInItsNamespace => Credential::root(),
    };
    candidates.into_iter().find_map(|address| {
        let question = question(&options.export, address, search, mount_address, budget);
        match reach(&MountRequest { credential: credential.clone(), ..question }) {
            Ok(reached) if takes_as_much(&reached, options) => {
                Some(NfsAddress { nfs: reached.nfs, mountd: reached.mountd })
            }
            Ok(_) => {
                debug!("NFS server {} ({address}) takes less at once than the volume needs", options.export.server);
                None
            }
            Err(error) => {
                debug!("{error}");
                None
            }
        }
    })
}

/// Whether the server accepts reads and writes as large as those of the volume.
fn takes_as_much(reached: &MountedExport, options: &ExportOptions) -> bool {
    reached.limits.read >= options.limits.read && reached.limits.write >= options.limits.write
}
