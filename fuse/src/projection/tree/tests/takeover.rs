//! Takeovers of trees: the supervisor's replica, and saved trees.

use super::*;

/// A server, and the supervisor's replica of its tree, for one commit after the other.
struct Pair {
    served: ProjectionTree,
    replica: ProjectionTree,
    images: Vec<Arc<Image>>,
    made: u64,
}

impl Pair {
    fn new() -> Self {
        let root = Root { mode: 0o755, gid: 7, directories: BTreeSet::new() };
        let tree = || ProjectionTree::new(root.clone(), SystemTime::UNIX_EPOCH);
        Self { served: tree(), replica: tree(), images: Vec::new(), made: 0 }
    }

    /// Announces a commit to both.
    fn announce(&mut self, payload: &[(&str, &str)]) -> Vec<ProjectionStep> {
        self.made += 1;
        let time = SystemTime::UNIX_EPOCH + Duration::from_secs(self.made);
        let (name, image) = (GenerationName::new(time), Arc::new(image(payload)));
        let current = self.replica.current();
        let previous = current.as_ref().map(|(name, image)| ShownGeneration { name, image });
        let mut steps = switch(previous, ShownGeneration { name: &name, image: &image }, 0o755, &BTreeSet::new());
        if let Some(previous) = previous {
            steps.extend(removal(previous, &[]));
        }
        // Each link has another owner.
        for (number, step) in (1000..).zip(&mut steps) {
            if let ProjectionStep::MakeLink { uid, .. } = step {
                *uid = number;
            }
        }
        for tree in [&mut self.replica, &mut self.served] {
            tree.announce(
                steps.clone(),
                Some(StagedGeneration { name: name.clone(), image: Arc::clone(&image) }),
                time,
            );
        }
        self.images.push(image);
        steps
    }

    /// Sends a step to the server, like the kernel.
    fn ask(&mut self, step: &ProjectionStep) -> Result<(), Errno> {
        let root = NodeId::ROOT;
        let tree = &mut self.served;
        match step {
            ProjectionStep::MakeGeneration { name } => tree.make_directory(root, name.as_ref()).map(drop),
            ProjectionStep::SetMode { name, mode } => {
                tree.set_mode(tree.find(name).expect("the generation"), *mode).map(drop)
            }
            ProjectionStep::MakeLink { name, target, .. } => {
                tree.make_link(root, name.as_ref(), target.as_ref()).map(drop)
            }
            ProjectionStep::Switch => tree.rename(root, DATA_TMP.as_ref(), root, DATA.as_ref()),
            ProjectionStep::Unlink { name, .. } => tree.unlink(root, name.as_ref()),
            ProjectionStep::RemoveDirectory { name, .. } => tree.remove_directory(root, name.as_ref()),
        }
    }

    /// Replaces the server by a successor, which begins with the replica and the number of applied steps.
    fn succeed(&mut self) {
        let applied = self.served.applied();
        let (saved, images) = self.replica.save();
        let saved = serde_json::from_str(&serde_json::to_string(&saved).expect("JSON")).expect("a tree");
        self.served =
            ProjectionTree::restore(saved, images.iter().map(|image| adopt(image)).collect()).expect("it fits");
        self.served.catch_up(applied).expect("it fits");
    }

    /// Every name of the root with its node.
    fn listing(&self, tree: &ProjectionTree) -> Vec<(u64, String)> {
        let mut names = Vec::new();
        let emit = |(node, _, _, name): TreeEntry<'_>| {
            names.push((node.0, name.to_owned()));
            false
        };
        tree.list(NodeId::ROOT, 0, emit).expect("a directory");
        names
    }
}

/// The image in another process.
fn adopt(image: &Image) -> Image {
    use std::os::fd::AsFd;
    let adopted = Image::adopt(image.as_fd().try_clone_to_owned().expect("a descriptor")).expect("an image");
    adopted.disown();
    adopted
}

#[test]
fn a_successor_shows_the_same_tree_after_a_kill_at_any_step() {
    // FU-06: before a step, after it but before its answer, and after its answer but before its confirmation.
    let payloads = [&[("a", "1"), ("b", "1")][..], &[("a", "2"), ("c", "2")], &[("c", "3")]];
    let mut undisturbed = Pair::new();
    for payload in payloads {
        for step in undisturbed.announce(payload) {
            undisturbed.ask(&step).expect("announced");
            undisturbed.replica.confirm(&step).expect("announced");
        }
    }
    let expected = undisturbed.listing(&undisturbed.served);
    for kill in ["before", "unanswered", "answered"] {
        let mut pair = Pair::new();
        for payload in payloads {
            for step in pair.announce(payload) {
                if kill == "before" {
                    pair.succeed();
                }
                pair.ask(&step).expect("announced");
                match kill {
                    "unanswered" => {
                        pair.succeed();
                        pair.ask(&step).expect("asked again, it is done already");
                        assert_eq!(pair.ask(&step), Err(Errno::EROFS), "{step:?} is done once");
                    }
                    "answered" => pair.succeed(),
                    _ => {}
                }
                pair.replica.confirm(&step).expect("announced");
            }
        }
        // Names of generations hold a random number.
        let plain = |listing: Vec<(u64, String)>| -> Vec<(u64, String)> {
            let plain = |name: String| if is_generation(&name) { "generation".to_owned() } else { name };
            listing.into_iter().map(|(node, name)| (node, plain(name))).collect()
        };
        assert_eq!(plain(pair.listing(&pair.served)), plain(expected.clone()), "killed {kill} each step");
        assert_eq!(pair.listing(&pair.served), pair.listing(&pair.replica));
    }
}

