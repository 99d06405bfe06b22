//! A rendering: the entries of each volume, in the layout of the kubelet's AtomicWriter.
//!
//! They are the entries that `podfs run` shows, with one difference: the directory of the generation, whose name holds the
//! time at which it was made, is called [`GENERATION`] here, so that equal manifests give equal renderings.

use std::borrow::Cow;
use std::collections::{BTreeMap, BTreeSet};

use crate::manifest::PodView;
use crate::manifest::pod::{ContainerMounts, Mount, SubPath};
use crate::payload::{Ownership, Payload, PayloadError, PayloadFile};
use crate::types::PayloadPath;
use crate::volume::{Projection, Storage, Volume, VolumeSource};

/// The name of each generation's directory.
pub const GENERATION: &str = "..generation";
/// The link to the generation's directory.
pub const DATA: &str = "..data";
/// Mode of the directories that other volumes are mounted on.
const NESTED: u16 = 0o755;

/// The future content of a pod's volumes, or of the mount paths of one container.
pub struct Rendering<'a> {
    /// The pod's namespace.
    pub namespace: String,
    /// The pod's name.
    pub name: String,
    /// The container, if the places are its mount paths.
    pub container: Option<String>,
    /// Volumes in the manifest's order, or mount paths with outer ones before those below them.
    pub places: Vec<RenderedVolume<'a>>,
    /// Warnings about the manifests, a sentence each.
    pub warnings: Vec<String>,
}

/// A volume, or the path that a container mounts it at.
pub struct RenderedVolume<'a> {
    /// The volume's name, or the mount path without its first `/`: a relative path without `..`.
    pub path: String,
    /// The volume's name.
    pub volume: String,
    /// The volume's kind, as the manifest has it.
    pub kind: String,
    /// Its content.
    pub content: RenderedContent<'a>,
}

/// The content of a volume or a mount path.
pub enum RenderedContent<'a> {
    /// Entries, each directory before the entries in it. The first entry is the place itself, with an empty path.
    Entries(Vec<RenderedEntry<'a>>),
    /// Content of the node, or content that a rendering does not show; this line describes it.
    OfNode(String),
    /// No content: podfs would wait, for this reason.
    Waiting(String),
}

/// A directory, link or file.
#[derive(Clone)]
pub struct RenderedEntry<'a> {
    /// The path below the place; empty for the place itself.
    pub path: String,
    /// Permission bits, setgid and sticky included.
    pub mode: u16,
    /// Owner.
    pub uid: u32,
    /// Group.
    pub gid: u32,
    /// Its type.
    pub kind: EntryKind<'a>,
}

/// The type of an entry.
#[derive(Clone)]
pub enum EntryKind<'a> {
    /// A directory.
    Directory,
    /// A symbolic link to this target.
    Link(String),
    /// A regular file.
    File {
        /// Its bytes.
        content: Cow<'a, [u8]>,
        /// Whether the bytes are secret.
        is_secret: bool,
    },
}

/// The pod's volumes of kind `image`: the image of each, by its name.
type Images = BTreeMap<String, String>;

/// Why there is no rendering. Its text is one sentence for the user.
#[derive(Debug, thiserror::Error)]
pub enum RenderError {
    /// The pod has no such container.
    #[error("the pod has no container {name:?}; its containers are {}", known.join(", "))]
    NoContainer {
        /// The requested container.
        name: String,
        /// The names of the pod's containers.
        known: Vec<String>,
    },
    /// A container mounts a volume that the pod does not have.
    #[error("container {container:?} mounts volume {volume:?}, which the pod does not have")]
    NoVolume {
        /// The container.
        container: String,
        /// The volume.
        volume: String,
    },
    /// A mount path that leads out of the container.
    #[error("container {container:?} mounts a volume at {path:?}; a mount path must not contain '..'")]
    Path {
        /// The container.
        container: String,
        /// The mount path.
        path: String,
    },
}

