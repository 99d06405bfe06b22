//! Logging, to standard error.

use std::env;

use clap::ValueEnum;
use podfs_fuse::confinement::refusal::Lines;
use tracing_subscriber::EnvFilter;

use crate::supervisor::progress::StandardError;
use crate::supervisor::report::Audience;

/// How log lines look.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub(super) enum LogFormat {
    /// Lines for people.
    #[default]
    Text,
    /// One JSON object per line.
    Json,
}

impl LogFormat {
    /// Starts logging. `RUST_LOG` chooses what is logged; without it, `info` and above.
    pub(super) fn start(self) {
        let filter = EnvFilter::builder().with_default_directive(tracing::Level::INFO.into()).from_env_lossy();
        let lines = tracing_subscriber::fmt().with_env_filter(filter).with_writer(|| StandardError).with_target(false);
        match self {
            Self::Text => lines.with_ansi(may_be_coloured()).init(),
            Self::Json => lines.json().init(),
        }
    }

    /// The same, for what is logged without the logger.
    pub(super) fn lines(self) -> Lines {
        match self {
            Self::Text => Lines::Text,
            Self::Json => Lines::Json,
        }
    }

    pub(super) fn audience(self) -> Audience {
        match self {
            Self::Text => Audience::People,
            Self::Json => Audience::Logs,
        }
    }
}

/// Whether standard error is a terminal whose user wants colours (no-color.org).
fn may_be_coloured() -> bool {
    let unwanted = env::var_os("NO_COLOR").is_some_and(|value| !value.is_empty());
    let dumb = env::var_os("TERM").is_some_and(|terminal| terminal == "dumb");
    rustix::termios::isatty(rustix::stdio::stderr()) && !unwanted && !dumb
}
