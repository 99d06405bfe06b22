//! The medium and size of an emptyDir, decided from the manifest and the node alone.

use std::fmt;

use podfs_fuse::mount::private::ContainerAccess;

use crate::manifest::pod::PodFacts;
use crate::payload::{OwnedEntry, fs_group_mode};
use crate::types::{Allocatable, Quantity};
use crate::volume::{EmptyDir, PageSize, Storage};

/// The storage, mode and group for the content of an emptyDir.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct EmptyDirPlan {
    /// The storage of its files.
    pub backing: EmptyDirBacking,
    /// The mode of the content's root, with the bits that a fsGroup adds (ED-10).
    pub mode: u16,
    /// The group of the content's root.
    pub gid: u32,
}

/// The storage of the files. Its text is the content of the file `ready` beside the files.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum EmptyDirBacking {
    /// The file system of podfs' root directory.
    Disk,
    /// A tmpfs with a limit.
    Memory {
        /// Most bytes of its files.
        bytes: u64,
    },
    /// A hugetlbfs.
    HugePages {
        /// The bytes of a page.
        page_size: u64,
        /// Most bytes of its files.
        limit: Option<u64>,
    },
}

impl EmptyDirBacking {
    /// Whether this is the text of a storage that podfs knows.
    pub(super) fn is_known(text: &str) -> bool {
        let is_size = |size: &str| {
            let bytes = Quantity::parse(size).ok().and_then(|size| u64::try_from(size.units()).ok());
            bytes.is_some_and(|bytes| bytes > 0 && PageSize(bytes).to_string() == size)
        };
        matches!(text, "disk" | "memory") || text.strip_prefix("hugepages-").is_some_and(is_size)
    }
}

impl fmt::Display for EmptyDirBacking {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            EmptyDirBacking::Disk => f.write_str("disk"),
            EmptyDirBacking::Memory { .. } => f.write_str("memory"),
            EmptyDirBacking::HugePages { page_size, .. } => write!(f, "hugepages-{}", PageSize(*page_size)),
        }
    }
}

/// Why podfs cannot choose a size of huge pages (ED-04). The texts are the kubelet's.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum PlanError {
    /// The pod requests pages of several sizes, and the volume's medium names no size.
    #[error("medium: HugePages can't be used if container requests multiple huge page sizes")]
    SeveralSizes,
    /// The pod requests no huge pages, or none of the medium's size.
    #[error("medium {0}: hugePages storage requested, but there is no resource request for huge pages")]
    NoRequest(Storage),
}

impl EmptyDirPlan {
    /// The plan for the volume `source` of a pod.
    ///
    /// # Errors
    /// When the medium is huge pages, and the pod does not request them.
    pub fn new(source: &EmptyDir, facts: &PodFacts, node: Allocatable) -> Result<EmptyDirPlan, PlanError> {
        let limit = source.size_limit;
        let (backing, mode) = match source.medium {
            Storage::Disk => (EmptyDirBacking::Disk, 0o777),
            Storage::Memory => {
                let bounds = [facts.resources.memory_limit, limit].into_iter().flatten();
                (EmptyDirBacking::Memory { bytes: bounds.fold(node.memory_bytes, u64::min) }, 0o1777)
            }
            Storage::HugePages(size) => {
                (EmptyDirBacking::HugePages { page_size: page_size(source.medium, size, facts)?, limit }, 0o777)
            }
        };
        let mode = source.mode.unwrap_or(mode);
        Ok(EmptyDirPlan {
            backing,
            mode: match facts.fs_group {
                Some(_) => fs_group_mode(mode, OwnedEntry::Directory, ContainerAccess::ReadWrite),
                None => mode,
            },
            gid: facts.fs_group.unwrap_or(0),
        })
    }
}

