//! Faults of the API server while objects change.

use std::time::Duration;

use fastrand::Rng;

use crate::api_server::{Answer, ApiServer, Disturbance, End, Order, Presents, User};
use crate::soak::CHANGES;

/// A fault, which lasts for some changes.
#[derive(Clone, Debug)]
pub enum Fault {
    None,
    /// The server refuses connections.
    Away,
    /// Connections break, again and again.
    Breaks,
    /// The server ends and begins again.
    Restarts,
    /// The server forgets its history, and connections break: it does not send missed changes.
    Forgets,
    /// Watches end after a few changes.
    Cut(usize, End),
    /// Watches end after a few milliseconds.
    Short(u64, End),
    /// Watches repeat changes, or send them out of order.
    Disturbed(Disturbance),
    /// The server answers some requests wrongly. Connections break first, so that there are requests.
    Wrong(usize, Answer),
    /// Answers take their time.
    Slow(u64),
    /// The server presents an untrusted certificate.
    Untrusted(Presents),
    /// The server does not accept podfs's token, until there is a new one.
    Unknown,
    /// Connections stay open, but carry no data.
    Frozen,
    /// The server accepts connections, and does not answer.
    Held,
}

impl Fault {
    /// Chooses a fault. Faults that only a timeout reveals come late, so that the first changes are made soon.
    pub fn choose(rng: &mut Rng, made: usize) -> Self {
        if made > CHANGES && rng.u8(0..60) == 0 {
            return if rng.bool() { Self::Frozen } else { Self::Held };
        }
        let end = [End::Clean, End::Broken, End::MidLine][rng.usize(0..3)];
        let presents = [Presents::Expired, Presents::OtherName, Presents::OtherAuthority][rng.usize(0..3)];
        let disturbance = [(true, false), (false, true), (true, true)][rng.usize(0..3)];
        let answers = [
            Answer::TooMany(1),
            Answer::Error(500),
            Answer::Error(503),
            Answer::Error(504),
            Answer::Unauthorized,
            Answer::Gone,
            Answer::Html,
            Answer::Redirect("https://elsewhere.example/".to_owned()),
            Answer::InvalidUtf8,
            Answer::Truncated,
            Answer::Broken,
            Answer::Oversize(6 << 20),
        ];
        match rng.usize(0..12) {
            0 => Self::None,
            1 => Self::Away,
            2 => Self::Breaks,
            3 => Self::Restarts,
            4 => Self::Forgets,
            5 => Self::Cut(rng.usize(0..4), end),
            6 => Self::Short(rng.u64(0..30), end),
            7 => Self::Disturbed(Disturbance { duplicate: disturbance.0, outdated: disturbance.1 }),
            8 => Self::Slow(rng.u64(1..30)),
            9 => Self::Untrusted(presents),
            10 => Self::Unknown,
            _ => Self::Wrong(rng.usize(1..8), answers[rng.usize(0..answers.len())].clone()),
        }
    }

    pub fn begin(&self, server: &ApiServer, user: &User) {
        match self {
            Self::None | Self::Breaks | Self::Restarts | Self::Forgets => {}
            Self::Away => server.connections(Order::Refuse),
            Self::Cut(events, end) => server.cut(Some(*events), None, *end),
            Self::Short(time, end) => server.cut(None, Some(Duration::from_millis(*time)), *end),
            Self::Disturbed(disturbance) => server.change_behaviour(|behaviour| behaviour.disturbance = *disturbance),
            Self::Slow(delay) => server.change_behaviour(|behaviour| behaviour.delay = Duration::from_millis(*delay)),
            Self::Wrong(times, answer) => {
                server.fail(*times, answer.clone());
                server.connections(Order::Break);
            }
            Self::Untrusted(presents) => {
                server.present(*presents);
                server.connections(Order::Break);
            }
            Self::Unknown => {
                server.refuse_tokens_of(user);
                server.connections(Order::Break);
            }
            Self::Frozen => server.connections(Order::Freeze),
            Self::Held => {
                server.connections(Order::Hold);
                server.connections(Order::Break);
            }
        }
    }

    /// Repeats a fault that occurs at intervals, after so many changes.
    pub fn go_on(&self, server: &ApiServer, changes: usize) {
        match self {
            Self::Breaks if changes.is_multiple_of(4) => server.connections(Order::Break),
            Self::Restarts if changes.is_multiple_of(8) => server.restart(),
            Self::Forgets if changes.is_multiple_of(8) => {
                server.connections(Order::Refuse);
                server.compact();
                server.connections(Order::Serve);
            }
            _ => {}
        }
    }

    pub fn end(&self, server: &ApiServer, user: &User) {
        match self {
            Self::Away | Self::Held => server.connections(Order::Serve),
            Self::Untrusted(_) => server.present(Presents::Good),
            Self::Unknown => server.renew_token_file(user),
            _ => {}
        }
        server.heal();
    }
}
