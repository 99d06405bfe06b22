mod takeover;

use std::time::Duration;

use super::*;
use crate::projection::generation::is_generation;
use crate::projection::image::{DirectoryAttributes, FileEntry, ImageLayout};
use crate::projection::steps::{DATA, DATA_TMP, ShownGeneration, removal, repair, switch};
use crate::session::NodeId;

const DIRECTORIES: DirectoryAttributes = DirectoryAttributes { mode: 0o755, gid: 0 };

/// A tree with calls like those of the supervisor and the kernel.
struct Rig {
    tree: ProjectionTree,
    current: Option<(GenerationName, Image)>,
    made: u64,
}

impl Rig {
    fn new() -> Self {
        let root = Root { mode: 0o777, gid: 7, directories: BTreeSet::from(["nested/deep".to_owned()]) };
        Self { tree: ProjectionTree::new(root, SystemTime::UNIX_EPOCH), current: None, made: 0 }
    }

    fn hidden() -> BTreeSet<String> {
        BTreeSet::from(["nested".to_owned()])
    }

    /// Announces a commit. Returns its steps.
    fn announce(&mut self, payload: &[(&str, &str)]) -> (GenerationName, Image, Vec<ProjectionStep>) {
        self.made += 1;
        let time = SystemTime::UNIX_EPOCH + Duration::from_secs(self.made);
        let name = GenerationName::new(time);
        let (image, staged) = (image(payload), image(payload));
        let previous = self.current.as_ref().map(|(name, image)| ShownGeneration { name, image });
        let steps = switch(previous, ShownGeneration { name: &name, image: &image }, 0o755, &Self::hidden());
        self.tree.announce(steps.clone(), Some(StagedGeneration { name: name.clone(), image: staged.into() }), time);
        (name, image, steps)
    }

    fn commit(&mut self, payload: &[(&str, &str)]) {
        let (name, image, steps) = self.announce(payload);
        self.perform(&steps).expect("announced steps are accepted");
        if let Some((old, old_image)) = self.current.replace((name, image)) {
            let known = self.tree.close_generation(old.as_str()).expect("the old generation");
            let steps = removal(ShownGeneration { name: &old, image: &old_image }, &known);
            self.tree.announce(steps.clone(), None, SystemTime::UNIX_EPOCH);
            self.perform(&steps).expect("announced steps are accepted");
        }
    }

    fn perform(&mut self, steps: &[ProjectionStep]) -> Result<(), Errno> {
        steps.iter().try_for_each(|step| self.perform_one(step))
    }

    fn perform_one(&mut self, step: &ProjectionStep) -> Result<(), Errno> {
        let root = NodeId::ROOT;
        match step {
            ProjectionStep::MakeGeneration { name } => self.tree.make_directory(root, name.as_ref()).map(drop),
            ProjectionStep::SetMode { name, mode } => {
                let node = self.find(name).expect("the generation");
                self.tree.set_mode(node, *mode).map(drop)
            }
            ProjectionStep::MakeLink { name, target, .. } => {
                self.tree.make_link(root, name.as_ref(), target.as_ref()).map(drop)
            }
            ProjectionStep::Switch => self.tree.rename(root, DATA_TMP.as_ref(), root, DATA.as_ref()),
            ProjectionStep::Unlink { directory, name } => {
                let parent = self.find(directory).expect("the directory");
                self.tree.unlink(parent, name.as_ref())
            }
            ProjectionStep::RemoveDirectory { directory, name } => {
                let parent = self.find(directory).expect("the directory");
                self.tree.remove_directory(parent, name.as_ref())
            }
        }
    }

    /// Finds a path without counting a lookup.
    fn find(&self, path: &str) -> Option<NodeId> {
        path.split('/')
            .filter(|name| !name.is_empty())
            .try_fold(NodeId::ROOT, |node, name| self.tree.child(node, name).ok())
    }

