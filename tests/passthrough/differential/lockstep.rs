//! Runs a program in a native directory and in a volume in lockstep, and compares the answers.

use std::collections::BTreeMap;
use std::fmt::{self, Display, Formatter};
use std::path::PathBuf;
use std::thread;
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use super::actors::ActorProcess;
use super::documented;
use super::observed::{Observed, remove, remove_names, remove_of_type};
use super::pods::{TestPod, kills_of_both, without_kill_of_both};
use super::program::{ACTORS, Actor, Disturbance, Program, Step, View};
use super::sources::SourceKind;

/// The time for which the kernel may show a volume as it was before a change elsewhere, with `cache: auto`.
const STALE: Duration = Duration::from_millis(1100);
/// The time after which a lock that the kernel has released must be free.
const RELEASED: Duration = Duration::from_secs(5);

/// Which caches a volume has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Caching {
    /// The kernel keeps names and attributes for a second.
    Auto,
    /// The kernel keeps neither.
    None,
    /// Only callers of this volume use the directory.
    Alone,
    /// The same, and the kernel keeps locks by itself.
    Private,
    /// As `Alone`, and the server reads and writes.
    Limited,
}

/// Volumes of one directory, and an equal directory without volumes.
pub struct Setup<'a> {
    /// A name such as `ext4, auto, io_uring`.
    pub name: String,
    pub kind: SourceKind,
    pub caching: Caching,
    pub pod: &'a TestPod,
    pub volume: PathBuf,
    pub second: Option<PathBuf>,
    pub host: Option<PathBuf>,
    pub native: PathBuf,
}

impl Setup<'_> {
    fn place(&self, view: View) -> Option<&PathBuf> {
        match view {
            View::Volume => Some(&self.volume),
            View::SecondVolume => self.second.as_ref(),
            View::Host => self.host.as_ref(),
        }
    }

    /// An answer without what need not be equal.
    fn comparable(&self, answer: &Value) -> Value {
        let mut answer = answer.clone();
        if self.may_cache_listings() {
            remove_of_type(&mut answer, 0o040_000, "atime");
        }
        if self.caching == Caching::Limited {
            // Reads from the kernel's cache do not change this time.
            remove(&mut answer, "atime");
        }
        if self.kind == SourceKind::Bindfs {
            // libfuse has an inode for each path, and renames files that are removed while they are open. The kernel reads ahead from
            // bindfs, also while another call sets this time.
            remove(&mut answer, "atime");
            remove(&mut answer, "nlink");
            remove(&mut answer, "first path");
            remove_names(&mut answer, ".fuse_hidden");
        }
        if self.kind == SourceKind::Overlay {
            // overlayfs takes this time from the upper file at moments of its own.
            remove(&mut answer, "atime");
        }
        answer
    }

    /// Whether the kernel may list a directory again without the server. That does not change the time of its last access.
    fn may_cache_listings(&self) -> bool {
        match self.caching {
            Caching::None => false,
            Caching::Auto => matches!(self.kind, SourceKind::Ext4 | SourceKind::Xfs),
            Caching::Alone | Caching::Private | Caching::Limited => true,
        }
    }

    /// The actors that can work there.
    pub fn actors(&self) -> Vec<Actor> {
        ACTORS.into_iter().filter(|actor| self.place(actor.view()).is_some()).collect()
    }
}

/// How a run of a program ended.
#[derive(Debug, PartialEq)]
pub enum Verdict {
    Equal,
    /// Ended early, at a difference that the documentation describes in this row.
    Documented(&'static str),
    Different(Difference),
}

/// A step with different answers, or the files that remain.
#[derive(Clone, Debug, PartialEq)]
pub struct Difference {
    pub step: String,
    pub native: String,
    pub volume: String,
}

impl Difference {
    /// What differences of the same kind have in common.
    pub fn kind(&self) -> String {
        let name = |step: &str| step.split('"').nth(3).unwrap_or(step).to_owned();
        let answer =
            |text: &str| text.chars().take_while(|letter| !letter.is_ascii_digit()).take(40).collect::<String>();
        format!("{}: {} / {}", name(&self.step), answer(&self.native), answer(&self.volume))
    }
}

impl Display for Difference {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        write!(f, "{}\n  native: {}\n  volume: {}", self.step, self.native, self.volume)
    }
}

