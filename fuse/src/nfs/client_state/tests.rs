//! The client's state, as another process reads it from the region.

use std::collections::HashMap;
use std::os::fd::AsFd;
use std::sync::Arc;

use podfs_nfs::rpc::Credential;
use podfs_nfs::v3::{FileType, NfsFileHandle};
use proptest::prelude::*;
use rustix::fs::{FallocateFlags, fallocate, fstat};
use rustix::io::{pread, pwrite};

use super::*;
use crate::nfs::client_state::inherit::InheritedState;
use crate::nfs::client_state::node::NewNfsNode;
use crate::region::{self, Region};
use crate::session::NodeId;

fn new_node(number: u8, kind: FileType) -> NewNfsNode {
    let handle = NfsFileHandle::new(&[number; 28]).expect("a handle");
    NewNfsNode { handle, kind, fileid: u64::from(number) + 1000 }
}

fn user() -> Credential {
    Credential::User { uid: 7, gid: 8, groups: (0..20).collect() }
}

/// A volume with nodes, names and open files, and its region.
fn volume() -> (ClientState, Arc<Region>) {
    let region = Arc::new(Region::create(region::VolumeKind::Nfs).expect("a region"));
    region.begin();
    let nodes = NfsNodes::new(Arc::clone(&region), new_node(0, FileType::Directory)).expect("memory");
    let files = NfsOpenFiles::new(Arc::clone(&region), HashMap::new(), HashMap::new());
    let calls = Calls::new(Arc::clone(&region), HashMap::new());
    for number in 1..60 {
        let name = vec![b'a' + number % 20; usize::from(number) * 4];
        nodes.enter(new_node(number, FileType::File), Some((NodeId::ROOT, &name))).expect("memory");
    }
    for number in 2..20 {
        let node = nodes.get(NodeId(number)).expect("a node");
        files.add(number * 2, &node, user(), number % 5 == 0).expect("memory");
    }
    (ClientState { nodes, files, calls }, region)
}

/// A region with this content, as another process has it.
fn region_of(bytes: &[u8]) -> Arc<Region> {
    let file =
        Region::create(region::VolumeKind::Nfs).expect("a region").as_fd().try_clone_to_owned().expect("a descriptor");
    fallocate(&file, FallocateFlags::empty(), 0, bytes.len() as u64).expect("memory");
    pwrite(&file, bytes, 0).expect("written");
    Arc::new(Region::adopt(file).expect("a region"))
}

fn bytes_of(region: &Region) -> Vec<u8> {
    let mut bytes = vec![0; fstat(region.as_fd()).expect("attributes").st_size as usize];
    pread(region.as_fd(), &mut bytes[..], 0).expect("read");
    bytes
}

#[test]
fn a_successor_knows_all_of_it() {
    let (known, region) = volume();
    let node = known.nodes.get(NodeId(9)).expect("a node");
    known.nodes.rename(&node, NodeId::ROOT, b"another name").expect("memory");
    node.set_silly(true);
    known.nodes.set_handle(&node, NfsFileHandle::new(&[200; 64]).expect("a handle")).expect("memory");
    known.nodes.forget(NodeId(30), 1, |_| false);
    let call = known.calls.begin(4711, 1, &user()).expect("memory");
    call.announce(99);
    let dead = bytes_of(&region);

    let InheritedState { state: next, .. } = InheritedState::read(&region_of(&dead)).expect("a root");
    assert_eq!(next.nodes.all().len(), 59);
    assert!(next.nodes.get(NodeId(30)).is_err());
    for old in known.nodes.all() {
        let new = next.nodes.get(old.id).expect("a node");
        assert_eq!((new.handle(), new.fileid, new.kind), (old.handle(), old.fileid, old.kind));
        let names = [&old, &new].map(|node| node.name().map(|name| (name.parent, name.name.clone())));
        assert_eq!(names[0], names[1]);
        assert_eq!((new.is_silly(), new.is_open()), (old.is_silly(), old.is_open()));
    }
    assert_eq!(next.nodes.at(NodeId::ROOT, b"another name").map(|node| node.id), Some(NodeId(9)));
    for old in known.files.all() {
        let new = next.files.get(old.handle).expect("an open file");
        assert_eq!((new.node.id, new.listing.is_some()), (old.node.id, old.listing.is_some()));
        let Credential::User { uid: 7, gid: 8, groups } = &new.credential else { panic!("{:?}", new.credential) };
        assert_eq!(*groups, (0..16).collect::<Vec<_>>(), "as many as are sent");
    }
    let again = next.calls.begin(4711, 1, &Credential::Anonymous).expect("memory");
    assert_eq!(again.xid(), Some(99));
    assert!(matches!(again.credential(), Credential::User { uid: 7, gid: 8, .. }));
    assert_eq!(next.calls.begin(4711, 1, &Credential::Anonymous).expect("memory").xid(), None, "it was taken up once");
}