    /// Looks a path up as the kernel does, through links.
    fn look_up(&mut self, path: &str) -> Option<NodeAttributes> {
        let mut node = NodeId::ROOT;
        let mut found = self.tree.attributes(node).ok()?;
        for name in path.split('/') {
            found = self.tree.lookup(node, name.as_ref()).ok()?;
            if found.kind == NodeKind::Link {
                let target = self.tree.read_link(found.node).expect("a link").to_owned();
                found = self.look_up(&target)?;
            }
            node = found.node;
        }
        Some(found)
    }

    fn read(&mut self, path: &str) -> Option<String> {
        let node = self.look_up(path)?.node;
        let (image, content) = self.tree.content(node).ok()?;
        Some(String::from_utf8(image.served(content).to_vec()).expect("text"))
    }

    fn names(&self, node: NodeId) -> Vec<String> {
        self.names_after(node, 0, usize::MAX).0
    }

    /// At most `room` names after the cookie `after`, and the next cookie.
    fn names_after(&self, node: NodeId, after: u64, room: usize) -> (Vec<String>, u64) {
        let (mut names, mut cookie) = (Vec::new(), after);
        let emit = |(_, next, _, name): TreeEntry<'_>| {
            if names.len() == room {
                return true;
            }
            names.push(name.to_owned());
            cookie = next;
            false
        };
        self.tree.list(node, after, emit).expect("a directory");
        (names, cookie)
    }
}

fn image(payload: &[(&str, &str)]) -> Image {
    let entries = payload.iter().map(|(path, content)| FileEntry {
        path,
        content: content.as_bytes(),
        mode: 0o640,
        uid: 5,
        gid: 7,
    });
    ImageLayout::new(entries, DIRECTORIES).expect("a tree").image().expect("an image")
}

#[test]
fn a_commit_shows_the_layout_of_the_atomic_writer() {
    // AW-01, AW-05, FU-14
    let mut rig = Rig::new();
    rig.commit(&[("a", "1"), ("sub/deep/b", "2")]);
    let generation = rig.current.as_ref().expect("a generation").0.to_string();
    assert_eq!(rig.names(NodeId::ROOT), [".", "..", "..data", "nested", &generation, "a", "sub"]);
    let data = rig.find("..data").expect("the link");
    assert_eq!(rig.tree.read_link(data), Ok(generation.as_str()));
    let sub = rig.find("sub").expect("the link");
    assert_eq!(rig.tree.read_link(sub), Ok("..data/sub"));
    assert_eq!(rig.read("a").as_deref(), Some("1"));
    assert_eq!(rig.read("sub/deep/b").as_deref(), Some("2"));
}

#[test]
fn attributes_are_those_of_the_payload() {
    // FU-01
    let mut rig = Rig::new();
    rig.commit(&[("a", "123"), ("sub/b", "")]);
    let root = rig.tree.attributes(NodeId::ROOT).expect("the root");
    assert_eq!((root.mode, root.gid, root.links), (0o777, 7, 4), "the generation and the nested mount point");
    let file = rig.look_up("a").expect("a file");
    assert_eq!((file.mode, file.uid, file.gid, file.size, file.links), (0o640, 5, 7, 3, 1));
    let generation = rig.look_up("..data").expect("the generation");
    assert_eq!((generation.mode, generation.links), (0o755, 3));
    let link = rig.tree.lookup(NodeId::ROOT, "a".as_ref()).expect("the link");
    assert_eq!((link.mode, link.uid, link.gid, link.size), (0o777, 5, 7, 8), "the link's owner is the file's (AW-22)");
}

#[test]
fn every_change_that_was_not_announced_is_refused() {
    // FU-13: also for root, also through a writable mount.
    let mut rig = Rig::new();
    rig.commit(&[("a", "1"), ("b", "2")]);
    let root = NodeId::ROOT;
    let generation = rig.look_up("..data").expect("the generation").node;
    let refused = Err(Errno::EROFS);
    assert_eq!(rig.tree.make_directory(root, "x".as_ref()).map(drop), refused);
    assert_eq!(rig.tree.make_directory(generation, "x".as_ref()).map(drop), refused);
    assert_eq!(rig.tree.make_link(root, "x".as_ref(), "y".as_ref()).map(drop), refused);
    assert_eq!(rig.tree.set_mode(generation, 0o777).map(drop), refused);
    assert_eq!(rig.tree.rename(root, "a".as_ref(), root, "b".as_ref()), refused);
    assert_eq!(rig.tree.rename(root, DATA_TMP.as_ref(), root, DATA.as_ref()), refused);
    assert_eq!(rig.tree.unlink(root, "a".as_ref()), refused);
    assert_eq!(rig.tree.unlink(generation, "a".as_ref()), refused);
    assert_eq!(rig.tree.remove_directory(root, "nested".as_ref()), refused);
}

