//! A volume that a driver of the node mounts: its home in the pod's directory, and what of the driver's mount is served.
//!
//! What is served is a clone of the driver's mount. So the driver can unmount its own whenever it is asked to, whoever has
//! files of the volume open.

use std::os::fd::AsFd;
use std::path::{Path, PathBuf};

use podfs_fuse::mount::bind::bind;
use podfs_fuse::mount::private::Access;
use tracing::{info, warn};

use super::passthrough::{MountPlan, PassthroughVolume, Planned, access};
use super::{Refresh, Setting, Trouble};
use crate::driver::flex::FlexMount;
use crate::driver::{self, DriverError, Drivers, Home};
use crate::host::Source;
use crate::manifest::objects::{ObjectKind, Secret};
use crate::supervisor::run_dir::site::Site;
use crate::volume::{Flex, SecretReference, ServedBy, Volume};

impl From<DriverError> for Trouble {
    fn from(error: DriverError) -> Trouble {
        Trouble::Passing(error.sentence)
    }
}

impl PassthroughVolume {
    /// A flexVolume volume of the pod.
    pub(super) fn flex(&mut self, spec: &Volume, flex: &Flex, refresh: &Refresh) -> Result<MountPlan, Trouble> {
        let path = self.setting().site.volume(&flex.directory(), spec.name.as_str());
        self.set_path(path.clone());
        self.flex_at(spec, path, flex, spec.name.as_str(), flex.read_only, refresh)
    }

    /// A volume of a FlexVolume driver, by the name of its PersistentVolume or its own.
    pub(super) fn flex_at(
        &self,
        spec: &Volume,
        path: PathBuf,
        flex: &Flex,
        name: &str,
        read_only: bool,
        refresh: &Refresh,
    ) -> Result<MountPlan, Trouble> {
        let (drivers, home) = self.home(&flex.directory(), name)?;
        let mount = FlexMount {
            flex,
            volume: spec.name.as_str(),
            name,
            pod: &refresh.identity,
            facts: &refresh.facts,
            secret: flex.secret.as_ref().map(|reference| secret(reference, refresh)).transpose()?,
            read_only,
            drivers: &drivers,
        };
        plan(spec, path, mount.set_up(&home)?, access(read_only))
    }

    /// The home of a volume, which is made, and where the drivers of the node are.
    fn home(&self, kind: &str, name: &str) -> Result<(Drivers, Home), Trouble> {
        let Setting { site, flex_volumes, .. } = self.setting();
        let Site::Pod(pod) = site else {
            return Err(Trouble::Manifests("a driver mounts the volume for a pod; serve it with podfs run".to_owned()));
        };
        let made = self.setting().mount_points().make_home(Some(Home::of(pod, kind, name).path().to_owned()));
        made.map_err(|error| Trouble::Passing(error.to_string()))?;
        // As mount tables name it, now that it is there.
        let pod = site.pod().unwrap_or_else(|| pod.clone());
        let root = pod.ancestors().nth(2).unwrap_or(&pod).to_owned();
        Ok((Drivers { root, flex_volumes: flex_volumes.clone() }, Home::of(&pod, kind, name)))
    }
}

/// What is served of a driver's mount.
fn plan(spec: &Volume, path: PathBuf, source: Source, access: Access) -> Result<MountPlan, Trouble> {
    let served_by = spec.preferences.served_by.unwrap_or(ServedBy::Fuse);
    let source = match served_by {
        // Binding it makes a clone.
        ServedBy::Bind => source,
        ServedBy::Fuse => Source::of_clone(bind(source.as_fd(), Access::ReadWrite).map_err(Trouble::of_mount)?)?,
    };
    let content = Planned::Source { source, served_by, limit: None, remote: None };
    Ok(MountPlan { path, content, access, selinux_context: None, turn: None })
}

/// The Secret that a volume names.
pub(super) fn secret<'a>(reference: &SecretReference, refresh: &'a Refresh) -> Result<&'a Secret, Trouble> {
    let namespace = reference.namespace.as_deref().unwrap_or(&refresh.identity.namespace);
    let objects = &refresh.objects;
    objects.secret(namespace, &reference.name).ok_or_else(|| {
        let unknown = objects.why_absent(ObjectKind::Secret, namespace, &reference.name).map(str::to_owned);
        let reason = unknown.unwrap_or_else(|| format!("secret {:?} not found", reference.name));
        Trouble::Manifests(format!("couldn't get secret {namespace}/{}: {reason}", reference.name))
    })
}

/// Takes back what drivers have done for one volume of the pod.
///
/// # Errors
/// What is left, and why.
pub(super) fn undo(setting: &Setting, volume: &str) -> Result<(), String> {
    let mut homes = homes(&setting.site).into_iter().filter(|(_, of)| of == volume);
    homes.try_for_each(|(home, _)| undo_home(setting, &home))
}

/// The homes of the pod's volumes, with the name of the volume of each.
pub(in crate::supervisor) fn homes(site: &Site) -> Vec<(Home, String)> {
    let all = site.pod().map(|pod| Home::all(&pod)).unwrap_or_default();
    all.into_iter().map(|(home, record)| (home, record.volume)).collect()
}

/// Takes back what a driver has done at a home. Blocks for as long as the driver takes.
///
/// # Errors
/// What is left, and why.
pub(in crate::supervisor) fn undo_home(setting: &Setting, home: &Home) -> Result<(), String> {
    driver::undo(home)?;
    info!("the driver has unmounted {}", home.target().display());
    forget(setting, home.path());
    Ok(())
}

fn forget(setting: &Setting, home: &Path) {
    let forgotten = setting.mount_points().forget(home, Some(home), setting.site.path());
    forgotten.unwrap_or_else(|error| warn!("{error}"));
}
