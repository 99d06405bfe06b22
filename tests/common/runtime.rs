//! Containers of runc and crun, on a root file system that has only busybox.

use std::fs;
use std::io::{BufRead, BufReader, Write};
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};

use nix::mount::{MsFlags, mount};
use serde_json::{Value, json};
use tempfile::TempDir;

use super::idmap::FIRST_ID;

/// The path of Debian's busybox-static, which needs no library.
const BUSYBOX: &str = "/bin/busybox";
/// The programs that scripts of tests call.
const PROGRAMS: [&str; 10] = ["cat", "echo", "ln", "ls", "mkdir", "mv", "rm", "rmdir", "sh", "sleep"];
/// crun refuses hosts that have cgroups of version 2 beside version 1. So crun runs in a mount namespace without them.
const WITHOUT_UNIFIED: &str = "umount /sys/fs/cgroup/unified 2>/dev/null; exec crun \"$@\"";

/// A program that starts containers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Runtime {
    Runc,
    Crun,
}

impl Runtime {
    pub const ALL: [Runtime; 2] = [Runtime::Runc, Runtime::Crun];

    fn command(self, state: &Path) -> Command {
        let mut command = match self {
            Runtime::Runc => Command::new("runc"),
            Runtime::Crun => {
                let mut command = Command::new("unshare");
                // Later mounts of the host still have to reach containers.
                command.args(["--mount", "--propagation", "slave", "sh", "-c", WITHOUT_UNIFIED, "crun"]);
                command.arg("--cgroup-manager=disabled");
                command
            }
        };
        command.arg("--root").arg(state);
        command
    }
}

/// A container that runs a shell. It ends when this is dropped.
pub struct RuntimeContainer {
    runtime: Runtime,
    directory: TempDir,
    name: String,
    child: Child,
    input: Option<ChildStdin>,
    output: BufReader<ChildStdout>,
}

impl RuntimeContainer {
    /// Starts a shell with these entries of `mounts` in the container's `config.json`.
    #[track_caller]
    pub fn start(runtime: Runtime, mounts: &[Value]) -> RuntimeContainer {
        Self::of_config(runtime, &config(mounts))
    }

    /// As [`Self::start`]. Mounts that the container makes below `rshared` mounts appear on the host, too.
    #[track_caller]
    pub fn start_sharing(runtime: Runtime, mounts: &[Value]) -> RuntimeContainer {
        let mut config = config(mounts);
        config["linux"]["rootfsPropagation"] = "rshared".into();
        Self::of_config(runtime, &config)
    }

    /// As [`Self::start`], in a user namespace of its own whose ids begin at [`FIRST_ID`] of the host.
    #[track_caller]
    pub fn start_in_user_namespace(runtime: Runtime, mounts: &[Value]) -> RuntimeContainer {
        let mut config = config(mounts);
        let ids = json!([{"containerID": 0, "hostID": FIRST_ID, "size": 1 << 16}]);
        config["linux"]["uidMappings"] = ids.clone();
        config["linux"]["gidMappings"] = ids;
        config["linux"]["namespaces"].as_array_mut().expect("a list").push(json!({"type": "user"}));
        Self::of_config(runtime, &config)
    }

    #[track_caller]
    fn of_config(runtime: Runtime, config: &Value) -> RuntimeContainer {
        let directory = TempDir::with_prefix("podfs-test-").expect("a directory");
        // The ids of a container with a user namespace may enter the directory, too.
        fs::set_permissions(directory.path(), fs::Permissions::from_mode(0o755)).expect("a mode");
        let root = directory.path().join("rootfs");
        make_root(&root);
        if let Some(first) = config["linux"]["uidMappings"][0]["hostID"].as_u64() {
            let status = Command::new("chown").arg("--recursive").arg(format!("{first}:{first}")).arg(&root).status();
            assert!(status.expect("chown").success());
        }
        let config = serde_json::to_vec(config).expect("JSON");
        fs::write(directory.path().join("config.json"), config).expect("written");
        let name = directory.path().file_name().expect("a name").to_str().expect("text").to_owned();
        let mut command = runtime.command(&directory.path().join("state"));
        command.arg("run").arg("--bundle").arg(directory.path()).arg(&name);
        let mut child =
            command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().expect("runc and crun are installed");
        let (input, output) = (child.stdin.take(), BufReader::new(child.stdout.take().expect("a pipe")));
        let mut container = RuntimeContainer { runtime, directory, name, child, input, output };
        assert_eq!(container.says("echo started"), "started", "{runtime:?} does not start a container");
        container
    }

