//! Volumes of the node that another process has unmounted or covered. The daemon watches the mount table for all supervisors. When
//! a volume no longer has exactly one mount at its path, or has one again, the daemon sends a Remount to its supervisor.

use std::collections::{BTreeMap, HashMap};
use std::path::{Path, PathBuf};

use podfs_fuse::mount::table::{MountTableEntry, mounts};
use tracing::warn;

use crate::node::world::VolumeId;
use crate::supervisor::TableWatch;

/// The mounts of volumes when podfs read the mount table last.
pub(super) struct Unmounts {
    watch: Option<TableWatch>,
    /// The root directory as supervisors write it, and without symbolic links, as the mount table has it.
    root: (PathBuf, PathBuf),
    /// For each volume that does not have exactly one mount at its path, the ids of the mounts there.
    odd: BTreeMap<VolumeId, Vec<u64>>,
}

impl Unmounts {
    /// Watches the volumes below this directory. If podfs cannot watch the table, it serves the volumes all the same.
    pub(super) fn new(root: &Path) -> Unmounts {
        let watch = TableWatch::open();
        let watch = watch.inspect_err(|error| warn!("podfs cannot notice unmounts by other processes: {error}")).ok();
        let real = root.canonicalize().unwrap_or_else(|_| root.to_owned());
        Unmounts { watch, root: (root.to_owned(), real), odd: BTreeMap::new() }
    }

    /// Waits until the mount table has changed, so that [`Unmounts::look`] is due. Cancel-safe.
    pub(super) async fn look_is_due(&mut self) {
        match &mut self.watch {
            Some(watch) => watch.look_is_due().await,
            None => std::future::pending().await,
        }
    }

    /// The mounted volumes that, since the last look, were unmounted, were covered, or are visible again.
    pub(super) fn look<'a>(&mut self, mounted: impl Iterator<Item = (&'a VolumeId, &'a Path)>) -> Vec<VolumeId> {
        match mounts() {
            Ok(table) => self.compare(&table, mounted),
            Err(error) => {
                warn!("podfs cannot read the mount table: {error}");
                Vec::new()
            }
        }
    }

    fn compare<'a>(
        &mut self,
        table: &[MountTableEntry],
        mounted: impl Iterator<Item = (&'a VolumeId, &'a Path)>,
    ) -> Vec<VolumeId> {
        let mut at: HashMap<&Path, Vec<u64>> = HashMap::new();
        for mount in table.iter().filter(|mount| mount.at.starts_with(&self.root.1)) {
            at.entry(&mount.at).or_default().push(mount.id);
        }
        let (root, real) = &self.root;
        let odd = mounted.filter_map(|(id, path)| {
            let path = path.strip_prefix(root).map_or_else(|_| path.to_owned(), |below| real.join(below));
            let mounts = at.get(path.as_path()).cloned().unwrap_or_default();
            (mounts.len() != 1).then(|| (id.clone(), mounts))
        });
        let odd: BTreeMap<_, _> = odd.collect();
        let before = std::mem::replace(&mut self.odd, odd);
        let changed = self.odd.iter().filter(|(id, mounts)| before.get(id) != Some(mounts));
        let mended = before.keys().filter(|id| !self.odd.contains_key(id));
        changed.map(|(id, _)| id).chain(mended).cloned().collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::node::sample::uid;

    #[test]
    fn volumes_that_were_unmounted_covered_or_mounted_again_are_reported_once() {
        let mut table = mounts().expect("a mount table");
        let template = table.remove(0);
        let mount = |id: u64, at: &str| MountTableEntry { id, at: at.into(), ..template.clone() };
        let id = VolumeId { pod: uid("u"), volume: "v".to_owned() };
        let path = Path::new("/nonexistent/root/v");
        let mut unmounts = Unmounts {
            watch: None,
            root: ("/nonexistent/root".into(), "/nonexistent/real".into()),
            odd: BTreeMap::new(),
        };
        let mut look = |table: &[MountTableEntry]| unmounts.compare(table, std::iter::once((&id, path))).len();
        let (own, cover) = (mount(1, "/nonexistent/real/v"), mount(2, "/nonexistent/real/v"));
        let other = mount(3, "/nonexistent/real/other");
        assert_eq!(look(&[own.clone(), other.clone()]), 0, "it is as it should be");
        assert_eq!(look(std::slice::from_ref(&other)), 1, "it is unmounted");
        assert_eq!(look(std::slice::from_ref(&other)), 0, "it was reported before");
        assert_eq!(look(&[own.clone(), other.clone()]), 1, "it is there again");
        assert_eq!(look(&[own.clone(), cover.clone()]), 1, "it is covered");
        assert_eq!(look(&[own.clone(), cover]), 0, "it was reported before");
        assert_eq!(look(&[own]), 1, "it is visible again");
    }
}
