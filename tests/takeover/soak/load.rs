//! A pod whose volumes are used all the time, and the callers that use them.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use crate::common::builds::Builds;
use crate::common::passthrough::disk_directory;
use crate::common::watch::Watcher;
use crate::common::*;
use crate::soak::callers::{CALLERS, Place};
use tempfile::TempDir;

/// Keys of the ConfigMap; all have the number of the commit as content.
const KEYS: usize = 20;

/// A pod with a projection that changes, one that does not, and both data paths of passthrough volumes.
pub struct Pod {
    pub fixture: Fixture,
    pub builds: Builds,
    source: TempDir,
}

impl Pod {
    pub fn new() -> Self {
        let source = disk_directory();
        let host = format!("{{name: host, hostPath: {{path: {}, type: Directory}}}}", source.path().display());
        let limited = "{name: limited, emptyDir: {sizeLimit: 1Gi}}";
        let projections = "{name: config, configMap: {name: app}}, {name: still, configMap: {name: still}}";
        let fixture = Fixture::new(&pod(&format!("[{projections}, {host}, {limited}]")));
        let builds = Builds::new(&fixture);
        fixture.write("objects/still.json", &config_map("still", &[("a", "1"), ("b", "2")]));
        let pod = Self { fixture, builds, source };
        pod.change_objects(0);
        pod
    }

    /// A directory of the host that is shown in the pod, to which no caller writes.
    pub fn quiet_directory(&self, host: &Path) -> PathBuf {
        let (name, path) = ("quiet", self.source.path().join("quiet"));
        fs::create_dir(&path).expect("a directory");
        (0..5).for_each(|n| fs::write(path.join(format!("file-{n}")), "").expect("written"));
        host.join(name)
    }

    /// Does `act` while callers use the volumes, again and again until it says that it is enough. No call may fail, and what
    /// all of them together have done must be there. Then the pod ends, and leaves nothing.
    pub fn under_load(&mut self, mut act: impl FnMut(&mut Self, &mut Running) -> bool) {
        let mut running = self.builds.run(&self.fixture);
        let config = running.volume("config");
        let places = ["host", "limited"].map(|name| Place::new(name, &running.volume(name)));
        let (load, watcher) = (Load::default(), Watcher::on("root", &config));
        let objects = self.fixture.path("objects/app.json");
        let directory = self.fixture.pod().parent().expect("its directory").to_owned();
        thread::scope(|scope| {
            let changes = scope.spawn(|| load.repeat("changes", |round| change(&objects, &config, round + 1)));
            scope.spawn(|| load.repeat("reads of a projection", |_| read_projection(&config)));
            let mut callers = Vec::new();
            for place in &places {
                for (who, caller) in CALLERS {
                    let (who, load) = (format!("{who} in {}", place.name), &load);
                    callers.push(scope.spawn(move || caller(place, &mut |round| load.repeat(&who, round))));
                }
            }
            let end = End { load: &load, directory };
            while !load.is_over() && act(self, &mut running) {}
            drop(end);
            running.freed(|| {
                for caller in callers {
                    if let Err(failure) = caller.join().expect("no panic") {
                        load.fail(failure);
                    }
                }
                let changes = changes.join().expect("no panic");
                let switches = watcher.switches() as u64;
                // The last change may have failed, or been given up.
                if load.failures.lock().expect("no panic").is_empty() && switches != changes {
                    load.fail(format!("{changes} changes were {switches} switches to who watches"));
                }
            });
        });
        println!("{} rounds of calls", load.rounds.load(Ordering::Relaxed));
        let failures = load.failures.into_inner().expect("no panic");
        let log = running.log();
        let tail: Vec<_> = log.lines().rev().take(30).collect();
        assert!(failures.is_empty(), "{failures:#?}\n{}", tail.into_iter().rev().collect::<Vec<_>>().join("\n"));
        assert!(!log.contains("lacks") && !log.contains("cannot commit"), "{log}");
        assert!(running.stop().success());
        self.fixture.assert_nothing_left();
    }

    fn change_objects(&self, number: u64) {
        self.fixture.write("objects/app.json", &object(number));
    }
}

/// The state that the callers and the disturbing thread share.
#[derive(Default)]
struct Load {
    over: AtomicBool,
    rounds: AtomicU64,
    failures: Mutex<Vec<String>>,
}

impl Load {
    fn fail(&self, failure: String) {
        self.failures.lock().expect("no panic").push(failure);
        self.over.store(true, Ordering::Relaxed);
    }

    fn is_over(&self) -> bool {
        self.over.load(Ordering::Relaxed)
    }

    /// Repeats a caller's round until it is over.
    fn repeat(&self, who: &str, mut round: impl FnMut(u64) -> Result<(), String>) -> u64 {
        let mut rounds = 0;
        while !self.is_over() {
            if let Err(failure) = round(rounds) {
                self.fail(format!("{who}, round {rounds}: {failure}"));
                break;
            }
            rounds += 1;
            self.rounds.fetch_add(1, Ordering::Relaxed);
        }
        rounds
    }
}

/// Ends the load. When the disturbing thread gives up, there may be no server to answer the calls, so they are made to fail.
struct End<'a> {
    load: &'a Load,
    directory: PathBuf,
}

impl Drop for End<'_> {
    fn drop(&mut self) {
        self.load.over.store(true, Ordering::Relaxed);
        if thread::panicking() {
            kill_all_of(&self.directory);
        }
    }
}

fn object(number: u64) -> String {
    let (keys, number) = ((0..KEYS).map(|key| format!("key-{key}")).collect::<Vec<_>>(), number.to_string());
    let data: Vec<_> = keys.iter().map(|key| (key.as_str(), number.as_str())).collect();
    config_map("app", &data)
}

/// Changes the object, and waits until that is seen.
fn change(object_file: &Path, config: &Path, number: u64) -> Result<(), String> {
    let new = object_file.with_extension("new");
    fs::write(&new, object(number)).and_then(|()| fs::rename(&new, object_file)).expect("written");
    let deadline = Instant::now() + TIMEOUT;
    while fs::read_to_string(config.join("key-0")).ok() != Some(number.to_string()) {
        if Instant::now() > deadline {
            return Err(format!("change {number} is not seen"));
        }
        thread::sleep(Duration::from_millis(1));
    }
    Ok(())
}

/// All files of a generation have the same content, and `..data` always leads to one.
fn read_projection(config: &Path) -> Result<(), String> {
    let data = || fs::read_link(config.join("..data")).map_err(|error| format!("..data: {error}"));
    let generation = data()?;
    let mut contents = Vec::new();
    for key in 0..KEYS {
        match fs::read_to_string(config.join(&generation).join(format!("key-{key}"))) {
            Ok(content) => contents.push(content),
            // An old generation goes at any time.
            Err(_) if data()? != generation => return Ok(()),
            Err(error) => return Err(format!("{}/key-{key}: {error}", generation.display())),
        }
    }
    contents.dedup();
    // Content that is known is read without a request; this is one.
    rustix::fs::statvfs(config).map_err(|error| format!("the status of the file system: {error}"))?;
    if contents.len() == 1 { Ok(()) } else { Err(format!("a mix: {contents:?}")) }
}
