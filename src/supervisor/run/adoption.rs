//! Taking over from a supervisor that was killed: its server still serves, and nothing is unmounted.

use std::collections::HashMap;
use std::io;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::Arc;

use nix::sys::socket::{getsockopt, sockopt};
use podfs_fuse::client::AdoptedVolume;
use podfs_fuse::confinement::Profile;
use podfs_fuse::mount::MountError;
use podfs_fuse::mount::visible::{MountPoint, take_away};
use podfs_fuse::region::VolumeKind;
use serde::Deserialize;
use tracing::{info, warn};

use crate::manifest::pod::PodIdentity;
use crate::supervisor::log_format::LogFormat;
use crate::supervisor::run_dir::claim::SERVER;
use crate::supervisor::run_dir::mount_points::MountPoints;
use crate::supervisor::run_dir::site::Site;
use crate::supervisor::run_dir::socket;
use crate::supervisor::server::program::ServerProgram;
use crate::supervisor::server::{PodServer, kill_server};
use crate::supervisor::volume::adopted::{KeptVolume, VolumeRecord};
use crate::volume::{Volume, VolumeSource};

/// Volumes that the adopted server serves, by name.
pub(in crate::supervisor) struct Adoption(HashMap<String, (VolumeRecord, AdoptedVolume)>);

impl Adoption {
    /// Gives the served volumes that are in `volumes`, with the same kind and below `site`, by their places in the
    /// manifest. Unmounts the others.
    ///
    /// # Errors
    /// When the mount table cannot be read.
    pub(in crate::supervisor) fn keep(
        self,
        volumes: &[(usize, Volume)],
        site: &Site,
        mount_points: &mut MountPoints,
    ) -> Result<HashMap<usize, KeptVolume>, MountError> {
        let Adoption(mut served) = self;
        let site = MountPoint::of_mount(site.path())?;
        let mut kept = HashMap::new();
        for (place, volume) in volumes {
            let Some((about, served)) = served.remove(volume.name.as_str()) else { continue };
            let same_kind =
                matches!(volume.source, VolumeSource::Projection(_)) == (served.kind() == VolumeKind::Projection);
            let there = about.path.starts_with(site.path()) && same_kind;
            let audited = served.is_audited();
            if there && audited != volume.preferences.audit {
                warn!(
                    volume = volume.name.as_str(),
                    "volume {:?} is {} audited, as it was mounted; its annotation takes effect when the pod is started anew",
                    volume.name.as_str(),
                    if audited { "still" } else { "not" }
                );
            }
            let place_of = |device: String| mount_points.keep_served(&about.path, &device).transpose();
            match served.device().filter(|_| there).and_then(place_of).transpose()? {
                Some((point, visible)) => drop(kept.insert(*place, KeptVolume { about, served, point, visible })),
                None => discard(volume.name.as_str(), &about, served, &site),
            }
        }
        for (name, (about, served)) in served {
            discard(&name, &about, served, &site);
            if about.path.starts_with(site.path()) {
                mount_points.forget(&about.path, None, site.path()).unwrap_or_else(|error| warn!("{error}"));
            }
        }
        Ok(kept)
    }
}

/// Unmounts a volume, but only below the pod's directory: the server chose the path.
fn discard(volume: &str, about: &VolumeRecord, served: AdoptedVolume, site: &MountPoint) {
    warn!(volume, "the pod no longer has volume {volume:?} of the podfs before; podfs unmounts it");
    let taken_away = match about.path.starts_with(site.path()) {
        true => take_away(&about.path).map_err(|error| error.to_string()),
        false => Err(format!("{} is not below {}", about.path.display(), site.path().display())),
    };
    if let Err(reason) = taken_away {
        warn!(volume, "podfs cannot remove a mount of an earlier podfs: {reason}");
    }
    drop(served);
}

/// Looks for a server in the pod's run directory, and takes it over with its volumes. If that fails, calls `refused` with the
/// reason and kills the server: its volumes are mounted anew.
pub(in crate::supervisor) fn find(
    directory: &Path,
    program: &Arc<ServerProgram>,
    pod: &PodIdentity,
    profile: Profile,
    log_format: LogFormat,
    refused: impl FnOnce(&str),
) -> Option<(PodServer, Adoption)> {
    let control = socket::stream().ok()?;
    socket::connect_to(&control, directory, SERVER).ok()?;
    let control = UnixStream::from(control);
    let pid = getsockopt(&control, sockopt::PeerCredentials).ok()?.pid();
    match adopt(control, pid, program, pod, profile, log_format) {
        Ok((server, adoption)) => {
            info!("the server with pid {pid} serves the volumes of the pod; podfs takes them over");
            Some((server, adoption))
        }
        Err(error) => {
            refused(&error.to_string());
            warn!("podfs cannot take over the server of the pod (pid {pid}): {error}; it mounts the volumes anew");
            kill_server(pid, pod.uid.as_str());
            None
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
    let mut adoption = HashMap::new();
    for served in volumes {
        let about = VolumeRecord::deserialize(served.about())?;
        let name = served.name().ok_or_else(|| io::Error::other("the server has a volume without a name"))?.to_owned();
        adoption.insert(name, (about, served));
    }
    Ok((server, Adoption(adoption)))
}
