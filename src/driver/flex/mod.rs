//! FlexVolume drivers: programs at `<directory>/<vendor>~<driver>/<driver>`, which podfs executes for each step.
//!
//! `init` returns the driver's capabilities. If its volumes have to be attached, podfs calls `attach`, `waitforattach` and
//! `mountdevice` for the node, and at the end `unmountdevice` and `detach`; then `mount` and `unmount` for each pod. podfs
//! skips commands that the driver does not support. podfs looks for the program each time, so a driver may be installed later.

mod call;

use std::cell::Cell;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;

use k8s_openapi::ByteString;
use podfs_fuse::mount::visible::take_away;
use serde_json::{Map, Value};
use tracing::{info, warn};

use super::home::make_directory;
use super::unfinished::CallRecord;
use super::{CallObserver, DriverError, DriverHome, DriverRecord, Drivers, LeaveError, NodeMount, UnmountError};
use crate::host::HostSource;
use crate::host::fs_group::{self, OwnershipObserver};
use crate::manifest::objects::{Secret, Values};
use crate::manifest::pod::{PodFacts, PodIdentity};
use crate::volume::Flex;
use crate::volume::csi::sha256;
use call::{DriverAnswer, FlexCapabilities};

/// Longest duration of a call.
const DEADLINE: Duration = Duration::from_secs(120);
/// Most bytes of the name of a file (`NAME_MAX`).
const LONGEST_FILE_NAME: usize = 255;

/// A volume of a pod, for a FlexVolume driver to mount.
pub struct FlexMount<'a> {
    /// The volume.
    pub flex: &'a Flex,
    /// Its name in the pod.
    pub volume: &'a str,
    /// The name of the PersistentVolume, or of the volume in the pod.
    pub name: &'a str,
    /// Whether it is the volume of a PersistentVolume.
    pub is_persistent: bool,
    /// The pod.
    pub pod: &'a PodIdentity,
    /// Further facts of the pod.
    pub facts: &'a PodFacts,
    /// The Secret for the driver, if the volume names one.
    pub secret: Option<&'a Secret>,
    /// Whether the volume is read-only.
    pub read_only: bool,
    /// The directories of drivers.
    pub drivers: &'a Drivers,
    /// Learns of the calls.
    pub observer: &'a CallObserver,
    /// Learns of the change of the files' group.
    pub ownership: &'a OwnershipObserver,
}

