//! An inotify watcher that writes events in a few words, such as `root CREATE|ISDIR new`.

use std::collections::BTreeMap;
use std::path::Path;

use nix::errno::Errno;
use nix::sys::inotify::{AddWatchFlags, InitFlags, Inotify, InotifyEvent, WatchDescriptor};
use podfs_fuse::client::Commit;

use super::eventually;

/// Words for events, in the order in which a test lists them.
const WORDS: [(AddWatchFlags, &str); 15] = [
    (AddWatchFlags::IN_ACCESS, "ACCESS"),
    (AddWatchFlags::IN_MODIFY, "MODIFY"),
    (AddWatchFlags::IN_ATTRIB, "ATTRIB"),
    (AddWatchFlags::IN_CLOSE_WRITE, "CLOSE_WRITE"),
    (AddWatchFlags::IN_CLOSE_NOWRITE, "CLOSE_NOWRITE"),
    (AddWatchFlags::IN_OPEN, "OPEN"),
    (AddWatchFlags::IN_MOVED_FROM, "MOVED_FROM"),
    (AddWatchFlags::IN_MOVED_TO, "MOVED_TO"),
    (AddWatchFlags::IN_CREATE, "CREATE"),
    (AddWatchFlags::IN_DELETE, "DELETE"),
    (AddWatchFlags::IN_DELETE_SELF, "DELETE_SELF"),
    (AddWatchFlags::IN_MOVE_SELF, "MOVE_SELF"),
    (AddWatchFlags::IN_UNMOUNT, "UNMOUNT"),
    (AddWatchFlags::IN_IGNORED, "IGNORED"),
    (AddWatchFlags::IN_ISDIR, "ISDIR"),
];

/// Watches, each with a label.
pub struct Watcher {
    inotify: Inotify,
    labels: BTreeMap<WatchDescriptor, &'static str>,
}

impl Watcher {
    /// Watches one path for everything, links followed.
    pub fn on(label: &'static str, path: &Path) -> Self {
        let inotify = Inotify::init(InitFlags::IN_NONBLOCK | InitFlags::IN_CLOEXEC).expect("inotify");
        let mut watcher = Self { inotify, labels: BTreeMap::new() };
        watcher.add(label, path);
        watcher
    }

    /// Watches another path.
    pub fn add(&mut self, label: &'static str, path: &Path) {
        let watch = self.inotify.add_watch(path, AddWatchFlags::IN_ALL_EVENTS).expect("a watch");
        self.labels.insert(watch, label);
    }

    /// All events since the last call. The kernel queues events before the system call that raises them returns, so after a
    /// commit all of its events are here.
    pub fn events(&self) -> Vec<String> {
        let mut texts = Vec::new();
        loop {
            match self.inotify.read_events() {
                Ok(events) => texts.extend(events.iter().map(|event| self.describe(event))),
                Err(Errno::EAGAIN) => return texts,
                Err(error) => panic!("cannot read events: {error}"),
            }
        }
    }

    /// Waits for the end of a commit in another process: until the watch with this label reports the removal of the old
    /// generation. Returns all events until then.
    #[track_caller]
    pub fn events_until_removal(&self, label: &str) -> Vec<String> {
        let mut events = Vec::new();
        let removal = format!("{label} DELETE|ISDIR ..");
        eventually(&removal, || {
            events.extend(self.events());
            events.iter().any(|event| event.starts_with(&removal))
        });
        events
    }

    /// As [`Self::events`], with the names of the generations replaced by words.
    pub fn events_renamed(&self, generations: &[(&str, &str)]) -> Vec<String> {
        self.events().into_iter().map(|event| renamed(event, generations)).collect()
    }

    /// The number of switches of a watched volume since the last call (EV-01).
    pub fn switches(&self) -> usize {
        self.events().iter().filter(|event| event.ends_with(" MOVED_TO ..data")).count()
    }

    fn describe(&self, event: &InotifyEvent) -> String {
        let words: Vec<_> =
            WORDS.iter().filter(|(flag, _)| event.mask.contains(*flag)).map(|(_, word)| *word).collect();
        let label = self.labels.get(&event.wd).copied().unwrap_or("?");
        let name = event.name.as_ref().map(|name| format!(" {}", name.to_string_lossy())).unwrap_or_default();
        format!("{label} {}{name}", words.join("|"))
    }
}

/// An event with the names of the generations replaced by words.
pub fn renamed(event: String, generations: &[(&str, &str)]) -> String {
    generations.iter().fold(event, |event, (name, word)| event.replace(name, word))
}

/// The name of the generation that a commit made current.
#[track_caller]
pub fn switched(commit: Commit) -> String {
    match commit {
        Commit::Switched { generation, .. } => generation.to_string(),
        Commit::Unchanged => panic!("the commit changed nothing"),
    }
}
