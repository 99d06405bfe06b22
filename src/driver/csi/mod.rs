//! CSI drivers: services of the node, which podfs calls as a kubelet does.
//!
//! | module | owns |
//! |---|---|
//! | `discovery` | the socket of a driver |
//! | `client` | the calls, their time limit, and the meaning of errors |
//! | `registration` | the registration of a driver, and the answer to it |
//! | `request` | the arguments of calls for a volume of a pod |
//! | `usage` | the size and health of a volume, as its driver reports them |
//!
//! A volume of a PersistentVolume is staged once for the node, if the driver stages (`NodeStageVolume` at
//! `<root>/plugins/kubernetes.io/csi/<driver>/<sha256 of the handle>/globalmount`), and published for each pod at the volume's
//! home. An ephemeral volume is only published. A volume that containers get as a block device is staged at
//! `<root>/plugins/kubernetes.io/csi/volumeDevices/<PersistentVolume>/globalmount`; the driver makes the device appear at the
//! target of the volume's home.

mod client;
mod discovery;
mod registration;
mod request;
mod usage;

use std::collections::BTreeMap;
use std::path::Path;

use tracing::{info, warn};

use super::home::HomeLock;
use super::home::make_directory;
use super::unfinished::CallRecord;
use super::{AwaitedCall, CallObserver, DriverError, DriverHome, DriverRecord, LeaveError, NodeMount};
use crate::host::HostSource;
use crate::host::device::BlockDevice;
use crate::host::fs_group::{self, OwnershipObserver};
use crate::host::global_mount::write_whole;
use crate::manifest::objects::{CsiDriver, DriverFsGroupPolicy, Secret};
use crate::manifest::pod::{PodFacts, PodIdentity};
use crate::volume::Csi;
use crate::volume::csi::sha256;
use client::{CsiCapabilities, CsiClient, DEADLINE};
pub use discovery::{REGISTRY, sockets_in};
pub use registration::{NodeDriver, answer, node_driver};
use request::text;
pub use usage::{Amounts, DriverUsage, usage};

/// A volume of a pod, for a CSI driver to mount.
pub struct CsiMount<'a> {
    /// The volume. Its handle is complete: it has the pod's namespace if the driver expects one.
    pub csi: &'a Csi,
    /// Its name in the pod.
    pub volume: &'a str,
    /// The name of the PersistentVolume, or of the volume in the pod.
    pub name: &'a str,
    /// The pod.
    pub pod: &'a PodIdentity,
    /// Further facts of the pod.
    pub facts: &'a PodFacts,
    /// The settings of the driver's CSIDriver object.
    pub driver: &'a CsiDriver,
    /// The attachment metadata from the cluster's controller.
    pub publish_context: &'a BTreeMap<String, String>,
    /// The Secret for NodeStageVolume.
    pub stage_secret: Option<&'a Secret>,
    /// The Secret for NodePublishVolume.
    pub publish_secret: Option<&'a Secret>,
    /// The Secret for NodeExpandVolume.
    pub expand_secret: Option<&'a Secret>,
    /// The tokens of the pod's service account, as JSON, if the driver gets some.
    pub tokens: Option<String>,
    /// The access modes of the volume. The driver gets the first one.
    pub access_modes: Vec<&'a str>,
    /// Options of its mount.
    pub mount_options: &'a [String],
    /// Whether the volume is read-only.
    pub read_only: bool,
    /// Whether containers get it as a block device.
    pub is_block: bool,
    /// The capacity of the PersistentVolume in bytes.
    pub capacity: Option<u64>,
    /// The capacity in the claim's status, in bytes.
    pub claimed: Option<u64>,
    /// The root directory.
    pub root: &'a Path,
    /// Learns of the calls.
    pub observer: &'a CallObserver,
    /// Learns of the change of the files' group.
    pub ownership: &'a OwnershipObserver,
}

