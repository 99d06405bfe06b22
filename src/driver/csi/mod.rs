//! CSI drivers: services of the node, which podfs calls as a kubelet does.
//!
//! | module | owns |
//! |---|---|
//! | `discovery` | where a driver listens |
//! | `client` | the calls, their time limit, and what an error means |
//!
//! A volume of a PersistentVolume is staged once for the node, if the driver stages (`NodeStageVolume` at
//! `<root>/plugins/kubernetes.io/csi/<driver>/<sha256 of the handle>/globalmount`), and published for each pod at the volume's home.
//! A volume that lives as long as its pod is published alone.

mod client;
mod discovery;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use super::home::{make_directory, replace};
use super::{DriverError, Home, NodeMount, Record};
use crate::csi::v1::volume_capability::access_mode::Mode;
use crate::csi::v1::volume_capability::{AccessMode, AccessType, MountVolume};
use crate::csi::v1::{NodePublishVolumeRequest, NodeStageVolumeRequest, VolumeCapability};
use crate::host::{Source, fs_group};
use crate::manifest::objects::{CsiDriver, DriverFsGroupPolicy, Secret, Values};
use crate::manifest::pod::{PodFacts, PodIdentity};
use crate::volume::Csi;
use crate::volume::csi::sha256;
use client::{Capabilities, Client};

/// What the attributes of a pod begin with.
const ATTRIBUTE: &str = "csi.storage.k8s.io/";

/// A volume that a CSI driver is to mount for a pod.
pub struct CsiMount<'a> {
    /// The volume, with the namespace of the pod where it needs one.
    pub csi: &'a Csi,
    /// Its name in the pod.
    pub volume: &'a str,
    /// The name of the PersistentVolume, or of the volume in the pod.
    pub name: &'a str,
    /// The pod.
    pub pod: &'a PodIdentity,
    /// What else is known of the pod.
    pub facts: &'a PodFacts,
    /// How the driver wants to be called.
    pub driver: &'a CsiDriver,
    /// What the cluster's controller says of the attached volume.
    pub publish_context: &'a BTreeMap<String, String>,
    /// What goes with NodeStageVolume.
    pub stage_secret: Option<&'a Secret>,
    /// What goes with NodePublishVolume.
    pub publish_secret: Option<&'a Secret>,
    /// The tokens of the pod's service account, as JSON, if the driver gets some.
    pub tokens: Option<String>,
    /// The access modes of the PersistentVolume.
    pub access_modes: &'a [String],
    /// Options of its mount.
    pub mount_options: &'a [String],
    /// No process writes.
    pub read_only: bool,
    /// The root directory.
    pub root: &'a Path,
}

