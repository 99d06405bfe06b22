//! A thread that reads the volumes all the time, and checks their content.

use std::collections::BTreeMap;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::thread::{self, JoinHandle};

use crate::soak::model::{Model, Object, VOLUMES};

/// The reading thread.
pub struct Reader {
    /// The result of each look. The thread begins the next look when the test has received the result.
    looks: Option<Receiver<Look>>,
    thread: Option<JoinHandle<()>>,
}

/// An observation: for each volume, the state of each object; `None` if the object is deleted.
pub type Look = BTreeMap<(&'static str, &'static str), Option<u64>>;

impl Reader {
    pub fn start(model: Arc<Model>, path: impl Fn(&str) -> PathBuf) -> Self {
        let volumes = VOLUMES.map(|(volume, objects)| Volume::new(volume, path(volume), objects));
        let (sender, looks) = sync_channel(0);
        let thread = thread::spawn(move || look(volumes, &model, &sender));
        Self { looks: Some(looks), thread: Some(thread) }
    }

    /// The next observation.
    #[track_caller]
    pub fn look(&mut self) -> Look {
        match self.looks.as_ref().expect("it looks until it is dropped").recv() {
            Ok(look) => look,
            // The panic of the thread has printed the reason.
            Err(_) => panic!("the reader has found an error: {:?}", self.thread.take().map(JoinHandle::join)),
        }
    }
}

impl Drop for Reader {
    fn drop(&mut self) {
        self.looks = None;
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

fn look(mut volumes: [Volume; VOLUMES.len()], model: &Model, sender: &SyncSender<Look>) {
    loop {
        let mut look = Look::new();
        for volume in &mut volumes {
            volume.look(model);
            look.extend(volume.shown.iter().map(|(object, shown)| ((volume.name, object.name()), shown.state)));
        }
        if sender.send(look).is_err() {
            return;
        }
    }
}

/// A volume, and the files that it showed last.
struct Volume {
    name: &'static str,
    path: PathBuf,
    shown: Vec<(Object, Shown)>,
}

/// The state of an object in a volume.
#[derive(Clone, Copy, Default)]
struct Shown {
    /// The state of the object; `None` if it is deleted.
    state: Option<u64>,
    /// The oldest state that the volume may show from now on.
    oldest: u64,
}

impl Volume {
    fn new(name: &'static str, path: PathBuf, objects: &[Object]) -> Self {
        Self { name, path, shown: objects.iter().map(|object| (*object, Shown::default())).collect() }
    }

    fn look(&mut self, model: &Model) {
        let mut files = generation(&self.path);
        for (object, shown) in &mut self.shown {
            let prefix = format!("{}.", object.name());
            let (of_object, others) = files.into_iter().partition(|(name, _)| name.starts_with(&prefix));
            *shown = judge(self.name, *object, *shown, &of_object, model);
            files = others;
        }
        assert!(files.is_empty(), "{} shows files that no object has: {:?}", self.name, files.keys());
    }
}

/// Checks that the volume may show these files after it has shown `before`. Returns what it shows now.
fn judge(volume: &str, object: Object, before: Shown, files: &BTreeMap<String, Vec<u8>>, model: &Model) -> Shown {
    let name = object.name();
    if files.is_empty() {
        assert_eq!(object, Object::Optional, "{volume}: {name} is missing, and its volume needs it");
        if before.state.is_none() && before.oldest > 0 {
            return before;
        }
        let gone_after = model.gone_after(object, before.oldest);
        let after = gone_after.unwrap_or_else(|| panic!("{volume}: {name} was never gone since {}", before.oldest));
        return Shown { state: None, oldest: after + 1 };
    }
    let serial = files.get(&object.serial_key()).unwrap_or_else(|| panic!("{volume}: {name} has no serial number"));
    let serial: u64 = std::str::from_utf8(serial).expect("text").parse().expect("a number");
    assert!(serial >= before.oldest, "{volume}: {name} goes back from {} to {serial}", before.oldest);
    assert!(serial <= model.last(object), "{volume}: {name} shows {serial}, which it never was");
    let expected = object.files(serial);
    let names = |files: &BTreeMap<String, Vec<u8>>| {
        files.iter().map(|(name, content)| format!("{name} ({} bytes)", content.len())).collect::<Vec<_>>()
    };
    assert!(expected == *files, "{volume}: {name} {serial} is {:?}, not {:?}", names(files), names(&expected));
    Shown { state: Some(serial), oldest: serial }
}

/// The files of the generation that a volume shows. Reads again if the generation was replaced meanwhile: podfs may have
/// removed some of its files before they were read.
fn generation(volume: &Path) -> BTreeMap<String, Vec<u8>> {
    let current = || fs::read_link(volume.join("..data")).expect("every volume has a generation");
    loop {
        let target = current();
        let files = read(&volume.join(&target));
        if current() == target {
            return files.unwrap_or_else(|error| panic!("{} cannot be read: {error}", volume.join(target).display()));
        }
    }
}

fn read(directory: &Path) -> io::Result<BTreeMap<String, Vec<u8>>> {
    let file = |entry: io::Result<fs::DirEntry>| {
        let entry = entry?;
        let name = entry.file_name().into_string().expect("names are text");
        Ok((name, fs::read(entry.path())?))
    };
    fs::read_dir(directory)?.map(file).collect()
}