impl CsiMount<'_> {
    /// Calls the driver to mount the volume, and opens it.
    ///
    /// # Errors
    /// The driver's or the node's error. The home's record has the calls that the driver may have executed.
    pub fn set_up(&self, home: &DriverHome) -> Result<HostSource, DriverError> {
        let (source, can) = self.publish(home)?;
        if let Some(group) = self.group(can) {
            fs_group::give_to_group(&source, group, self.facts.fs_group_policy, self.volume, self.ownership)?;
        }
        Ok(source)
    }

    /// Calls the driver to make the volume a block device at its home, and opens the device. A driver cannot unpublish a device
    /// that podfs has open.
    ///
    /// # Errors
    /// The driver's or the node's error. The home's record has the calls that the driver may have executed.
    pub fn set_up_device(&self, home: &DriverHome) -> Result<BlockDevice, DriverError> {
        let (source, _) = self.publish(home)?;
        Ok(BlockDevice::open(&source)?)
    }

    fn publish(&self, home: &DriverHome) -> Result<(HostSource, CsiCapabilities), DriverError> {
        let (client, can) = self.connect()?;
        let _lock = lock(home)?;
        let write = |record: &DriverRecord| write(home, record);
        let node_mount = self.node_mount(can);
        let earlier = home.read_or_begin()?;
        let mut record = DriverRecord {
            node_mount: node_mount.as_ref().map(|mount| mount.directory().to_owned()),
            published: earlier.published,
            published_read_only: earlier.published_read_only,
            capacity: earlier.capacity.or(self.claimed).or(self.capacity),
            expanded: earlier.expanded,
            ..self.record()
        };
        write(&record)?;
        if let Some(node_mount) = &node_mount {
            node_mount.enter(home, |path| self.stage(&client, can, node_mount, home, path))?;
        }
        let was_published = record.published;
        (record.published, record.published_read_only) = (true, Some(self.read_only));
        write(&record)?;
        let request = self.publish_request(home, can, node_mount.as_ref())?;
        let answer =
            self.call_to_mount("NodePublishVolume", &CallRecord::of_home(home.path()), || client.publish(request));
        if let Err(error) = answer {
            // A definite failure means that there is nothing to undo, even if the answer to an earlier call was uncertain. The
            // exception is a mount that an earlier call has made.
            let is_mounted = was_published && home.is_mounted().unwrap_or(true);
            if !error.is_uncertain && !is_mounted {
                record.published = false;
                write(&record)?;
            }
            return Err(error);
        }
        Ok((HostSource::of_driver(&home.target())?, can))
    }

    /// Calls the driver to grow the volume to the capacity of its PersistentVolume, if volumes of this driver have to grow on the
    /// node. Returns whether they have.
    ///
    /// # Errors
    /// The driver's error. The volume keeps its size.
    pub fn expand(&self, home: &DriverHome) -> Result<bool, DriverError> {
        let Some(wanted) = self.capacity else { return Ok(false) };
        if home.read()?.is_none() {
            return Ok(false);
        }
        let (client, can) = self.connect()?;
        let _lock = lock(home)?;
        // Another thread may have changed the record before the lock.
        let Some(record) = home.read()? else { return Ok(false) };
        if can.expand {
            let node_mount = self.node_mount(can);
            client.expand(self.expand_request(home, can, node_mount.as_ref(), wanted)?)?;
        }
        write(home, &DriverRecord { capacity: Some(wanted), expanded: can.expand.then_some(wanted), ..record })?;
        if can.expand {
            info!("CSI driver {} has grown volume {:?} to {wanted} bytes", self.csi.driver, self.volume);
        }
        Ok(can.expand)
    }

    /// Calls NodePublishVolume again for a mounted volume, whose content may depend on tokens or on the pod. The driver may
    /// write new files, which belong to the pod's group, too. Does nothing if the driver has unpublished the volume.
    ///
    /// # Errors
    /// The driver's or the node's error. The volume stays mounted.
    pub fn publish_again(mut self, home: &DriverHome) -> Result<(), DriverError> {
        let (client, can) = self.connect()?;
        let lock = lock(home)?;
        // Without a record that can be read, the volume still gets its tokens.
        let read = home.read();
        if matches!(&read, Ok(None)) || matches!(&read, Ok(Some(record)) if !record.published) {
            // Another thread has had the driver unpublish the volume before the lock.
            return Ok(());
        }
        // A driver may refuse another mode for a volume that it has published. Earlier versions of podfs published PersistentVolumes
        // read-only for the field `readOnly` of their source, too.
        let record = read.ok().flatten().unwrap_or_default();
        self.read_only = record.published_read_only.unwrap_or(self.read_only || self.csi.read_only);
        let node_mount = self.node_mount(can);
        let request = self.publish_request(home, can, node_mount.as_ref())?;
        self.call_to_mount("NodePublishVolume", &CallRecord::of_home(home.path()), || client.publish(request))?;
        drop(lock);
        if let Some(group) = self.group(can) {
            let source = HostSource::of_driver(&home.target())?;
            let given =
                fs_group::give_to_group(&source, group, self.facts.fs_group_policy, self.volume, self.ownership);
            // Containers use the files, and may move them meanwhile. The next call comes soon.
            given.unwrap_or_else(|error| warn!("volume {:?}: {error}", self.volume));
        }
        Ok(())
    }

    fn connect(&self) -> Result<(CsiClient, CsiCapabilities), DriverError> {
        let socket = discovery::find(self.root, &self.csi.driver)?;
        let client = CsiClient::connect(&self.csi.driver, &socket)?;
        let _awaited = self.begins("NodeGetCapabilities");
        let can = client.capabilities()?;
        Ok((client, can))
    }

    fn record(&self) -> DriverRecord {
        let node_name = self.facts.node_name.clone().unwrap_or_default();
        DriverRecord {
            driver_name: self.csi.driver.clone(),
            volume_handle: self.handle(),
            spec_vol_id: self.name.to_owned(),
            attachment_id: match self.driver.attach_required {
                true => self.csi.attachment(self.facts.node_name.as_deref()).unwrap_or_default(),
                false => String::new(),
            },
            node_name,
            volume_lifecycle_mode: self.csi.lifecycle_mode().to_owned(),
            volume: self.volume.to_owned(),
            ..DriverRecord::default()
        }
    }

    fn handle(&self) -> String {
        self.csi.handle_in(self.pod.uid.as_str(), self.volume)
    }

    /// The node's mount of the volume, if the driver stages it.
    fn node_mount(&self, can: CsiCapabilities) -> Option<NodeMount> {
        let of_csi = self.root.join("plugins/kubernetes.io/csi");
        let directory = match self.is_block {
            true => of_csi.join("volumeDevices").join(self.name),
            false => of_csi.join(&self.csi.driver).join(sha256(&[&self.handle()])),
        };
        (can.stage && !self.csi.is_ephemeral()).then(|| NodeMount::at(directory))
    }

    fn stage(
        &self,
        client: &CsiClient,
        can: CsiCapabilities,
        node_mount: &NodeMount,
        home: &DriverHome,
        path: &Path,
    ) -> Result<(), DriverError> {
        let failed = |error: std::io::Error| DriverError::of_node("use", path, error);
        make_directory(path).map_err(failed)?;
        let data = serde_json::json!({"driverName": self.csi.driver, "volumeHandle": self.handle()});
        write_whole(&node_mount.directory().join("vol_data.json"), data.to_string().as_bytes()).map_err(failed)?;
        let request = self.stage_request(can, path)?;
        let record = CallRecord::of_node_mount(node_mount.directory(), home.path());
        self.call_to_mount("NodeStageVolume", &record, || client.stage(request))
    }

    /// Makes a call after which the driver may have mounted the volume.
    fn call_to_mount(
        &self,
        method: &str,
        record: &CallRecord,
        call: impl FnOnce() -> Result<(), DriverError>,
    ) -> Result<(), DriverError> {
        let _awaited = self.begins(method);
        let earlier = record.remaining(DEADLINE)?;
        let begun = record.begin(method);
        begun.map_err(|error| {
            DriverError::because(format!("cannot record the call {method} of a CSI driver: {error}"), error)
        })?;
        match (call(), earlier) {
            // The call of a podfs that was killed may still mount the volume, whatever the driver answers to this one.
            (Err(error), Some(_)) => Err(DriverError { is_uncertain: true, ..error }),
            (answer, _) => {
                record.end();
                answer
            }
        }
    }

    fn begins(&self, call: &str) -> AwaitedCall<'_> {
        self.observer.begins(self.volume, &format!("CSI driver {}", self.csi.driver), call, DEADLINE)
    }

    /// The pod's group, if podfs has to give the volume's files to it.
    fn group(&self, can: CsiCapabilities) -> Option<u32> {
        self.facts.fs_group.filter(|_| !can.mount_group && self.is_for_group())
    }

    /// Whether the driver's volumes belong to the pod's group.
    fn is_for_group(&self) -> bool {
        let is_of_one_node =
            || self.access_modes.iter().any(|mode| matches!(*mode, "ReadWriteOnce" | "ReadWriteOncePod"));
        !self.read_only
            && match self.driver.fs_group_policy {
                DriverFsGroupPolicy::None => false,
                DriverFsGroupPolicy::File => true,
                DriverFsGroupPolicy::ReadWriteOnceWithFsType => self.csi.fs_type.is_some() && is_of_one_node(),
            }
    }
}