    /// The standard output and error of a command in the container, without the newline at the end.
    #[track_caller]
    pub fn says(&mut self, command: &str) -> String {
        const END: &str = "--- the command has ended ---";
        let input = self.input.as_mut().expect("it is open until the end");
        writeln!(input, "{{ {command} ; }} 2>&1 </dev/null; echo; echo '{END}'").expect("the shell lives");
        let mut output = String::new();
        loop {
            let mut line = String::new();
            assert!(self.output.read_line(&mut line).expect("a line") > 0, "the container has ended: {output}");
            if line.trim_end() == END {
                return output.trim_end_matches('\n').to_owned();
            }
            output += &line;
        }
    }

    /// The first process of the container, with its id in the pid namespace of the test.
    #[track_caller]
    pub fn pid(&self) -> u32 {
        let mut state = self.runtime.command(&self.directory.path().join("state"));
        let output = state.args(["state", &self.name]).output().expect("the runtime starts");
        let state: Value = serde_json::from_slice(&output.stdout).expect("JSON");
        state["pid"].as_u64().and_then(|pid| u32::try_from(pid).ok()).expect("a process")
    }

    /// Starts a command in the container, and does not wait for its end.
    #[track_caller]
    pub fn begin(&mut self, command: &str) {
        let input = self.input.as_mut().expect("it is open until the end");
        writeln!(input, "{{ {command} ; }} >/dev/null 2>&1 </dev/null &").expect("the shell lives");
    }
}

impl Drop for RuntimeContainer {
    fn drop(&mut self) {
        let mut delete = self.runtime.command(&self.directory.path().join("state"));
        let deleted =
            delete.args(["delete", "--force", &self.name]).stdout(Stdio::null()).stderr(Stdio::null()).status();
        drop(self.input.take());
        if !deleted.is_ok_and(|status| status.success()) {
            let _ = self.child.kill();
        }
        let _ = self.child.wait();
    }
}

fn make_root(root: &Path) {
    for directory in ["bin", "dev", "etc", "proc", "tmp"] {
        fs::create_dir_all(root.join(directory)).expect("a directory");
    }
    fs::copy(BUSYBOX, root.join("bin/busybox")).expect("busybox-static is installed");
    for program in PROGRAMS {
        symlink("busybox", root.join("bin").join(program)).expect("a link");
    }
}

fn config(more: &[Value]) -> Value {
    let capabilities = json!(["CAP_DAC_OVERRIDE", "CAP_CHOWN", "CAP_FOWNER", "CAP_KILL"]);
    let own = [
        json!({"destination": "/proc", "type": "proc", "source": "proc"}),
        json!({"destination": "/dev", "type": "tmpfs", "source": "tmpfs", "options": ["nosuid", "mode=755"]}),
    ];
    let mounts = [&own[..], more].concat();
    json!({
        "ociVersion": "1.0.2",
        "process": {
            "user": {"uid": 0, "gid": 0},
            "args": ["/bin/sh"],
            "env": ["PATH=/bin"],
            "cwd": "/",
            "capabilities": {"bounding": capabilities, "effective": capabilities, "permitted": capabilities},
        },
        "root": {"path": "rootfs"},
        "mounts": mounts,
        // containerd sets `rootfsPropagation` when a mount is `rslave`. Without it, crun makes all mounts private
        // first.
        "linux": {"rootfsPropagation": "rslave", "namespaces": [{"type": "pid"}, {"type": "ipc"}, {"type": "uts"}, {"type": "mount"}]},
    })
}

/// A directory that propagates mounts below it to other mount namespaces, like the root directory of a node.
pub struct SharedDirectory(TempDir);

impl SharedDirectory {
    pub fn new() -> SharedDirectory {
        let directory = TempDir::with_prefix("podfs-test-").expect("a directory");
        let path = directory.path();
        mount(Some(path), path, None::<&str>, MsFlags::MS_BIND, None::<&str>).expect("a bind mount");
        mount(None::<&str>, path, None::<&str>, MsFlags::MS_SHARED, None::<&str>).expect("a shared mount");
        SharedDirectory(directory)
    }

    pub fn path(&self) -> PathBuf {
        self.0.path().to_owned()
    }
}

impl Drop for SharedDirectory {
    fn drop(&mut self) {
        super::unmount_below(self.0.path());
    }
}