impl<'a> Rendering<'a> {
    /// Every volume of the pod; images come last.
    pub fn of_volumes(pod: &'a PodView, volumes: &'a [Volume], images: &Images) -> Rendering<'a> {
        let mut rendering = Rendering::empty(pod);
        for volume in volumes {
            let content = rendering.content(pod, volume);
            rendering.add(volume, volume.name.as_str().to_owned(), content);
        }
        for (name, reference) in images {
            rendering.places.push(image(name.clone(), name, reference, &SubPath::Whole));
        }
        rendering
    }

    /// The content that a container of the pod sees at its mount paths.
    ///
    /// # Errors
    /// A container, or a volume of it, that the pod does not have, and a mount path with `..`.
    pub fn of_container(
        pod: &'a PodView,
        volumes: &'a [Volume],
        images: &Images,
        mounts: &[ContainerMounts],
        name: &str,
    ) -> Result<Rendering<'a>, RenderError> {
        let container = mounts.iter().find(|one| one.container == name).ok_or_else(|| RenderError::NoContainer {
            name: name.to_owned(),
            known: mounts.iter().map(|one| one.container.clone()).collect(),
        })?;
        let mut rendering = Rendering { container: Some(name.to_owned()), ..Rendering::empty(pod) };
        let mut sorted: Vec<(String, &Mount)> = Vec::new();
        for mount in &container.mounts {
            sorted.push((relative(name, mount)?, mount));
        }
        // An outer mount comes before those below it.
        sorted.sort_by(|(a, _), (b, _)| a.split('/').cmp(b.split('/')));
        for (path, mount) in sorted {
            if let Some(reference) = images.get(&mount.volume) {
                rendering.places.push(image(path, &mount.volume, reference, &mount.sub_path));
                continue;
            }
            let volume = volumes.iter().find(|volume| volume.name.as_str() == mount.volume);
            let volume = volume
                .ok_or_else(|| RenderError::NoVolume { container: name.to_owned(), volume: mount.volume.clone() })?;
            let content = match (rendering.content(pod, volume), &mount.sub_path) {
                (content @ RenderedContent::Waiting(_), _) | (content, SubPath::Whole) => content,
                (RenderedContent::OfNode(line), SubPath::At(sub)) => {
                    RenderedContent::OfNode(format!("{line}, subPath {sub}"))
                }
                (_, SubPath::Both) => {
                    RenderedContent::Waiting("subPath and subPathExpr are mutually exclusive".to_owned())
                }
                (_, SubPath::Expression(text)) => {
                    RenderedContent::OfNode(format!("subPathExpr {text}, which depends on the container's environment"))
                }
                (RenderedContent::Entries(entries), SubPath::At(sub)) => content_at(entries, sub),
            };
            rendering.add(volume, path, content);
        }
        Ok(rendering)
    }

    /// Why podfs would wait, in the kubelet's words, for each volume that it would wait for.
    pub fn reasons(&self) -> Vec<String> {
        let mut reasons: Vec<String> = Vec::new();
        for place in &self.places {
            if let RenderedContent::Waiting(reason) = &place.content {
                let sentence = format!("MountVolume.SetUp failed for volume {:?} : {reason}", place.volume);
                if !reasons.contains(&sentence) {
                    reasons.push(sentence);
                }
            }
        }
        reasons
    }

    /// The places that have entries.
    pub fn with_entries(&self) -> impl Iterator<Item = (&RenderedVolume<'a>, &[RenderedEntry<'a>])> {
        self.places.iter().filter_map(|place| match &place.content {
            RenderedContent::Entries(entries) => Some((place, entries.as_slice())),
            RenderedContent::OfNode(_) | RenderedContent::Waiting(_) => None,
        })
    }

    /// The number of secret files.
    pub fn secrets(&self) -> usize {
        let is_secret = |entry: &&RenderedEntry<'_>| matches!(entry.kind, EntryKind::File { is_secret: true, .. });
        self.with_entries().map(|(_, entries)| entries.iter().filter(is_secret).count()).sum()
    }

    fn empty(pod: &'a PodView) -> Rendering<'a> {
        let identity = &pod.identity;
        Rendering {
            namespace: identity.namespace.clone(),
            name: identity.name.clone(),
            container: None,
            places: Vec::new(),
            warnings: Vec::new(),
        }
    }

    fn add(&mut self, volume: &Volume, path: String, content: RenderedContent<'a>) {
        let (volume, kind) = (volume.name.as_str().to_owned(), volume.field().to_owned());
        self.places.push(RenderedVolume { path, volume, kind, content });
    }

    fn content(&mut self, pod: &'a PodView, volume: &'a Volume) -> RenderedContent<'a> {
        let VolumeSource::Projection(projection) = &volume.source else {
            return RenderedContent::OfNode(describe(volume, &pod.identity.name));
        };
        let mut warnings = Vec::new();
        let content = match entries(volume, projection, pod, &mut warnings) {
            Ok(entries) => RenderedContent::Entries(entries),
            Err(error) => RenderedContent::Waiting(error.to_string()),
        };
        for warning in warnings.into_iter().map(|text| format!("volume {:?}: {text}", volume.name.as_str())) {
            // A container may mount a volume several times.
            if !self.warnings.contains(&warning) {
                self.warnings.push(warning);
            }
        }
        content
    }
}