#[test]
fn lookup_counts_outlive_the_server() {
    // AW-13, across a takeover
    let mut pair = Pair::new();
    for step in pair.announce(&[("a", "old")]) {
        pair.ask(&step).expect("announced");
        pair.replica.confirm(&step).expect("announced");
    }
    let (name, _) = pair.served.current().expect("a generation");
    let generation = pair.served.lookup(NodeId::ROOT, name.as_str().as_ref()).expect("the directory").node;
    let file = pair.served.lookup(generation, "a".as_ref()).expect("a file").node;
    pair.succeed();
    assert_eq!(pair.served.close_generation(name.as_str()).expect("known nodes"), [0, 1]);
    pair.replica.close_generation_but(name.as_str(), &[0, 1]).expect("the generation");
    for step in pair.announce(&[("a", "new")]) {
        pair.ask(&step).expect("announced");
        pair.replica.confirm(&step).expect("announced");
    }
    pair.succeed();
    // mkdir, the lookup here
    pair.served.forget(generation, 2);
    assert!(pair.served.content(file).is_ok(), "it is open");
    pair.replica.prune();
    assert!(pair.replica.content(file).is_ok(), "a successor would need it");
    pair.served.forget(file, 1);
    assert_eq!(pair.served.content(file).map(drop), Err(Errno::ESTALE));
    pair.replica.prune();
    assert_eq!(pair.replica.content(file).map(drop), Err(Errno::ESTALE), "it is not needed any more");
}

#[test]
fn an_inconsistent_saved_tree_is_refused() {
    let mut pair = Pair::new();
    for step in pair.announce(&[("a", "1"), ("b", "1")]) {
        pair.ask(&step).expect("announced");
    }
    let (saved, images) = pair.served.save();
    let text = serde_json::to_value(&saved).expect("JSON");
    let restore = |change: &dyn Fn(&mut serde_json::Value)| {
        let mut text = text.clone();
        change(&mut text);
        let saved = serde_json::from_value(text).expect("a tree");
        ProjectionTree::restore(saved, images.iter().map(|image| adopt(image)).collect())
    };
    assert!(restore(&|_| {}).is_some());
    let broken: [&dyn Fn(&mut serde_json::Value); 6] = [
        &|tree| tree["next"] = 1.into(),
        &|tree| tree["links"][0]["node"] = tree["generations"][0]["base"].clone(),
        &|tree| tree["links"][0]["name"] = tree["links"][1]["name"].clone(),
        &|tree| tree["links"][0]["node"] = u64::MAX.into(),
        &|tree| tree["named"] = serde_json::json!([7]),
        &|tree| tree["staged"] = "..2026_11_20_17_46_18.1".into(),
    ];
    for (number, change) in broken.iter().enumerate() {
        assert!(restore(change).is_none(), "{number}");
    }
    let applied = pair.served.applied();
    assert!(pair.replica.catch_up(applied).is_err(), "the two are more than one step apart");
}

#[test]
fn a_successor_continues_with_a_generation_that_the_server_has_removed_and_zeroed() {
    let zero = |image: &Image| {
        let of_the_server = adopt(image);
        of_the_server.own();
        drop(of_the_server);
    };
    let mut pair = Pair::new();
    for payload in [&[("a", "old")], &[("a", "new")]] {
        for step in pair.announce(payload) {
            pair.ask(&step).expect("announced");
            if let ProjectionStep::RemoveDirectory { .. } = &step {
                // The kernel forgets the generation before the supervisor has the answer, and then the server is killed.
                zero(&pair.images[0]);
                pair.succeed();
                assert!(!pair.served.has_lost_content(), "it has no name any more");
            }
            pair.replica.confirm(&step).expect("announced");
        }
    }
    assert!(pair.images[0].is_zeroed() && !pair.images[1].is_zeroed());
    zero(&pair.images[1]);
    pair.succeed();
    assert!(pair.served.has_lost_content(), "it is shown");
}
