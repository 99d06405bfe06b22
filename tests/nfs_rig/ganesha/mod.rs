//! nfs-ganesha from Debian, on ports of 127.0.0.1 and in a temporary directory.
//!
//! It is a complete server, with a cache of duplicate requests, file handles that stay valid after a restart, and a write
//! verifier that changes with a restart. It does not simulate the kernel's NFS server, nor a server across a network: here, no
//! answer is slow or lost. The server never closes an idle connection, even with `RPC_Idle_Timeout_S`; to a client, a
//! connection that the proxy ends looks the same.
//!
//! Many servers can run at once. Each has its own mount namespace with its own `/run`, where the replacement of rpcbind
//! listens. A server is in the network namespace of the thread that starts it.

mod config;

use std::ffi::CString;
use std::fs::{self, File};
use std::io::Error;
use std::net::{Ipv4Addr, SocketAddr, TcpStream};
use std::os::fd::AsRawFd;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::ptr::null;
use std::time::Instant;

use nix::mount::{MntFlags, MsFlags, mount, umount2};
use nix::sys::signal::{Signal, kill};
use nix::sys::wait::{WaitPidFlag, WaitStatus, waitpid};
use nix::unistd::Pid;
use tempfile::TempDir;

use super::libnfs::Libnfs;
use super::ports::Port;
use super::rpcbind::Rpcbind;
use super::{TIMEOUT, children};

use config::Place;
pub use config::{Access, Export, Setup, Squash, Storage};

const PROGRAM: &str = "/usr/bin/ganesha.nfsd";

/// The number of lines of the log that a failure shows.
const TAIL: usize = 40;

/// A server. Dropping it kills it and removes its files.
pub struct Ganesha {
    child: Option<Child>,
    /// The stopped processes of the server from before [`Self::move_to`].
    old_children: Vec<Child>,
    host: Ipv4Addr,
    setup: Setup,
    nfs: Port,
    mount: Port,
    /// The number of starts, which the server uses as its write verifier. Ganesha's default, the time in seconds, would be the
    /// same after a quick restart.
    starts: u32,
    /// The number of times that the exports have got new numbers.
    moves: u16,
    _rpcbind: Rpcbind,
    directory: TempDir,
}

impl Ganesha {
    /// A server with one export, `/export`.
    #[track_caller]
    pub fn start() -> Self {
        Self::with(Setup::default())
    }

    #[track_caller]
    pub fn with(setup: Setup) -> Self {
        let directory = TempDir::with_prefix("podfs-test-").expect("a directory");
        for name in ["run", "recovery"] {
            fs::create_dir(directory.path().join(name)).expect("a directory");
        }
        let rpcbind = Rpcbind::start(&directory.path().join("run"));
        let (nfs, mount) = (Port::reserve(), Port::reserve());
        let (child, old_children, host) = (None, Vec::new(), Ipv4Addr::LOCALHOST);
        let mut server =
            Self { child, old_children, host, setup, nfs, mount, starts: 0, moves: 0, _rpcbind: rpcbind, directory };
        let exports = &server.setup.exports;
        exports.iter().for_each(|export| create_directory(export, &export.directory(server.directory.path())));
        server.restart();
        server
    }

    /// The address of the NFS service.
    pub fn address(&self) -> SocketAddr {
        (self.host, self.nfs.address().port()).into()
    }

    /// The address of the MOUNT service.
    pub fn mount_address(&self) -> SocketAddr {
        (self.host, self.mount.address().port()).into()
    }

    /// The local directory of the first export.
    pub fn exported(&self) -> PathBuf {
        self.directory_of(&self.setup.exports[0].name)
    }

    /// The local directory of an export.
    pub fn directory_of(&self, name: &str) -> PathBuf {
        let export = self.setup.exports.iter().find(|export| export.name == name).expect("an export of this name");
        export.directory(self.directory.path())
    }

    /// The first export, for the programs of libnfs.
    pub fn libnfs(&self) -> Libnfs {
        let export = self.setup.exports[0].name.clone();
        Libnfs { nfs: self.address(), mount: self.mount_address(), export }
    }

