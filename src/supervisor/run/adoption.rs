//! Adoption: taking over from an earlier supervisor that was killed, or that left its volumes. Its server still serves, and
//! nothing was unmounted.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::io;
use std::mem::ManuallyDrop;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::Arc;

use nix::sys::socket::{getsockopt, sockopt};
use podfs_fuse::client::AdoptedVolume;
use podfs_fuse::confinement::Profile;
use podfs_fuse::mount::MountError;
use podfs_fuse::mount::point::MountPoint;
use podfs_fuse::mount::visible::take_away;
use podfs_fuse::region::VolumeKind;
use tracing::{info, warn};

use crate::manifest::pod::PodIdentity;
use crate::supervisor::log_format::LogFormat;
use crate::supervisor::run_dir::mount_points::MountPoints;
use crate::supervisor::run_dir::server_socket;
use crate::supervisor::run_dir::site::Site;
use crate::supervisor::server::program::ServerProgram;
use crate::supervisor::server::{PodServer, kill_server};
use crate::supervisor::volume::adopted::{KeptVolume, VolumeRecord};
use crate::volume::{Volume, VolumeSource};

/// Volumes that the adopted server serves, by name.
pub(in crate::supervisor) struct Adoption(HashMap<String, NamedVolume>);

/// The served volume of a name.
struct NamedVolume {
    record: VolumeRecord,
    served: AdoptedVolume,
    /// Earlier mounts of the volume.
    earlier: Vec<AdoptedVolume>,
}

impl Adoption {
    /// Adds a volume. Of the volumes of one name, the last one is the volume, and the others are its earlier mounts.
    fn add(&mut self, name: String, record: VolumeRecord, served: AdoptedVolume) {
        match self.0.entry(name) {
            Entry::Vacant(entry) => drop(entry.insert(NamedVolume { record, served, earlier: Vec::new() })),
            Entry::Occupied(mut entry) => {
                let named = entry.get_mut();
                if served.is_newer_than(&named.served) {
                    named.record = record;
                    named.earlier.push(std::mem::replace(&mut named.served, served));
                } else {
                    named.earlier.push(served);
                }
            }
        }
    }

    /// Returns the served volumes that the pod still has, by place: those that are in `volumes`, of the same kind, and mounted
    /// below `site`. Unmounts the other served volumes. If it fails, all volumes stay mounted.
    ///
    /// # Errors
    /// When the mount table cannot be read.
    pub(in crate::supervisor) fn keep(
        self,
        volumes: &[(usize, Volume)],
        pod: &PodIdentity,
        site: &Site,
        mount_points: &mut MountPoints,
    ) -> Result<HashMap<usize, KeptVolume>, MountError> {
        // To drop a volume unmounts it, also on an error.
        let (mut adoption, mut kept) = (ManuallyDrop::new(self), ManuallyDrop::new(HashMap::new()));
        let site = MountPoint::of_mount(site.path())?;
        for (place, volume) in volumes {
            let Some(name) = adoption.name_of(volume, pod) else { continue };
            let Some(NamedVolume { record, served, .. }) = adoption.0.get(&name) else { continue };
            let same_kind =
                matches!(volume.source, VolumeSource::Projection(_)) == (served.kind() == VolumeKind::Projection);
            if !record.path.starts_with(site.path()) || !same_kind {
                continue;
            }
            let audited = served.is_audited();
            if audited != volume.preferences.audit {
                warn!(
                    volume = volume.name.as_str(),
                    "volume {:?} is {} audited, as it was mounted; its annotation takes effect when the pod is started anew",
                    volume.name.as_str(),
                    if audited { "still" } else { "not" }
                );
            }
            if record.read_only == Some(false) && is_read_only(volume) {
                warn!(
                    volume = volume.name.as_str(),
                    "volume {:?} stays read-write, as it was mounted, although a volume of its claim is read-only in the manifest now; \
                     that takes effect when the pod is started anew",
                    volume.name.as_str(),
                );
            }
            let Some(device) = served.device() else { continue };
            let Some((point, visible)) = mount_points.keep_served(&record.path, &device)? else { continue };
            if let Some(NamedVolume { record, served, earlier }) = adoption.0.remove(&name) {
                kept.insert(*place, KeptVolume { record, served, point, visible, earlier });
            }
        }
        let Adoption(mut unwanted) = ManuallyDrop::into_inner(adoption);
        leave_elsewhere(&mut unwanted, &site);
        for (name, NamedVolume { record, served, earlier }) in unwanted {
            discard(&name, &record, served);
            drop(earlier);
            mount_points.forget(&record.path, None, site.path()).unwrap_or_else(|error| warn!("{error}"));
        }
        Ok(ManuallyDrop::into_inner(kept))
    }

