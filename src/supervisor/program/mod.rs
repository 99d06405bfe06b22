//! `podfs-supervisor`, the program of the supervisors that `podfs node` starts, and what it shares with `podfs run`.
//!
//! | module | owns |
//! |---|---|
//! | `arguments` | the command line of the program |
//! | `options` | options that `podfs run` and `podfs node` have, too |
//! | `service` | how `podfs run` and podfs-supervisor serve a pod, once they have read its manifest |
//! | `machine` | what the machine has to have; the runtime of a supervisor |
//! | `failure` | exit codes, and the sentence of a failure |
//! | `log` | logging, to standard error |
//!
//! A node has one supervisor for each pod. The dynamic linker relocates parts of a program at its start, and processes do not
//! share the memory of these parts. So this program has only what such a supervisor needs: no client of the Kubernetes API, no
//! commands, no server of gRPC. `podfs node` watches the objects, and pushes them to the supervisors.

mod arguments;
pub(crate) mod failure;
pub(crate) mod log;
pub(crate) mod machine;
pub(crate) mod options;
pub(crate) mod service;

use std::env;
use std::ffi::{OsStr, OsString};
use std::os::unix::process::CommandExt;
use std::process::{Command, ExitCode};
use std::sync::Arc;

use anyhow::anyhow;
use clap::Parser;
use podfs_fuse::memory_lock;
use podfs_fuse::program::NAME as SERVER;
use podfs_fuse::server::process;

use self::arguments::{Arguments, of_this_program};
use self::failure::{Failure, leave_failure};
use self::machine::check_machine;
use self::service::PodService;
use super::exec_state;
use super::installed::{SUPERVISOR, supervisor_program};
use super::run::upgrade::roll_back;
use super::server::program::{ServerProgram, this_podfs};
use crate::host::kernel_nfs::{self, mounter};
use crate::source::{AcceptedDocuments, FileSource, PodInput, PushSource, Source};

/// Runs the program with the arguments of this process.
pub fn main() -> ExitCode {
    memory_lock::tune_allocator();
    let mut words = env::args_os().skip(1);
    let outcome = match words.next() {
        Some(first) if first == "server" => Err(become_server(words)),
        Some(first) if first == kernel_nfs::SUBCOMMAND => mount_nfs(),
        _ => Arguments::try_parse_from(of_this_program(env::args_os())).map_or_else(refuse, serve),
    };
    match outcome {
        Ok(()) => ExitCode::SUCCESS,
        Err(failure) => failure.report(),
    }
}

/// Prints why the arguments are refused, and ends the process. In an upgrade, the program before the upgrade goes on.
fn refuse(error: clap::Error) -> Result<(), Failure> {
    roll_back(&error.to_string());
    if let Some(manifest) = arguments::manifest(env::args_os()) {
        let rendered = error.to_string();
        leave_failure(&manifest, rendered.lines().next().unwrap_or_default());
    }
    error.exit()
}

/// Serves the pod until a signal ends the supervisor. In an upgrade, the program before the upgrade goes on if this one fails
/// before it serves the pod. `podfs node` gets the sentence of the failure.
fn serve(arguments: Arguments) -> Result<(), Failure> {
    let manifest = arguments.pod.clone();
    serve_pod(arguments).inspect_err(|failure| {
        let sentence = failure.to_string();
        roll_back(&sentence);
        leave_failure(&manifest, &sentence);
    })
}

fn serve_pod(arguments: Arguments) -> Result<(), Failure> {
    arguments.log.start(arguments.log_format);
    podfs_fuse::log::name_pod_in_text();
    exec_state::check().map_err(Failure::general)?;
    let server_program = check_machine()?;
    // podfs node publishes later versions of the pod on the control socket.
    let manifest = arguments.pod;
    let input = PodInput::Once(manifest.clone());
    let (files, snapshot) = FileSource::open_accepting(AcceptedDocuments::KnownPods, Some(input), &[])?;
    let pod = snapshot.pod.clone().ok_or_else(|| Failure::input(anyhow!("there is no pod")))?;
    if arguments.uid != pod.identity.uid.as_str() {
        let (wanted, uid) = (arguments.uid, &pod.identity.uid);
        return Err(Failure::input(anyhow!("pod {} has the uid {uid}, and not {wanted} as asked for", pod.identity)));
    }
    let (source, snapshot) = PushSource::new(files, snapshot, Arc::clone(&pod));
    let service = PodService {
        root_dir: arguments.root_dir,
        run_dir: arguments.run_dir,
        server_program,
        drivers: arguments.drivers,
        memory: arguments.memory,
        generations: arguments.generations,
        sub_paths: arguments.sub_paths,
        transport: arguments.transport,
        log_format: arguments.log_format,
        manifest_of_node: Some(manifest),
        metrics: None,
    };
    service.run(&pod, Source::Push(source), snapshot)
}

/// Executes podfs-fuse. In an upgrade, a supervisor of another version starts a server of this version through this program,
/// which finds the podfs-fuse of its own version. Returns only if that fails.
pub(crate) fn become_server(arguments: impl Iterator<Item = OsString>) -> Failure {
    let program = match ServerProgram::find() {
        Ok(program) => program,
        Err(error) => {
            process::refuse(&error.to_string());
            return Failure::machine(error);
        }
    };
    let mut command = Command::new(program.executable());
    command.arg0(SERVER).arg("server").args(arguments).arg(this_podfs().argument());
    Failure::machine(anyhow!("{SERVER} cannot be executed: {}", command.exec()))
}

/// Mounts the NFS export that a supervisor, at the other end of standard input, asks for. A supervisor executes its own program
/// for this.
pub(crate) fn mount_nfs() -> Result<(), Failure> {
    let socket = rustix::io::dup(rustix::stdio::stdin()).map_err(anyhow::Error::new);
    let answered = socket.and_then(|socket| mounter::answer(socket).map_err(anyhow::Error::new));
    answered.map_err(|error| Failure::general(anyhow!("cannot report the outcome of the mount: {error}")))
}

/// Executes podfs-supervisor if these are the arguments of a supervisor that an earlier `podfs node` has started as `podfs
/// run`. Does not change the arguments: if the upgrade fails, podfs-supervisor executes the earlier podfs with them. Returns
/// `None` if they are other arguments, and a failure if podfs-supervisor cannot be executed.
pub(crate) fn become_supervisor(arguments: impl Iterator<Item = OsString>) -> Option<Failure> {
    let words: Vec<OsString> = arguments.collect();
    let is_of_daemon = words.get(1).is_some_and(|word| word == "run") && words.iter().any(|word| word == "--pod-once");
    if !is_of_daemon {
        return None;
    }
    let path = match supervisor_program() {
        Ok(path) => path,
        Err(error) => return Some(Failure::machine(error)),
    };
    let cause = Command::new(&path).arg0(SUPERVISOR).args(words.iter().skip(1).map(OsString::as_os_str)).exec();
    Some(Failure::machine(anyhow!("{} cannot be executed: {cause}", path.display())))
}

/// Whether these words are the command line of a supervisor that `podfs node` has started with this manifest.
pub(crate) fn is_started_with(words: &[&OsStr], manifest: &OsStr) -> bool {
    words.windows(2).any(|pair| pair[0] == "--pod" && pair[1] == manifest)
}
