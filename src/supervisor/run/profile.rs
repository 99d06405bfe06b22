//! The profile of the server that the pod's volumes need.

use podfs_fuse::confinement::Profile;
use podfs_fuse::session::uring;

use crate::volume::{Volume, VolumeSource};

/// The profile of a server for these volumes: the widest that one of them needs.
pub(super) fn profile<'a>(volumes: impl IntoIterator<Item = &'a Volume>, io_uring: bool) -> Profile {
    let of_sources = if io_uring && uring::are_offered() { Profile::Rings } else { Profile::Passthrough };
    let of_volume = |volume: &Volume| match volume.source {
        VolumeSource::Projection(_) | VolumeSource::Unsupported(_) if volume.preferences.audit => Profile::Audit,
        VolumeSource::Projection(_) | VolumeSource::Unsupported(_) => Profile::Projection,
        _ => of_sources,
    };
    volumes.into_iter().map(of_volume).max().unwrap_or(Profile::Projection)
}