    /// The name under which the server serves this volume of the pod, if it does. Volumes of one claim share a mount, which has the
    /// name of the volume that was their leader when podfs mounted them.
    fn name_of(&self, volume: &Volume, pod: &PodIdentity) -> Option<String> {
        let claim = volume.claim_name(&pod.name);
        let of_claim = || self.0.iter().find(|(_, named)| claim.is_some() && named.record.claim == claim);
        let named = || {
            let named = self.0.get_key_value(volume.name.as_str());
            // Earlier versions of podfs recorded no claims.
            named.filter(|(_, named)| named.record.claim.is_none())
        };
        of_claim().or_else(named).map(|(name, _)| name.clone())
    }
}

fn is_read_only(volume: &Volume) -> bool {
    matches!(&volume.source, VolumeSource::Claim(claim) if claim.read_only)
}

/// Removes the volumes that are not below the pod's directory, and leaves their mounts: the paths come from the server, which a
/// container may control.
fn leave_elsewhere(served: &mut HashMap<String, NamedVolume>, site: &MountPoint) {
    let elsewhere: Vec<_> = served.extract_if(|_, named| !named.record.path.starts_with(site.path())).collect();
    if let Some((_, first)) = elsewhere.first() {
        let (mounts, first, site) = (elsewhere.len(), first.record.path.display(), site.path().display());
        warn!(
            "podfs no longer serves {mounts} mounts of the podfs before, such as {first}, which are not below {site}; it leaves them"
        );
    }
}

/// Unmounts a volume.
fn discard(volume: &str, record: &VolumeRecord, served: AdoptedVolume) {
    warn!(volume, "the pod no longer has volume {volume:?} of the podfs before; podfs unmounts it");
    if let Err(reason) = take_away(&record.path) {
        warn!(volume, "podfs cannot remove a mount of an earlier podfs: {reason}");
    }
    drop(served);
}

/// A server that only another version of podfs can take over. It still serves the volumes.
#[derive(Debug, thiserror::Error)]
#[error(
    "podfs does not touch the volumes of pod {uid}, because it cannot take over their server (pid {pid}): {cause}; use the podfs that \
     started the server, or end the server, which ends the volumes of running containers"
)]
pub struct UnknownServer {
    uid: String,
    pid: i32,
    #[source]
    cause: io::Error,
}

/// Connects to the server that listens in the pod's run directory, and adopts it with its volumes. `None` if no server listens.
/// If podfs cannot adopt the server, calls `refused` with the reason, kills the server, and returns `None`: podfs mounts the
/// volumes anew.
///
/// # Errors
/// When only another version of podfs can take over the server, which works.
pub(in crate::supervisor) fn find(
    directory: &Path,
    program: &Arc<ServerProgram>,
    pod: &PodIdentity,
    profile: Profile,
    log_format: LogFormat,
    refused: impl FnOnce(&str),
) -> Result<Option<(PodServer, Adoption)>, UnknownServer> {
    let Ok(control) = server_socket::connect(directory).map(UnixStream::from) else { return Ok(None) };
    let Ok(peer) = getsockopt(&control, sockopt::PeerCredentials) else { return Ok(None) };
    let pid = peer.pid();
    match adopt(control, pid, program, pod, profile, log_format) {
        Ok((server, adoption)) => {
            info!("the server with pid {pid} serves the volumes of the pod; podfs takes them over");
            Ok(Some((server, adoption)))
        }
        Err(cause) if cause.kind() == io::ErrorKind::Unsupported => {
            Err(UnknownServer { uid: pod.uid.to_string(), pid, cause })
        }
        Err(error) => {
            refused(&error.to_string());
            warn!("podfs cannot take over the server of the pod (pid {pid}): {error}; it mounts the volumes anew");
            kill_server(pid, pod.uid.as_str());
            Ok(None)
        }
    }
}

fn adopt(
    control: UnixStream,
    pid: i32,
    program: &Arc<ServerProgram>,
    pod: &PodIdentity,
    profile: Profile,
    log_format: LogFormat,
) -> io::Result<(PodServer, Adoption)> {
    let (server, volumes) = PodServer::adopt(control, pid, program, pod, profile, log_format)?;
    let named = |served: &AdoptedVolume| {
        let record = VolumeRecord::of_served(served.about())?;
        let name = served.name().ok_or_else(|| io::Error::other("the server has a volume without a name"))?.to_owned();
        Ok((name, record))
    };
    let records: io::Result<Vec<_>> = volumes.iter().map(named).collect();
    // To drop a volume ends it.
    let volumes = ManuallyDrop::new(volumes);
    let records = match records {
        Err(error) if error.kind() == io::ErrorKind::Unsupported => return Err(error),
        records => records,
    };
    let volumes = ManuallyDrop::into_inner(volumes);
    let mut adoption = Adoption(HashMap::new());
    for ((name, record), served) in records?.into_iter().zip(volumes) {
        adoption.add(name, record, served);
    }
    Ok((server, adoption))
}
