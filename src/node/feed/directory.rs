//! The manifest directory: static pods and objects of all its files.
//!
//! Each file may have any number of documents. If two documents describe one pod or one object, podfs uses the first
//! document, in the order of the files' names, and reports the second one in the node's status.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::sync::Arc;

use serde_json::Value;

use super::object::WholeObject;
use crate::manifest::objects::ObjectKey;
use crate::manifest::pod::{Pod, PodUid};
use crate::manifest::{Document, ManifestError, Origin, check_kind, check_spelling, read_documents};
use crate::node::pod::{NodePod, PodOrigin, PodStage};
use crate::source::{BadDocument, CombinationProblem, FileCombiner, Files, IMMUTABLE, ParsedFile, PathRole, Subject};

/// Objects by their keys.
pub(super) type FileObjects = BTreeMap<ObjectKey, Arc<WholeObject>>;

/// The content of the directory.
pub(super) struct DirectoryContent {
    /// The pods. No two of them have the same uid or name.
    pub(super) pods: Vec<NodePod>,
    /// The objects.
    pub(super) objects: Arc<FileObjects>,
}

/// Combines the files of the directory.
pub(super) struct DirectoryCombiner {
    /// The name of the node, which podfs writes into its pods, if it is known.
    node: Option<String>,
    /// The objects when the files were read last.
    objects: Arc<FileObjects>,
    problems: Vec<CombinationProblem>,
}

/// The pods and objects of one file.
pub(super) struct ManifestFile {
    pods: Vec<(Origin, NodePod)>,
    objects: Vec<Arc<WholeObject>>,
}

impl DirectoryCombiner {
    pub(super) fn new(node: Option<String>) -> DirectoryCombiner {
        DirectoryCombiner { node, objects: Arc::default(), problems: Vec::new() }
    }

    fn pod(&self, file: &Path, document: Document) -> Result<(Origin, NodePod), ManifestError> {
        let origin = document.origin.clone();
        let mut manifest = document.into_value();
        if let (Some(node), Some(spec)) = (&self.node, manifest.get_mut("spec").and_then(Value::as_object_mut)) {
            spec.insert("nodeName".to_owned(), node.as_str().into());
        }
        let document = Document::of_server(origin.clone(), manifest.clone())?;
        // As a kubelet, podfs serves a static pod with unknown fields, if it can.
        let misspelled = check_spelling(&document);
        let pod = Pod::parse(document).map_err(|error| misspelled.err().unwrap_or(error))?;
        let (pod, manifest) = (Arc::new(pod), Arc::new(manifest));
        Ok((origin, NodePod { pod, manifest, origin: PodOrigin::File(file.to_owned()), stage: PodStage::Desired }))
    }

    /// Adds what the document describes to the contents of its file.
    fn add(&self, file: &Path, document: Document, contents: &mut ManifestFile) -> Result<(), ManifestError> {
        check_kind(&document)?;
        match (document.api_version.as_str(), document.kind.as_str()) {
            ("v1", "Pod") => contents.pods.push(self.pod(file, document)?),
            _ => contents.objects.extend(WholeObject::parse(document)?),
        }
        Ok(())
    }

    fn report(&mut self, origin: &Origin, field: &str, sentence: impl Into<String>) {
        let error = Arc::new(ManifestError::invalid(origin, field, sentence));
        self.problems.push(CombinationProblem { error, until_then: "", object: None });
    }

    fn pods(&mut self, files: Files<'_, ManifestFile>) -> Vec<NodePod> {
        let mut by_uid: BTreeMap<&PodUid, &Origin> = BTreeMap::new();
        let mut by_name: BTreeMap<String, &Origin> = BTreeMap::new();
        let mut pods = Vec::new();
        for (origin, pod) in files.iter().flat_map(|(_, contents)| &contents.pods) {
            let identity = &pod.pod.identity;
            let name = identity.to_string();
            let (same_uid, same_name) = (by_uid.get(&identity.uid), by_name.get(&name));
            let problem = match (same_uid, same_name) {
                (None, None) => {
                    by_uid.insert(&identity.uid, origin);
                    by_name.insert(name, origin);
                    pods.push(pod.clone());
                    continue;
                }
                (_, Some(first)) => {
                    ("metadata.name", format!("pod {name} is described in {first}, too; remove one of them"))
                }
                (Some(first), None) => {
                    let sentence =
                        format!("pod {name} has the uid of the pod in {first}; give it another uid, or none");
                    ("metadata.uid", sentence)
                }
            };
            self.report(origin, problem.0, format!("{}; until then, podfs goes by the first one", problem.1));
        }
        pods
    }

