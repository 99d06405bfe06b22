//! What the arguments choose: groups, rows, places, rounds and the callers' CPU. Without arguments, the bench measures everything.

use std::sync::OnceLock;

/// What a run measures.
#[derive(Default)]
pub struct Choice {
    groups: Vec<String>,
    rows: Vec<String>,
    places: Vec<String>,
    rounds: Option<usize>,
    cpu: Option<usize>,
}

impl Choice {
    /// The choice of this run.
    pub fn of_arguments() -> &'static Self {
        static CHOICE: OnceLock<Choice> = OnceLock::new();
        CHOICE.get_or_init(|| Self::parse(std::env::args().skip(1)))
    }

    fn parse(arguments: impl Iterator<Item = String>) -> Self {
        let mut choice = Self::default();
        // Cargo passes options of its own.
        for argument in arguments.filter(|argument| !argument.starts_with('-')) {
            match argument.split_once('=') {
                Some(("row", text)) => choice.rows.push(text.to_owned()),
                Some(("place", name)) => choice.places.push(name.to_owned()),
                Some(("rounds", count)) => choice.rounds = Some(count.parse().expect("rounds=N")),
                Some(("cpu", number)) => choice.cpu = Some(number.parse().expect("cpu=N")),
                Some(_) => panic!("{argument}: not one of row=TEXT, place=NAME, rounds=N, cpu=N"),
                None => choice.groups.push(argument),
            }
        }
        choice
    }

    /// Whether a group of measurements runs.
    pub fn has_group(&self, name: &str) -> bool {
        self.groups.is_empty() || self.groups.iter().any(|group| group == name)
    }

    /// Whether a row of a table is measured: one of the texts stands in its title.
    pub fn has_row(&self, title: &str) -> bool {
        self.rows.is_empty() || self.rows.iter().any(|text| title.contains(text))
    }

    /// Whether a place takes part.
    pub fn has_place(&self, name: &str) -> bool {
        self.places.is_empty() || self.places.iter().any(|place| place == name)
    }

    /// How many rounds there are, where `usual` is the number for a table that is published.
    pub fn rounds(&self, usual: usize) -> usize {
        self.rounds.unwrap_or(usual)
    }

    /// The only CPU that callers run on.
    pub fn cpu(&self) -> Option<usize> {
        self.cpu
    }
}
