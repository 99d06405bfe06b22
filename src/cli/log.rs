//! Logging, to standard error.

use std::env;
use std::ffi::OsString;

use clap::{Args, ValueEnum};
use podfs_fuse::log::may_be_coloured;
use tracing_subscriber::EnvFilter;

use crate::supervisor::status::progress::StandardError;
use crate::supervisor::status::report::Audience;

/// The variable from which the server of a pod, and the next version of podfs after an upgrade, take the filter.
const FILTER: &str = "RUST_LOG";
/// The filter without an option, a variable or a setting.
const DEFAULT: &str = "info";

/// What is logged.
#[derive(Args)]
pub(super) struct LogOptions {
    /// What is logged: error, warn, info, debug or trace and what is worse, or a filter of the crate tracing-subscriber, such
    /// as warn,podfs::source=debug.
    #[arg(long, value_name = "FILTER", default_value = DEFAULT, value_parser = filter)]
    log: String,
}

impl LogOptions {
    /// Starts logging, in this process and in those that it starts. No other thread may run yet.
    pub(super) fn start(&self, format: LogFormat) {
        // The default filter stays out of the environment of programs that podfs runs.
        if self.log != DEFAULT || env::var_os(FILTER).is_some() {
            // SAFETY: the command has just begun, and starts its threads after its log.
            unsafe { env::set_var(FILTER, &self.log) };
        }
        format.start();
    }
}

impl LogOptions {
    /// The same for another podfs.
    pub(super) fn arguments(&self) -> Vec<OsString> {
        vec!["--log".into(), self.log.as_str().into()]
    }
}

fn filter(text: &str) -> Result<String, String> {
    EnvFilter::builder().parse(text).map(|_| text.to_owned()).map_err(|error| error.to_string())
}

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
    /// Starts logging what the environment says; if it says nothing, `info` and above.
    pub(super) fn start(self) {
        let filter = EnvFilter::builder().with_default_directive(tracing::Level::INFO.into()).from_env_lossy();
        let lines = tracing_subscriber::fmt().with_env_filter(filter).with_writer(|| StandardError).with_target(false);
        match self {
            Self::Text => lines.with_ansi(may_be_coloured()).init(),
            Self::Json => lines.json().init(),
        }
    }

    /// As an argument.
    pub(super) fn word(self) -> &'static str {
        match self {
            Self::Text => "text",
            Self::Json => "json",
        }
    }

    pub(super) fn audience(self) -> Audience {
        match self {
            Self::Text => Audience::People,
            Self::Json => Audience::Logs,
        }
    }
}