/// The processes of a setup, in both places.
pub struct Lockstep<'a> {
    /// Setups with the same actors. The processes can work in each.
    setups: Vec<&'a Setup<'a>>,
    /// The one in which they work now.
    pub setup: &'a Setup<'a>,
    actors: BTreeMap<Actor, [ActorProcess; 2]>,
    /// The number of programs so far. Each works in a directory of its own.
    programs: usize,
    name: String,
}

impl<'a> Lockstep<'a> {
    /// `name` tells the directories of this one's programs from those of others. All setups have the same actors. The processes begin in
    /// the first.
    pub fn new(setups: Vec<&'a Setup<'a>>, name: String) -> Self {
        let setup = setups[0];
        let mut lockstep = Self { setups, setup, actors: BTreeMap::new(), programs: 0, name };
        lockstep.start();
        lockstep
    }

    fn start(&mut self) {
        for actor in self.setup.actors() {
            let shown = |setup: &&'a Setup<'a>| setup.place(actor.view()).expect("it is one of those").as_path();
            let native: Vec<_> = self.setups.iter().map(|setup| setup.native.as_path()).collect();
            let shown: Vec<_> = self.setups.iter().map(shown).collect();
            self.actors.insert(actor, [native, shown].map(|bases| ActorProcess::start(actor, &bases)));
        }
    }

    /// Lets the processes work in another setup from the next program on.
    pub fn choose(&mut self, setup: usize) -> Result<(), String> {
        self.setup = self.setups[setup];
        let actors = self.setup.actors();
        self.all_do(&actors, "choose", &[json!(setup)])
    }

    /// Runs a program. A failure is one of the tester or a call that hangs.
    pub fn run(&mut self, program: &Program) -> Result<Verdict, String> {
        self.programs += 1;
        let kills_of_both_before = kills_of_both();
        let top = format!("{}-{}", self.name, self.programs);
        // `..` from the program's directory must not lead to those of others.
        let directory = format!("{top}/1/2/3/4");
        self.all_do(&[Actor::A], "make", &[json!(directory)])?;
        let is_used = |actor: &Actor| program.has(|step| matches!(step, Step::Call { by, .. } if by == actor));
        let used: Vec<_> =
            self.setup.actors().into_iter().filter(|actor| *actor == Actor::A || is_used(actor)).collect();
        self.all_do(&used, "enter", &[json!(directory)])?;
        let mut run = Run {
            lockstep: self,
            program,
            used: &used,
            answers: Vec::new(),
            changed: BTreeMap::new(),
            fresh: None,
            during: false,
            kills_of_both: kills_of_both_before,
        };
        let verdict = run.steps()?;
        let left = self.all_do(&used, "leave", &[]);
        // Closing a lost file fails.
        let lost_both = kills_of_both() != kills_of_both_before;
        if !lost_both {
            left?;
        }
        let removed = self.all_do(&[Actor::A], "remove", &[json!(top)]);
        match (removed, verdict) {
            (Err(reason), Verdict::Equal) if !lost_both => {
                let step = "removing all".to_owned();
                Ok(Verdict::Different(Difference { step, native: String::new(), volume: reason }))
            }
            (_, verdict) => Ok(verdict),
        }
    }

    /// Lets these actors make a call in both places that must succeed, all at once.
    fn all_do(&mut self, actors: &[Actor], name: &str, arguments: &[Value]) -> Result<(), String> {
        for actor in actors {
            self.both(*actor).iter_mut().for_each(|process| process.ask(name, arguments));
        }
        let mut result = Ok(());
        for actor in actors {
            for process in self.both(*actor) {
                let answer = process.answer()?;
                if answer[0] != "ok" {
                    result = Err(format!("{name} {arguments:?}: {answer}"));
                }
            }
        }
        result
    }

    fn both(&mut self, actor: Actor) -> &mut [ActorProcess; 2] {
        self.actors.get_mut(&actor).expect("an actor of the setup")
    }

    /// Ends all processes after a failure of one. Starts them anew if the test goes on.
    pub fn restart(&mut self, goes_on: bool) {
        if !goes_on {
            self.setup.pod.kill_all();
        }
        self.actors.clear();
        if goes_on {
            self.start();
        }
    }
}

