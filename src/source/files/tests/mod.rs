//! Manifest files as users and tools change them. Nothing here sleeps; a test waits for the next snapshot.

mod changes;
mod links;
mod start;
mod trouble;
mod writers;

use std::fs;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::time::Duration;

use tempfile::TempDir;

use super::documents::DocumentStore;
use super::find::ConfiguredPath;
use super::pod_and_objects::PodAndObjects;
use super::watch::{WatchMessage, Watcher};
use super::{AcceptedDocuments, FileSource, PodInput, SourceError};
use crate::source::Snapshot;

/// A directory for one test.
struct ManifestHome(TempDir);

impl ManifestHome {
    fn new() -> Self {
        Self(tempfile::tempdir().expect("a directory"))
    }

    /// A home with a directory `objects` in it.
    fn with_objects(files: &[(&str, &str)]) -> Self {
        let home = Self::new();
        fs::create_dir(home.path("objects")).expect("a directory");
        for (name, value) in files {
            home.write(&format!("objects/{name}.yaml"), &config_map(name, value));
        }
        home
    }

    fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    /// Writes in place, as `echo` does.
    fn write(&self, name: &str, text: &str) {
        fs::write(self.path(name), text).expect("a file");
    }

    /// Writes beside and renames over, as careful tools do.
    fn replace(&self, name: &str, text: &str) {
        self.write("beside", text);
        self.rename("beside", name);
    }

    fn rename(&self, from: &str, to: &str) {
        fs::rename(self.path(from), self.path(to)).expect("a rename");
    }

    fn link(&self, target: impl AsRef<Path>, name: &str) {
        symlink(target, self.path(name)).expect("a link");
    }

    fn open(&self, pod: Option<&str>, objects: &[&str]) -> Result<Watched, SourceError> {
        let pod = pod.map(|name| PodInput::File(self.path(name)));
        let objects: Vec<_> = objects.iter().map(|name| self.path(name)).collect();
        FileSource::open(pod, &objects).map(|(source, now)| Watched { source, now })
    }

    /// The error with which podfs does not start, without the path of the home.
    fn complaint(&self, pod: Option<&str>, objects: &[&str]) -> String {
        let error = self.open(pod, objects).err().expect("podfs does not start").to_string();
        error.replace(&format!("{}/", self.0.path().display()), "")
    }

    /// Watches the directory `objects`.
    fn watch(&self) -> Watched {
        self.open(None, &["objects"]).expect("good manifests")
    }

    /// The same without the thread, scan by scan.
    fn step_by_step(&self, objects: &[&str]) -> Steps {
        let roots = objects.iter().map(|name| ConfiguredPath::objects(self.path(name))).collect();
        let (mut watcher, signals) = Watcher::new().expect("a watcher");
        let mut store = DocumentStore::new(PodAndObjects::new(AcceptedDocuments::Pods), None, roots);
        store.first_scan(&mut watcher).expect("good manifests");
        Steps { watcher, store, signals }
    }

    /// As [`Self::step_by_step`], without the files that podfs cannot read.
    fn step_by_step_of_good_files(&self, objects: &[&str]) -> Steps {
        let roots = objects.iter().map(|name| ConfiguredPath::objects(self.path(name))).collect();
        let (mut watcher, signals) = Watcher::new().expect("a watcher");
        let mut store = DocumentStore::new(PodAndObjects::new(AcceptedDocuments::Pods), None, roots);
        store.first_scan_of_good_files(&mut watcher);
        Steps { watcher, store, signals }
    }
}

/// A source and its latest snapshot.
struct Watched {
    source: FileSource,
    now: Snapshot,
}

impl Watched {
    async fn change(&mut self) {
        self.now = tokio::time::timeout(Duration::from_secs(20), self.source.changed()).await.expect("a snapshot");
    }

    /// Waits until the ConfigMap has the value, and returns how many snapshots came until then.
    async fn until(&mut self, name: &str, value: Option<&str>) -> usize {
        let mut snapshots = 0;
        while self.value(name) != value {
            self.change().await;
            snapshots += 1;
        }
        snapshots
    }

    fn value(&self, name: &str) -> Option<&str> {
        value(&self.now, name)
    }

    fn label(&self, name: &str) -> Option<&str> {
        self.now.pod.as_ref()?.facts.labels.get(name).map(String::as_str)
    }
}

/// A source whose thread is the test.
struct Steps {
    watcher: Watcher,
    store: DocumentStore<PodAndObjects>,
    signals: std::sync::mpsc::Sender<WatchMessage>,
}

impl Steps {
    /// Waits for a change and scans.
    fn scan(&mut self) -> Option<Snapshot> {
        assert!(self.watcher.wait());
        self.store.next_scan(&mut self.watcher).combined
    }
}

/// The manifest of a ConfigMap with one key.
fn config_map(name: &str, value: &str) -> String {
    format!("apiVersion: v1\nkind: ConfigMap\nmetadata: {{name: {name}}}\ndata:\n  key: {value:?}\n")
}

/// The manifest of a pod with one label.
fn pod(label: &str) -> String {
    format!(
        "apiVersion: v1\nkind: Pod\nmetadata:\n  name: web\n  labels: {{version: {label}}}\nspec:\n  containers: [{{name: c, image: i}}]\n"
    )
}

/// The value of a ConfigMap's one key.
fn value<'a>(snapshot: &'a Snapshot, name: &str) -> Option<&'a str> {
    snapshot.known.objects.config_map("default", name)?.data.get("key").map(String::as_str)
}
