//! A volume that a driver of another vendor mounts: its home, a directory in the pod's directory, and the mount that
//! podfs serves.
//!
//! podfs serves a clone of the driver's mount. So the driver can unmount its own mount at any time, even while
//! containers have files of the volume open.

use std::collections::BTreeMap;
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};
use std::time::Duration;

use k8s_openapi::jiff::Timestamp;
use podfs_fuse::mount::bind::bind;
use podfs_fuse::mount::private::ContainerAccess;
use tracing::{info, warn};

use super::growth::ExpansionState;
use super::label::label;
use super::mount_plan::{MountPlan, PlannedContent, access};
use super::{RefreshFailure, VolumeContext};
use crate::binding::BoundVolume;
use crate::driver::csi::CsiMount;
use crate::driver::flex::FlexMount;
use crate::driver::{self, DriverError, DriverHome, Drivers, UndoError};
use crate::host::HostSource;
use crate::host::device::BlockDevice;
use crate::host::serve::{BindReason, SourceForm};
use crate::manifest::PodView;
use crate::manifest::objects::{CsiDriver, ObjectKind, Secret, VolumeAttachment};
use crate::supervisor::run_dir::site::Site;
use crate::volume::migration::{complete, inline_access_mode};
use crate::volume::{Csi, Flex, SecretReference, ServedBy, TokenKey, Volume};

/// How often podfs calls a CSI driver with `requiresRepublish` again (the kubelet: each 63 to 84 s).
const REPUBLISH_INTERVAL: Duration = Duration::from_secs(75);

/// Makes a FlexVolume driver mount a volume, and plans the mount at `path`. `name` is the name of the PersistentVolume,
/// or that of the volume in the pod.
pub(super) fn mount_flex(
    setting: &VolumeContext,
    spec: &Volume,
    path: PathBuf,
    flex: &Flex,
    bound: Option<&BoundVolume>,
    pod: &PodView,
) -> Result<MountPlan, RefreshFailure> {
    let (name, read_only) = (name(spec, bound), bound.map_or(flex.read_only, |bound| bound.read_only));
    let (drivers, home) = home(setting, &flex.directory(), name)?;
    let mount = FlexMount {
        flex,
        volume: spec.name.as_str(),
        name,
        is_persistent: bound.is_some(),
        pod: &pod.identity,
        facts: &pod.facts,
        secret: flex.secret.as_ref().map(|reference| secret(reference, pod)).transpose()?,
        read_only,
        drivers: &drivers,
        observer: &setting.driver_calls,
        ownership: &setting.ownership,
    };
    plan(spec, path, mount.set_up(&home)?, access(read_only), label(pod, &setting.site))
}

/// Makes a CSI driver mount a volume, and plans the mount at `path`. The volume is the PersistentVolume `bound`, or a
/// csi volume of the pod itself.
pub(super) fn mount_csi(
    setting: &VolumeContext,
    spec: &Volume,
    path: PathBuf,
    csi: &Csi,
    bound: Option<&BoundVolume>,
    pod: &PodView,
) -> Result<(MountPlan, Republication), RefreshFailure> {
    let read_only = bound.map_or(csi.read_only, |bound| bound.read_only);
    let call = CsiCall::of(csi, pod)?;
    let (drivers, home) = home(setting, Csi::DIRECTORY, name(spec, bound))?;
    let source = call.mount(setting, spec, bound, pod, &drivers).set_up(&home)?;
    let republication = Republication { is_wanted: call.driver.requires_republish };
    let label = label(pod, &setting.site);
    Ok((plan(spec, path, source, access(read_only), label)?, republication))
}

/// Whether the CSI driver of a mounted volume has `requiresRepublish`.
#[derive(Default)]
pub(super) struct Republication {
    is_wanted: bool,
}

impl Republication {
    /// The pause before the next call, if the driver has `requiresRepublish`.
    pub(super) fn next(&self) -> Option<Duration> {
        self.is_wanted.then_some(REPUBLISH_INTERVAL)
    }

    /// Calls the driver again, if its CSIDriver object still has `requiresRepublish`.
    pub(super) fn publish_again(
        &mut self,
        setting: &VolumeContext,
        spec: &Volume,
        csi: &Csi,
        bound: Option<&BoundVolume>,
        pod: &PodView,
    ) -> Result<(), RefreshFailure> {
        self.is_wanted = pod.known.objects.csi_driver(&csi.driver).is_some_and(|driver| driver.requires_republish);
        if !self.is_wanted {
            return Ok(());
        }
        let call = CsiCall::of(csi, pod)?;
        let (drivers, home) = home(setting, Csi::DIRECTORY, name(spec, bound))?;
        Ok(call.mount(setting, spec, bound, pod, &drivers).publish_again(&home)?)
    }
}