impl EntryKind<'_> {
    /// The size of a file in bytes; none for others.
    pub fn size(&self) -> Option<u64> {
        match self {
            EntryKind::File { content, .. } => Some(content.len() as u64),
            EntryKind::Directory | EntryKind::Link(_) => None,
        }
    }
}

/// The bytes of a file; none if they are secret and not to be revealed.
pub fn visible(content: &[u8], is_secret: bool, reveal: bool) -> Option<&[u8]> {
    (reveal || !is_secret).then_some(content)
}

fn entries<'a>(
    volume: &Volume,
    projection: &'a Projection,
    pod: &'a PodView,
    warnings: &mut Vec<String>,
) -> Result<Vec<RenderedEntry<'a>>, PayloadError> {
    let assembled = Payload::assemble(projection, pod)?;
    warnings.extend(assembled.warnings.iter().map(ToString::to_string));
    let payload = assembled.payload;
    let mut layout = EntryCollector { gid: payload.gid, entries: BTreeMap::new() };
    layout.add_entry("", Ownership::of(&pod.facts).root_mode(projection.medium), 0, EntryKind::Directory);
    let hidden: BTreeSet<&str> = volume.nested.iter().map(PayloadPath::top_level).collect();
    for path in &volume.nested {
        for directory in path.ancestors().chain([path.as_str()]) {
            layout.add_entry(directory, NESTED, 0, EntryKind::Directory);
        }
    }
    layout.add_entry(DATA, LINK, 0, EntryKind::Link(GENERATION.to_owned()));
    layout.add_entry(GENERATION, payload.directory_mode, 0, EntryKind::Directory);
    for (name, uid) in payload.top_level().into_iter().filter(|(name, _)| !hidden.contains(name)) {
        layout.add_entry(name, LINK, uid, EntryKind::Link(format!("{DATA}/{name}")));
    }
    for (path, file) in payload.files {
        for directory in path.ancestors() {
            let directory = format!("{GENERATION}/{directory}");
            layout.add_entry(&directory, payload.directory_mode, 0, EntryKind::Directory);
        }
        let PayloadFile { content, mode, uid, is_secret } = file;
        layout.add_entry(&format!("{GENERATION}/{path}"), mode, uid, EntryKind::File { content, is_secret });
    }
    Ok(layout.finish())
}

/// Mode of symbolic links.
const LINK: u16 = 0o777;

/// Entries being collected.
struct EntryCollector<'a> {
    gid: u32,
    entries: BTreeMap<String, RenderedEntry<'a>>,
}

impl<'a> EntryCollector<'a> {
    fn add_entry(&mut self, path: &str, mode: u16, uid: u32, kind: EntryKind<'a>) {
        let entry = RenderedEntry { path: path.to_owned(), mode, uid, gid: self.gid, kind };
        self.entries.insert(path.to_owned(), entry);
    }

