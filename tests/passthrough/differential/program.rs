//! Programs: sequences of calls, as lines that both Python and this tester read.

use std::fmt::{self, Display, Formatter};

use serde_json::Value;

/// A process that makes calls, by the place in which it works.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Actor {
    /// Root in the volume.
    A,
    /// An ordinary user in the volume.
    U,
    /// Another process of root in the volume.
    V,
    /// Root in a second volume of the same directory.
    B,
    /// Root on the host.
    H,
}

pub const ACTORS: [Actor; 5] = [Actor::A, Actor::U, Actor::V, Actor::B, Actor::H];

/// The place in which an actor works. Each has caches of its own.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum View {
    Volume,
    SecondVolume,
    Host,
}

impl Actor {
    pub fn view(self) -> View {
        match self {
            Actor::A | Actor::U | Actor::V => View::Volume,
            Actor::B => View::SecondVolume,
            Actor::H => View::Host,
        }
    }

    pub fn uid(self) -> u32 {
        if self == Actor::U { super::generator::USER } else { 0 }
    }

    fn of(name: &str) -> Option<Actor> {
        ACTORS.into_iter().find(|actor| actor.name() == name)
    }

    pub fn name(self) -> &'static str {
        match self {
            Actor::A => "A",
            Actor::U => "U",
            Actor::V => "V",
            Actor::B => "B",
            Actor::H => "H",
        }
    }
}

/// What happens beside the calls.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Disturbance {
    DropCaches,
    KillServer,
    KillKeeper,
    /// The server is killed while it handles the next call.
    KillServerDuring,
    /// Both are killed at once, between two calls.
    KillServerAndKeeper,
}

const DISTURBANCES: [(Disturbance, &str); 5] = [
    (Disturbance::DropCaches, "drop caches"),
    (Disturbance::KillServer, "kill server"),
    (Disturbance::KillKeeper, "kill keeper"),
    (Disturbance::KillServerDuring, "kill server during the next call"),
    (Disturbance::KillServerAndKeeper, "kill server and keeper"),
];

/// A step of a program.
#[derive(Clone, Debug, PartialEq)]
pub enum Step {
    Call { by: Actor, name: String, arguments: Vec<Value> },
    Disturb(Disturbance),
}

impl Step {
    pub fn by(&self) -> Option<Actor> {
        match self {
            Step::Call { by, .. } => Some(*by),
            Step::Disturb(_) => None,
        }
    }

    pub fn is(&self, wanted: &str) -> bool {
        matches!(self, Step::Call { name, .. } if name == wanted)
    }

    pub fn is_any(&self, wanted: &[&str]) -> bool {
        wanted.iter().any(|name| self.is(name))
    }

    /// Whether the line of the step contains this text.
    pub fn has_word(&self, word: &str) -> bool {
        self.to_string().contains(word)
    }

    /// Whether these numbers are the last arguments.
    pub fn ends_with(&self, numbers: &[i64]) -> bool {
        let Step::Call { arguments, .. } = self else { return false };
        let first = arguments.len().saturating_sub(numbers.len());
        arguments[first..].iter().map(Value::as_i64).eq(numbers.iter().copied().map(Some))
    }

    /// The slots of the files that the call uses, and the one into which it opens a file.
    pub fn slots(&self) -> Vec<u64> {
        let Step::Call { arguments, .. } = self else { return Vec::new() };
        let slots = if self.is_any(&["openat", "reopen", "dup", "copy", "sendfile"]) { 2 } else { 1 };
        arguments.iter().take(slots).filter_map(Value::as_u64).collect()
    }

    /// The slot, if the first argument is one.
    pub fn slot(&self) -> Option<u64> {
        match self {
            Step::Call { arguments, .. } => arguments.first()?.as_u64(),
            Step::Disturb(_) => None,
        }
    }
}

impl Display for Step {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        let line: Vec<Value> = match self {
            Step::Call { by, name, arguments } => {
                [by.name(), name].map(Value::from).into_iter().chain(arguments.iter().cloned()).collect()
            }
            Step::Disturb(disturbance) => {
                let (_, words) = DISTURBANCES.iter().find(|(other, _)| other == disturbance).expect("all are listed");
                ["-", words].map(Value::from).to_vec()
            }
        };
        // A word of JSON that Python does not know would come from `true`, `false` or `null`; no call has these.
        write!(f, "{}", Value::from(line))
    }
}

/// A program: its steps, one per line.
#[derive(Clone, Debug, PartialEq)]
pub struct Program(pub Vec<Step>);

impl Program {
    /// Reads the lines of a program. Those that begin with `#` are comments.
    pub fn of(text: &str) -> Program {
        let lines = text.lines().filter(|line| !line.trim().is_empty() && !line.starts_with('#'));
        Program(lines.map(step).collect())
    }

    pub fn has(&self, mut is_wanted: impl FnMut(&Step) -> bool) -> bool {
        self.0.iter().any(&mut is_wanted)
    }

    /// Whether a process in this place makes calls.
    pub fn uses(&self, view: View) -> bool {
        self.has(|step| matches!(step, Step::Call { by, .. } if by.view() == view))
    }
}

fn step(line: &str) -> Step {
    let mut words: Vec<Value> = serde_json::from_str(line).unwrap_or_else(|error| panic!("{line}: {error}"));
    let arguments = words.split_off(2);
    let [by, name] = [&words[0], &words[1]].map(|word| word.as_str().expect("a word").to_owned());
    match Actor::of(&by) {
        Some(by) => Step::Call { by, name, arguments },
        None => {
            let known = DISTURBANCES.iter().find(|(_, words)| *words == name);
            Step::Disturb(known.unwrap_or_else(|| panic!("what is {line}?")).0)
        }
    }
}

impl Display for Program {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|step| writeln!(f, "{step}"))
    }
}

#[test]
fn a_program_is_read_as_it_was_written() {
    for seed in 0..50 {
        let program = super::generator::program(&mut fastrand::Rng::with_seed(seed), &ACTORS, true);
        assert_eq!(Program::of(&program.to_string()), program);
    }
}
