//! Watches for changes, by inotify.
//!
//! The watcher watches only directories: a process replaces a file through its entry there, and the kernel reports writes to a
//! file there, too. The watcher drops events of reading at once, because the scan's reading raises such events.

use std::collections::BTreeSet;
use std::fs;
use std::io::{self, PipeReader, PipeWriter, Read, Write};
use std::os::fd::AsRawFd;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::mpsc::{self, Receiver, RecvTimeoutError, Sender};
use std::time::{Duration, Instant};

use notify::event::{AccessKind, AccessMode, CreateKind, EventKind, ModifyKind, RenameMode};
use notify::{Config, Event, INotifyWatcher, RecursiveMode, Watcher as _};

use super::SourceError;
use super::route::Route;
use super::settle::Activity;

/// After an event, a scan waits until no event has come for this time, so that a burst costs one scan.
const SETTLE_TIME: Duration = Duration::from_micros(500);

/// A scan waits no longer than this, however busy the directory is.
const TIMEOUT: Duration = Duration::from_millis(20);

/// How long the kernel may take to report the marker. It takes microseconds.
const MARKER_TIMEOUT: Duration = Duration::from_millis(100);

/// Most markers whose events are late: each has two descriptors.
const MOST_LATE_MARKERS: usize = 16;

/// A message for the watching thread.
pub(super) enum WatchMessage {
    /// Something happened to a file.
    Event(notify::Result<Event>),
    /// The source is no longer needed.
    Stop,
}

/// The watches, and the events received.
pub(super) struct Watcher {
    inotify: INotifyWatcher,
    messages: Receiver<WatchMessage>,
    marker: MarkerPipe,
    /// Markers whose events came too late. They stay open, so that no other marker gets their paths while their events may come.
    late_markers: Vec<MarkerPipe>,
    /// How long the kernel may take to report a marker.
    pub(super) marker_timeout: Duration,
    route: Route,
    /// Directories with a watch, or without permission for one.
    watched: BTreeSet<PathBuf>,
    /// Whether events were lost, so that podfs has to read all files again.
    lost_track: bool,
    stopped: bool,
    /// When the last wait received an event.
    noticed_at: Option<Instant>,
    pub(super) activity: Activity,
}

impl Watcher {
    /// A watcher of nothing, and a sender that can stop it.
    pub(super) fn new() -> Result<(Self, Sender<WatchMessage>), SourceError> {
        let (sender, messages) = mpsc::channel();
        let events = sender.clone();
        let forward = move |event: notify::Result<Event>| {
            if !is_of_reading(&event) {
                // Fails only if the watching thread has ended.
                let _ = events.send(WatchMessage::Event(event));
            }
        };
        let mut inotify = INotifyWatcher::new(forward, Config::default()).map_err(instance_error)?;
        let marker = MarkerPipe::new(&mut inotify)?;
        let watcher = Self {
            inotify,
            messages,
            marker,
            late_markers: Vec::new(),
            marker_timeout: MARKER_TIMEOUT,
            route: Route::default(),
            watched: BTreeSet::new(),
            lost_track: false,
            stopped: false,
            noticed_at: None,
            activity: Activity::default(),
        };
        Ok((watcher, sender))
    }

    /// Watches the directories of `route` and no others. Returns whether some of them are new: they may have changed, without
    /// an event, between the search and the watch.
    pub(super) fn adopt(&mut self, route: Route) -> Result<bool, SourceError> {
        self.route = route;
        let wanted: BTreeSet<PathBuf> = self.route.directories().map(Path::to_owned).collect();
        for directory in self.watched.difference(&wanted) {
            // Fails when the directory is gone, and its watch with it.
            let _ = self.inotify.unwatch(directory);
        }
        self.watched.retain(|directory| wanted.contains(directory));
        let mut has_new = false;
        for directory in wanted {
            if self.watched.contains(&directory) {
                continue;
            }
            has_new = true;
            match self.inotify.watch(&directory, RecursiveMode::NonRecursive) {
                Err(error) if is_not_found(&error) => continue,
                // A process that may pass through a directory but not list it cannot watch it either.
                Err(error) if is_denied(&error) => {}
                Err(error) => return Err(watch_error(directory, error)),
                Ok(()) => {}
            }
            self.watched.insert(directory);
        }
        Ok(has_new)
    }