    fn objects(&mut self, files: Files<'_, ManifestFile>) -> FileObjects {
        let mut objects = FileObjects::new();
        for object in files.iter().flat_map(|(_, contents)| &contents.objects) {
            let (key, origin) = (object.key(), &object.parsed.origin);
            if let Some(first) = objects.get(key) {
                let first = &first.parsed.origin;
                let sentence = format!(
                    "{key} is described in {first}, too; remove one of them; until then, podfs goes by the first one"
                );
                self.report(origin, "metadata.name", sentence);
                continue;
            }
            let old = self.objects.get(key).cloned();
            let refused = old.as_ref().and_then(|old| object.parsed.refused_change(&old.parsed));
            if let Some(field) = refused {
                self.report(origin, field, IMMUTABLE);
            }
            // An annotation that makes an object too long for a push counts as a change, although no volume shows it.
            let kept = old.as_ref().filter(|old| refused.is_some() || object.value == old.value);
            objects.insert(key.clone(), Arc::clone(kept.unwrap_or(object)));
        }
        objects
    }
}

impl FileCombiner for DirectoryCombiner {
    type Contents = ManifestFile;
    type Combined = DirectoryContent;
    const NAMES_COUNT: bool = true;

    fn parse(
        &self,
        _: PathRole,
        file: &Path,
        bytes: &[u8],
        earlier: Option<&ManifestFile>,
    ) -> ParsedFile<ManifestFile> {
        let (mut contents, mut bad) = (ManifestFile { pods: Vec::new(), objects: Vec::new() }, Vec::new());
        for document in read_documents(file, bytes) {
            let subject = document.as_ref().map_or(Subject::Unknown, Subject::of);
            let added = document.and_then(|document| self.add(file, document, &mut contents));
            bad.extend(added.err().map(|error| BadDocument::new(subject, error)));
        }
        if let Some(earlier) = earlier {
            contents.keep_earlier(earlier, &mut bad);
        }
        ParsedFile { contents, bad }
    }

    fn combine(&mut self, files: Files<'_, ManifestFile>) -> Option<DirectoryContent> {
        self.problems.clear();
        let pods = self.pods(files);
        self.objects = Arc::new(self.objects(files));
        Some(DirectoryContent { pods, objects: Arc::clone(&self.objects) })
    }

    fn problems(&self) -> &[CombinationProblem] {
        &self.problems
    }

    /// The daemon starts without bad documents.
    fn refuses_to_start(&self, _: &Subject) -> bool {
        false
    }
}

impl ManifestFile {
    /// Keeps what the file described earlier in place of bad documents.
    fn keep_earlier(&mut self, earlier: &ManifestFile, bad: &mut [BadDocument]) {
        let names: BTreeSet<_> = self.pods.iter().map(|(_, pod)| pod.pod.identity.to_string()).collect();
        for (origin, pod) in &earlier.pods {
            let name = pod.pod.identity.to_string();
            let is_of_pod = |subject: &Subject| matches!(subject, Subject::Pod(described) if *described == name);
            if !names.contains(&name) && stands_in(bad, is_of_pod) {
                self.pods.push((origin.clone(), pod.clone()));
            }
        }
        let keys: BTreeSet<_> = self.objects.iter().map(|object| object.key().clone()).collect();
        for object in &earlier.objects {
            let is_of_object = |subject: &Subject| matches!(subject, Subject::Object(key) if key == object.key());
            if !keys.contains(object.key()) && stands_in(bad, is_of_object) {
                self.objects.push(Arc::clone(object));
            }
        }
    }
}

