//! Files that a name leads to, also while another process changes the name.

use std::fs::{self, File};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::{MetadataExt, symlink};
use std::path::Path;

use rustix::fs::{FileType, Mode, OFlags, openat};

use super::super::attributes::{attributes_of, kind};
use super::super::nodes::{NewNode, Nodes};
use super::super::share::Share;
use super::*;
use crate::region::VolumeKind;
use crate::session::NodeId;

/// A directory, open, with its node.
struct Rig {
    mounts: SourceMounts,
    nodes: Nodes,
    directory: File,
}

impl Rig {
    /// `None` if the file handles of the file system do not contain inode numbers.
    fn new(path: &Path) -> Option<Self> {
        let region = Arc::new(Region::create(VolumeKind::Passthrough).expect("a region"));
        let table = Arc::new(MountTable::open().expect("the mount table"));
        let mounts = SourceMounts::new(Arc::clone(&region), table, std::iter::empty());
        let directory = File::open(path).expect("a directory");
        let (identity, mount) = mounts.identify(directory.as_fd(), None).expect("an identity");
        let kind = kind(&attributes_of(directory.as_fd()).expect("attributes"));
        let source = OwnedFd::from(directory.try_clone().expect("a descriptor"));
        let found = NewNode { identity, mount, kind, charge: 0 };
        let nodes = Nodes::new(region, found, source, &Share::new("test")).expect("nodes");
        let rig = Self { mounts, nodes, directory };
        rig.root().handle()?.ino()?;
        Some(rig)
    }

    fn root(&self) -> Arc<Node> {
        self.nodes.get(NodeId::ROOT).expect("the root")
    }

    fn by_name(&self, name: &CStr, meanwhile: impl FnOnce()) -> Result<Option<(FileIdentity, Statx)>, Errno> {
        SourceMounts::identify_name_while(&self.root(), self.directory.as_fd(), name, meanwhile)
    }

    /// The identity that the open file has.
    fn by_descriptor(&self, name: &CStr) -> FileIdentity {
        let flags = OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let file = openat(&self.directory, name, flags, Mode::empty()).expect("a file");
        self.mounts.identify(file.as_fd(), Some(&self.root())).expect("an identity").0
    }
}

#[test]
fn a_name_leads_to_the_node_that_its_open_file_has() {
    let base = tempfile::tempdir().expect("a directory");
    let at = |name| base.path().join(name);
    fs::write(at("file"), "x").expect("written");
    fs::hard_link(at("file"), at("link")).expect("linked");
    symlink("file", at("symlink")).expect("a link");
    fs::create_dir(at("directory")).expect("a directory");
    let Some(rig) = Rig::new(base.path()) else { return };
    for (name, expected_kind) in [
        (c"file", FileType::RegularFile),
        (c"link", FileType::RegularFile),
        (c"symlink", FileType::Symlink),
        (c"directory", FileType::Directory),
    ] {
        let (identity, found) = rig.by_name(name, || {}).expect("there is one").expect("two calls tell it");
        assert_eq!(identity, rig.by_descriptor(name), "{name:?}");
        assert_eq!(
            SourceMounts::identity_of_name(&rig.root(), rig.directory.as_fd(), name),
            Some(identity),
            "{name:?}"
        );
        assert_eq!(kind(&found), expected_kind, "{name:?}");
        let number = fs::symlink_metadata(at(name.to_str().expect("text"))).expect("attributes").ino();
        assert_eq!(found.stx_ino, number, "{name:?}");
    }
    assert_eq!(rig.by_descriptor(c"file"), rig.by_descriptor(c"link"));
    assert_eq!(rig.by_name(c"absent", || {}).err(), Some(Errno::NOENT));
    assert_eq!(SourceMounts::identity_of_name(&rig.root(), rig.directory.as_fd(), c"absent"), None);
}

#[test]
fn a_name_that_another_file_got_meanwhile_is_not_used() {
    let base = tempfile::tempdir().expect("a directory");
    let at = |name| base.path().join(name);
    let Some(rig) = Rig::new(base.path()) else { return };
    fs::write(at("file"), "old").expect("written");
    fs::write(at("other"), "new").expect("written");
    // The old file stays under another name, so its number is not used again.
    fs::hard_link(at("file"), at("kept")).expect("linked");
    let replace = || fs::rename(at("other"), at("file")).expect("renamed");
    assert_eq!(rig.by_name(c"file", replace).expect("there is one").map(|(identity, _)| identity), None);
    let remove = || fs::remove_file(at("file")).expect("removed");
    assert_eq!(rig.by_name(c"file", remove).expect("there was one").map(|(identity, _)| identity), None);
}

#[test]
fn a_new_file_with_the_number_of_the_old_one_is_never_opened_as_the_old_one() {
    let base = tempfile::tempdir().expect("a directory");
    let path = base.path().join("file");
    let Some(rig) = Rig::new(base.path()) else { return };
    fs::write(&path, "old").expect("written");
    let make_anew = || {
        fs::remove_file(&path).expect("removed");
        fs::write(&path, "new").expect("written");
    };
    // The file system may use the inode number again at once, or not.
    if let Some((identity, _)) = rig.by_name(c"file", make_anew).expect("there is one") {
        let FileIdentity::Handle { handle, .. } = identity else { panic!("a handle") };
        let opened = handle.open(rig.directory.as_fd(), OFlags::PATH);
        assert_eq!(opened.err(), Some(Errno::STALE));
    }
    assert_eq!(
        rig.by_name(c"file", || {}).expect("there is one").expect("two calls tell it").0,
        rig.by_descriptor(c"file")
    );
}

#[test]
fn a_name_that_another_mount_covers_is_not_used() {
    let Some(rig) = Rig::new(Path::new("/")) else { return };
    for name in [c"proc", c"dev", c"sys"] {
        assert_eq!(rig.by_name(name, || {}).expect("there is one").map(|(identity, _)| identity), None, "{name:?}");
        assert_eq!(SourceMounts::identity_of_name(&rig.root(), rig.directory.as_fd(), name), None, "{name:?}");
    }
}

#[test]
fn a_mount_that_two_requests_reach_at_once_is_one_mount() {
    let base = tempfile::tempdir().expect("a directory");
    let Some(rig) = Rig::new(base.path()) else { return };
    let root = rig.root();
    let added = || rig.mounts.add(12345, None, Restrictions::default(), Some(&root)).expect("a mount");
    let (first, second) = (added(), added());
    assert!(Arc::ptr_eq(&first, &second));
}
