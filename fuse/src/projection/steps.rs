//! The system calls of a commit, as data.
//!
//! The supervisor plans these calls, announces them to the server, and performs them one by one on the private mount. The server
//! accepts only the announced calls, in their order. So no other process can change the tree, although a privileged container can
//! remount its bind mount read-write.
//!
//! The order is the `AtomicWriter`'s, and so are the inotify events in containers: the new directory, `..data_tmp`, its rename to
//! `..data`, new links, links of removed names, and, when its time is over, the old generation (rows EV-01 to EV-05 of the
//! kubelet's behaviour).

use std::collections::BTreeSet;

use serde::{Deserialize, Serialize};

use super::generation::{GenerationName, is_generation};
use super::image::{Image, Index};

/// The link to the current generation.
pub const DATA: &str = "..data";
/// The link that becomes [`DATA`] by a rename.
pub const DATA_TMP: &str = "..data_tmp";

/// One system call that changes a projection's tree. Names without a directory are in the root.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum ProjectionStep {
    /// mkdirat(2) of a generation's directory, which makes the whole generation visible.
    MakeGeneration {
        /// The staged generation.
        name: String,
    },
    /// `fchmodat(2)` of a generation's directory.
    SetMode {
        /// The directory.
        name: String,
        /// Permission bits.
        mode: u16,
    },
    /// `symlinkat(2)`.
    MakeLink {
        /// The link.
        name: String,
        /// Its target.
        target: String,
        /// Its owner. A chown(2) would cause another event.
        uid: u32,
    },
    /// `renameat(2)` of [`DATA_TMP`] to [`DATA`]: the switch.
    Switch,
    /// `unlinkat(2)` of a link or file.
    Unlink {
        /// Path of the directory below the root; empty for the root.
        directory: String,
        /// The entry in it.
        name: String,
    },
    /// `unlinkat(2)` with `AT_REMOVEDIR`. For a generation's directory, this also removes the
    /// entries that the kernel never looked up.
    RemoveDirectory {
        /// Path of the directory above it, below the root; empty for the root.
        directory: String,
        /// The directory to remove.
        name: String,
    },
}

impl ProjectionStep {
    /// The name of the entry that the step changes.
    pub fn name(&self) -> &str {
        match self {
            Self::Switch => DATA,
            Self::MakeGeneration { name }
            | Self::SetMode { name, .. }
            | Self::MakeLink { name, .. }
            | Self::Unlink { name, .. }
            | Self::RemoveDirectory { name, .. } => name,
        }
    }

    /// The owner of the new link, if the step makes the link `name`.
    pub fn link_owner(&self, name: &str) -> Option<u32> {
        match self {
            Self::MakeLink { name: own, uid, .. } if own == name => Some(*uid),
            _ => None,
        }
    }
}

/// A generation and its content.
#[derive(Clone, Copy)]
pub struct ShownGeneration<'a> {
    /// Its directory.
    pub name: &'a GenerationName,
    /// Its payload.
    pub image: &'a Image,
}

/// The steps from `previous` to `next`: the switch, then the links of added and removed names. Names in
/// `hidden` are real directories of the root (mount points of nested volumes) and get no link
/// (AW-21).
pub fn switch(
    previous: Option<ShownGeneration<'_>>,
    next: ShownGeneration<'_>,
    mode: u16,
    hidden: &BTreeSet<String>,
) -> Vec<ProjectionStep> {
    let mut steps = vec![
        ProjectionStep::MakeGeneration { name: next.name.to_string() },
        ProjectionStep::SetMode { name: next.name.to_string(), mode },
        ProjectionStep::MakeLink { name: DATA_TMP.to_owned(), target: next.name.to_string(), uid: 0 },
        ProjectionStep::Switch,
    ];
    let before = || links(previous.map(|shown| shown.image), hidden);
    let after = || links(Some(next.image), hidden);
    steps.extend(missing(after(), before()).map(|(name, uid)| make_link(name, uid)));
    steps.extend(missing(before(), after()).map(|(name, _)| unlink_root(name)));
    steps
}

/// The steps to remove an old generation. They unlink each entry that the kernel knows, children before their directory, so that
/// watchers of a file get the event of its removal (EV-04).
pub fn removal(old: ShownGeneration<'_>, looked_up: &[Index]) -> Vec<ProjectionStep> {
    let mut indexes: Vec<_> =
        looked_up.iter().copied().filter(|index| (1..old.image.nodes()).contains(index)).collect();
    indexes.sort_unstable_by(|a, b| b.cmp(a));
    indexes.dedup();
    let mut steps: Vec<_> = indexes.into_iter().map(|index| remove_node(old, index)).collect();
    steps.push(ProjectionStep::RemoveDirectory { directory: String::new(), name: old.name.to_string() });
    steps
}

/// The steps from a root with these entries to the entries of `current`, after an interrupted commit: no `..data_tmp` (AW-18), no
/// leaked generation (AW-19), and all links (AW-16). Generations for which `is_kept` is true stay.
pub fn repair(
    entries: &[String],
    current: Option<ShownGeneration<'_>>,
    hidden: &BTreeSet<String>,
    is_kept: impl Fn(&str) -> bool,
) -> Vec<ProjectionStep> {
    let wanted = || links(current.map(|shown| shown.image), hidden);
    let names: BTreeSet<_> = wanted().map(|(name, _)| name).collect();
    let present: BTreeSet<_> = entries.iter().map(String::as_str).collect();
    let mut steps = Vec::new();
    if present.contains(DATA_TMP) {
        steps.push(unlink_root(DATA_TMP));
    }
    steps.extend(wanted().filter(|(name, _)| !present.contains(name)).map(|(name, uid)| make_link(name, uid)));
    for &entry in &present {
        let kept = entry == DATA || entry == DATA_TMP || names.contains(entry) || hidden.contains(entry);
        let is_wanted = current.is_some_and(|shown| shown.name.as_str() == entry) || is_kept(entry);
        if is_generation(entry) && !is_wanted {
            steps.push(ProjectionStep::RemoveDirectory { directory: String::new(), name: entry.to_owned() });
        } else if !kept && !is_wanted {
            steps.push(unlink_root(entry));
        }
    }
    steps
}