/// Makes the CSI driver of a PersistentVolume provide it as a block device.
pub(super) fn map_csi(
    setting: &VolumeContext,
    spec: &Volume,
    csi: &Csi,
    bound: &BoundVolume,
    pod: &PodView,
) -> Result<BlockDevice, RefreshFailure> {
    let call = CsiCall::of(csi, pod)?;
    let (drivers, home) = home(setting, Csi::DIRECTORY, &bound.name)?;
    Ok(call.mount(setting, spec, Some(bound), pod, &drivers).set_up_device(&home)?)
}

/// Makes the CSI driver of a PersistentVolume grow it, if the PersistentVolume has more bytes than at the driver's last
/// call.
pub(super) fn expand_csi(
    setting: &VolumeContext,
    spec: &Volume,
    csi: &Csi,
    bound: &BoundVolume,
    pod: &PodView,
    growth: &mut ExpansionState,
) -> Result<(), RefreshFailure> {
    let (drivers, home) = home(setting, Csi::DIRECTORY, &bound.name)?;
    let record = home.read().map_err(DriverError::from)?.unwrap_or_default();
    if bound.read_only || !record.published || record.capacity >= bound.capacity {
        // An earlier supervisor of the pod may have grown the volume.
        growth.succeed(bound, record.expanded.is_some_and(|_| record.expanded >= bound.capacity));
        return Ok(());
    }
    let mut call = CsiCall::of(csi, pod)?;
    let reference = call.csi.expand_secret.as_ref();
    call.expand_secret = reference.map(|reference| secret(reference, pod)).transpose()?;
    match call.mount(setting, spec, Some(bound), pod, &drivers).expand(&home) {
        Ok(by_node) => {
            growth.succeed(bound, by_node);
            Ok(())
        }
        Err(error) => Err(growth.refused(bound, error)),
    }
}

/// The name of the PersistentVolume; without one, the name of the volume in the pod.
fn name<'a>(spec: &'a Volume, bound: Option<&'a BoundVolume>) -> &'a str {
    bound.map_or(spec.name.as_str(), |bound| &bound.name)
}

/// Makes the home of a volume. Returns the home, and the directories of the node's drivers.
fn home(setting: &VolumeContext, kind: &str, name: &str) -> Result<(Drivers, DriverHome), RefreshFailure> {
    let VolumeContext { site, flex_volumes, .. } = setting;
    let Site::Pod(pod) = site else {
        return Err(RefreshFailure::manifests("a driver mounts the volume for a pod; serve it with podfs run"));
    };
    let made = setting.mount_points().make_home(Some(DriverHome::of(pod, kind, name).path().to_owned()));
    made.map_err(RefreshFailure::temporary)?;
    // Now that the pod's directory exists, this is its path in mount tables.
    let pod = site.pod().unwrap_or_else(|| pod.clone());
    let root = pod.ancestors().nth(2).unwrap_or(&pod).to_owned();
    Ok((Drivers { root, flex_volumes: flex_volumes.clone() }, DriverHome::of(&pod, kind, name)))
}

/// The data from the cluster's objects for calls of a CSI driver.
struct CsiCall<'a> {
    csi: Csi,
    driver: CsiDriver,
    publish_context: BTreeMap<String, String>,
    stage_secret: Option<&'a Secret>,
    publish_secret: Option<&'a Secret>,
    expand_secret: Option<&'a Secret>,
    tokens: Option<String>,
}

impl<'a> CsiCall<'a> {
    /// Collects the data, without the Secret for growing.
    fn of(csi: &Csi, pod: &'a PodView) -> Result<CsiCall<'a>, RefreshFailure> {
        let mut csi = csi.clone();
        complete(&mut csi, &pod.identity.namespace);
        let driver = csi_driver(&csi, pod)?;
        let secret = |reference: &Option<SecretReference>| {
            reference.as_ref().map(|reference| secret(reference, pod)).transpose()
        };
        Ok(CsiCall {
            publish_context: if driver.attach_required { attached(&csi, pod)? } else { BTreeMap::new() },
            stage_secret: secret(&csi.stage_secret)?,
            publish_secret: secret(&csi.publish_secret)?,
            // Only the growth of a volume needs this Secret.
            expand_secret: None,
            tokens: tokens(&driver, pod)?,
            csi,
            driver,
        })
    }

    /// The request to the driver.
    fn mount<'b>(
        &'b self,
        setting: &'b VolumeContext,
        spec: &'b Volume,
        bound: Option<&'b BoundVolume>,
        pod: &'b PodView,
        drivers: &'b Drivers,
    ) -> CsiMount<'b> {
        CsiMount {
            csi: &self.csi,
            volume: spec.name.as_str(),
            name: name(spec, bound),
            pod: &pod.identity,
            facts: &pod.facts,
            driver: &self.driver,
            publish_context: &self.publish_context,
            stage_secret: self.stage_secret,
            publish_secret: self.publish_secret,
            expand_secret: self.expand_secret,
            tokens: self.tokens.clone(),
            access_modes: match bound {
                Some(bound) => bound.access_modes.iter().map(String::as_str).collect(),
                None => vec![inline_access_mode(&self.csi)],
            },
            mount_options: bound.map_or(&[], |bound| &bound.mount_options),
            read_only: bound.map_or(self.csi.read_only, |bound| bound.read_only),
            is_block: spec.is_block_device(),
            capacity: bound.and_then(|bound| bound.capacity),
            claimed: bound.and_then(|bound| bound.claimed),
            root: &drivers.root,
            observer: &setting.driver_calls,
            ownership: &setting.ownership,
        }
    }
}

