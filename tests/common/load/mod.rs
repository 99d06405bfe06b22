//! A pod under load: threads use its volumes while a test kills or upgrades its processes.

mod callers;
pub mod faults;
pub mod rounds;

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant, SystemTime};

use super::builds::Builds;
use super::passthrough::disk_directory;
use super::turn::Turn;
use super::watch::Watcher;
use super::*;
use callers::{CALLERS, TestVolume};
use tempfile::TempDir;

/// The number of keys of the ConfigMap. The value of all of them is the number of the change.
const KEYS: usize = 20;

/// A pod with a projection that changes, a projection that does not change, and passthrough volumes with both data paths.
pub struct Pod {
    pub fixture: Fixture,
    pub builds: Builds,
    source: TempDir,
    /// The names of the volumes that the callers change.
    changed: Vec<&'static str>,
}

impl Pod {
    pub fn new() -> Self {
        Self::with(Builds::new, &[])
    }

    /// A pod of these builds. The callers also change its volumes `more`, given by name and definition.
    pub fn with(builds: impl FnOnce(&Fixture) -> Builds, more: &[(&'static str, String)]) -> Self {
        let source = disk_directory();
        let host = format!("{{name: host, hostPath: {{path: {}, type: Directory}}}}", source.path().display());
        let limited = "{name: limited, emptyDir: {sizeLimit: 1Gi}}";
        let projections = "{name: config, configMap: {name: app}}, {name: still, configMap: {name: still}}";
        let others: String = more.iter().map(|(_, definition)| format!(", {definition}")).collect();
        let fixture = Fixture::new(&pod(&format!("[{projections}, {host}, {limited}{others}]")));
        let builds = builds(&fixture);
        fixture.write("objects/still.json", &config_map("still", &[("a", "1"), ("b", "2")]));
        let changed = ["host", "limited"].into_iter().chain(more.iter().map(|(name, _)| *name)).collect();
        let pod = Self { fixture, builds, source, changed };
        pod.change_objects(0);
        pod
    }

    /// Makes a directory in the source of the host volume. No caller writes to it. Returns its path in the volume.
    pub fn quiet_directory(&self, host: &Path) -> PathBuf {
        let (name, path) = ("quiet", self.source.path().join("quiet"));
        fs::create_dir(&path).expect("a directory");
        (0..5).for_each(|n| fs::write(path.join(format!("file-{n}")), "").expect("written"));
        host.join(name)
    }

    /// Calls `act` again and again, until it returns false, while callers use the volumes. Fails the test if a call of a caller
    /// failed, or if the effect of one is lost. Then stops the pod, and checks that it leaves nothing behind.
    pub fn under_load(&mut self, mut act: impl FnMut(&mut Self, &mut Running) -> bool) {
        let _turn = Turn::of_soak();
        let mut running = self.builds.run(&self.fixture);
        let config = running.volume("config");
        let volumes: Vec<_> = self.changed.iter().map(|name| TestVolume::new(name, &running.volume(name))).collect();
        let (load, watcher) = (Load::default(), Watcher::on("root", &config));
        let objects = self.fixture.path("objects/app.json");
        let directory = self.fixture.pod().parent().expect("its directory").to_owned();
        thread::scope(|scope| {
            let changes = scope.spawn(|| load.repeat("changes", |round| change(&objects, &config, round + 1)));
            scope.spawn(|| load.repeat("reads of a projection", |_| read_projection(&config)));
            let mut callers = Vec::new();
            for volume in &volumes {
                for (name, caller) in CALLERS {
                    let (name, load) = (format!("{name} in {}", volume.name), &load);
                    callers.push(scope.spawn(move || caller(volume, &mut |round| load.repeat(&name, round))));
                }
            }
            let end_of_load = EndOfLoad { load: &load, directory };
            while !load.is_over() && act(self, &mut running) {}
            drop(end_of_load);
            running.freed(|| {
                for caller in callers {
                    if let Err(failure) = caller.join().expect("no panic") {
                        load.fail(failure);
                    }
                }
                let changes = changes.join().expect("no panic");
                let switches = watcher.switches() as u64;
                // After a failure, the last change may not have become visible.
                if load.failures.lock().expect("no panic").is_empty() && switches != changes {
                    load.fail(format!("after {changes} changes, the watcher got the events of {switches} switches"));
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

/// The state that the callers share with the thread that kills processes.
#[derive(Default)]
struct Load {
    over: AtomicBool,
    rounds: AtomicU64,
    failures: Mutex<Vec<String>>,
}

impl Load {
    fn fail(&self, failure: String) {
        self.failures.lock().expect("no panic").push(format!("{:.3} {failure}", load_time()));
        self.over.store(true, Ordering::Relaxed);
    }

    fn is_over(&self) -> bool {
        self.over.load(Ordering::Relaxed)
    }

    /// Repeats a round of a caller until the load ends or the round fails. Returns the number of rounds.
    fn repeat(&self, caller: &str, mut round: impl FnMut(u64) -> Result<(), String>) -> u64 {
        let mut rounds = 0;
        while !self.is_over() {
            if let Err(failure) = round(rounds) {
                self.fail(format!("{caller}, round {rounds}: {failure}"));
                break;
            }
            rounds += 1;
            self.rounds.fetch_add(1, Ordering::Relaxed);
        }
        rounds
    }
}

/// Ends the load when it is dropped. After a panic of the thread that kills processes, possibly no server answers the callers.
/// Then the drop kills all processes of podfs, so that the kernel ends the calls with an error.
struct EndOfLoad<'a> {
    load: &'a Load,
    directory: PathBuf,
}

impl Drop for EndOfLoad<'_> {
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

/// Changes the object, and waits until the volume shows the change.
fn change(object_file: &Path, config: &Path, number: u64) -> Result<(), String> {
    let new = object_file.with_extension("new");
    fs::write(&new, object(number)).and_then(|()| fs::rename(&new, object_file)).expect("written");
    let deadline = Instant::now() + TIMEOUT;
    while fs::read_to_string(config.join("key-0")).ok() != Some(number.to_string()) {
        if Instant::now() > deadline {
            return Err(format!("the volume does not show change {number}"));
        }
        thread::sleep(Duration::from_millis(1));
    }
    Ok(())
}

/// Checks that `..data` leads to a generation, and that all files of this generation have the same content.
fn read_projection(config: &Path) -> Result<(), String> {
    let data = || fs::read_link(config.join("..data")).map_err(|error| format!("..data: {error}"));
    let generation = data()?;
    let mut contents = Vec::new();
    for key in 0..KEYS {
        match fs::read_to_string(config.join(&generation).join(format!("key-{key}"))) {
            Ok(content) => contents.push(content),
            // podfs may have removed the generation meanwhile.
            Err(_) if data()? != generation => return Ok(()),
            Err(error) => return Err(format!("{}/key-{key}: {error}", generation.display())),
        }
    }
    contents.dedup();
    // The kernel may read cached files without a request to the server, but each statfs(2) sends one.
    rustix::fs::statvfs(config).map_err(|error| format!("the status of the file system: {error}"))?;
    if contents.len() == 1 { Ok(()) } else { Err(format!("a generation with several contents: {contents:?}")) }
}

/// The time in seconds since 1970, by which a failure can be compared with the faults before it and with the log.
fn load_time() -> f64 {
    SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).expect("a clock").as_secs_f64()
}

/// The number of rounds that the environment sets, or this default.
pub fn rounds_or(default: u64) -> u64 {
    number("PODFS_SOAK_ROUNDS").unwrap_or(default)
}

/// The number in an environment variable, if it is set.
pub fn number(variable: &str) -> Option<u64> {
    std::env::var(variable).ok().map(|text| text.parse().expect("a number"))
}
