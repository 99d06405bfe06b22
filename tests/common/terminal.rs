//! Terminals whose screens tests read.

use std::fs::File;
use std::io::{Read, Write};
use std::os::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd};
use std::os::unix::process::CommandExt;
use std::process::Command;
use std::sync::{Arc, Mutex};
use std::thread;

use super::{TIMEOUT, eventually};

/// Makes a command write its standard error to `output`, whatever else is set for the command.
pub fn with_standard_error(command: &mut Command, output: impl AsFd) {
    let output = output.as_fd().try_clone_to_owned().expect("a descriptor");
    // SAFETY: the call is async-signal-safe, and the descriptor is open as long as `command` exists.
    unsafe {
        command.pre_exec(move || match libc::dup2(output.as_raw_fd(), libc::STDERR_FILENO) {
            -1 => Err(std::io::Error::last_os_error()),
            _ => Ok(()),
        });
    }
}

/// Makes a command write its standard output to this terminal.
pub fn with_standard_output(command: &mut Command, terminal: &Terminal) {
    command.stdout(terminal.inside.try_clone().expect("a descriptor"));
}

/// A terminal, with all that was ever written to it.
pub struct Terminal {
    keyboard: File,
    inside: OwnedFd,
    /// The screen, and all bytes that were written to the terminal.
    shown: Arc<Mutex<(vt100::Parser, Vec<u8>)>>,
}

impl Terminal {
    /// An empty terminal of this size.
    pub fn new(rows: u16, columns: u16) -> Self {
        let (mut outside, mut inside) = (-1, -1);
        let size = libc::winsize { ws_row: rows, ws_col: columns, ws_xpixel: 0, ws_ypixel: 0 };
        let (none, unchanged) = (std::ptr::null_mut(), std::ptr::null_mut());
        // SAFETY: the numbers and the size outlive the call; the pointer for the name is null, which openpty allows.
        let made = unsafe { libc::openpty(&raw mut outside, &raw mut inside, none, unchanged, &raw const size) };
        assert_eq!(made, 0, "{}", std::io::Error::last_os_error());
        // SAFETY: the kernel just made them for this process alone.
        let (mut outside, inside) = unsafe { (File::from_raw_fd(outside), OwnedFd::from_raw_fd(inside)) };
        for end in [outside.as_fd(), inside.as_fd()] {
            // SAFETY: the call takes numbers.
            unsafe { libc::fcntl(end.as_raw_fd(), libc::F_SETFD, libc::FD_CLOEXEC) };
        }
        let keyboard = outside.try_clone().expect("a descriptor");
        let shown = Arc::new(Mutex::new((vt100::Parser::new(rows, columns, 0), Vec::new())));
        let written = Arc::clone(&shown);
        // The thread ends when no process has the terminal open any more.
        thread::spawn(move || {
            let mut bytes = [0; 4096];
            while let Ok(length @ 1..) = outside.read(&mut bytes) {
                let mut shown = written.lock().expect("no panic");
                shown.0.process(&bytes[..length]);
                shown.1.extend_from_slice(&bytes[..length]);
            }
        });
        Self { keyboard, inside, shown }
    }

    /// Makes this the controlling terminal of a command, so that Ctrl-C reaches it.
    pub fn controls(&self, command: &mut Command) {
        with_standard_error(command, &self.inside);
        // SAFETY: the calls are async-signal-safe; standard error is the terminal by now.
        unsafe {
            command.pre_exec(|| {
                match libc::setsid() >= 0 && libc::ioctl(libc::STDERR_FILENO, libc::TIOCSCTTY, 0) == 0 {
                    true => Ok(()),
                    false => Err(std::io::Error::last_os_error()),
                }
            });
        }
    }

    /// As [`Self::controls`], with the terminal also as the standard input of the command, which reads the typed keys.
    pub fn is_read_by(&self, command: &mut Command) {
        command.stdin(self.inside.try_clone().expect("a descriptor"));
        self.controls(command);
    }

    /// Types `keys`.
    pub fn types(&mut self, keys: &[u8]) {
        self.keyboard.write_all(keys).expect("the terminal is there");
    }

    /// The lines of the screen, without empty ones.
    pub fn screen(&self) -> Vec<String> {
        let shown = self.shown.lock().expect("no panic");
        let (_, columns) = shown.0.screen().size();
        let rows = shown.0.screen().rows(0, columns).map(|row| row.trim_end().to_owned());
        rows.filter(|row| !row.is_empty()).collect()
    }

    /// Everything that was written.
    pub fn written(&self) -> String {
        String::from_utf8_lossy(&self.shown.lock().expect("no panic").1).into_owned()
    }

    /// Whether the cursor cannot be seen.
    pub fn hides_cursor(&self) -> bool {
        self.shown.lock().expect("no panic").0.screen().hide_cursor()
    }

    /// Waits until a line of the screen fits, and returns the screen.
    #[track_caller]
    pub fn wait_line(&self, what: &str, fits: impl Fn(&str) -> bool) -> Vec<String> {
        let deadline = std::time::Instant::now() + TIMEOUT;
        loop {
            let screen = self.screen();
            if screen.iter().any(|line| fits(line)) {
                return screen;
            }
            assert!(std::time::Instant::now() < deadline, "never on the screen: {what}\n{}", screen.join("\n"));
            thread::sleep(std::time::Duration::from_millis(2));
        }
    }

    /// Waits until the screen ends with these lines, and returns the screen.
    #[track_caller]
    pub fn wait_end(&self, end: &[&str]) -> Vec<String> {
        let mut screen = Vec::new();
        eventually(&format!("the screen ends with {end:#?}"), || {
            screen = self.screen();
            screen.len() >= end.len() && screen[screen.len() - end.len()..] == *end
        });
        screen
    }

    /// Waits until all lines of the screen fit.
    #[track_caller]
    pub fn wait_all(&self, what: &str, fits: impl Fn(&str) -> bool) {
        eventually(what, || self.screen().iter().all(|line| fits(line)));
    }
}