    pub fn pid(&self) -> Pid {
        let child = self.child.as_ref().expect("the server runs");
        Pid::from_raw(i32::try_from(child.id()).expect("a pid"))
    }

    /// Kills the server, as a crash does.
    pub fn kill(&mut self) {
        if let Some(mut child) = self.child.take() {
            let _ = child.kill();
            let _ = child.wait();
        }
    }

    /// Sends SIGTERM to the server, and waits until it has ended.
    #[track_caller]
    pub fn terminate(&mut self) -> ExitStatus {
        kill(self.pid(), Signal::SIGTERM).expect("the server is there");
        self.child.take().expect("the server runs").wait().expect("the server ends")
    }

    /// Starts the server again with the same addresses and files. Kills the server before if it still runs.
    #[track_caller]
    pub fn restart(&mut self) {
        self.kill();
        let place = Place {
            directory: self.directory.path(),
            host: self.host,
            nfs_port: self.nfs.address().port(),
            mount_port: self.mount.address().port(),
            first_export: 1 + 100 * self.moves,
        };
        fs::write(self.path("ganesha.conf"), self.setup.config(&place)).expect("written");
        self.starts += 1;
        self.child = Some(children::start(self.command()).unwrap_or_else(|error| panic!("{PROGRAM}: {error}")));
        self.wait_ready();
    }

    /// Starts the server again with other settings. New exports get an empty directory.
    #[track_caller]
    pub fn restart_with(&mut self, change: impl FnOnce(&mut Setup)) {
        self.kill();
        change(&mut self.setup);
        let directory = self.directory.path();
        let missing = self.setup.exports.iter().filter(|export| !export.directory(directory).exists());
        missing.for_each(|export| create_directory(export, &export.directory(directory)));
        self.restart();
    }

    /// Starts the server again as if on another machine: the files are the same, but all earlier handles are stale.
    #[track_caller]
    pub fn restart_elsewhere(&mut self) {
        self.moves += 1;
        self.restart();
    }

    /// Simulates a move to another machine: starts the server at another local address, with other handles. If the server still
    /// runs at the old address, this stops its process there, so that it does not answer.
    #[track_caller]
    pub fn move_to(&mut self, host: Ipv4Addr) {
        if self.child.is_some() {
            self.stop();
            self.old_children.extend(self.child.take());
        }
        self.host = host;
        self.restart_elsewhere();
    }

    /// Gives the services other ports from the next start on.
    pub fn change_ports(&mut self) {
        (self.nfs, self.mount) = (Port::reserve(), Port::reserve());
    }

    /// Stops the server's process (SIGSTOP): the kernel still accepts connections and data, but the server does not answer.
    pub fn stop(&self) {
        kill(self.pid(), Signal::SIGSTOP).expect("the server is there");
        let state = waitpid(self.pid(), Some(WaitPidFlag::WUNTRACED)).expect("our child");
        assert!(matches!(state, WaitStatus::Stopped(..)), "{state:?}");
    }

    /// Continues the server's process after [`Self::stop`].
    pub fn cont(&self) {
        kill(self.pid(), Signal::SIGCONT).expect("the server is there");
    }

    /// The server's log since its first start.
    pub fn log(&self) -> String {
        let read = |name: &str| fs::read(self.path(name)).unwrap_or_default();
        String::from_utf8_lossy(&[read("output"), read("log")].concat()).into_owned()
    }

    fn path(&self, name: &str) -> PathBuf {
        self.directory.path().join(name)
    }

    fn command(&self) -> Command {
        let mut command = Command::new(PROGRAM);
        // An old process of the server (see `old_children`) still has a lock on its own PID file.
        let pid = format!("pid-{}", self.starts);
        let files = [("-f", "ganesha.conf"), ("-L", "log"), ("-p", &pid)];
        command.arg("-F").args(files.iter().flat_map(|(flag, name)| [Path::new(flag).to_owned(), self.path(name)]));
        command.arg("-E").arg(self.starts.to_string());
        let output = File::options().create(true).append(true).open(self.path("output")).expect("a file");
        command.stdin(Stdio::null()).stdout(output.try_clone().expect("a descriptor")).stderr(output);
        let (run, descriptors) = (c_string(&self.path("run")), self.setup.descriptors);
        // The thread that starts all children may be in another network namespace than this thread.
        let network = File::open("/proc/thread-self/ns/net").expect("a network namespace");
        // SAFETY: all calls are async-signal-safe and allocate nothing.
        unsafe {
            command.pre_exec(move || {
                enter_network(&network)?;
                mount_at_run(&run)?;
                descriptors.map_or(Ok(()), limit_descriptors)
            });
        }
        command
    }

