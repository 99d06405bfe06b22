//! An export of an NFS server: the choice of the client, the server's address, and the options.

use std::net::IpAddr;
use std::time::Duration;

use podfs_fuse::caller::credentials::ActAs;
use podfs_fuse::mount::private::ContainerAccess;
use podfs_fuse::nfs::options::{Caching, ExportOptions, PortOptions};
use podfs_fuse::nfs::sockets::NfsSockets;
use podfs_nfs::address::{self, ExportAddress};
use podfs_nfs::mount::{MountRequest, MountedExport, reach};
use podfs_nfs::rpc::Credential;
use rustix::mount::MountAttrFlags;

use super::VolumeContext;
use super::failure::{RefreshCause, RefreshFailure};
use crate::host::{HostSource, kernel_nfs};
use crate::manifest::PodView;
use crate::volume::nfs_options::{Backend, BackendError, Security};
use crate::volume::{Nfs, NfsOptions, Volume};

/// How long podfs may take to find out whether it can serve an export. If the NFS server is slower, podfs tries again
/// later.
pub(super) const BUDGET: Duration = Duration::from_secs(10);

/// The NFS client of a volume: podfs's or the kernel's. Checks whether the kernel has a client only if the choice
/// depends on that, because the check loads the kernel's module.
pub(super) fn backend(spec: &Volume, source: &Nfs, options: &NfsOptions) -> Result<Backend, RefreshFailure> {
    let wish = spec.preferences.nfs_backend;
    let chosen = match options.choose_backend(wish, false) {
        Ok(backend) => Ok(backend),
        Err(_) => options.choose_backend(wish, kernel_nfs::is_available()),
    };
    chosen.map_err(|error| refused(source, error))
}

/// The failure of a volume that no client can serve. The kernel may get a client at any time, and nothing reports that.
fn refused(source: &Nfs, error: BackendError) -> RefreshFailure {
    let is_temporary = match error {
        BackendError::NeedsOtherThanAskedFor { .. } => false,
        BackendError::AskedForAbsent | BackendError::NeedsAbsent { .. } => true,
    };
    let cause = RefreshCause::NfsBackend { export: source.address.clone(), cause: error };
    if is_temporary { RefreshFailure::Temporary(cause) } else { RefreshFailure::Manifests(cause) }
}

/// Mounts an export with the kernel's client.
pub(super) fn mount_by_kernel(
    source: &Nfs,
    options: &NfsOptions,
    access: ContainerAccess,
) -> Result<HostSource, RefreshFailure> {
    Ok(kernel_nfs::mount(&kernel_nfs::KernelMount::new(source, options, access == ContainerAccess::ReadOnly))?)
}

/// The identity with which the client calls the NFS server. The kernel's client implements `sec=none` itself.
pub(super) fn callers(backend: Backend, options: &NfsOptions, pod: &PodView) -> ActAs {
    match (backend, &options.security, pod.facts.user_namespace) {
        (Backend::User, Security::None, _) => ActAs::Nobody,
        (_, _, true) => ActAs::CallerInItsNamespace,
        (_, _, false) => ActAs::Caller,
    }
}

/// An export that podfs has reached, and serves with its own client.
pub(super) struct ReachedExport {
    /// The client's options.
    pub(super) options: ExportOptions,
    /// The sockets of its connections.
    pub(super) sockets: NfsSockets,
    /// The restrictions of the mount.
    pub(super) attributes: MountAttrFlags,
}

impl ReachedExport {
    /// Finds the NFS server of a volume, and asks it for the export. The pod's volumes of one NFS server share the
    /// sockets to it.
    pub(super) fn find(
        source: &Nfs,
        options: &NfsOptions,
        access: ContainerAccess,
        setting: &VolumeContext,
        pod: &PodView,
    ) -> Result<ReachedExport, RefreshFailure> {
        let reached = reach_any(source, options)?;
        let serving = ExportOptions {
            read_only: access == ContainerAccess::ReadOnly,
            callers: callers(Backend::User, options, pod),
            one_user: reached.one_user,
            trace: setting.trace,
            ..serving(source, options, &reached)
        };
        let connections = usize::from(options.connections);
        let sockets = setting.server.nfs_sockets().join(&serving, connections, options.reserved_port);
        let sockets = sockets.map_err(|cause| RefreshFailure::Temporary(RefreshCause::NfsSocket(cause)))?;
        let attributes = [
            (options.no_suid, MountAttrFlags::MOUNT_ATTR_NOSUID),
            (options.no_dev, MountAttrFlags::MOUNT_ATTR_NODEV),
            (options.no_exec, MountAttrFlags::MOUNT_ATTR_NOEXEC),
        ];
        let attributes = attributes.into_iter().filter(|(wanted, _)| *wanted).map(|(_, attribute)| attribute).collect();
        Ok(ReachedExport { options: serving, sockets, attributes })
    }
}