    /// Sleeps until something has changed and no more events come. False when the source is no longer needed.
    pub(super) fn wait(&mut self) -> bool {
        while !self.activity.is_scan_due() {
            match self.receive(self.activity.next_deadline()) {
                WatchEvent::Nothing => self.activity.reach_deadlines(),
                WatchEvent::Stop => return false,
                WatchEvent::Event | WatchEvent::Marker => {}
            }
        }
        let noticed_at = Instant::now();
        self.noticed_at = Some(noticed_at);
        let deadline = noticed_at + TIMEOUT;
        loop {
            let calm = Instant::now() + SETTLE_TIME;
            match self.receive(Some(calm.min(deadline))) {
                WatchEvent::Nothing => return true,
                WatchEvent::Stop => return false,
                WatchEvent::Event | WatchEvent::Marker => {}
            }
        }
    }

    /// When the event came that ended the last [wait](Self::wait).
    pub(super) fn noticed_at(&self) -> Option<Instant> {
        self.noticed_at
    }

    /// Receives every event that the kernel has queued so far. Returns whether there is none that was lost or is late.
    pub(super) fn catch_up(&mut self) -> bool {
        let deadline = Instant::now() + self.marker_timeout;
        self.marker.put();
        let last = loop {
            match self.receive(Some(deadline)) {
                WatchEvent::Event => {}
                last => break last,
            }
        };
        self.marker.take();
        match last {
            // The events of earlier markers came before.
            WatchEvent::Marker => self.drop_late_markers(),
            WatchEvent::Nothing => {
                self.lose_track();
                self.renew_marker();
            }
            WatchEvent::Event | WatchEvent::Stop => {}
        }
        !self.lost_track
    }

    /// Takes another marker in place of one whose event is late: that event must not end the next [catch-up](Self::catch_up).
    fn renew_marker(&mut self) {
        if self.late_markers.len() >= MOST_LATE_MARKERS {
            return;
        }
        // Without another marker, the late event may end the next catch-up, and the one after that loses track.
        if let Ok(marker) = MarkerPipe::new(&mut self.inotify) {
            self.late_markers.push(std::mem::replace(&mut self.marker, marker));
        }
    }

    fn drop_late_markers(&mut self) {
        for marker in self.late_markers.drain(..) {
            // Fails only if the kernel has removed the watch.
            let _ = self.inotify.unwatch(&marker.path);
        }
    }

    /// Whether events were lost since the last call.
    pub(super) fn has_lost_track(&mut self) -> bool {
        std::mem::take(&mut self.lost_track)
    }

    /// Waits for one relevant message, at most until `until`.
    fn receive(&mut self, until: Option<Instant>) -> WatchEvent {
        while !self.stopped {
            // The deadline counts even if events never stop.
            let message = match until.map(|until| until.checked_duration_since(Instant::now())) {
                None => self.messages.recv().map_err(RecvTimeoutError::from),
                Some(None) => return WatchEvent::Nothing,
                Some(Some(timeout)) => self.messages.recv_timeout(timeout),
            };
            match message {
                Ok(WatchMessage::Event(Ok(event))) if event.paths.first() == Some(&self.marker.path) => {
                    return WatchEvent::Marker;
                }
                Ok(WatchMessage::Event(Ok(event))) if !event.need_rescan() => {
                    if self.note(&event) {
                        return WatchEvent::Event;
                    }
                }
                Ok(WatchMessage::Event(_)) => {
                    self.lose_track();
                    return WatchEvent::Event;
                }
                Err(RecvTimeoutError::Timeout) => return WatchEvent::Nothing,
                Ok(WatchMessage::Stop) | Err(RecvTimeoutError::Disconnected) => self.stopped = true,
            }
        }
        WatchEvent::Stop
    }

