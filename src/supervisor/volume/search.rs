//! Searches for NFS servers that do not answer: their name may have moved to another machine.
//!
//! 1. podfs searches for a server that has not answered a call for some seconds, and again after pauses that grow,
//!    until it answers. The watchdog of the pod's server soon notices a server that does not answer, and the search
//!    starts then: it has no timer of its own.
//! 2. A blocking thread resolves names and asks machines, one for each server at a time.
//! 3. A machine qualifies if its address is of the family that the sockets are bound to, and if it offers the export
//!    and accepts reads and writes as large as the volume was mounted with. Then all volumes that share the server move
//!    there.
//! 4. The search does not check whether its files are the same. A different file there has another number, and calls on
//!    the old one fail with `ESTALE`.
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

/// The searches: for each server, by one of its volumes.
#[derive(Default)]
pub struct Searches(HashMap<VolumeNumber, RunningSearch>);

struct RunningSearch {
    work: JoinHandle<()>,
    began: Instant,
    /// The pause after `began` before the next search.
    pause: Duration,
    backoff: Backoff,
}

impl RunningSearch {
    fn is_due(&self) -> bool {
        self.work.is_finished() && self.began.elapsed() >= self.pause
    }
}

impl Searches {
    /// Starts to search for the servers that are silent now. Never blocks.
    pub fn start(&mut self, client: &Arc<ServerClient>) {
        let silent = client.silent_exports(TIMEOUT);
        self.0.retain(|volume, _| silent.iter().any(|(other, _)| other == volume));
        for (volume, options) in silent {
            let Some(search) = options.search.clone() else { continue };
            let mut backoff = match self.0.get(&volume) {
                None => PAUSE.backoff(),
                Some(last) if last.is_due() => last.backoff,
                Some(_) => continue,
            };
            let client = Arc::clone(client);
            let work = spawn_blocking(move || look(&client, volume, &options, &search));
            self.0.insert(volume, RunningSearch { work, began: Instant::now(), pause: backoff.fail(), backoff });
        }
    }
}

/// Searches once for the server of a volume. If it has moved, moves the volumes there.
fn look(client: &ServerClient, volume: VolumeNumber, options: &ExportOptions, search: &PortOptions) {
    let server = &options.export.server;
    let Some(place) = find(options, search) else { return };
    match client.move_nfs(volume, place) {
        Ok(()) => info!("NFS server {server} has moved from {} to {}", options.nfs.ip(), place.nfs.ip()),
        // The volume or the pod has ended.
        Err(error) => debug!("NFS server {server} is not followed to {}: {error}", place.nfs.ip()),
    }
}

/// Another address of the server's name, at which a machine has the export.
fn find(options: &ExportOptions, search: &PortOptions) -> Option<NfsAddress> {
    let current = options.nfs.ip();
    let is_worth_it = |address: &IpAddr| *address != current && address.is_ipv4() == current.is_ipv4();
    let others: Vec<_> = resolve(&options.export.server).ok()?.into_iter().filter(is_worth_it).collect();
    if others.is_empty() {
        return None;
    }
    let mount_address = mount_address(search).ok()?;
    let budget = BUDGET / u32::try_from(others.len()).unwrap_or(u32::MAX);
    let credential = match options.callers {
        ActAs::Nobody => Credential::Anonymous,
        ActAs::Caller | ActAs::CallerInItsNamespace => Credential::root(),
    };
    others.into_iter().find_map(|address| {
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

fn takes_as_much(reached: &MountedExport, options: &ExportOptions) -> bool {
    reached.limits.read >= options.limits.read && reached.limits.write >= options.limits.write
}