/// The settings of a volume's driver. Fails, in the kubelet's words, if the driver does not serve volumes of this life cycle. Such a
/// driver may trust attributes that only an administrator should choose.
fn csi_driver(csi: &Csi, pod: &PodView) -> Result<CsiDriver, RefreshFailure> {
    let mode = csi.lifecycle_mode();
    let refused = |reason: &str| {
        RefreshFailure::manifests(format!("volume mode {mode:?} not supported by driver {} ({reason})", csi.driver))
    };
    let objects = &pod.known.objects;
    match (objects.csi_driver(&csi.driver), objects.why_absent(ObjectKind::CsiDriver, "", &csi.driver)) {
        (Some(driver), _) if driver.lifecycle_modes.iter().any(|supported| supported == mode) => Ok(driver.clone()),
        (Some(driver), _) => Err(refused(&format!("only supports {:?}", driver.lifecycle_modes))),
        // If podfs cannot read the CSIDriver object, it does not know whether the volume has to be attached.
        (None, Some(reason)) => Err(RefreshFailure::manifests(reason)),
        (None, None) if csi.is_ephemeral() => Err(refused("no CSIDriver object")),
        (None, None) => Ok(CsiDriver::default()),
    }
}

/// The publish context of a volume, from its VolumeAttachment. Fails until a controller of the cluster has attached the
/// volume to the node.
fn attached(csi: &Csi, pod: &PodView) -> Result<BTreeMap<String, String>, RefreshFailure> {
    let Some(handle) = &csi.handle else { return Ok(BTreeMap::new()) };
    let Some(node) = pod.facts.node_name.as_deref() else {
        return Err(RefreshFailure::manifests(format!(
            "volume {handle:?} of CSI driver {} has to be attached to a node, and the pod is on none; set spec.nodeName, or \
             attachRequired: false in the CSIDriver object",
            csi.driver
        )));
    };
    let name = csi.attachment(Some(node)).unwrap_or_default();
    let failed = |reason: &str| {
        RefreshFailure::manifests(format!("volume {handle:?} is not attached to node {node:?} yet: {reason}"))
    };
    match pod.known.objects.volume_attachment(&name) {
        Some(attachment) if attachment.deleting => Err(failed(&format!("VolumeAttachment {name} is being deleted"))),
        Some(attachment) if attachment.attached => Ok(attachment.metadata.clone()),
        Some(VolumeAttachment { error: Some(error), .. }) => Err(failed(error)),
        Some(_) => Err(failed(&format!("VolumeAttachment {name} says so"))),
        None => Err(failed(&match pod.known.objects.why_absent(ObjectKind::VolumeAttachment, "", &name) {
            Some(reason) => reason.to_owned(),
            None => format!("there is no VolumeAttachment {name}; a controller of the cluster makes it"),
        })),
    }
}

/// The service account tokens that a driver asks for, by audience, as JSON.
fn tokens(driver: &CsiDriver, pod: &PodView) -> Result<Option<String>, RefreshFailure> {
    if driver.token_requests.is_empty() {
        return Ok(None);
    }
    let mut tokens = serde_json::Map::new();
    for request in &driver.token_requests {
        let key = TokenKey::new(Some(request.audience.clone()), request.expiration_seconds);
        let token = match pod.known.tokens.get(&key) {
            Some(Ok(token)) => String::from_utf8_lossy(token).into_owned(),
            Some(Err(reason)) => {
                return Err(RefreshFailure::manifests(format!("no token for the CSI driver: {reason}")));
            }
            None => {
                let text =
                    "the CSI driver gets tokens, and there is no API server that issues them; give podfs --kubeconfig";
                return Err(RefreshFailure::manifests(text));
            }
        };
        let expires =
            pod.known.tokens.expirations().find(|(of, _)| **of == key).and_then(|(_, at)| Timestamp::try_from(at).ok());
        let mut status = serde_json::Map::from_iter([("token".to_owned(), token.into())]);
        status.extend(expires.map(|at| ("expirationTimestamp".to_owned(), at.to_string().into())));
        tokens.insert(request.audience.clone(), status.into());
    }
    Ok(Some(serde_json::Value::Object(tokens).to_string()))
}

