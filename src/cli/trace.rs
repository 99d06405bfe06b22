//! `podfs trace`: the requests of a live volume.

use std::io::{self, ErrorKind, PipeReader, Read, Write, pipe};
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};
use std::thread::sleep;
use std::time::{Duration, Instant};

use anyhow::anyhow;
use clap::{Args, ValueHint};
use podfs_fuse::printable::Printer;

use super::exit::{Failure, say};
use super::status::pod_directory;
use crate::supervisor::control::{ControlAnswer, ControlQuestion, ask};
use crate::supervisor::program::options::{RUN_DIRECTORY, directory};
use crate::supervisor::run_dir::claim;
use crate::supervisor::run_dir::record::PodLockRecord;
use crate::supervisor::status::VolumeState;

/// Most requests to a server that does not answer, mostly because its successor starts.
const TRIES: u32 = 20;
/// How long a pod may take to end after the server has closed the trace, and how often podfs looks whether it has ended.
const END_TIMEOUT: Duration = Duration::from_secs(10);
const PAUSE: Duration = Duration::from_millis(50);

/// Print the FUSE requests of a live volume until Ctrl-C, or until the volume ends.
///
/// Each line is: time (UTC), operation, path, the caller's pid and uid, result, microseconds. A - stands for a value that the
/// kernel does not send: the uid of most callers when volumes may be ID-mapped (Linux 6.12), and both for the kernel's own
/// requests. podfs mount --trace does without ID-mapped mounts and shows every uid.
///
/// The volume never waits for this command: if a reader is too slow, podfs leaves requests out, and a line says how many.
/// Four traces of a volume may run at once. A warm projection sends no requests, and the kernel does not send podfs the reads
/// and writes of a volume in mode passthrough.
#[derive(Args)]
#[command(after_help = "\
EXIT STATUS:
  0  the volume ended
  1  there is no such pod or volume, or its supervisor or server does not answer
  2  bad arguments or settings
  3  a privilege is missing

EXAMPLES:
  podfs trace --pod c15b9f1e-0a47-5d0c-9b6c-3f1f5f1d7a10 --volume config")]
pub(super) struct Trace {
    /// The pod; podfs status lists all.
    #[arg(long, value_name = "UID")]
    pod: String,
    /// The volume, as it is called in the pod's manifest.
    #[arg(long, value_name = "NAME")]
    volume: String,
    /// The run directory of podfs run.
    #[arg(long, value_name = "DIR", default_value = RUN_DIRECTORY, value_parser = directory(), value_hint = ValueHint::DirPath)]
    run_dir: PathBuf,
}

impl Trace {
    pub(super) fn execute(self) -> Result<(), Failure> {
        let Self { pod, volume, run_dir } = self;
        let directory = pod_directory(&run_dir, &pod)?;
        let mut requests = attach(&directory, &volume).map_err(Failure::general)?;
        say(&format!("requests of volume {volume:?} of pod {pod}; Ctrl-C ends this"));
        loop {
            if !copy(&mut requests)? {
                return Ok(());
            }
            // The server closes the pipe when the volume ends, and when a successor takes over.
            match attach(&directory, &volume) {
                Ok(again) => requests = again,
                Err(_) if has_ended(&directory, &volume) => {
                    say(&format!("volume {volume:?} has ended"));
                    return Ok(());
                }
                Err(error) => return Err(Failure::general(error)),
            }
            say("the server was replaced; requests in between are not shown");
        }
    }
}

/// Makes the server write the volume's requests to a new pipe.
fn attach(directory: &Path, volume: &str) -> anyhow::Result<PipeReader> {
    let (reader, writer) = pipe().map_err(|error| anyhow!("cannot make a pipe: {error}"))?;
    let question = ControlQuestion::Trace { volume: volume.to_owned() };
    for _ in 0..TRIES {
        match ask(directory, &question, Some(writer.as_fd()))? {
            ControlAnswer::Tracing => return Ok(reader),
            ControlAnswer::Refused(reason) => return Err(anyhow!(reason)),
            // The supervisor answers so after 500 ms without an answer of the server.
            ControlAnswer::Busy(_) => {}
            other => return Err(anyhow!("the supervisor gave an answer to another question: {other:?}")),
        }
    }
    Err(anyhow!("the server of the pod does not answer; podfs status shows how the pod is"))
}

/// Whether a volume that cannot be traced any more has ended. Waits a while for a pod that ends: its supervisor unmounts all
/// volumes before it gives up the claim.
fn has_ended(directory: &Path, volume: &str) -> bool {
    let until = Instant::now() + END_TIMEOUT;
    loop {
        let is_held = claim::is_held(directory);
        if PodLockRecord::read(directory).is_none() {
            return true;
        }
        if let Ok(ControlAnswer::Status(pod)) = ask(directory, &ControlQuestion::Status, None) {
            let found = pod.volumes.iter().find(|found| found.name == volume);
            if found.is_none_or(|found| found.state == VolumeState::Waiting) {
                return true;
            }
        }
        if !is_held || Instant::now() >= until {
            return false;
        }
        sleep(PAUSE);
    }
}

/// Prints the requests until the end of the pipe. Returns `false` if the reader has closed standard output.
fn copy(requests: &mut PipeReader) -> Result<bool, Failure> {
    let mut buffer = vec![0; 64 << 10];
    let mut out = io::stdout().lock();
    // Escapes control characters: the server answers requests of containers, so podfs does not trust its lines.
    let mut printer = Printer::default();
    loop {
        let length = match requests.read(&mut buffer) {
            Ok(0) => return Ok(true),
            Ok(length) => length,
            Err(error) if error.kind() == ErrorKind::Interrupted => continue,
            Err(error) => return Err(Failure::general(anyhow!("cannot read the trace: {error}"))),
        };
        match out.write_all(printer.add(&buffer[..length]).as_bytes()).and_then(|()| out.flush()) {
            Ok(()) => {}
            Err(error) if error.kind() == ErrorKind::BrokenPipe => return Ok(false),
            Err(error) => return Err(Failure::general(anyhow!("cannot write to standard output: {error}"))),
        }
    }
}