/// Asks for an export at the addresses of its NFS server, one after the other. Each address gets an equal part of the
/// time.
fn reach_any(source: &Nfs, options: &NfsOptions) -> Result<MountedExport, RefreshFailure> {
    let addresses = resolve(&source.address.server)?;
    let search = search(options);
    let mount_address = mount_address(&search)?;
    let budget = BUDGET / u32::try_from(addresses.len()).unwrap_or(u32::MAX);
    let mut failure = RefreshFailure::temporary(format!("NFS server {} has no address", source.address.server));
    for address in addresses {
        let request = MountRequest {
            rsize: options.rsize,
            wsize: options.wsize,
            credential: if options.security == Security::None { Credential::Anonymous } else { Credential::root() },
            ..question(&source.address, address, &search, mount_address, budget)
        };
        match reach(&request) {
            Ok(reached) => return Ok(reached),
            Err(error) => failure = RefreshFailure::temporary(error),
        }
    }
    Err(failure)
}

/// The request that asks an NFS server at `address` for an export.
pub(super) fn question(
    export: &ExportAddress,
    address: IpAddr,
    search: &PortOptions,
    mount_address: Option<IpAddr>,
    budget: Duration,
) -> MountRequest {
    MountRequest {
        port: search.port,
        mount_address,
        mount_port: search.mount_port,
        reserved_port: search.reserved_port,
        ..MountRequest::new(export.clone(), address, budget)
    }
}

/// The address of the MOUNT service, if it is another host than the NFS server.
pub(super) fn mount_address(search: &PortOptions) -> Result<Option<IpAddr>, RefreshFailure> {
    let addresses = search.mount_host.as_deref().map(resolve).transpose()?;
    Ok(addresses.and_then(|addresses| addresses.first().copied()))
}

/// The options for finding the NFS server: ports, and the host of the MOUNT service.
fn search(options: &NfsOptions) -> PortOptions {
    PortOptions {
        port: options.port,
        mount_host: options.mount_host.clone(),
        mount_port: options.mount_port,
        reserved_port: options.reserved_port,
    }
}

/// The addresses of an NFS server, at most four.
pub(super) fn resolve(server: &str) -> Result<Vec<IpAddr>, RefreshFailure> {
    const MOST: usize = 4;
    let resolved = address::resolve(server);
    let mut addresses = resolved
        .map_err(|cause| RefreshFailure::Temporary(RefreshCause::NfsAddress { server: server.to_owned(), cause }))?;
    addresses.dedup();
    addresses.truncate(MOST);
    Ok(addresses)
}

/// The options of podfs's own client, from the mount options.
fn serving(source: &Nfs, options: &NfsOptions, reached: &MountedExport) -> ExportOptions {
    let seconds = |time: Duration| u32::try_from(time.as_secs()).unwrap_or(u32::MAX);
    let attributes = &options.attributes;
    ExportOptions {
        mountd: Some(reached.mountd),
        root_attributes: Some(reached.attributes),
        // podfs does not search for a server that the volume names by its address.
        search: (!source.address.is_numeric()).then(|| search(options)),
        retry_policy: options.retry_policy,
        timeo: u32::try_from(options.timeout.as_millis() / 100).unwrap_or(u32::MAX),
        retrans: options.retransmissions,
        caching: Caching {
            acregmin: seconds(attributes.file_min),
            acregmax: seconds(attributes.file_max),
            acdirmin: seconds(attributes.directory_min),
            acdirmax: seconds(attributes.directory_max),
            lookups: options.lookup_cache,
            close_to_open: options.close_to_open,
        },
        stable: options.sync,
        with_attributes: options.readdirplus,
        local_locks: options.local_locks,
        ..ExportOptions::new(source.address.clone(), reached.nfs, reached.root.as_bytes(), reached.limits)
    }
}

#[cfg(test)]
mod tests {
    use k8s_openapi::api::core::v1::NFSVolumeSource;

    use super::*;

    #[test]
    fn a_volume_that_needs_a_client_of_the_kernel_is_tried_again_and_one_whose_options_contradict_is_not() {
        let source = NFSVolumeSource { server: "files".to_owned(), path: "/srv".to_owned(), read_only: None };
        let source = Nfs::parse(&source).expect("an export");
        for (options, wish, is_tried_again) in [
            ("nfsvers=4.1", None, true),
            ("sec=krb5p", None, true),
            ("nfsvers=3", Some(Backend::Kernel), true),
            ("nfsvers=4.1", Some(Backend::User), false),
        ] {
            let parsed = NfsOptions::parse([options]).expect(options);
            let error = parsed.choose_backend(wish, false).expect_err(options);
            let sentence = format!("files:/srv: {error}");
            match refused(&source, error) {
                RefreshFailure::Temporary(cause) => {
                    assert_eq!((is_tried_again, cause.to_string()), (true, sentence), "{options}")
                }
                RefreshFailure::Manifests(cause) => {
                    assert_eq!((is_tried_again, cause.to_string()), (false, sentence), "{options}")
                }
                RefreshFailure::Permanent(error) => panic!("{options}: {error}"),
            }
        }
    }
}