impl CsiMount<'_> {
    /// Has the driver mount the volume, and opens it.
    ///
    /// # Errors
    /// What went wrong. The home's record says what may have been done.
    pub fn set_up(&self, home: &Home) -> Result<Source, DriverError> {
        let (client, can) = self.connect()?;
        let write = |record: &Record| {
            home.write(record).map_err(|error| DriverError::of_node("write the record in", home.path(), &error))
        };
        let node_mount = (can.stage && !self.csi.is_ephemeral()).then(|| self.node_mount());
        let mut record = Record {
            node_mount: node_mount.as_ref().map(|mount| mount.directory().to_owned()),
            published: home.read().is_some_and(|before| before.published),
            ..self.record()
        };
        write(&record)?;
        if let Some(node_mount) = &node_mount {
            node_mount.enter(home, |path| self.stage(&client, can, node_mount, path))?;
        }
        let had_been = record.published;
        record.published = true;
        write(&record)?;
        if let Err(error) = client.publish(self.publish_request(home, can, node_mount.as_ref())?) {
            // After an answer that left it open, a failure says that there is nothing to undo. What was mounted stays.
            let may_stay = had_been && home.is_mounted().unwrap_or(true);
            if !error.is_uncertain && !may_stay {
                record.published = false;
                write(&record)?;
            }
            return Err(error);
        }
        let source = Source::of_driver(&home.target())?;
        if let Some(group) = self.facts.fs_group.filter(|_| !can.mount_group && self.is_for_group()) {
            fs_group::give(&source, group, self.facts.fs_group_policy, self.volume)?;
        }
        Ok(source)
    }

    /// Calls the driver again for a volume that is mounted: its content may depend on tokens, or on the pod.
    ///
    /// # Errors
    /// What went wrong. The volume stays as it is.
    pub fn publish_again(&self, home: &Home) -> Result<(), DriverError> {
        let (client, can) = self.connect()?;
        let node_mount = (can.stage && !self.csi.is_ephemeral()).then(|| self.node_mount());
        client.publish(self.publish_request(home, can, node_mount.as_ref())?)
    }

    fn connect(&self) -> Result<(Client, Capabilities), DriverError> {
        let socket = discovery::find(self.root, &self.csi.driver)?;
        let client = Client::connect(&self.csi.driver, &socket)?;
        let can = client.capabilities()?;
        Ok((client, can))
    }

    fn record(&self) -> Record {
        let node_name = self.facts.node_name.clone().unwrap_or_default();
        Record {
            driver_name: self.csi.driver.clone(),
            volume_handle: self.handle(),
            spec_vol_id: self.name.to_owned(),
            attachment_id: match self.driver.attach_required {
                true => self.csi.attachment(self.facts.node_name.as_deref()).unwrap_or_default(),
                false => String::new(),
            },
            node_name,
            volume_lifecycle_mode: if self.csi.is_ephemeral() { "Ephemeral" } else { "Persistent" }.to_owned(),
            volume: self.volume.to_owned(),
            ..Record::default()
        }
    }

    fn handle(&self) -> String {
        self.csi.handle_in(self.pod.uid.as_str(), self.volume)
    }

    fn node_mount(&self) -> NodeMount {
        let of_driver = self.root.join("plugins/kubernetes.io/csi").join(&self.csi.driver);
        NodeMount::at(of_driver.join(sha256(&[&self.handle()])))
    }

    fn stage(
        &self,
        client: &Client,
        can: Capabilities,
        node_mount: &NodeMount,
        path: &Path,
    ) -> Result<(), DriverError> {
        let failed = |error: std::io::Error| DriverError::of_node("use", path, &error);
        make_directory(path).map_err(failed)?;
        let data = serde_json::json!({"driverName": self.csi.driver, "volumeHandle": self.handle()});
        replace(&node_mount.directory().join("vol_data.json"), data.to_string().as_bytes()).map_err(failed)?;
        client.stage(NodeStageVolumeRequest {
            volume_id: self.handle(),
            publish_context: pairs(self.publish_context),
            staging_target_path: text(path)?,
            volume_capability: Some(self.capability(can)),
            secrets: secrets(self.stage_secret)?,
            volume_context: pairs(&self.csi.attributes),
        })
    }

    fn publish_request(
        &self,
        home: &Home,
        can: Capabilities,
        node_mount: Option<&NodeMount>,
    ) -> Result<NodePublishVolumeRequest, DriverError> {
        let mut volume_context = self.csi.attributes.clone();
        if self.driver.pod_info_on_mount {
            let ephemeral = self.csi.is_ephemeral().to_string();
            for (key, value) in [
                ("pod.name", self.pod.name.as_str()),
                ("pod.namespace", &self.pod.namespace),
                ("pod.uid", self.pod.uid.as_str()),
                ("serviceAccount.name", &self.facts.service_account),
                ("ephemeral", &ephemeral),
            ] {
                volume_context.insert(format!("{ATTRIBUTE}{key}"), value.to_owned());
            }
        }
        let mut secrets = secrets(self.publish_secret)?;
        if let Some(tokens) = &self.tokens {
            let key = format!("{ATTRIBUTE}serviceAccount.tokens");
            match self.driver.tokens_in_secrets {
                true => drop(secrets.insert(key, tokens.clone())),
                false => drop(volume_context.insert(key, tokens.clone())),
            }
        }
        Ok(NodePublishVolumeRequest {
            volume_id: self.handle(),
            publish_context: pairs(self.publish_context),
            staging_target_path: node_mount.map(|mount| text(&mount.path())).transpose()?.unwrap_or_default(),
            target_path: text(&home.target())?,
            volume_capability: Some(self.capability(can)),
            readonly: self.read_only,
            secrets,
            volume_context: pairs(&volume_context),
        })
    }

    fn capability(&self, can: Capabilities) -> VolumeCapability {
        let group = self.facts.fs_group.filter(|_| can.mount_group);
        let mount = MountVolume {
            fs_type: self.csi.fs_type.clone().unwrap_or_default(),
            mount_flags: self.mount_options.iter().filter(|option| !option.is_empty()).cloned().collect(),
            volume_mount_group: group.map(|group| group.to_string()).unwrap_or_default(),
        };
        let mode = access_mode(self.access_modes.first().map(String::as_str), can);
        VolumeCapability {
            access_mode: Some(AccessMode { mode: mode.into() }),
            access_type: Some(AccessType::Mount(mount)),
        }
    }

    /// Whether podfs gives the files of the volume to the pod's group.
    fn is_for_group(&self) -> bool {
        let is_of_one_node =
            || self.access_modes.iter().any(|mode| mode == "ReadWriteOnce" || mode == "ReadWriteOncePod");
        !self.read_only
            && match self.driver.fs_group_policy {
                DriverFsGroupPolicy::None => false,
                DriverFsGroupPolicy::File => true,
                DriverFsGroupPolicy::ReadWriteOnceWithFsType => self.csi.fs_type.is_some() && is_of_one_node(),
            }
    }
}