/// Plans the mount of a volume that a driver has mounted at `source`.
fn plan(
    spec: &Volume,
    path: PathBuf,
    source: HostSource,
    access: ContainerAccess,
    selinux_context: Option<String>,
) -> Result<MountPlan, RefreshFailure> {
    let (source, form) = match spec.preferences.served_by {
        // A bind mount is a clone already.
        Some(ServedBy::Bind) => (source, SourceForm::Bind(BindReason::Asked)),
        Some(ServedBy::Fuse) | None => {
            let clone = bind(source.as_fd(), ContainerAccess::ReadWrite).map_err(RefreshFailure::of_mount)?;
            (HostSource::of_clone(clone)?, SourceForm::Fuse)
        }
    };
    let content = PlannedContent::Source { source, form, limit: None, remote: None };
    Ok(MountPlan { path, content, access, selinux_context, lock: None })
}

/// The Secret that a volume names.
pub(super) fn secret<'a>(reference: &SecretReference, pod: &'a PodView) -> Result<&'a Secret, RefreshFailure> {
    let namespace = reference.namespace.as_deref().unwrap_or(&pod.identity.namespace);
    let objects = &pod.known.objects;
    objects.secret(namespace, &reference.name).ok_or_else(|| {
        let unknown = objects.why_absent(ObjectKind::Secret, namespace, &reference.name).map(str::to_owned);
        let reason = unknown.unwrap_or_else(|| format!("secret {:?} not found", reference.name));
        RefreshFailure::manifests(format!("couldn't get secret {namespace}/{}: {reason}", reference.name))
    })
}

/// Makes drivers undo their calls for one volume of the pod, which is mounted at `path`.
///
/// # Errors
/// When a driver fails. The error names the mounts and files that stay.
pub(super) fn undo(setting: &VolumeContext, volume: &str, path: Option<&Path>) -> Result<(), UndoError> {
    let is_of_volume = |home: &DriverHome| path.is_some_and(|path| is_home_of(home, path));
    let mut homes = homes(&setting.site).into_iter().filter(|(home, of)| of == volume || is_of_volume(home));
    homes.try_for_each(|(home, _)| undo_home(setting, &home))
}

/// Whether this is the home of the volume that is mounted at `path`. The record in the home may have another name of the volume,
/// because several volumes of the pod may name one claim.
pub(in crate::supervisor) fn is_home_of(home: &DriverHome, path: &Path) -> bool {
    let (Some(kind), Some(name)) = (home.path().parent().and_then(Path::file_name), home.path().file_name()) else {
        return false;
    };
    // The mount of a CSI driver is in the directory `mount` below the volume's.
    path.ancestors().take(2).any(|at| at.ends_with(Path::new("volumes").join(kind).join(name)))
}

/// The homes of the pod's volumes, with the name of the volume of each.
pub(in crate::supervisor) fn homes(site: &Site) -> Vec<(DriverHome, String)> {
    let all = site.pod().map(|pod| DriverHome::all(&pod)).unwrap_or_default();
    all.into_iter().map(|(home, record)| (home, record.volume)).collect()
}

/// Makes a driver undo its calls for the volume with this home. Blocks for as long as the driver takes.
///
/// # Errors
/// When the driver fails. The error names the mounts and files that stay.
pub(in crate::supervisor) fn undo_home(setting: &VolumeContext, home: &DriverHome) -> Result<(), UndoError> {
    driver::undo(home)?;
    info!("the driver has unmounted {}", home.target().display());
    forget(setting, home.path());
    Ok(())
}

/// Removes the home from the record, and the empty directories of it.
fn forget(setting: &VolumeContext, home: &Path) {
    let forgotten = setting.mount_points().forget(home, Some(home), setting.site.path());
    forgotten.unwrap_or_else(|error| warn!("{error}"));
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_home_belongs_to_the_volume_at_the_path_of_the_same_kind_and_name() {
        let pod = Path::new("/k/pods/u");
        let is_home_of = |kind: &str, path: &str| is_home_of(&DriverHome::of(pod, kind, "pv-1"), &pod.join(path));
        assert!(is_home_of("kubernetes.io~csi", "volumes/kubernetes.io~csi/pv-1/mount"));
        assert!(is_home_of("example.com~disk", "volumes/example.com~disk/pv-1"));
        assert!(!is_home_of("kubernetes.io~csi", "volumes/kubernetes.io~csi/pv-2/mount"));
        assert!(!is_home_of("kubernetes.io~csi", "volumes/example.com~disk/pv-1"));
    }
}
