//! Credentials from a program that the kubeconfig names (`users[].user.exec`): podfs passes an ExecCredential without a status in
//! the environment variable `KUBERNETES_EXEC_INFO`, and the program writes one with a status on its standard output. If the
//! kubeconfig says `provideClusterInfo: true`, the variable describes the cluster, too. If podfs runs in the foreground of a
//! terminal, the program may ask the user there.

use std::io;
use std::process::{ExitStatus, Stdio};
use std::time::{Duration, SystemTime};

use k8s_openapi::ByteString;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use kube_client::config::{Cluster, ExecConfig, ExecInteractiveMode};
use rustix::process::getpgrp;
use rustix::termios::tcgetpgrp;
use secrecy::SecretString;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use tokio::io::AsyncReadExt;
use tokio::process::Command;
use tokio::time::timeout;

use super::tls::{Authority, ClientCertificate};

/// How long the program may take, and how long if it may ask the user.
const TIMEOUT: Duration = Duration::from_secs(60);
const TIMEOUT_OF_PERSON: Duration = Duration::from_secs(300);
/// Most bytes that the program may write.
const MAX_OUTPUT: u64 = 1 << 20;
/// The extension of a kubeconfig's cluster that is for the program.
const EXTENSION: &str = "client.authentication.k8s.io/exec";

/// A program that issues credentials.
pub(crate) struct CredentialProgram {
    pub(crate) exec: ExecConfig,
    /// The description of the cluster, if the program gets one.
    pub(crate) cluster: Option<ProgramCluster>,
}

/// The cluster in `KUBERNETES_EXEC_INFO`, for client.authentication.k8s.io/v1 and v1beta1.
#[derive(Serialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) struct ProgramCluster {
    server: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    tls_server_name: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    insecure_skip_tls_verify: Option<bool>,
    #[serde(skip_serializing_if = "Option::is_none")]
    certificate_authority_data: Option<ByteString>,
    #[serde(skip_serializing_if = "Option::is_none")]
    proxy_url: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    disable_compression: Option<bool>,
    #[serde(skip_serializing_if = "Option::is_none")]
    config: Option<Value>,
}

impl ProgramCluster {
    /// The description of a kubeconfig's cluster, whose certificate authority is read.
    pub(crate) fn of(cluster: &Cluster, authority: &Authority) -> ProgramCluster {
        let given = |text: &Option<String>| text.clone().filter(|text| !text.is_empty());
        let extension = cluster.extensions.iter().flatten().find(|extension| extension.name == EXTENSION);
        ProgramCluster {
            server: given(&cluster.server),
            tls_server_name: given(&cluster.tls_server_name),
            insecure_skip_tls_verify: cluster.insecure_skip_tls_verify.filter(|skips| *skips),
            certificate_authority_data: match authority {
                Authority::Pem(pem) => Some(ByteString(pem.clone())),
                Authority::System | Authority::Unchecked => None,
            },
            proxy_url: given(&cluster.proxy_url),
            disable_compression: cluster.disable_compression.filter(|disables| *disables),
            config: extension.map(|extension| extension.extension.clone()),
        }
    }
}

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

/// What a program did wrong. The text quotes nothing of its output, which may have a credential.
#[derive(Debug, thiserror::Error)]
pub enum ExecProblem {
    #[error("asks for input, and podfs has no terminal; log in with that program first")]
    NoTerminal,
    #[error("cannot be started: {cause}{}", hint.as_deref().map(|hint| format!("; {}", hint.trim())).unwrap_or_default())]
    Start {
        #[source]
        cause: io::Error,
        /// How to install the program, as the kubeconfig says.
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
pub(crate) async fn issue(program: &CredentialProgram) -> Result<ProgramCredential, ExecError> {
    let command = program.exec.command.as_deref().filter(|command| !command.is_empty()).ok_or(ExecError::NoCommand)?;
    let issued = issue_by(command, program).await;
    issued.map_err(|problem| ExecError::Program { program: command.to_owned(), problem })
}

async fn issue_by(command: &str, program: &CredentialProgram) -> Result<ProgramCredential, ExecProblem> {
    let is_interactive = may_ask(&program.exec)?;
    let limit = if is_interactive { TIMEOUT_OF_PERSON } else { TIMEOUT };
    let output = timeout(limit, run(command, program, is_interactive)).await;
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

async fn run(command: &str, program: &CredentialProgram, is_interactive: bool) -> Result<Vec<u8>, ExecProblem> {
    let CredentialProgram { exec, cluster } = program;
    let version = exec.api_version.as_deref().unwrap_or("client.authentication.k8s.io/v1");
    let mut spec = json!({ "interactive": is_interactive });
    if let Some(cluster) = cluster {
        spec["cluster"] = json!(cluster);
    }
    let wanted = json!({ "apiVersion": version, "kind": "ExecCredential", "spec": spec });
    let mut command = Command::new(command);
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