#[test]
fn announced_steps_are_accepted_in_their_order_and_once() {
    let mut rig = Rig::new();
    let (_, _, steps) = rig.announce(&[("a", "1")]);
    for late in steps.iter().filter(|step| matches!(step, ProjectionStep::MakeLink { .. } | ProjectionStep::Switch)) {
        assert_eq!(rig.perform_one(late), Err(Errno::EROFS), "{late:?} comes later");
    }
    rig.perform(&steps).expect("in order");
    assert_eq!(rig.perform_one(&steps[0]), Err(Errno::EROFS), "a step is accepted once");
}

#[test]
fn an_open_file_keeps_its_bytes_until_it_is_forgotten() {
    // AW-13
    let mut rig = Rig::new();
    rig.commit(&[("a", "old")]);
    let old = rig.look_up("a").expect("a file");
    rig.commit(&[("a", "new")]);
    let (held, content) = rig.tree.content(old.node).expect("still there");
    assert_eq!(held.served(content), b"old");
    assert_eq!(rig.tree.attributes(old.node).expect("still there").links, 0, "it is unlinked");
    assert_eq!(rig.read("a").as_deref(), Some("new"));
}

#[test]
fn a_generation_is_dropped_when_the_kernel_forgot_its_last_node() {
    let mut rig = Rig::new();
    rig.commit(&[("a", "old"), ("b", "old")]);
    let (a, b) = (rig.look_up("a").expect("a file"), rig.look_up("b").expect("a file"));
    let generation = rig.find("..data").and_then(|_| rig.look_up("..data")).expect("the generation");
    let image = rig.tree.content(a.node).expect("bytes").0;
    let held = Arc::downgrade(&image);
    drop(image);
    rig.commit(&[("a", "new")]);
    rig.tree.forget(a.node, 1);
    rig.tree.forget(b.node, 1);
    assert!(held.upgrade().is_some(), "the kernel still knows the generation's directory");
    // mkdir, three walks through ..data
    rig.tree.forget(generation.node, 4);
    assert!(held.upgrade().is_none(), "it cannot be reached any more");
    assert_eq!(rig.tree.attributes(a.node), Err(Errno::ESTALE));
}

#[test]
fn node_ids_are_never_used_again() {
    // AW-12, FU-01
    let mut rig = Rig::new();
    let mut seen = BTreeSet::new();
    for round in 0..20 {
        rig.commit(&[("a", "same"), ("b", &round.to_string())]);
        for path in ["a", "b"] {
            let node = rig.look_up(path).expect("a file").node;
            assert!(seen.insert(node), "every key gets a new inode with every generation");
        }
    }
}

#[test]
fn a_listing_that_crosses_a_switch_shows_nothing_twice() {
    // FU-15
    let mut rig = Rig::new();
    let before: Vec<_> = (0..20).map(|key| format!("key-{key:02}")).collect();
    let payload: Vec<_> = before.iter().map(|key| (key.as_str(), "1")).collect();
    rig.commit(&payload);
    for cut in 0..24 {
        let (mut names, cookie) = rig.names_after(NodeId::ROOT, 0, cut);
        rig.commit(&[&payload[..], &[("extra", "2")]].concat());
        names.extend(rig.names_after(NodeId::ROOT, cookie, usize::MAX).0);
        let names: Vec<_> = names.into_iter().filter(|name| !is_generation(name)).collect();
        let distinct: BTreeSet<_> = names.iter().collect();
        assert_eq!(distinct.len(), names.len(), "twice in {names:?}");
        assert!(before.iter().all(|key| distinct.contains(key)), "missing in {names:?}");
        rig.commit(&payload);
    }
}