    #[track_caller]
    fn wait_ready(&mut self) {
        let deadline = Instant::now() + TIMEOUT;
        let mut addresses = vec![self.address()];
        if self.setup.protocols.contains('3') {
            addresses.push(self.mount_address());
        }
        while !addresses.iter().all(|address| TcpStream::connect(address).is_ok()) {
            let status = self.child.as_mut().expect("the server was started").try_wait().expect("our child");
            assert!(status.is_none(), "the server ended at once: {status:?}\n{}", self.log());
            assert!(Instant::now() < deadline, "the server is not ready:\n{}", self.log());
            std::thread::sleep(std::time::Duration::from_millis(2));
        }
    }
}

impl Drop for Ganesha {
    fn drop(&mut self) {
        self.kill();
        for mut child in self.old_children.drain(..) {
            let _ = child.kill();
            let _ = child.wait();
        }
        for export in &self.setup.exports {
            let _ = umount2(&export.directory(self.directory.path()), MntFlags::MNT_DETACH);
        }
        if std::thread::panicking() {
            let log = self.log();
            let lines: Vec<_> = log.lines().collect();
            eprintln!("the end of ganesha's log:\n{}", lines[lines.len().saturating_sub(TAIL)..].join("\n"));
        }
    }
}

/// Creates the directory of an export, writable for all users.
fn create_directory(export: &Export, directory: &Path) {
    use std::os::unix::fs::PermissionsExt;
    fs::create_dir_all(directory).expect("a directory");
    if let Storage::Tmpfs(options) = export.storage {
        mount(Some("tmpfs"), directory, Some("tmpfs"), MsFlags::empty(), Some(options)).expect("a tmpfs");
    }
    fs::set_permissions(directory, fs::Permissions::from_mode(0o777)).expect("the mode is set");
}

/// Moves the process to another network namespace. Called in a child before exec.
fn enter_network(network: &File) -> Result<(), Error> {
    // SAFETY: the descriptor is open, and the child has one thread.
    match unsafe { libc::setns(network.as_raw_fd(), libc::CLONE_NEWNET) } {
        0 => Ok(()),
        _ => Err(Error::last_os_error()),
    }
}

/// Mounts a directory at `/run`, in a new mount namespace. Called in a child before exec.
fn mount_at_run(directory: &CString) -> Result<(), Error> {
    let mount = |source: *const libc::c_char, target: &std::ffi::CStr, flags| {
        // SAFETY: the strings end with a NUL, and there is neither a type nor data.
        match unsafe { libc::mount(source, target.as_ptr(), null(), flags, null()) } {
            0 => Ok(()),
            _ => Err(Error::last_os_error()),
        }
    };
    // SAFETY: the child has one thread; the call changes nothing in its memory.
    if unsafe { libc::unshare(libc::CLONE_NEWNS) } == -1 {
        return Err(Error::last_os_error());
    }
    mount(null(), c"/", libc::MS_REC | libc::MS_PRIVATE)?;
    mount(directory.as_ptr(), c"/run", libc::MS_BIND)
}

/// Sets the limit of open files. Called in a child before exec.
fn limit_descriptors(most: u64) -> Result<(), Error> {
    let limit = libc::rlimit { rlim_cur: most, rlim_max: most };
    // SAFETY: the limit lives until the call returns.
    match unsafe { libc::setrlimit(libc::RLIMIT_NOFILE, &raw const limit) } {
        0 => Ok(()),
        _ => Err(Error::last_os_error()),
    }
}

fn c_string(path: &Path) -> CString {
    CString::new(path.as_os_str().as_bytes()).expect("a path without NUL")
}