#[test]
fn ended_calls_leave_nothing() {
    let (known, region) = volume();
    let cells = || region.cells().tagged().count();
    let before = cells();
    drop(known.calls.begin(1, 1, &user()).expect("memory"));
    let open = known.files.add(2, &known.nodes.root(), user(), true).expect("memory");
    known.files.remove(open.handle, false);
    drop(open);
    let node = known.nodes.enter(new_node(100, FileType::File), Some((NodeId::ROOT, &[b'x'; 255]))).expect("memory");
    let id = node.id;
    drop(node);
    known.nodes.forget(id, 1, |_| false);
    assert_eq!(cells(), before);
}

#[test]
fn a_file_that_the_kernel_forgets_before_it_closes_it_leaves_nothing() {
    let (known, region) = volume();
    let cells = || region.cells().tagged().count();
    let before = cells();
    let node = known.nodes.enter(new_node(100, FileType::File), Some((NodeId::ROOT, b"x"))).expect("memory");
    let handle = known.files.add(2, &node, user(), false).expect("memory").handle;
    known.nodes.forget(node.id, 1, |_| false);
    let id = node.id;
    drop(node);
    drop(known.close(handle, |_| false, |_| false));
    assert!(known.nodes.get(id).is_err());
    assert_eq!(cells(), before);
}

#[test]
fn a_file_that_podfs_has_to_remove_stays_until_it_is_removed() {
    let (known, _region) = volume();
    let node = known.nodes.enter(new_node(100, FileType::File), Some((NodeId::ROOT, b".nfs1"))).expect("memory");
    let handle = known.files.add(2, &node, user(), false).expect("memory").handle;
    node.set_silly(true);
    drop(known.close(handle, |_| false, |_| false));
    known.nodes.forget(node.id, 1, |_| false);
    let at = || known.nodes.at(NodeId::ROOT, b".nfs1").map(|node| node.id);
    assert_eq!(at(), Some(node.id), "the end of the volume waits for its removal, and listings hide it");
    node.set_silly(false);
    known.nodes.drop_forgotten(|_| false);
    assert_eq!(at(), None);
}

#[test]
fn a_region_without_a_root_is_refused() {
    let region = Arc::new(Region::create(region::VolumeKind::Nfs).expect("a region"));
    assert!(InheritedState::read(&region).is_none());
}

#[test]
fn cells_of_any_content_are_harmless() {
    let (_known, region) = volume();
    let bytes = bytes_of(&region);
    let cells = region::cells_begin();
    let random = prop::collection::vec((cells..bytes.len(), any::<u8>()), 1..2000);
    proptest!(ProptestConfig::with_cases(64), |(changes in random, tag in 15_u8..22)| {
        let mut bytes = bytes.clone();
        changes.iter().for_each(|(at, byte)| bytes[*at] = *byte);
        // Valid tags, so that the reader parses the rest of each cell.
        (cells..bytes.len()).step_by(128).for_each(|at| bytes[at] = if bytes[at] == 0 { tag } else { bytes[at] });
        if let Some(InheritedState { state, .. }) = InheritedState::read(&region_of(&bytes)) {
            for node in state.nodes.all() {
                prop_assert!(node.name().is_none_or(|name| inherit::is_name(&name.name)));
            }
            for open in state.files.all() {
                prop_assert!(state.nodes.get(open.node.id).is_ok());
            }
        }
    });
}
