//! emptyDir volumes: a directory that exists as long as its pod.

use std::fmt;

use k8s_openapi::api::core::v1::{EmptyDirVolumeSource, Volume};

use super::{VolumeSource, VolumeType};
use crate::types::InvalidField;
use crate::types::Quantity;

pub(super) const KIND: VolumeType = VolumeType {
    field: "emptyDir",
    directory: Some("kubernetes.io~empty-dir"),
    parse: |volume: &Volume, _| volume.empty_dir.as_ref().map(|source| parse(source).map(VolumeSource::EmptyDir)),
};

/// A directory that is empty at first.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct EmptyDir {
    /// The storage of its files.
    pub medium: Storage,
    /// Most bytes it may hold.
    pub size_limit: Option<u64>,
    /// Permission bits of its root, when the manifest gives them (KEP-5502).
    pub mode: Option<u16>,
}

impl EmptyDir {
    /// Whether a mounted emptyDir can become `next`, which has another size limit, while containers use it. On disk, the server
    /// enforces a limit only if it has counted the bytes since the mount. The limit of huge pages never changes.
    pub(super) fn can_become(self, next: EmptyDir) -> bool {
        let is_resizable = match self.medium {
            Storage::Disk => self.size_limit.is_some(),
            Storage::Memory => true,
            Storage::HugePages(_) => false,
        };
        is_resizable && EmptyDir { size_limit: next.size_limit, ..self } == next
    }
}

/// The storage of an emptyDir's files. Its text is the `medium` of the manifest.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Storage {
    /// The file system of podfs' root directory.
    Disk,
    /// Memory of the node.
    Memory,
    /// Huge pages of this many bytes; without a number, of the only size that the pod requests.
    HugePages(Option<u64>),
}

impl fmt::Display for Storage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Storage::Disk => Ok(()),
            Storage::Memory => f.write_str("Memory"),
            Storage::HugePages(None) => f.write_str("HugePages"),
            Storage::HugePages(Some(bytes)) => write!(f, "HugePages-{}", PageSize(*bytes)),
        }
    }
}

/// A page size, as resources spell it: `2Mi`.
pub(crate) struct PageSize(pub(crate) u64);

impl fmt::Display for PageSize {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let units = [("Gi", 30), ("Mi", 20), ("Ki", 10)];
        match units.iter().find(|(_, shift)| self.0 > 0 && self.0.trailing_zeros() >= *shift) {
            Some((unit, shift)) => write!(f, "{}{unit}", self.0 >> shift),
            None => self.0.fmt(f),
        }
    }
}

fn parse(source: &EmptyDirVolumeSource) -> Result<EmptyDir, InvalidField> {
    Ok(EmptyDir {
        medium: storage(source.medium.as_deref().unwrap_or_default())?,
        size_limit: source.size_limit.as_ref().map(|limit| size_limit(&limit.0)).transpose()?.flatten(),
        mode: source.mode.map(mode).transpose()?,
    })
}

fn storage(medium: &str) -> Result<Storage, InvalidField> {
    match medium {
        "" => return Ok(Storage::Disk),
        "Memory" => return Ok(Storage::Memory),
        "HugePages" => return Ok(Storage::HugePages(None)),
        _ => {}
    }
    let size = medium.strip_prefix("HugePages-").and_then(|size| Quantity::parse(size).ok());
    match size.and_then(|size| u64::try_from(size.units()).ok()) {
        Some(bytes) if bytes > 0 => Ok(Storage::HugePages(Some(bytes))),
        _ => {
            // ED-09
            let sentence = format!(
                "unknown storage medium {medium:?}; known are \"\", Memory, HugePages, \
                 and HugePages-<size> such as HugePages-2Mi"
            );
            Err(InvalidField::new("medium", sentence))
        }
    }
}

/// Parses `sizeLimit`. Zero means no limit, as for the kubelet.
fn size_limit(text: &str) -> Result<Option<u64>, InvalidField> {
    if text.starts_with('-') && Quantity::parse(&text[1..]).is_ok() {
        let sentence = "must not be negative; write a quantity such as 500Mi, or leave it out for no limit";
        return Err(InvalidField::new("sizeLimit", sentence));
    }
    let limit = Quantity::parse(text).map_err(|error| InvalidField::new("sizeLimit", error))?;
    let bytes = u64::try_from(limit.units()).unwrap_or(u64::MAX);
    Ok((bytes > 0).then_some(bytes))
}

fn mode(mode: i32) -> Result<u16, InvalidField> {
    match u16::try_from(mode) {
        Ok(bits @ 0..=0o1777) => Ok(bits),
        _ => {
            let sentence = format!("must be a number between 0 and 01777 (octal), both inclusive; it is {mode}");
            Err(InvalidField::new("mode", sentence))
        }
    }
}