#[test]
fn a_directory_larger_than_one_answer_is_listed_whole() {
    let mut rig = Rig::new();
    let keys: Vec<_> = (0..3000).map(|key| format!("d/key-{key:04}")).collect();
    let payload: Vec<_> = keys.iter().map(|key| (key.as_str(), "")).collect();
    rig.commit(&payload);
    let directory = rig.look_up("d").expect("a directory").node;
    let (mut names, mut cookie) = (Vec::new(), 0);
    loop {
        let (some, next) = rig.names_after(directory, cookie, 100);
        if some.is_empty() {
            break;
        }
        names.extend(some);
        cookie = next;
    }
    assert_eq!(names.len(), 3002);
    assert!(names[2..].is_sorted());
}

#[test]
fn only_nodes_that_the_kernel_knows_can_be_looked_up_in_a_closed_generation() {
    let mut rig = Rig::new();
    rig.commit(&[("known", "1"), ("unknown", "2")]);
    let directory = rig.look_up("..data").expect("the generation").node;
    rig.look_up("known").expect("a file");
    let name = rig.current.as_ref().expect("a generation").0.to_string();
    assert_eq!(rig.tree.close_generation(&name).expect("known nodes").len(), 2);
    assert!(rig.tree.lookup(directory, "known".as_ref()).is_ok());
    assert_eq!(rig.tree.lookup(directory, "unknown".as_ref()).map(drop), Err(Errno::ENOENT));
}

#[test]
fn a_directory_on_a_key_s_name_hides_the_key() {
    // AW-21
    let mut rig = Rig::new();
    rig.commit(&[("nested", "hidden"), ("a", "1")]);
    let nested = rig.look_up("nested").expect("the directory");
    assert_eq!(nested.kind, NodeKind::Directory);
    assert!(rig.look_up("nested/deep").is_some());
    rig.commit(&[("a", "1")]);
    assert!(rig.look_up("nested").is_some(), "removing the key does not remove the directory");
}

#[test]
fn names_that_are_not_utf_8_are_absent() {
    use std::os::unix::ffi::OsStrExt;
    let mut rig = Rig::new();
    rig.commit(&[("a", "1")]);
    assert_eq!(rig.tree.lookup(NodeId::ROOT, OsStr::from_bytes(b"\xff")).map(drop), Err(Errno::ENOENT));
    assert_eq!(rig.tree.lookup(NodeId(999_999), "a".as_ref()).map(drop), Err(Errno::ESTALE));
}

#[test]
fn the_next_commit_repairs_an_interrupted_one() {
    // AW-16, AW-17, AW-18, AW-19: stop after every step, of the switch and of the removal.
    let (before, after) = ([("a", "1"), ("gone", "1")], [("a", "2"), ("new/b", "2")]);
    for stop in 0..8 {
        let mut rig = Rig::new();
        rig.commit(&before);
        rig.look_up("a").expect("a file");
        let (name, image, steps) = rig.announce(&after);
        rig.perform(&steps[..stop.min(steps.len())]).expect("in order");
        let switched = steps[..stop.min(steps.len())].contains(&ProjectionStep::Switch);
        if switched {
            rig.current = Some((name, image));
        }
        let entries =
            rig.names(NodeId::ROOT).into_iter().filter(|name| name != "." && name != "..").collect::<Vec<_>>();
        let current = rig.current.as_ref().map(|(name, image)| ShownGeneration { name, image });
        let steps = repair(&entries, current, &Rig::hidden(), |_| false);
        rig.tree.announce(steps.clone(), None, SystemTime::UNIX_EPOCH);
        rig.perform(&steps).expect("repairs are accepted");
        let generation = rig.current.as_ref().expect("a generation").0.to_string();
        let mut names = rig.names(NodeId::ROOT);
        names.sort_unstable();
        let keys: &[&str] = if switched { &["a", "nested", "new"] } else { &["a", "gone", "nested"] };
        let mut expected = vec![".", "..", &generation, "..data"];
        expected.extend(keys);
        assert_eq!(names, expected, "stopped after {stop} steps");
        assert_eq!(rig.read("a").as_deref(), Some(if switched { "2" } else { "1" }));
    }
}
