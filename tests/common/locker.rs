//! Processes that take file locks as a test orders (`tests/peers/locker.py` has the orders).

use std::fs;
use std::io::{BufRead, BufReader, Write};
use std::path::Path;
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::mpsc::{Receiver, TryRecvError, channel};
use std::thread;

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use super::{TIMEOUT, eventually};

/// A process that opens files and takes locks. Dropping this kills the process.
pub struct Locker {
    child: Child,
    orders: ChildStdin,
    answers: Receiver<String>,
}

impl Locker {
    /// A process that has this file open. Orders call the file `f`.
    pub fn with(file: &Path) -> Self {
        let mut locker = Self::new();
        locker.does(&format!("open f {}", file.display()));
        locker
    }

    pub fn new() -> Self {
        let program = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/peers/locker.py");
        let mut child = Command::new("python3")
            .args(["-I", "-S"])
            .arg(program)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .expect("python starts");
        let orders = child.stdin.take().expect("a pipe");
        let output = BufReader::new(child.stdout.take().expect("a pipe"));
        let (answer, answers) = channel();
        thread::spawn(move || output.lines().map_while(Result::ok).try_for_each(|line| answer.send(line)));
        Self { child, orders, answers }
    }

    /// Gives an order.
    pub fn order(&mut self, order: &str) {
        writeln!(self.orders, "{order}").expect("it listens");
    }

    /// The result of the last order.
    #[track_caller]
    pub fn answer(&mut self) -> String {
        self.answers.recv_timeout(TIMEOUT).unwrap_or_else(|reason| panic!("no answer: {reason}"))
    }

    #[track_caller]
    pub fn ask(&mut self, order: &str) -> String {
        self.order(order);
        self.answer()
    }

    /// Gives an order, and fails the test if it does not succeed.
    #[track_caller]
    pub fn does(&mut self, order: &str) {
        assert_eq!(self.ask(order), "ok", "{order}");
    }

    /// Gives an order for a lock, and fails the test unless the lock conflicts with that of another process.
    #[track_caller]
    pub fn is_refused(&mut self, order: &str) {
        assert_eq!(self.ask(order), "EAGAIN", "{order}");
    }

    /// Gives an order, and waits until its system call hangs in the kernel (`proc_pid_syscall(5)`).
    #[track_caller]
    pub fn waits_in(&mut self, order: &str) {
        self.order(order);
        let calls = [libc::SYS_fcntl, libc::SYS_flock].map(|call| call.to_string());
        eventually(&format!("it waits in {order:?}"), || {
            let call = fs::read_to_string(format!("/proc/{}/syscall", self.child.id())).expect("a process");
            call.split(' ').next().is_some_and(|number| calls.iter().any(|call| call == number))
        });
        assert_eq!(self.answers.try_recv(), Err(TryRecvError::Empty), "{order}");
    }

    pub fn signal(&self, signal: Signal) {
        kill(self.pid(), signal).expect("it is there");
    }

    /// Kills the process with SIGKILL, and waits until the kernel has closed its files.
    #[track_caller]
    pub fn dies(mut self) {
        self.signal(Signal::SIGKILL);
        eventually("a killed process is gone", || self.child.try_wait().expect("a child").is_some());
    }

    fn pid(&self) -> Pid {
        Pid::from_raw(i32::try_from(self.child.id()).expect("a pid"))
    }
}

impl Drop for Locker {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