    /// Notes an event of a file. False if the file is not relevant.
    fn note(&mut self, event: &Event) -> bool {
        let Some(path) = event.paths.first().filter(|path| self.route.passes(path)) else {
            return false;
        };
        match event.kind {
            EventKind::Access(AccessKind::Close(AccessMode::Write)) => self.activity.close(path),
            EventKind::Modify(ModifyKind::Data(_)) => self.activity.write(path),
            EventKind::Modify(ModifyKind::Metadata(_)) => self.activity.request_scan(),
            EventKind::Create(CreateKind::Folder) => {
                self.activity.write(path);
                self.activity.request_scan();
            }
            EventKind::Create(_) if awaits_its_writer(path) => self.activity.write(path),
            EventKind::Remove(_) | EventKind::Modify(ModifyKind::Name(RenameMode::From)) => {
                // notify removes the watches of a directory that was deleted or renamed.
                self.watched.retain(|directory| !directory.starts_with(path));
                self.activity.replace(path);
            }
            _ => self.activity.replace(path),
        }
        true
    }

    /// Handles the loss of events, which may have concerned any file.
    fn lose_track(&mut self) {
        self.watched.clear();
        self.lost_track = true;
        self.activity.request_scan();
    }
}

/// The event that ended [`Watcher::receive`].
enum WatchEvent {
    Event,
    Marker,
    Nothing,
    Stop,
}

/// A pipe among the watched files. The kernel queues the event of a write to the pipe behind all earlier events: when that
/// event arrives, the earlier ones have arrived.
struct MarkerPipe {
    reader: PipeReader,
    writer: PipeWriter,
    path: PathBuf,
}

impl MarkerPipe {
    fn new(inotify: &mut INotifyWatcher) -> Result<Self, SourceError> {
        let (reader, writer) = io::pipe().map_err(|error| instance_error(notify::Error::io(error)))?;
        let path = PathBuf::from(format!("/proc/self/fd/{}", reader.as_raw_fd()));
        inotify.watch(&path, RecursiveMode::NonRecursive).map_err(|error| watch_error(path.clone(), error))?;
        Ok(Self { reader, writer, path })
    }

    fn put(&mut self) {
        self.writer.write_all(&[0]).expect("one byte fits into an empty pipe with a reader");
    }

    fn take(&mut self) {
        self.reader.read_exact(&mut [0]).expect("the byte is in the pipe");
    }
}

fn is_of_reading(event: &notify::Result<Event>) -> bool {
    event.as_ref().is_ok_and(|event| match event.kind {
        EventKind::Access(kind) => kind != AccessKind::Close(AccessMode::Write),
        // notify reports the two halves of a renaming as separate events, too.
        EventKind::Modify(ModifyKind::Name(RenameMode::Both)) => true,
        _ => false,
    })
}

/// Whether a new entry is a file that was opened to be written, unlike a symbolic or hard link, which is complete.
fn awaits_its_writer(path: &Path) -> bool {
    fs::symlink_metadata(path).is_ok_and(|entry| entry.is_file() && entry.nlink() == 1)
}

fn is_not_found(error: &notify::Error) -> bool {
    matches!(error.kind, notify::ErrorKind::PathNotFound) || io_kind(error) == Some(io::ErrorKind::NotFound)
}

fn is_denied(error: &notify::Error) -> bool {
    io_kind(error) == Some(io::ErrorKind::PermissionDenied)
}

fn io_kind(error: &notify::Error) -> Option<io::ErrorKind> {
    match &error.kind {
        notify::ErrorKind::Io(error) => Some(error.kind()),
        _ => None,
    }
}

fn watch_error(path: PathBuf, error: notify::Error) -> SourceError {
    match error.kind {
        notify::ErrorKind::MaxFilesWatch => SourceError::WatchLimit(path),
        _ => SourceError::Watch(error),
    }
}

fn instance_error(error: notify::Error) -> SourceError {
    match &error.kind {
        notify::ErrorKind::Io(cause) if matches!(cause.raw_os_error(), Some(libc::EMFILE | libc::ENFILE)) => {
            SourceError::InstanceLimit
        }
        _ => SourceError::Watch(error),
    }
}