impl FlexMount<'_> {
    /// Calls the driver to mount the volume, and opens it.
    ///
    /// # Errors
    /// The driver's or the node's error. The home's record has the calls that the driver may have executed.
    pub fn set_up(&self, home: &DriverHome) -> Result<HostSource, DriverError> {
        let (source, capabilities) = self.mount_at(home)?;
        if let (Some(group), true, false) = (self.facts.fs_group, capabilities.fs_group, self.read_only) {
            fs_group::give_to_group(&source, group, self.facts.fs_group_policy, self.volume, self.ownership)?;
        }
        Ok(source)
    }

    /// Calls the driver to mount the volume at the home, and opens it.
    fn mount_at(&self, home: &DriverHome) -> Result<(HostSource, FlexCapabilities), DriverError> {
        let _lock = home.lock().map_err(|error| DriverError::of_node("lock", home.path(), error))?;
        let of_home = CallRecord::of_home(home.path());
        let program = self.program()?;
        let capabilities = self.init(&program, &of_home)?;
        let node_name = self.node_name();
        let earlier = home.read_or_begin()?;
        let named = if capabilities.attach { self.volume_name(&program, &of_home)? } else { None };
        // The node's mount may be one that an older podfs has made, at another path.
        let node_mount = || earlier.node_mount.clone().map_or_else(|| self.node_mount(named.as_deref()), NodeMount::at);
        let node_mount = capabilities.attach.then(node_mount);
        let mut record = DriverRecord {
            driver_name: self.flex.driver.clone(),
            spec_vol_id: self.name.to_owned(),
            volume_handle: match capabilities.attach {
                true => named.unwrap_or_else(|| self.name.to_owned()),
                false => earlier.volume_handle.clone(),
            },
            node_name: node_name.clone(),
            volume: self.volume.to_owned(),
            executable: Some(program.clone()),
            node_mount: node_mount.as_ref().map(|mount| mount.directory().to_owned()),
            attached: earlier.attached,
            published: earlier.published,
            ..DriverRecord::default()
        };
        let write = |record: &DriverRecord| {
            home.write(record).map_err(|error| DriverError::of_node("write the record in", home.path(), error))
        };
        write(&record)?;
        let mut node_path = None;
        if let Some(node_mount) = &node_mount {
            // Some drivers fail to detach a volume that they have not attached, so the record says whether podfs has called `attach`.
            let attached = DriverRecord { attached: true, ..record.clone() };
            let is_refused = Cell::new(false);
            let entered = node_mount.enter(home, |path| {
                write(&attached)?;
                let of_node = CallRecord::of_node_mount(node_mount.directory(), home.path());
                self.mount_device(&program, path, &node_name, &is_refused, &of_node)
            });
            if let Err(error) = entered {
                if is_refused.get() && !earlier.attached {
                    write(&record).unwrap_or_else(|error| warn!("{error}"));
                }
                return Err(error);
            }
            // If another pod has had the volume attached, the last one of them has it detached.
            record = attached;
            if !earlier.attached {
                write(&record)?;
            }
            node_path = Some(node_mount.path());
        }
        let target = home.make_target().map_err(|error| DriverError::of_node("make", &home.target(), error))?;
        let failed = |error: io::Error| DriverError::of_node("look at", &target, error);
        if !home.is_mounted().map_err(failed)? {
            record.published = true;
            write(&record)?;
            match self.mount(&program, &target, capabilities, &of_home) {
                Ok(Some(_)) => {}
                // The driver has mounted the volume for the node, and supports no `mount` for pods.
                Ok(None) if node_path.is_some() => {
                    record.published = false;
                    write(&record)?;
                }
                Ok(None) => {
                    return Err(DriverError::refused(format!(
                        "FlexVolume driver {} mounts nothing",
                        program.display()
                    )));
                }
                Err(error) => {
                    // A driver that fails may have mounted all the same.
                    if !error.is_uncertain && !home.is_mounted().unwrap_or(true) {
                        record.published = false;
                        write(&record)?;
                    }
                    return Err(error);
                }
            }
        }
        let path = if record.published { target } else { node_path.unwrap_or(target) };
        Ok((HostSource::of_driver(&path)?, capabilities))
    }

    fn call(
        &self,
        program: &Path,
        arguments: &[&str],
        record: &CallRecord,
    ) -> Result<Option<DriverAnswer>, DriverError> {
        let (driver, command) = (format!("FlexVolume driver {}", program.display()), arguments.first());
        let _awaited = self.observer.begins(self.volume, &driver, command.copied().unwrap_or_default(), DEADLINE);
        call::call(program, arguments, DEADLINE, record)
    }

    fn init(&self, program: &Path, record: &CallRecord) -> Result<FlexCapabilities, DriverError> {
        let answer = self.call(program, &["init"], record)?;
        Ok(answer.map(|answer| answer.capabilities).unwrap_or_default())
    }

    fn program(&self) -> Result<PathBuf, DriverError> {
        let Drivers { flex_volumes, .. } = self.drivers;
        let name = self.flex.driver.rsplit('/').next().unwrap_or_default();
        let program = flex_volumes.join(self.flex.directory()).join(name);
        match program.is_file() {
            true => Ok(program),
            false => Err(DriverError::refused(format!(
                "FlexVolume driver {} is not installed on this node: there is no {}; podfs looks for it again",
                self.flex.driver,
                program.display()
            ))),
        }
    }

    /// The node's mount of the volume. All volumes that are the same for the driver have the same: those to which it has given the
    /// name `named`, or else those with the same name and options.
    fn node_mount(&self, named: Option<&str>) -> NodeMount {
        let mounts = self.drivers.root.join("plugins/kubernetes.io/flexvolume").join(&self.flex.driver).join("mounts");
        let directory = match named {
            Some(named) if is_file_name(named) => named.to_owned(),
            Some(named) => sha256(&[named]),
            None if self.is_persistent => self.name.to_owned(),
            None => self.digest(),
        };
        NodeMount::at(mounts.join(directory))
    }

    /// A digest of the fields of an inline volume, whose name is unique in its pod only.
    fn digest(&self) -> String {
        let Flex { fs_type, options, secret, .. } = self.flex;
        let secret = secret.as_ref().map(|secret| (&self.pod.namespace, &secret.name));
        sha256(&[&serde_json::json!([self.name, fs_type, options, secret]).to_string()])
    }

    fn node_name(&self) -> String {
        let of_machine = || rustix::system::uname().nodename().to_string_lossy().into_owned();
        self.facts.node_name.clone().unwrap_or_else(of_machine)
    }

    /// The driver's name of the volume, if the driver names its volumes.
    fn volume_name(&self, program: &Path, record: &CallRecord) -> Result<Option<String>, DriverError> {
        let answer = self.call(program, &["getvolumename", &self.options(false, false)], record)?;
        Ok(answer.map(|answer| answer.volume_name).filter(|name| !name.is_empty()))
    }

    /// Has the driver attach the volume to the node, and mount it at `path` for the node. Sets `is_refused` if the driver has not
    /// attached it.
    fn mount_device(
        &self,
        program: &Path,
        path: &Path,
        node: &str,
        is_refused: &Cell<bool>,
        record: &CallRecord,
    ) -> Result<(), DriverError> {
        let options = self.options(false, false);
        let attached = self.call(program, &["attach", &options, node], record);
        let attached = attached.inspect_err(|error| is_refused.set(!error.is_uncertain))?;
        let mut device = attached.map(|answer| answer.device).unwrap_or_default();
        if let Some(waited) = self.call(program, &["waitforattach", &device, &options], record)? {
            device = if waited.device.is_empty() { device } else { waited.device };
        }
        let attachment = self.call(program, &["isattached", &options, node], record)?;
        if attachment.is_some_and(|answer| !answer.attached) {
            return Err(DriverError::uncertain(format!(
                "FlexVolume driver {}: volume {:?} is not attached to node {node:?} yet",
                program.display(),
                self.name
            )));
        }
        make_directory(path).map_err(|error| DriverError::of_node("make", path, error))?;
        if super::home::is_mount(path).map_err(|error| DriverError::of_node("look at", path, error))? {
            return Ok(());
        }
        let arguments = ["mountdevice", text(path)?, &device, &options];
        match self.call(program, &arguments, record)? {
            None if !device.is_empty() => Err(DriverError::refused(format!(
                "FlexVolume driver {} attaches device {device} and does not mount it; use a driver with mountdevice",
                program.display()
            ))),
            _ => Ok(()),
        }
    }

    fn mount(
        &self,
        program: &Path,
        target: &Path,
        capabilities: FlexCapabilities,
        record: &CallRecord,
    ) -> Result<Option<DriverAnswer>, DriverError> {
        self.call(program, &["mount", text(target)?, &self.options(true, capabilities.fs_group)], record)
    }

    /// The options of a call: those of Kubernetes, overridden by those of the volume.
    fn options(&self, of_pod: bool, group: bool) -> String {
        let mut options = Map::new();
        let mut set = |key: &str, value: &str| drop(options.insert(format!("kubernetes.io/{key}"), Value::from(value)));
        set("fsType", self.flex.fs_type.as_deref().unwrap_or_default());
        set("readwrite", if self.read_only { "ro" } else { "rw" });
        set("pvOrVolumeName", self.name);
        if of_pod {
            set("pod.name", &self.pod.name);
            set("pod.namespace", &self.pod.namespace);
            set("pod.uid", self.pod.uid.as_str());
            set("serviceAccount.name", &self.facts.service_account);
            if let Some(group) = self.facts.fs_group.filter(|_| group) {
                set("mounterArgs.FsGroup", &group.to_string());
            }
            for (key, value) in self.secret.iter().flat_map(|secret| secret.values()) {
                // Bytes are in base64.
                let value = serde_json::to_value(ByteString(value.to_vec())).unwrap_or_default();
                options.insert(format!("kubernetes.io/secret/{key}"), value);
            }
        }
        options.extend(self.flex.options.iter().map(|(key, value)| (key.clone(), Value::from(value.as_str()))));
        Value::Object(options).to_string()
    }
}

