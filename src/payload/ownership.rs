//! Modes and owners of files, from a pod's fsGroup, its user and the manifest's modes.
//!
//! The kubelet writes files as root and then walks the volume to give it to the group. podfs computes the result of
//! that walk, so that a file has its final mode and owner from the first moment.

use podfs_fuse::mount::private::ContainerAccess;

use crate::manifest::pod::PodFacts;
use crate::volume::Medium;

const SETGID: u16 = 0o2000;
/// Mode of directories in a pod without an fsGroup.
const DIRECTORY: u16 = 0o755;
/// Mode of credentials when the pod has an fsGroup or a single user.
const CREDENTIAL: u16 = 0o600;

/// The type of an entry in the walk over a volume.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OwnedEntry {
    /// A regular file.
    File,
    /// A directory, from which new entries inherit the group (setgid).
    Directory,
}

/// The mode of an entry after the walk for the fsGroup, in a volume that gives containers this access. The walk only adds
/// bits.
pub fn fs_group_mode(mode: u16, entry: OwnedEntry, access: ContainerAccess) -> u16 {
    let mask = match access {
        ContainerAccess::ReadOnly => 0o440,
        ContainerAccess::ReadWrite => 0o660,
    };
    match entry {
        OwnedEntry::File => mode | mask,
        OwnedEntry::Directory => mode | mask | SETGID | 0o110,
    }
}

/// The part of a pod's security context that decides the modes and owners in its projections.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Ownership {
    fs_group: Option<u32>,
    fs_user: Option<u32>,
}

impl Ownership {
    /// The ownership that follows from a pod's security context.
    pub fn of(facts: &PodFacts) -> Ownership {
        Ownership { fs_group: facts.fs_group, fs_user: facts.fs_user }
    }

    /// Group of everything in the volume, the root and the links included.
    pub fn gid(self) -> u32 {
        self.fs_group.unwrap_or(0)
    }

    /// Mode of the volume's root: that of a new emptyDir on the medium. The root of a tmpfs is sticky.
    pub fn root_mode(self, medium: Medium) -> u16 {
        let mode = match medium {
            Medium::Disk => 0o777,
            Medium::Memory => 0o1777,
        };
        self.shared(mode, OwnedEntry::Directory, ContainerAccess::ReadWrite)
    }

    /// Mode of the directories below the root.
    pub fn directory_mode(self) -> u16 {
        self.shared(DIRECTORY, OwnedEntry::Directory, ContainerAccess::ReadOnly)
    }

    /// Mode and owner of a file made of an object or of the pod's fields. Root owns such files unless the manifest
    /// names a user (KEP-5936), even if all containers run as one user.
    pub fn file(self, mode: u16, user: Option<u32>) -> (u16, u32) {
        (self.shared(mode, OwnedEntry::File, ContainerAccess::ReadOnly), user.unwrap_or(0))
    }

    /// Mode and owner of a token, a trust bundle or a certificate. If the pod has a user or an fsGroup, only these can read
    /// the file, whatever mode the manifest gives.
    pub fn credential(self, mode: u16, user: Option<u32>) -> (u16, u32) {
        let private = self.fs_group.is_some() || self.fs_user.is_some();
        let mode = if private { CREDENTIAL } else { mode };
        self.file(mode, user.or(self.fs_user))
    }

    fn shared(self, mode: u16, entry: OwnedEntry, access: ContainerAccess) -> u16 {
        match self.fs_group {
            Some(_) => fs_group_mode(mode, entry, access),
            None => mode,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ownership(fs_user: Option<u32>, fs_group: Option<u32>) -> Ownership {
        Ownership { fs_group, fs_user }
    }

    #[test]
    fn fg_01_mask_table() {
        use OwnedEntry::{Directory, File};
        let rows = [
            (File, 0o644, 0o664, 0o644),
            (File, 0o600, 0o660, 0o640),
            (File, 0o400, 0o660, 0o440),
            (File, 0o000, 0o660, 0o440),
            (Directory, 0o755, 0o2775, 0o2755),
            (Directory, 0o777, 0o2777, 0o2777),
            (Directory, 0o1777, 0o3777, 0o3777),
        ];
        for (entry, before, read_write, read_only) in rows {
            assert_eq!(fs_group_mode(before, entry, ContainerAccess::ReadWrite), read_write, "{entry:?} {before:o}");
            assert_eq!(fs_group_mode(before, entry, ContainerAccess::ReadOnly), read_only, "{entry:?} {before:o}");
        }
    }

    #[test]
    fn se_05_the_root_is_that_of_an_empty_dir_on_its_medium() {
        assert_eq!(ownership(None, None).root_mode(Medium::Disk), 0o777);
        assert_eq!(ownership(None, None).root_mode(Medium::Memory), 0o1777);
        assert_eq!(ownership(None, Some(0)).root_mode(Medium::Disk), 0o2777);
        assert_eq!(ownership(None, Some(1001)).root_mode(Medium::Memory), 0o3777);
    }

    #[test]
    fn fg_01_directories_hand_the_group_on() {
        assert_eq!(ownership(None, None).directory_mode(), 0o755);
        assert_eq!(ownership(None, Some(1001)).directory_mode(), 0o2755);
        assert_eq!(ownership(None, Some(1001)).gid(), 1001);
        assert_eq!(ownership(Some(7), None).gid(), 0);
    }

    #[test]
    fn fg_06_a_0400_secret_becomes_readable_for_the_group() {
        assert_eq!(ownership(None, Some(1001)).file(0o400, None), (0o440, 0));
        assert_eq!(ownership(None, None).file(0o400, None), (0o400, 0));
    }

    #[test]
    fn ex_01_only_an_explicit_user_owns_a_file() {
        assert_eq!(ownership(Some(1000), None).file(0o644, None), (0o644, 0));
        assert_eq!(ownership(Some(1000), None).file(0o644, Some(7)), (0o644, 7));
        assert_eq!(ownership(Some(1000), None).credential(0o644, Some(7)), (0o600, 7));
    }

    #[test]
    fn tk_02_tk_03_tk_04_credentials_are_private_to_the_pods_user_or_group() {
        assert_eq!(ownership(None, None).credential(0o644, None), (0o644, 0));
        assert_eq!(ownership(Some(1000), None).credential(0o644, None), (0o600, 1000));
        assert_eq!(ownership(Some(0), None).credential(0o644, None), (0o600, 0));
        assert_eq!(ownership(None, Some(1000)).credential(0o644, None), (0o640, 0));
        assert_eq!(ownership(Some(1000), Some(1000)).credential(0o644, None), (0o640, 1000));
    }
}