/// One run of a program.
struct Run<'r, 'a> {
    lockstep: &'r mut Lockstep<'a>,
    program: &'r Program,
    /// The actors that make calls.
    used: &'r [Actor],
    /// The answers in the native directory so far.
    answers: Vec<Value>,
    /// When something was last changed in a place.
    changed: BTreeMap<&'static str, Instant>,
    /// An actor that has just taken a lock on the file in this slot, whose attributes the kernel does not have cached.
    fresh: Option<(Actor, u64)>,
    /// Whether the server is to be killed during the next call.
    during: bool,
    /// The number of such kills when the program began.
    kills_of_both: u64,
}

impl Run<'_, '_> {
    fn steps(&mut self) -> Result<Verdict, String> {
        let program = self.program;
        for (index, step) in program.0.iter().enumerate() {
            let before = &program.0[..index];
            let mut answer = Value::Null;
            let verdict = match step {
                Step::Disturb(Disturbance::KillServerDuring) => {
                    self.during = true;
                    Verdict::Equal
                }
                Step::Disturb(disturbance) => {
                    let setup = self.lockstep.setup;
                    setup.pod.disturb(*disturbance, &setup.volume, || ());
                    Verdict::Equal
                }
                Step::Call { by, .. } if !self.lockstep.actors.contains_key(by) => Verdict::Equal,
                Step::Call { by, name, arguments } => {
                    let [native, mut volume] = self.call(step, *by, name, arguments)?;
                    volume = self.settled(*by, name, arguments, &native, volume)?;
                    let verdict = self.compare(step, before, &native, &volume)?;
                    answer = native;
                    verdict
                }
            };
            if verdict != Verdict::Equal {
                return Ok(verdict);
            }
            self.answers.push(answer);
        }
        self.remaining()
    }

    /// The answers to a call in both places.
    fn call(&mut self, step: &Step, by: Actor, name: &str, arguments: &[Value]) -> Result<[Value; 2], String> {
        let is_lock = LOCKS.contains(&name);
        let is_fresh = self.fresh.is_some() && self.fresh == step.slot().map(|slot| (by, slot));
        if !(is_lock || is_fresh && AT_FRESH_FILE.contains(&name)) {
            self.wait(by.view());
        }
        let _server_or_keeper_lives = without_kill_of_both();
        let during = std::mem::take(&mut self.during);
        let setup = self.lockstep.setup;
        let both = self.lockstep.both(by);
        both.iter_mut().for_each(|process| process.ask(name, arguments));
        let answers = if during {
            setup
                .pod
                .disturb(Disturbance::KillServerDuring, &setup.volume, || both.each_mut().map(ActorProcess::answer))
        } else {
            both.each_mut().map(ActorProcess::answer)
        };
        let [native, volume] = answers;
        let (native, volume) = (native?, volume?);
        if !LOOKS.contains(&name) {
            self.changed.insert(place_name(by.view()), Instant::now());
        }
        if is_lock {
            self.fresh = step.slot().filter(|_| native[0] == "ok").map(|slot| (by, slot));
        } else if !is_fresh {
            self.fresh = None;
        }
        Ok([native, volume])
    }

    /// Waits until this place shows what was changed in others.
    fn wait(&self, view: View) {
        if self.lockstep.setup.caching != Caching::Auto || view == View::Host {
            return;
        }
        let elsewhere = self.changed.iter().filter(|(place, _)| **place != place_name(view)).map(|(_, at)| *at).max();
        if let Some(at) = elsewhere {
            thread::sleep((at + STALE).saturating_duration_since(Instant::now()));
        }
    }

    /// The answer about a lock when the kernel has told the server of the last close.
    fn settled(
        &mut self,
        by: Actor,
        name: &str,
        arguments: &[Value],
        native: &Value,
        volume: Value,
    ) -> Result<Value, String> {
        let mut volume = volume;
        let deadline = Instant::now() + RELEASED;
        let may_settle = LOCKS.contains(&name) && native[0] == "ok";
        while may_settle && *native != volume && Instant::now() < deadline {
            thread::sleep(Duration::from_millis(5));
            let _server_or_keeper_lives = without_kill_of_both();
            let process = &mut self.lockstep.both(by)[1];
            process.ask(name, arguments);
            volume = process.answer()?;
        }
        Ok(volume)
    }

