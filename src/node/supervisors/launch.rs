//! Starts the supervisor of a pod, so that it continues when the daemon ends or is killed.
//!
//! 1. Where systemd runs, the supervisor is a transient unit, `podfs-pod-UID.service`, with the settings of the packaged unit
//!    `podfs@.service`: systemd starts it again when it dies, also while there is no daemon.
//! 2. Elsewhere it is a child of the daemon, in a session of its own and, where possible, a cgroup of its own.
//!
//! A daemon that has left its container ([`on_host`]) starts no supervisor in the container: a child gets the node's namespaces,
//! and a cgroup that the kubelet does not kill.
//!
//! In both cases the lock in the pod's run directory shows that the pod has its supervisor, whichever process started it.

use std::ffi::{OsStr, OsString};
use std::fs::File;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use tracing::debug;

use crate::manifest::pod::PodUid;
use crate::node::on_host;
use crate::supervisor::installed::{SUPERVISOR, last_installed};
use crate::supervisor::run_dir::cgroup;
use crate::supervisor::server::spawn::{ProcessKind, Start};

/// The unit with the settings of supervisors.
const UNIT: &str = include_str!("../../../packaging/systemd/podfs@.service");
/// The directory that exists where systemd is the service manager (`sd_booted(3)`).
const BOOTED: &str = "/run/systemd/system";
/// Settings of the unit that `systemd-run` gets as options, or that only a file can have.
const NOT_TRANSIENT: [&str; 4] = ["Type", "ExecStart", "EnvironmentFile", "Slice"];

/// Starts supervisors.
#[derive(Clone, Debug)]
pub(super) struct Launcher {
    program: PathBuf,
    podfs: PathBuf,
    arguments: Vec<OsString>,
    run_directory: PathBuf,
    is_systemd: bool,
}

/// A supervisor that was launched.
#[derive(Clone, Copy, Debug)]
pub(super) enum LaunchedSupervisor {
    /// A child of the daemon, with this pid.
    Child(i32),
    /// A unit. Its pid is known when it listens.
    Unit,
}