/// Has the driver unpublish a volume, and unstage it if no other pod of the node uses it.
///
/// # Errors
/// What went wrong.
pub(super) fn undo(home: &Home, record: &Record) -> Result<(), String> {
    let is_staged = record.node_mount.as_ref().is_some_and(|directory| directory.exists());
    if !record.published && !is_staged {
        return Ok(());
    }
    let told = |error: DriverError| error.sentence;
    let client = || -> Result<Client, DriverError> {
        let root = home.root().ok_or_else(|| DriverError::refused("the home of the volume is no home"))?;
        Client::connect(&record.driver_name, &discovery::find(&root, &record.driver_name)?)
    };
    if record.published {
        let target = home.target();
        client().and_then(|client| client.unpublish(&record.volume_handle, &text(&target)?)).map_err(told)?;
        if home.is_mounted().unwrap_or(false) {
            return Err(format!(
                "CSI driver {} says that it has unpublished the volume, and {} is mounted still",
                record.driver_name,
                target.display()
            ));
        }
        let record = Record { published: false, ..record.clone() };
        home.write(&record)
            .map_err(|error| format!("cannot write the record in {}: {error}", home.path().display()))?;
    }
    let Some(directory) = &record.node_mount else { return Ok(()) };
    NodeMount::at(directory.clone()).leave(home, |path| {
        client().and_then(|client| client.unstage(&record.volume_handle, &text(path)?)).map_err(told)
    })
}

/// The API's access modes, as CSI has them.
fn access_mode(mode: Option<&str>, can: Capabilities) -> Mode {
    match (mode, can.multi_writer) {
        (Some("ReadOnlyMany"), _) => Mode::MultiNodeReaderOnly,
        (Some("ReadWriteMany"), _) => Mode::MultiNodeMultiWriter,
        (Some("ReadWriteOncePod"), true) => Mode::SingleNodeSingleWriter,
        (Some("ReadWriteOnce"), true) => Mode::SingleNodeMultiWriter,
        _ => Mode::SingleNodeWriter,
    }
}

/// Secrets are text in CSI.
fn secrets(secret: Option<&Secret>) -> Result<std::collections::HashMap<String, String>, DriverError> {
    let values = secret.into_iter().flat_map(Values::values);
    let text = |(key, value): (&str, &[u8])| match String::from_utf8(value.to_vec()) {
        Ok(value) => Ok((key.to_owned(), value)),
        Err(_) => Err(DriverError::refused(format!(
            "key {key:?} of the volume's Secret is no text, and CSI drivers take text"
        ))),
    };
    values.map(text).collect()
}

fn pairs(pairs: &BTreeMap<String, String>) -> std::collections::HashMap<String, String> {
    pairs.iter().map(|(key, value)| (key.clone(), value.clone())).collect()
}

fn text(path: &Path) -> Result<String, DriverError> {
    let path: PathBuf = path.to_owned();
    path.into_os_string()
        .into_string()
        .map_err(|path| DriverError::refused(format!("{} is not UTF-8, and drivers take text", path.display())))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cs_02_access_modes_are_those_of_the_driver() {
        let (plain, multi) = (Capabilities::default(), Capabilities { multi_writer: true, ..Capabilities::default() });
        for (mode, can, expected) in [
            (None, plain, Mode::SingleNodeWriter),
            (Some("ReadWriteOnce"), plain, Mode::SingleNodeWriter),
            (Some("ReadWriteOnce"), multi, Mode::SingleNodeMultiWriter),
            (Some("ReadWriteOncePod"), plain, Mode::SingleNodeWriter),
            (Some("ReadWriteOncePod"), multi, Mode::SingleNodeSingleWriter),
            (Some("ReadOnlyMany"), multi, Mode::MultiNodeReaderOnly),
            (Some("ReadWriteMany"), plain, Mode::MultiNodeMultiWriter),
        ] {
            assert_eq!(access_mode(mode, can), expected, "{mode:?}");
        }
    }
}