fn write(home: &DriverHome, record: &DriverRecord) -> Result<(), DriverError> {
    home.write(record).map_err(|error| DriverError::of_node("write the record in", home.path(), error))
}

fn lock(home: &DriverHome) -> Result<HomeLock, DriverError> {
    home.lock().map_err(|error| DriverError::of_node("lock", home.path(), error))
}

/// Calls the driver to unpublish a volume, and to unstage it if no other pod of the node uses it.
///
/// # Errors
/// The driver's or the node's error.
pub(super) fn undo(home: &DriverHome, record: &DriverRecord) -> Result<(), LeaveError> {
    let is_staged = record.node_mount.as_ref().is_some_and(|directory| directory.exists());
    if !record.published && !is_staged {
        return Ok(());
    }
    let client = || client_of(home, record);
    // While the driver may still execute a call of a killed process to mount, podfs only has it unmount what it has mounted.
    let unfinished = |call: &CallRecord| {
        let remaining = call.remaining(DEADLINE).map_err(LeaveError::from);
        let driver = || record.driver_name.clone();
        let error = |(call, _)| LeaveError::StillExecuting { driver: driver(), call, longest: DEADLINE };
        remaining.map(|remaining| remaining.map(error))
    };
    if record.published {
        let target = home.target();
        let unfinished = unfinished(&CallRecord::of_home(home.path()))?;
        if unfinished.is_none() || home.is_mounted().unwrap_or(true) {
            client().and_then(|client| client.unpublish(&record.volume_handle, &text(&target)?))?;
        }
        if home.is_mounted().unwrap_or(false) {
            return Err(LeaveError::StillPublished { driver: record.driver_name.clone(), target });
        }
        if let Some(unfinished) = unfinished {
            return Err(unfinished);
        }
        // Without this record, the next podfs calls the driver once more, which has nothing to do then.
        let unpublished = DriverRecord { published: false, ..record.clone() };
        write(home, &unpublished).unwrap_or_else(|error| warn!("{error}"));
    }
    let Some(directory) = &record.node_mount else { return Ok(()) };
    let node_mount = NodeMount::at(directory.clone());
    node_mount.leave(home, false, |path| {
        let unfinished = unfinished(&CallRecord::of_node_mount(directory, home.path()))?;
        if unfinished.is_none() || node_mount.is_mounted().unwrap_or(true) {
            client().and_then(|client| client.unstage(&record.volume_handle, &text(path)?))?;
        }
        unfinished.map_or(Ok(()), Err)
    })
}

/// Connects to the driver of a home's volume.
fn client_of(home: &DriverHome, record: &DriverRecord) -> Result<CsiClient, DriverError> {
    let not_below_root = || DriverError::refused(format!("{} is not in a directory of a pod", home.path().display()));
    let root = home.root().ok_or_else(not_below_root)?;
    CsiClient::connect(&record.driver_name, &discovery::find(&root, &record.driver_name)?)
}