/// The size of huge pages: that of the medium, or the only size that the pod requests.
fn page_size(medium: Storage, size: Option<u64>, facts: &PodFacts) -> Result<u64, PlanError> {
    let requested = &facts.resources.page_sizes;
    match (size, requested.first()) {
        (Some(size), _) if requested.contains(&size) => Ok(size),
        (None, Some(_)) if requested.len() > 1 => Err(PlanError::SeveralSizes),
        (None, Some(only)) => Ok(*only),
        _ => Err(PlanError::NoRequest(medium)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::manifest::pod::PodResources;

    const NODE: Allocatable = Allocatable { cpu_milli: 1, memory_bytes: 16 << 30, ephemeral_storage_bytes: 1 };

    fn plan(medium: Storage, size_limit: Option<u64>, resources: PodResources) -> Result<EmptyDirPlan, PlanError> {
        let facts = PodFacts { resources, ..PodFacts::placeholder() };
        EmptyDirPlan::new(&EmptyDir { medium, size_limit, mode: None }, &facts, NODE)
    }

    #[test]
    fn ed_02_memory_is_bounded_by_node_pod_and_volume() {
        let bytes = |pod: Option<u64>, volume: Option<u64>| {
            let resources = PodResources { memory_limit: pod.map(|gib| gib << 30), ..PodResources::default() };
            match plan(Storage::Memory, volume.map(|gib| gib << 30), resources).expect("a plan").backing {
                EmptyDirBacking::Memory { bytes } => bytes >> 30,
                other => panic!("{other:?}"),
            }
        };
        assert_eq!(bytes(Some(10), Some(1)), 1);
        assert_eq!(bytes(Some(10), None), 10);
        assert_eq!(bytes(None, None), 16);
        assert_eq!(bytes(Some(32), Some(64)), 16);
    }

    #[test]
    fn ed_04_the_page_size_is_one_the_pod_asks_for() {
        const SMALL: u64 = 2 << 20;
        const LARGE: u64 = 1 << 30;
        let chosen = |sizes: &[u64], medium: Option<u64>| {
            let page_sizes = sizes.iter().copied().collect();
            let plan = plan(Storage::HugePages(medium), None, PodResources { page_sizes, memory_limit: None });
            plan.map(|plan| plan.backing.to_string()).map_err(|error| error.to_string())
        };
        assert_eq!(chosen(&[SMALL], None).as_deref(), Ok("hugepages-2Mi"));
        assert_eq!(chosen(&[SMALL, LARGE], Some(LARGE)).as_deref(), Ok("hugepages-1Gi"));
        assert_eq!(chosen(&[SMALL, LARGE], Some(SMALL)).as_deref(), Ok("hugepages-2Mi"));
        assert_eq!(
            chosen(&[SMALL, LARGE], None),
            Err("medium: HugePages can't be used if container requests multiple huge page sizes".to_owned())
        );
        let none = |medium: &str| {
            let text = "hugePages storage requested, but there is no resource request for huge pages";
            Err(format!("medium {medium}: {text}"))
        };
        assert_eq!(chosen(&[], None), none("HugePages"));
        assert_eq!(chosen(&[SMALL], Some(1 << 20)), none("HugePages-1Mi"));
    }

    #[test]
    fn ed_01_ed_10_ex_02_the_root_is_open_to_all_unless_the_manifest_says_otherwise() {
        let mode = |medium, mode, fs_group| {
            let facts = PodFacts { fs_group, ..PodFacts::placeholder() };
            EmptyDirPlan::new(&EmptyDir { medium, size_limit: None, mode }, &facts, NODE).expect("a plan").mode
        };
        assert_eq!(mode(Storage::Disk, None, None), 0o777);
        assert_eq!(mode(Storage::Memory, None, None), 0o1777);
        assert_eq!(mode(Storage::Disk, None, Some(7)), 0o2777);
        assert_eq!(mode(Storage::Memory, None, Some(7)), 0o3777);
        assert_eq!(mode(Storage::Disk, Some(0o700), None), 0o700);
        assert_eq!(mode(Storage::Disk, Some(0o700), Some(7)), 0o2770);
    }
}
