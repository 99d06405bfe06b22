//! The steps of a plan.

use std::path::Path;
use std::sync::Arc;
use std::thread;
use std::time::Duration;

use tokio::task::spawn_blocking;
use tokio::time::timeout;
use tracing::info;

use super::super::clean::{Erasure, ErasureProgress};
use super::super::error::InspectionError;
use super::super::inspection::{UsableEntry, inspect};
use super::super::plan::{DiskStep, OfferedClass, is_about, is_to_be_cleaned};
use super::super::record::ErasureRecord;
use super::super::volume::{LocalVolume, Offer};
use super::{Provisioner, ProvisionerEvent};
use crate::kube::address::{Collection, Resource};
use crate::kube::error::ApiError;
use crate::manifest::objects::VolumeMode;
use crate::node::service::in_use;

/// How long the task waits for an inspection before it continues without the result.
const INSPECTION_TIMEOUT: Duration = Duration::from_secs(10);

impl Provisioner {
    pub(super) async fn perform(&mut self, step: DiskStep) {
        let name = step.volume().to_owned();
        let result = match step {
            DiskStep::Forget(name) => {
                if let Err(cause) = self.records.remove(&name) {
                    let file = self.records.file(&name);
                    self.pause(&name, &format!("the record {} cannot be removed: {cause}", file.display()));
                }
                return;
            }
            DiskStep::Delete { volume, uid } => self.delete(&volume, &uid, None).await,
            DiskStep::Withdraw { volume, uid, version } => {
                let deleted = self.delete(&volume, &uid, Some(&version)).await;
                if deleted.is_ok() {
                    info!("podfs has deleted PersistentVolume {volume}: its entry is gone");
                }
                deleted
            }
            DiskStep::Clean(record) => self.clean(record).await,
            DiskStep::Offer { volume, class, path, mode } => self.offer(&volume, &class, &path, mode).await,
        };
        match result {
            Ok(()) => self.retry.reset(),
            Err(error) if error.class.passes() => {
                self.log_once(&name, &format!("PersistentVolume {name}: {error}; podfs tries again"));
                self.wait_for_server(&error).await;
            }
            Err(error) => self.pause(&name, &format!("PersistentVolume {name}: {error}")),
        }
    }

    /// Waits until a request may succeed again. Stops erasures meanwhile that are no longer planned.
    async fn wait_for_server(&mut self, error: &ApiError) {
        let pause = self.retry.failed(error);
        loop {
            tokio::select! {
                () = self.retry.wait(&pause) => return,
                input = self.inputs.recv() => {
                    if let Some(input) = input {
                        self.take(input);
                    }
                    let steps = self.plan();
                    self.stop_cleanings(&steps);
                }
            }
        }
    }

    async fn delete(&mut self, name: &str, uid: &str, version: Option<&str>) -> Result<(), ApiError> {
        let collection = Collection::only(Resource::PERSISTENT_VOLUME, None, name);
        self.settings.client.delete(&collection, uid, version).await?;
        // The watch reports the deletion, which a finalizer may delay.
        if let Some(volume) = self.volumes.as_mut().and_then(|volumes| volumes.get_mut(name)) {
            volume.deleting = true;
        }
        Ok(())
    }

    async fn offer(&mut self, name: &str, class: &str, path: &Path, mode: VolumeMode) -> Result<(), ApiError> {
        let Some(OfferedClass { reclaim, mount_options }) = self.classes.get(class).cloned() else { return Ok(()) };
        let usable = match self.inspect(path, mode).await {
            Ok(usable) => usable,
            Err(reason) => {
                self.log_once(&format!("fit {name}"), &format!("{} is not offered: it {reason}", path.display()));
                self.unfit.insert(path.to_owned());
                return Ok(());
            }
        };
        let offer = Offer {
            class,
            path,
            mode,
            capacity: usable.capacity,
            identity: &usable.identity,
            reclaim,
            mount_options: &mount_options,
        };
        let object = offer.object(&self.names);
        let created = self.settings.client.create(Resource::PERSISTENT_VOLUME, None, &[], &object).await?;
        self.put(&created);
        self.pauses.remove(name);
        info!("{} is offered as PersistentVolume {name} of StorageClass {class}", path.display());
        Ok(())
    }

    async fn inspect(&mut self, path: &Path, mode: VolumeMode) -> Result<UsableEntry, InspectionError> {
        self.hanging.remove(path);
        let owned = path.to_owned();
        let mut inspection = spawn_blocking(move || inspect(&owned, mode));
        match timeout(INSPECTION_TIMEOUT, &mut inspection).await {
            Ok(found) => found.unwrap_or(Err(InspectionError::Lost)),
            Err(_) => {
                self.hanging.insert(path.to_owned(), inspection);
                Err(InspectionError::Late)
            }
        }
    }

    /// Starts an erasure, after a last check of all that could forbid it.
    async fn clean(&mut self, record: ErasureRecord) -> Result<(), ApiError> {
        let name = record.volume.clone();
        let unique_name = format!("kubernetes.io/local-volume/{name}");
        if in_use(&self.settings.handle.state()).any(|volume| volume.unique_name == unique_name) {
            let path = record.path.display();
            self.pause(&name, &format!("{path} of PersistentVolume {name} is in use by a pod of this node"));
            return Ok(());
        }
        let collection = Collection::only(Resource::PERSISTENT_VOLUME, None, &name);
        let known = self.volumes.as_ref().is_some_and(|volumes| volumes.contains_key(&name));
        match self.settings.client.get(&collection).await? {
            Some(object) => {
                let volume = LocalVolume::parse(&object, &self.names);
                self.put(&object);
                if !known || !volume.is_some_and(|volume| is_to_be_cleaned(&volume) && is_about(&record, &volume)) {
                    return Ok(());
                }
            }
            None => {
                if let Some(volumes) = &mut self.volumes {
                    volumes.remove(&name);
                }
                if known {
                    return Ok(());
                }
            }
        }
        let progress = Arc::<ErasureProgress>::default();
        let roots = [self.settings.root_directory.clone(), self.settings.kubelet_root.clone()];
        let (file, path) = (self.records.file(&name), record.path.display().to_string());
        let cleaning = Erasure { record, file, roots, progress: Arc::clone(&progress) };
        let (input, of) = (self.input.clone(), name.clone());
        let work = move || drop(input.send(ProvisionerEvent::Cleaned(of, Box::new(cleaning.run()))));
        match thread::Builder::new().name("podfs-clean".to_owned()).spawn(work) {
            Ok(_) => {
                info!("podfs erases {path} of PersistentVolume {name}, which was released");
                self.settings.metrics.begin(&name, &progress);
                self.cleanings.insert(name, progress);
            }
            Err(cause) => self.pause(&name, &format!("{path} is not cleaned: there is no thread: {cause}")),
        }
        Ok(())
    }
}