/// The links of an image, sorted by name, each with its owner.
fn links<'a>(image: Option<&'a Image>, hidden: &'a BTreeSet<String>) -> impl Iterator<Item = (&'a str, u32)> {
    image.into_iter().flat_map(Image::top_level).filter(|(name, _)| !hidden.contains(*name))
}

/// The entries of `links` that are not in `present`, both sorted by name. A payload may have thousands of names,
/// and an update usually changes none.
fn missing<'a>(
    links: impl Iterator<Item = (&'a str, u32)>,
    present: impl Iterator<Item = (&'a str, u32)>,
) -> impl Iterator<Item = (&'a str, u32)> {
    let mut present = present.peekable();
    links.filter(move |(name, _)| {
        while present.next_if(|(other, _)| other < name).is_some() {}
        present.peek().is_none_or(|(other, _)| other != name)
    })
}

fn make_link(name: &str, uid: u32) -> ProjectionStep {
    ProjectionStep::MakeLink { name: name.to_owned(), target: format!("{DATA}/{name}"), uid }
}

fn unlink_root(name: &str) -> ProjectionStep {
    ProjectionStep::Unlink { directory: String::new(), name: name.to_owned() }
}

fn remove_node(old: ShownGeneration<'_>, index: Index) -> ProjectionStep {
    let parent = old.image.path(old.image.parent(index));
    let directory = match parent.as_str() {
        "" => old.name.to_string(),
        below => format!("{}/{below}", old.name),
    };
    let name = old.image.name(index).to_owned();
    if old.image.is_directory(index) {
        ProjectionStep::RemoveDirectory { directory, name }
    } else {
        ProjectionStep::Unlink { directory, name }
    }
}

#[cfg(test)]
mod tests {
    use std::time::SystemTime;

    use super::super::image::{DirectoryAttributes, FileEntry, ImageLayout};
    use super::*;

    fn image(paths: &[&str]) -> Image {
        let entries = paths.iter().map(|path| FileEntry { path, content: b"", mode: 0o644, uid: 0, gid: 0 });
        let directories = DirectoryAttributes { mode: 0o755, gid: 0 };
        ImageLayout::new(entries, directories).expect("a tree").image().expect("an image")
    }

    fn words(steps: &[ProjectionStep], name: &GenerationName) -> Vec<String> {
        let word = |step: &ProjectionStep| match step {
            ProjectionStep::MakeGeneration { .. } => "mkdir gen".to_owned(),
            ProjectionStep::SetMode { .. } => "chmod gen".to_owned(),
            ProjectionStep::MakeLink { name, .. } => format!("symlink {name}"),
            ProjectionStep::Switch => "switch".to_owned(),
            ProjectionStep::Unlink { directory, name } => format!("unlink {directory}/{name}"),
            ProjectionStep::RemoveDirectory { directory, name } => format!("rmdir {directory}/{name}"),
        };
        steps.iter().map(|step| word(step).replace(name.as_str(), "gen")).collect()
    }

    #[test]
    fn the_order_is_that_of_the_atomic_writer() {
        // EV-02, EV-03, AW-14: links after the switch; `sub` stays while a key below it remains.
        let old_name = GenerationName::new(SystemTime::UNIX_EPOCH);
        let name = GenerationName::new(SystemTime::now());
        let (old, new) = (image(&["a", "b", "sub/x", "sub/y"]), image(&["a", "c", "sub/y"]));
        let previous = ShownGeneration { name: &old_name, image: &old };
        let next = ShownGeneration { name: &name, image: &new };
        let steps = switch(Some(previous), next, 0o755, &BTreeSet::new());
        let expected = ["mkdir gen", "chmod gen", "symlink ..data_tmp", "switch", "symlink c", "unlink /b"];
        assert_eq!(words(&steps, &name), expected);
        let first = switch(None, next, 0o755, &BTreeSet::from(["sub".to_owned()]));
        let expected = ["mkdir gen", "chmod gen", "symlink ..data_tmp", "switch", "symlink a", "symlink c"];
        assert_eq!(words(&first, &name), expected, "`sub` is a real directory here (AW-21)");
    }

    #[test]
    fn an_old_generation_is_removed_children_first_and_only_its_known_nodes() {
        let name = GenerationName::new(SystemTime::now());
        let old = image(&["a", "b", "sub/deep/x", "sub/y"]);
        let index =
            |path: &str| path.split('/').try_fold(0, |at, name| old.child(at, name.as_bytes())).expect("a node");
        let known = [0, index("a"), index("sub"), index("sub/deep"), index("sub/deep/x"), 999];
        let steps = removal(ShownGeneration { name: &name, image: &old }, &known);
        let expected = ["unlink gen/sub/deep/x", "rmdir gen/sub/deep", "rmdir gen/sub", "unlink gen/a", "rmdir /gen"];
        assert_eq!(words(&steps, &name), expected);
    }
}