    fn compare(&mut self, step: &Step, before: &[Step], native: &Value, volume: &Value) -> Result<Verdict, String> {
        let setup = self.lockstep.setup;
        let (native, volume) = (setup.comparable(native), setup.comparable(volume));
        if native == volume {
            return Ok(Verdict::Equal);
        }
        let observed = Observed {
            step,
            before,
            answers: &self.answers,
            native: &native,
            volume: &volume,
            caching: setup.caching,
            kind: setup.kind,
            lost_both: kills_of_both() != self.kills_of_both,
            is_directory: false,
        };
        if observed.is_of_old_stream() {
            return Ok(Verdict::Equal);
        }
        let is_directory = is_directory(self.lockstep, step)?;
        let observed = Observed { is_directory, ..observed };
        Ok(match documented::row(&observed) {
            Some(row) => Verdict::Documented(row),
            None if step.is("tree") => {
                let by = step.by().map_or("", Actor::name);
                Verdict::Different(only_differences(
                    format!("the files that remain, as {by} sees them"),
                    &native,
                    &volume,
                ))
            }
            None => Verdict::Different(Difference {
                step: step.to_string(),
                native: native.to_string(),
                volume: volume.to_string(),
            }),
        })
    }

    /// Compares all files, as the volume shows them and as they are on the host.
    fn remaining(&mut self) -> Result<Verdict, String> {
        for actor in [Actor::A, Actor::B, Actor::H] {
            if !self.used.contains(&actor) {
                continue;
            }
            self.wait(actor.view());
            let both = self.lockstep.both(actor);
            both.iter_mut().for_each(|process| process.ask("tree", &[]));
            let [native, volume] = both.each_mut().map(ActorProcess::answer);
            let step = Step::Call { by: actor, name: "tree".to_owned(), arguments: Vec::new() };
            let verdict = self.compare(&step, &self.program.0, &native?, &volume?)?;
            if verdict != Verdict::Equal {
                return Ok(verdict);
            }
        }
        Ok(Verdict::Equal)
    }
}

/// Whether the first argument of a call is the slot of a directory.
fn is_directory(lockstep: &mut Lockstep, step: &Step) -> Result<bool, String> {
    let (Some(by), Some(slot)) = (step.by(), step.slot()) else { return Ok(false) };
    let native = &mut lockstep.both(by)[0];
    native.ask("fstat", &[json!(slot)]);
    Ok(native.answer()?[1]["mode"].as_str().is_some_and(|mode| mode.starts_with("0o4")))
}

/// The entries of two trees that differ.
fn only_differences(step: String, native: &Value, volume: &Value) -> Difference {
    let (Some(all), Some(shown)) = (native[1].as_object(), volume[1].as_object()) else {
        return Difference { step, native: native.to_string(), volume: volume.to_string() };
    };
    let paths: std::collections::BTreeSet<_> = all.keys().chain(shown.keys()).collect();
    let of = |files: &serde_json::Map<String, Value>, other: &serde_json::Map<String, Value>| {
        let differ = |path: &&&String| files.get(**path) != other.get(**path);
        let describe = |path: &String| format!("{path}: {}", files.get(path).unwrap_or(&Value::Null));
        paths.iter().filter(differ).map(|path| describe(path)).collect::<Vec<_>>().join("\n    ")
    };
    Difference { step, native: of(all, shown), volume: of(shown, all) }
}

fn place_name(view: View) -> &'static str {
    match view {
        View::Volume => "volume",
        View::SecondVolume => "second",
        View::Host => "host",
    }
}

/// Calls about locks: their answers are those of the source at once.
pub const LOCKS: [&str; 5] = ["flock", "posix", "ofd", "posixget", "ofdget"];
/// Calls on the locked file whose answers are right at once.
const AT_FRESH_FILE: [&str; 5] = ["fstat", "pread", "lseek", "write", "pwrite"];
/// Calls that change nothing, not even a time.
const LOOKS: [&str; 16] = [
    "stat",
    "lstat",
    "fstat",
    "access",
    "same",
    "getfl",
    "getxattr",
    "fgetxattr",
    "listxattr",
    "posixget",
    "ofdget",
    "umask",
    "dup",
    "handle",
    "getcwd",
    "tell",
];