/// Whether a name is that of a file in its directory.
fn is_file_name(name: &str) -> bool {
    name.len() <= LONGEST_FILE_NAME && !name.starts_with('.') && !name.contains(['/', '\0'])
}

fn text(path: &Path) -> Result<&str, DriverError> {
    path.to_str().ok_or_else(|| DriverError::refused(format!("{} is not UTF-8, and drivers take text", path.display())))
}

/// Calls the driver to unmount a volume for a pod, and for the node if no other pod uses it.
///
/// # Errors
/// The driver's or the node's error.
pub(super) fn undo(home: &DriverHome, record: &DriverRecord) -> Result<(), LeaveError> {
    let Some(program) = &record.executable else { return Ok(()) };
    let target = home.target();
    let failed = |cause: UnmountError| LeaveError::Unmount { target: target.clone(), cause };
    let of_home = CallRecord::of_home(home.path());
    of_home.end_driver()?;
    if record.published {
        let path = text(&target)?;
        // Without the driver's program, podfs unmounts the volume itself.
        let unmounted = match program.is_file() {
            true => call::call(program, &["unmount", path], DEADLINE, &of_home).map(|answer| answer.is_some()),
            false => Ok(false),
        };
        let is_supported = match unmounted {
            // An earlier podfs may have had the driver unmount the volume before it was killed itself.
            Err(error) if !home.is_mounted().map_err(|error| failed(error.into()))? => {
                info!("{error}; nothing is mounted at {} any more", target.display());
                true
            }
            outcome => outcome?,
        };
        if !is_supported && home.is_mounted().map_err(|error| failed(error.into()))? {
            take_away(&target).map_err(|error| failed(error.into()))?;
        }
        if home.is_mounted().map_err(|error| failed(error.into()))? {
            return Err(LeaveError::StillMounted(target));
        }
    }
    let Some(directory) = &record.node_mount else { return Ok(()) };
    let node_mount = NodeMount::at(directory.clone());
    node_mount.leave(home, record.attached, |path| {
        let path_text = text(path)?;
        let of_node = CallRecord::of_node_mount(node_mount.directory(), home.path());
        of_node.end_driver()?;
        let call = |arguments: &[&str]| call::call(program, arguments, DEADLINE, &of_node);
        let is_mounted = || node_mount.is_mounted().map_err(|error| failed(error.into()));
        // Like the kubelet, podfs does not call the driver for a directory without a mount.
        // Without the driver's program, podfs unmounts the volume itself.
        let is_installed = program.is_file();
        let may_be_mounted = node_mount.may_be_mounted();
        let is_left = is_mounted()? && !(is_installed && call(&["unmountdevice", path_text])?.is_some());
        if is_left && is_mounted()? {
            take_away(path)?;
        }
        if record.attached && is_installed {
            match call(&["detach", &record.volume_handle, &record.node_name]) {
                // After a reboot or an interrupted removal, the driver may have nothing to detach.
                Err(error) if !may_be_mounted => warn!("{error}"),
                outcome => drop(outcome?),
            }
            // The next podfs does not detach the volume again.
            let detached = DriverRecord { attached: false, ..record.clone() };
            home.write(&detached).unwrap_or_else(|error| warn!("{}: {error}", home.path().display()));
        } else if record.attached {
            warn!(
                "FlexVolume driver {} is not installed on this node any more: volume {:?} is unmounted, and may still be attached \
                 to node {:?}; detach it with the driver's tools",
                record.driver_name, record.volume_handle, record.node_name
            );
        }
        match fs::remove_dir(path) {
            Err(cause) if cause.kind() != io::ErrorKind::NotFound => {
                Err(LeaveError::Remove { directory: path.to_owned(), cause })
            }
            _ => Ok(()),
        }
    })
}
