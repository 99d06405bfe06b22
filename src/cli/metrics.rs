//! `podfs metrics`: the metrics of the pods of this node.

use std::io;
use std::net::{SocketAddr, TcpListener};
use std::path::PathBuf;

use anyhow::anyhow;
use clap::{ArgGroup, Args, ValueHint};
use sd_notify::NotifyState;

use super::exit::{Failure, say};
use super::status::{pod_directory, pods, print_for_programs};
use crate::admin::readings::Readings;
use crate::admin::survey;
use crate::metrics::{Exposition, ExpositionFormat, exporter};
use crate::supervisor::program::options::{RUN_DIRECTORY, directory, metrics_address};
use crate::supervisor::run::signals::StopSignals;

/// Print the metrics of pods as OpenMetrics text, or serve them over HTTP.
///
/// podfs asks the supervisors of all pods of the run directory at once. For a pod that does not answer within two seconds, it
/// prints only the state (podfs_up is 0).
///
/// With --metrics-addr, the command stays in the foreground until SIGTERM or Ctrl-C, and asks all pods at each request for
/// http://ADDR:PORT/metrics; one port for all pods of the node. It answers every client that reaches the address.
#[derive(Args)]
#[command(group = ArgGroup::new("pods").args(["pod", "all"]).required(true))]
#[command(after_help = "\
EXIT STATUS:
  0  the metrics were printed
  1  there is no such pod, or the address is in use
  2  bad arguments or settings
  3  a privilege is missing

EXAMPLES:
  podfs metrics --all
  podfs metrics --pod c15b9f1e-0a47-5d0c-9b6c-3f1f5f1d7a10
  podfs metrics --all --metrics-addr 127.0.0.1:9753")]
pub(super) struct Metrics {
    /// This pod; podfs status lists all.
    #[arg(long, value_name = "UID")]
    pod: Option<String>,
    /// Every pod of this node.
    #[arg(long)]
    all: bool,
    /// Serve them at http://ADDR:PORT/metrics.
    #[arg(long, value_name = "ADDR:PORT", conflicts_with = "pod", value_parser = metrics_address)]
    metrics_addr: Option<SocketAddr>,
    /// The run directory of podfs run.
    #[arg(long, value_name = "DIR", default_value = RUN_DIRECTORY, value_parser = directory(), value_hint = ValueHint::DirPath)]
    run_dir: PathBuf,
}

impl Metrics {
    pub(super) fn execute(self) -> Result<(), Failure> {
        let directories = match &self.pod {
            Some(uid) => vec![pod_directory(&self.run_dir, uid)?],
            None => pods(&self.run_dir)?,
        };
        match self.metrics_addr {
            Some(address) => serve(address, self.run_dir),
            None => print_for_programs(&read(&directories, &Readings::default()).text(ExpositionFormat::OpenMetrics)),
        }
    }
}

/// Listens at the address. Returns the listener and its address, with the port that the kernel chose if the port was 0.
pub(super) fn listen(address: SocketAddr) -> Result<(TcpListener, SocketAddr), Failure> {
    let listening = exporter::listen(address).and_then(|listener| Ok((listener.local_addr()?, listener)));
    match listening {
        Ok((address, listener)) => Ok((listener, address)),
        Err(error) => Err(Failure::general(anyhow!(
            "cannot serve metrics at {address}: {error}; give another address with --metrics-addr"
        ))),
    }
}

fn serve(address: SocketAddr, run_directory: PathBuf) -> Result<(), Failure> {
    let (listener, address) = listen(address)?;
    let cannot = |error: io::Error| Failure::general(anyhow!("cannot serve metrics: {error}"));
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().max_blocking_threads(1).build();
    let runtime = runtime.map_err(cannot)?;
    let readings = Readings::default();
    let read = move || {
        let directories = survey::pods(&run_directory).unwrap_or_else(|error| {
            say(&format!("cannot read {}: {error}", run_directory.display()));
            Vec::new()
        });
        read(&directories, &readings)
    };
    let outcome = runtime.block_on(async {
        let mut stop = StopSignals::listen()?;
        say(&format!("the metrics of all pods are at http://{address}/metrics"));
        // An error means that systemd did not start this command.
        let _ = sd_notify::notify(&[NotifyState::Ready]);
        tokio::select! {
            _ = stop.received() => Ok(()),
            Err(error) = exporter::serve(listener, read) => Err(error),
        }
    });
    runtime.shutdown_background();
    outcome.map_err(cannot)
}

/// The metrics of these pods.
fn read(directories: &[PathBuf], readings: &Readings) -> Exposition {
    Exposition::of(readings.take(directories, |_, sentence| say(sentence)))
}