    /// The entries in the order of a walk: a directory, then the entries in it, then its next sibling.
    fn finish(self) -> Vec<RenderedEntry<'a>> {
        let mut entries: Vec<_> = self.entries.into_values().collect();
        // The place itself has no name, and comes first.
        entries.sort_by(|a, b| names(&a.path).cmp(names(&b.path)));
        entries
    }
}

fn names(path: &str) -> impl Iterator<Item = &str> {
    path.split('/').filter(|name| !name.is_empty())
}

/// The content at a path of a volume, with the path as its root. Links of the volume are resolved.
fn content_at<'a>(entries: Vec<RenderedEntry<'a>>, sub_path: &str) -> RenderedContent<'a> {
    let below: Vec<&str> = names(sub_path).filter(|name| *name != ".").collect();
    let below: &[&str] = match below.as_slice() {
        [DATA | GENERATION, rest @ ..] => rest,
        all => all,
    };
    let root = below.iter().fold(GENERATION.to_owned(), |path, name| path + "/" + name);
    let relative_to_root = |entry: RenderedEntry<'a>| {
        let below = entry.path.strip_prefix(&root)?;
        let path = if below.is_empty() { below } else { below.strip_prefix('/')? };
        Some(RenderedEntry { path: path.to_owned(), ..entry })
    };
    let entries: Vec<_> = entries.into_iter().filter_map(relative_to_root).collect();
    match entries.is_empty() {
        true => RenderedContent::Waiting(format!("subPath {sub_path:?} does not exist in the volume")),
        false => RenderedContent::Entries(entries),
    }
}

/// A mount path as a path below the container's root.
fn relative(container: &str, mount: &Mount) -> Result<String, RenderError> {
    let names: Vec<&str> = names(&mount.path).filter(|name| *name != ".").collect();
    if names.contains(&"..") {
        return Err(RenderError::Path { container: container.to_owned(), path: mount.path.clone() });
    }
    Ok(names.join("/"))
}

/// An image, which the container runtime mounts.
fn image<'a>(path: String, volume: &str, reference: &str, sub_path: &SubPath) -> RenderedVolume<'a> {
    let part = match sub_path {
        SubPath::At(sub_path) => format!(", subPath {sub_path}"),
        SubPath::Expression(text) => format!(", subPathExpr {text}"),
        SubPath::Whole | SubPath::Both => String::new(),
    };
    let line = format!("the image {reference}{part}, which the container runtime mounts");
    RenderedVolume { path, volume: volume.to_owned(), kind: "image".to_owned(), content: RenderedContent::OfNode(line) }
}

/// A line that describes a volume whose content does not come from Kubernetes objects.
fn describe(volume: &Volume, pod: &str) -> String {
    match &volume.source {
        VolumeSource::HostPath(host) => format!("{} of the node", host.path.display()),
        VolumeSource::EmptyDir(dir) => {
            let medium = match dir.medium {
                Storage::Disk => "an empty directory on the node's disk".to_owned(),
                Storage::Memory => "an empty directory in memory".to_owned(),
                Storage::HugePages(_) => "an empty directory in huge pages".to_owned(),
            };
            dir.size_limit.map_or(medium.clone(), |limit| format!("{medium}, at most {limit} bytes"))
        }
        VolumeSource::Nfs(nfs, _) => {
            let read_only = if nfs.read_only { ", read-only" } else { "" };
            format!("{} of an NFS server{read_only}", nfs.address)
        }
        VolumeSource::Claim(claim) => {
            let read_only = if claim.read_only { ", read-only" } else { "" };
            format!("the volume of claim {}{read_only}", claim.reference.name(pod, volume.name.as_str()))
        }
        VolumeSource::Flex(flex) => {
            let read_only = if flex.read_only { ", read-only" } else { "" };
            format!("a volume of the FlexVolume driver {}{read_only}", flex.driver)
        }
        VolumeSource::Csi(csi) => {
            let read_only = if csi.read_only { ", read-only" } else { "" };
            format!("a volume of the CSI driver {}{read_only}", csi.driver)
        }
        VolumeSource::Unsupported(_) | VolumeSource::Projection(_) => {
            volume.unsupported_reason().unwrap_or_else(|| "files".to_owned())
        }
    }
}