/// Why systemd or the kernel cannot start or stop a supervisor.
#[derive(Debug, thiserror::Error)]
pub enum LaunchError {
    /// The supervisor would be in the namespaces of the daemon's container.
    #[error("cannot move the supervisor out of the container: {0}")]
    Namespaces(#[source] io::Error),
    /// The supervisor would be in the cgroup of the daemon's container.
    #[error("the supervisor would end with the container, and podfs can make no cgroup outside of it: {0}")]
    Cgroup(#[source] io::Error),
    /// The program cannot be executed.
    #[error("cannot start {}: {cause}", .program.display())]
    Program {
        /// The program.
        program: PathBuf,
        /// The error of the system call.
        #[source]
        cause: io::Error,
    },
    /// systemd does not start the unit.
    #[error("systemd-run does not start the unit {unit}: {complaint}")]
    Unit {
        /// The unit.
        unit: String,
        /// The output of systemd-run.
        complaint: String,
    },
    /// systemd does not stop the unit.
    #[error("systemctl does not stop the unit {unit}: {complaint}")]
    Stop {
        /// The unit.
        unit: String,
        /// The output of systemctl.
        complaint: String,
    },
}

impl Launcher {
    /// For each pod, starts `program` with these arguments, and with the pod's manifest and uid. The reload command of a unit
    /// executes `podfs`.
    pub(super) fn new(program: PathBuf, podfs: PathBuf, arguments: Vec<OsString>, run_directory: PathBuf) -> Launcher {
        let is_systemd = Path::new(BOOTED).is_dir();
        if !is_systemd && on_host::has_left_container() {
            cgroup::warn_of_version_1();
        }
        Launcher { program, podfs, arguments, run_directory, is_systemd }
    }

    /// Starts the supervisor of a pod.
    ///
    /// # Errors
    /// When the process cannot be started.
    pub(super) fn launch(&self, uid: &PodUid, manifest: &Path) -> Result<LaunchedSupervisor, LaunchError> {
        if self.is_systemd {
            return self.launch_unit(uid, manifest).map(|()| LaunchedSupervisor::Unit);
        }
        let (cgroup, namespaces) = match (cgroup::of_supervisor(uid), on_host::has_left_container()) {
            (Ok(cgroup), true) => (Some(cgroup), on_host::namespaces_of_node().map_err(LaunchError::Namespaces)?),
            (Err(error), true) => return Err(LaunchError::Cgroup(error)),
            (Ok(cgroup), false) => (Some(cgroup), Vec::new()),
            (Err(error), false) => {
                debug!("the supervisor of pod {uid} has no cgroup of its own: {error}");
                (None, Vec::new())
            }
        };
        let words =
            [OsStr::new(SUPERVISOR)].into_iter().map(OsStr::to_owned).chain(self.program_arguments(uid, manifest));
        let words: Vec<OsString> = words.collect();
        let arguments: Vec<&OsStr> = words.iter().map(OsString::as_os_str).collect();
        let start = |input: OwnedFd| {
            let cgroup = cgroup.as_ref().map(AsFd::as_fd);
            let namespaces = &namespaces;
            Start {
                program: &self.program,
                arguments: &arguments,
                input,
                cgroup,
                namespaces,
                role: ProcessKind::Supervisor,
            }
            .spawn()
        };
        let started = File::open("/dev/null").map(OwnedFd::from).and_then(start);
        started
            .map(LaunchedSupervisor::Child)
            .map_err(|cause| LaunchError::Program { program: self.program.clone(), cause })
    }

    /// The arguments of the program.
    fn program_arguments(&self, uid: &PodUid, manifest: &Path) -> Vec<OsString> {
        let fixed = ["--uid", uid.as_str(), "--pod"].map(OsString::from);
        fixed.into_iter().chain([manifest.as_os_str().to_owned()]).chain(self.arguments.iter().cloned()).collect()
    }

    fn launch_unit(&self, uid: &PodUid, manifest: &Path) -> Result<(), LaunchError> {
        let mut command = Command::new("systemd-run");
        command.args(["--quiet", "--no-block", "--collect", "--service-type=notify", "--slice=podfs.slice"]);
        command.arg(format!("--unit={}", unit_name(uid)));
        command.args(self.properties(uid).iter().map(|property| format!("--property={property}")));
        // After a crash, systemd starts the version that was installed last, which may have replaced this one by an upgrade.
        command.arg("--").arg(last_installed(self.program.clone())).args(self.program_arguments(uid, manifest));
        match complaint(command.output()) {
            // After a crash, systemd waits a second before it starts the unit again.
            Some(complaint) if complaint.contains("already loaded") || complaint.contains("already exists") => Ok(()),
            Some(complaint) => Err(LaunchError::Unit { unit: unit_name(uid), complaint }),
            None => Ok(()),
        }
    }

    /// The settings of the packaged unit, for this pod.
    fn properties(&self, uid: &PodUid) -> Vec<String> {
        let podfs = last_installed(self.podfs.clone()).display().to_string();
        let mut properties: Vec<(String, String)> = Vec::new();
        for (section, key, value) in settings(UNIT) {
            if section == "Install" || NOT_TRANSIENT.contains(&key.as_str()) || key == "Documentation" {
                continue;
            }
            let mut value = value.replace("%i", uid.as_str()).replace("/usr/bin/podfs", &podfs);
            if key == "ExecReload" {
                value.push_str(&format!(" --run-dir {}", quoted(&self.run_directory)));
            }
            // A file may set a key twice, which adds the values; of properties that are set twice, the last one counts.
            match properties.iter_mut().find(|(other, _)| *other == key && key == "CapabilityBoundingSet") {
                Some((_, all)) => all.extend([" ", &value]),
                None => properties.push((key, value)),
            }
        }
        properties.into_iter().map(|(key, value)| format!("{key}={value}")).collect()
    }
}

/// Makes systemd stop the unit of a process, if it is the unit of the pod's supervisor. Returns whether it is.
///
/// # Errors
/// When systemd refuses.
pub(super) fn stop_unit(uid: &PodUid, pid: u32) -> Result<bool, LaunchError> {
    let unit = unit_name(uid);
    let groups = std::fs::read_to_string(format!("/proc/{pid}/cgroup")).unwrap_or_default();
    if !groups.lines().any(|line| line.split('/').any(|part| part == unit)) {
        return Ok(false);
    }
    match complaint(Command::new("systemctl").args(["stop", "--no-block", &unit]).output()) {
        Some(complaint) => Err(LaunchError::Stop { unit, complaint }),
        None => Ok(true),
    }
}

fn unit_name(uid: &PodUid) -> String {
    format!("podfs-pod-{uid}.service")
}

/// A path as a word of a command line of a unit (`systemd.service(5)`).
fn quoted(path: &Path) -> String {
    let escaped = path.display().to_string().replace('\\', r"\\").replace('"', r#"\""#).replace('$', "$$");
    format!("\"{escaped}\"")
}

/// The output of a program that failed.
fn complaint(output: io::Result<Output>) -> Option<String> {
    match output {
        Ok(output) if output.status.success() => None,
        Ok(output) => Some(String::from_utf8_lossy(&output.stderr).trim().to_owned()),
        Err(error) => Some(error.to_string()),
    }
}

/// The settings of a unit file: section, key and value, in their order (`systemd.syntax(7)`).
fn settings(unit: &str) -> Vec<(String, String, String)> {
    let joined = unit.replace("\\\n", " ");
    let mut section = String::new();
    let mut settings = Vec::new();
    for line in joined.lines().map(str::trim) {
        if let Some(name) = line.strip_prefix('[').and_then(|line| line.strip_suffix(']')) {
            section = name.to_owned();
        } else if !line.starts_with('#')
            && let Some((key, value)) = line.split_once('=')
        {
            settings.push((section.clone(), key.to_owned(), value.to_owned()));
        }
    }
    settings
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_transient_unit_has_the_settings_of_the_packaged_one() {
        let launcher =
            Launcher::new("/opt/podfs-supervisor".into(), "/opt/podfs".into(), Vec::new(), r#"/run/my "pods"$"#.into());
        let uid = PodUid::parse("u1").expect("a uid");
        let properties = launcher.properties(&uid);
        for expected in [
            "KillMode=process",
            "Restart=always",
            "RestartKillSignal=SIGUSR1",
            "Delegate=memory",
            "OOMScoreAdjust=-999",
            r#"ExecReload=/opt/podfs upgrade --pod u1 --run-dir "/run/my \"pods\"$$""#,
            "LogExtraFields=POD_UID=u1",
        ] {
            assert!(properties.iter().any(|property| property == expected), "{expected} in {properties:#?}");
        }
        let capabilities: Vec<_> =
            properties.iter().filter(|property| property.starts_with("CapabilityBoundingSet=")).collect();
        assert!(
            matches!(&capabilities[..], [all] if all.contains("CAP_SYS_ADMIN") && all.contains("CAP_NET_BIND_SERVICE"))
        );
        assert_eq!(properties.iter().filter(|property| property.starts_with("DeviceAllow=")).count(), 5);
        assert!(!properties.iter().any(|property| property.contains("%i") || property.starts_with("ExecStart=")));
    }
}