/// Whether what a file described earlier stands in for a bad document of this subject, or of an unknown one. Notes it there.
fn stands_in(bad: &mut [BadDocument], is_subject: impl Fn(&Subject) -> bool) -> bool {
    let mut any = false;
    for bad in bad.iter_mut().filter(|bad| bad.subject == Subject::Unknown || is_subject(&bad.subject)) {
        bad.has_earlier_content = true;
        any = true;
    }
    any
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The pods with their files, and the problems, of files with these names and texts.
    fn combine(combiner: &mut DirectoryCombiner, files: &[(&str, &str)]) -> (Vec<String>, Vec<String>) {
        let parse = |(name, text): &(&str, &str)| {
            combiner.parse(PathRole::Objects, Path::new(name), text.as_bytes(), None).contents
        };
        let contents: Vec<_> = files.iter().map(parse).collect();
        let files: Vec<_> = files.iter().map(|(name, _)| Path::new(*name)).zip(&contents).collect();
        let combined = combiner.combine(&files).expect("always");
        let pods = combined.pods.iter().map(|pod| match &pod.origin {
            PodOrigin::File(file) => format!("{} of {}", pod.pod.identity, file.display()),
            PodOrigin::Api | PodOrigin::Kubelet | PodOrigin::Runtime => unreachable!("it was in a file"),
        });
        (pods.collect(), combiner.problems().iter().map(|problem| problem.error.to_string()).collect())
    }

    fn pod(metadata: &str) -> String {
        format!("{{apiVersion: v1, kind: Pod, metadata: {{{metadata}}}, spec: {{containers: [{{name: c}}]}}}}")
    }

    fn config_map(value: &str) -> String {
        format!("{{apiVersion: v1, kind: ConfigMap, immutable: true, metadata: {{name: app}}, data: {{k: {value:?}}}}}")
    }

    #[test]
    fn of_two_manifests_with_one_uid_or_one_name_the_first_file_counts() {
        let mut combiner = DirectoryCombiner::new(None);
        let (web, other) = (pod("name: web, uid: u1"), pod("name: other, uid: u1"));
        let again = pod("name: web, uid: u2");
        let files = [("a.yaml", web.as_str()), ("b.yaml", &other), ("c.yaml", &again)];
        let (pods, problems) = combine(&mut combiner, &files);
        assert_eq!(pods, ["default/web of a.yaml"]);
        assert_eq!(
            problems,
            [
                "b.yaml: metadata.uid: pod default/other has the uid of the pod in a.yaml; give it another uid, or none; \
                 until then, podfs goes by the first one",
                "c.yaml: metadata.name: pod default/web is described in a.yaml, too; remove one of them; until then, \
                 podfs goes by the first one",
            ]
        );
        let (pods, problems) = combine(&mut combiner, &files[1..]);
        assert_eq!((pods.len(), problems.len()), (2, 0));
    }

    #[test]
    fn a_file_may_have_many_pods_and_objects_and_a_uid_is_derived_from_the_name() {
        let combiner = DirectoryCombiner::new(Some("n1".to_owned()));
        let text = format!("{}\n---\n{}\n---\n{}", pod("name: web"), config_map("1"), pod("name: db, namespace: shop"));
        let contents = combiner.parse(PathRole::Objects, Path::new("all.yaml"), text.as_bytes(), None).contents;
        let names: Vec<_> = contents.pods.iter().map(|(_, pod)| pod.pod.identity.to_string()).collect();
        assert_eq!(
            (names.as_slice(), contents.objects.len()),
            (&["default/web".to_owned(), "shop/db".to_owned()][..], 1)
        );
        let (_, web) = &contents.pods[0];
        assert_eq!(web.pod.identity.uid.as_str().len(), 36);
        assert_eq!((web.pod.facts.node_name.as_deref(), &web.manifest["spec"]["nodeName"]), (Some("n1"), &"n1".into()));
    }

    #[test]
    fn a_bad_document_keeps_the_earlier_pod_or_object_and_the_others_change() {
        let combiner = DirectoryCombiner::new(None);
        let parse = |text: &str, earlier: Option<&ManifestFile>| {
            let parsed = combiner.parse(PathRole::Objects, Path::new("all.yaml"), text.as_bytes(), earlier);
            let names = parsed.contents.pods.iter().map(|(_, pod)| pod.pod.identity.to_string());
            let objects = parsed.contents.objects.iter().map(|object| format!("{}", object.value["data"]["k"]));
            let names: Vec<_> = names.chain(objects).collect();
            let unread = parsed.bad.iter().filter(|bad| bad.is_unread()).count();
            (names, unread, parsed.contents)
        };
        let good = format!("{}\n---\n{}\n---\n{}", pod("name: web"), config_map("1"), pod("name: db"));
        let (_, _, earlier) = parse(&good, None);
        let earlier = Some(&earlier);
        let spoilt =
            good.replace("name: web}, spec: {containers: [{name: c}]", "name: web}, spec: {volumes: [{name: 5}]");
        let (names, unread, _) = parse(&spoilt, earlier);
        assert_eq!((names.as_slice(), unread), (&["default/db", "default/web", "\"1\""].map(str::to_owned)[..], 0));
        assert_eq!(parse(&spoilt, None).1, 1, "the pod may have been there");
        let spoilt = config_map("1").replace("\"1\"", "[2]");
        let (names, unread, _) = parse(&spoilt, earlier);
        assert_eq!((names.as_slice(), unread), (&["\"1\"".to_owned()][..], 0), "both pods were removed");
        let (names, unread, _) = parse("a: [", earlier);
        assert_eq!((names.len(), unread), (3, 0));
    }

    #[test]
    fn an_object_described_twice_is_that_of_the_first_file_and_an_immutable_one_stays() {
        let mut combiner = DirectoryCombiner::new(None);
        let (one, two) = (config_map("1"), config_map("2"));
        let value = |combiner: &DirectoryCombiner| {
            let object = combiner.objects.values().next().expect("one");
            object.value["data"]["k"].clone()
        };
        let (_, problems) = combine(&mut combiner, &[("a.yaml", &one), ("b.yaml", &two)]);
        assert_eq!((value(&combiner), problems.len()), ("1".into(), 1));
        let (_, problems) = combine(&mut combiner, &[("b.yaml", &two)]);
        assert_eq!((value(&combiner), problems), ("1".into(), vec![format!("b.yaml: data: {IMMUTABLE}")]));
        let mutable = one.replace("immutable: true, ", "");
        let (_, problems) = combine(&mut combiner, &[("b.yaml", &mutable)]);
        assert_eq!(problems, [format!("b.yaml: immutable: {IMMUTABLE}")]);
        assert!(combine(&mut combiner, &[]).1.is_empty());
        let (_, problems) = combine(&mut combiner, &[("b.yaml", &two)]);
        assert_eq!((value(&combiner), problems.len()), ("2".into(), 0));
    }
}
