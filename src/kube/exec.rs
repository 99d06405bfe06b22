//! Credentials from a program that the kubeconfig names (`users[].user.exec`): podfs describes the cluster in an environment
//! variable, and the program writes an ExecCredential on its standard output. If podfs runs in the foreground of a terminal, the
//! program may ask the user there.

use std::io;
use std::process::{ExitStatus, Stdio};
use std::time::{Duration, SystemTime};

use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use kube_client::config::{ExecConfig, ExecInteractiveMode};
use rustix::process::getpgrp;
use rustix::termios::tcgetpgrp;
use secrecy::SecretString;
use serde::Deserialize;
use serde_json::json;
use tokio::io::AsyncReadExt;
use tokio::process::Command;
use tokio::time::timeout;

use super::tls::ClientCertificate;

/// How long the program may take, and how long if it may ask the user.
const TIMEOUT: Duration = Duration::from_secs(60);
const TIMEOUT_OF_PERSON: Duration = Duration::from_secs(300);
/// Most bytes it may write.
const MAX_OUTPUT: u64 = 1 << 20;

/// The program's credential.
#[derive(Clone)]
pub(crate) struct ProgramCredential {
    pub(crate) token: Option<SecretString>,
    pub(crate) certificate: Option<ClientCertificate>,
    /// When the program has to run again; `None` if it did not say.
    pub(crate) expires: Option<SystemTime>,
}

#[derive(Deserialize)]
struct ExecCredential {
    status: Option<CredentialStatus>,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct CredentialStatus {
    token: Option<SecretString>,
    client_certificate_data: Option<String>,
    client_key_data: Option<SecretString>,
    expiration_timestamp: Option<Time>,
}

/// Why a program gave no credential.
#[derive(Debug, thiserror::Error)]
pub enum ExecError {
    /// The kubeconfig names no program.
    #[error("the kubeconfig's exec has no command")]
    NoCommand,
    /// The program could not be started, or failed.
    #[error("the kubeconfig's program {program} {problem}")]
    Program {
        program: String,
        #[source]
        problem: ExecProblem,
    },
}

/// What a program did wrong. The text quotes nothing of its output, because that may still be a credential.
#[derive(Debug, thiserror::Error)]
pub enum ExecProblem {
    #[error("asks for input, and podfs has no terminal; log in with that program first")]
    NoTerminal,
    #[error("cannot be started: {cause}{}", hint.as_deref().map(|hint| format!("; {}", hint.trim())).unwrap_or_default())]
    Start {
        #[source]
        cause: io::Error,
        /// How to install it, as the kubeconfig says.
        hint: Option<String>,
    },
    #[error("did not end within {} s", .0.as_secs())]
    Timeout(Duration),
    #[error("cannot be read: {0}")]
    Read(#[source] io::Error),
    #[error("ended, but podfs cannot read its exit status: {0}")]
    Wait(#[source] io::Error),
    #[error("failed ({0}); its messages are above")]
    Failed(ExitStatus),
    #[error("did not write an ExecCredential in JSON")]
    NoCredential,
    #[error("wrote an ExecCredential without a status")]
    NoStatus,
    #[error("gave only one of clientCertificateData and clientKeyData")]
    HalfCertificate,
    #[error("gave neither a token nor a certificate")]
    Nothing,
}

/// Runs the program and parses its output.
///
/// # Errors
/// One sentence that names the program.
pub(crate) async fn issue(exec: &ExecConfig) -> Result<ProgramCredential, ExecError> {
    let program = exec.command.as_deref().filter(|command| !command.is_empty()).ok_or(ExecError::NoCommand)?;
    let issued = issue_by(program, exec).await;
    issued.map_err(|problem| ExecError::Program { program: program.to_owned(), problem })
}

async fn issue_by(program: &str, exec: &ExecConfig) -> Result<ProgramCredential, ExecProblem> {
    let is_interactive = may_ask(exec)?;
    let limit = if is_interactive { TIMEOUT_OF_PERSON } else { TIMEOUT };
    let output = timeout(limit, run(program, exec, is_interactive)).await;
    let output = output.map_err(|_| ExecProblem::Timeout(limit))??;
    let credential: ExecCredential = serde_json::from_slice(&output).map_err(|_| ExecProblem::NoCredential)?;
    let status = credential.status.ok_or(ExecProblem::NoStatus)?;
    let certificate = match (status.client_certificate_data, status.client_key_data) {
        (Some(chain), Some(key)) => Some(ClientCertificate { chain: chain.into_bytes(), key }),
        (None, None) => None,
        _ => return Err(ExecProblem::HalfCertificate),
    };
    if status.token.is_none() && certificate.is_none() {
        return Err(ExecProblem::Nothing);
    }
    let expires = status.expiration_timestamp.map(|time| SystemTime::from(time.0));
    Ok(ProgramCredential { token: status.token, certificate, expires })
}

/// Whether the program gets the terminal, to ask the user.
fn may_ask(exec: &ExecConfig) -> Result<bool, ExecProblem> {
    match (&exec.interactive_mode, has_terminal()) {
        (Some(ExecInteractiveMode::Always), false) => Err(ExecProblem::NoTerminal),
        (Some(ExecInteractiveMode::Never), _) => Ok(false),
        (_, has_terminal) => Ok(has_terminal),
    }
}

/// Whether standard input is a terminal that podfs may read: a process in the background would be stopped.
fn has_terminal() -> bool {
    tcgetpgrp(io::stdin()).is_ok_and(|foreground| foreground == getpgrp())
}

async fn run(program: &str, exec: &ExecConfig, is_interactive: bool) -> Result<Vec<u8>, ExecProblem> {
    let version = exec.api_version.as_deref().unwrap_or("client.authentication.k8s.io/v1");
    let wanted = json!({ "apiVersion": version, "kind": "ExecCredential", "spec": { "interactive": is_interactive } });
    let mut command = Command::new(program);
    command
        .args(exec.args.iter().flatten())
        .env("KUBERNETES_EXEC_INFO", wanted.to_string())
        .stdin(if is_interactive { Stdio::inherit() } else { Stdio::null() })
        .stdout(Stdio::piped())
        .stderr(Stdio::inherit())
        .kill_on_drop(true);
    for variable in exec.env.iter().flatten() {
        if let (Some(name), Some(value)) = (variable.get("name"), variable.get("value")) {
            command.env(name, value);
        }
    }
    let failed = |cause| ExecProblem::Start { cause, hint: exec.install_hint.clone() };
    let mut child = command.spawn().map_err(failed)?;
    let mut output = Vec::new();
    let stdout = child.stdout.take().expect("its output is piped");
    stdout.take(MAX_OUTPUT).read_to_end(&mut output).await.map_err(ExecProblem::Read)?;
    let status = child.wait().await.map_err(ExecProblem::Wait)?;
    if status.success() { Ok(output) } else { Err(ExecProblem::Failed(status)) }
}
