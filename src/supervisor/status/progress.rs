//! The progress of volumes until all are mounted, on a terminal: a few lines below the log, which podfs updates in
//! place.
//!
//! These lines and the log are both on standard error, so this module writes both. For each log line, it removes these
//! lines, and draws them again below the log line. podfs does not hide the cursor and changes no mode of the terminal,
//! so nothing has to be restored, however podfs ends.

use std::io::{self, Write};
use std::sync::{Mutex, MutexGuard};

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle, TermLike};
use podfs_fuse::log;
use podfs_fuse::printable::printable_line;

use crate::manifest::pod::PodIdentity;

/// Most waiting volumes that the lines name.
const MOST_ROWS: usize = 8;
/// The columns and rows of a terminal that does not report its size.
const USUAL_SIZE: (usize, usize) = (80, 24);

/// The lines that the terminal shows now.
static SHOWN: Mutex<Option<ProgressBar>> = Mutex::new(None);

/// The progress of the volumes.
pub(in crate::supervisor) struct VolumeProgress<'a> {
    /// The pod of the volumes; `None` for `podfs mount`.
    pub(in crate::supervisor) pod: Option<&'a PodIdentity>,
    /// How many volumes there are.
    pub(in crate::supervisor) expected: usize,
    /// The names of the volumes that are mounted.
    pub(in crate::supervisor) up: Vec<&'a str>,
    /// The names of the volumes that wait, each with the reason.
    pub(in crate::supervisor) waiting: Vec<(&'a str, &'a str)>,
}

/// The progress lines of one pod. Dropping this removes them from the terminal.
pub(in crate::supervisor) struct StandardErrorLines {
    wanted: bool,
    lines: Vec<String>,
}

impl StandardErrorLines {
    /// No lines yet. There are never any if they are not `wanted`, or if standard error is no terminal that can show
    /// them.
    pub(in crate::supervisor) fn new(wanted: bool) -> Self {
        Self { wanted: wanted && can_be_drawn_on(), lines: Vec::new() }
    }

    /// Whether a terminal shows the lines.
    pub(in crate::supervisor) fn is_wanted(&self) -> bool {
        self.wanted
    }

    /// Replaces the lines.
    pub(in crate::supervisor) fn show(&mut self, upcoming: &VolumeProgress<'_>) {
        let lines = upcoming.lines(size_of_terminal());
        if !self.wanted || lines == self.lines {
            return;
        }
        self.lines = lines;
        let mut shown = shown();
        let bar = shown.get_or_insert_with(|| {
            let bar =
                ProgressBar::with_draw_target(None, ProgressDrawTarget::term_like(Box::<TerminalOutput>::default()));
            bar.with_style(ProgressStyle::with_template("{msg}").expect("the template is one"))
        });
        bar.set_message(self.lines.join("\n"));
    }

    /// Removes the lines from the terminal.
    pub(in crate::supervisor) fn clear(&mut self) {
        self.lines.clear();
        if self.wanted
            && let Some(bar) = shown().take()
        {
            bar.finish_and_clear();
        }
    }
}

impl Drop for StandardErrorLines {
    fn drop(&mut self) {
        self.clear();
    }
}

impl VolumeProgress<'_> {
    /// A headline, and a line for each volume that waits, as far as there is room.
    fn lines(&self, (width, height): (usize, usize)) -> Vec<String> {
        let Self { pod, expected, up, waiting } = self;
        let of_pod = pod.map_or(String::new(), |pod| format!(" of pod {pod}"));
        let mut headline = format!("podfs: {} of {expected} volumes{of_pod} are up", up.len());
        if !up.is_empty() {
            headline += &format!(": {}", up.join(", "));
        }
        let room = MOST_ROWS.min(height.saturating_sub(3));
        let longest = waiting.iter().take(room).map(|(name, _)| name.len()).max().unwrap_or_default();
        let rows = waiting.iter().take(room).map(|(name, reason)| format!("  {name:<longest$}  waits: {reason}"));
        let unnamed = waiting.len().saturating_sub(room);
        let unnamed = (unnamed > 0 && room > 0).then(|| format!("  … and {unnamed} more wait"));
        std::iter::once(headline).chain(rows).chain(unnamed).map(|line| fitted(&line, width)).collect()
    }
}

/// The part of a line that fits into the width of the terminal, without characters that would move the cursor.
fn fitted(line: &str, width: usize) -> String {
    // Most line ends are those of longer messages.
    let line = line.replace(['\n', '\t'], " ");
    let shown: Vec<_> = printable_line(&line).chars().collect();
    // Terminals differ in whether a character in the last column moves the cursor to the next line, so podfs does not
    // use it.
    let room = width.saturating_sub(1).max(1);
    match shown.get(..room) {
        Some(start) if shown.len() > room => start[..room - 1].iter().chain(&['…']).collect(),
        _ => shown.into_iter().collect(),
    }
}

/// Whether standard error is a terminal whose cursor can be moved.
fn can_be_drawn_on() -> bool {
    let is_dumb = std::env::var_os("TERM").is_none_or(|terminal| terminal.is_empty() || terminal == "dumb");
    rustix::termios::isatty(rustix::stdio::stderr()) && !is_dumb
}

fn size_of_terminal() -> (usize, usize) {
    match rustix::termios::tcgetwinsize(rustix::stdio::stderr()) {
        Ok(size) if size.ws_col > 0 && size.ws_row > 0 => (size.ws_col.into(), size.ws_row.into()),
        _ => USUAL_SIZE,
    }
}

/// Standard error, as the crate indicatif draws on it. Each drawing is one write(2), and leaves the cursor at the
/// beginning of a line. Otherwise the `^C` that the terminal shows for a Ctrl-C could wrap to a new line, and the next
/// drawing would be one line too low.
#[derive(Debug, Default)]
struct TerminalOutput(Mutex<String>);

impl TerminalOutput {
    fn add(&self, text: &str) -> io::Result<()> {
        self.0.lock().expect("no thread panics while it is locked").push_str(text);
        Ok(())
    }

    /// Moves the cursor (`console_codes(4)`).
    fn move_cursor(&self, by: usize, code: char) -> io::Result<()> {
        if by == 0 { Ok(()) } else { self.add(&format!("\x1b[{by}{code}")) }
    }
}

impl TermLike for TerminalOutput {
    fn width(&self) -> u16 {
        u16::try_from(size_of_terminal().0).unwrap_or(u16::MAX)
    }

    fn height(&self) -> u16 {
        u16::try_from(size_of_terminal().1).unwrap_or(u16::MAX)
    }

    fn move_cursor_up(&self, by: usize) -> io::Result<()> {
        self.move_cursor(by, 'A')
    }

    fn move_cursor_down(&self, by: usize) -> io::Result<()> {
        self.move_cursor(by, 'B')
    }

    fn move_cursor_right(&self, by: usize) -> io::Result<()> {
        self.move_cursor(by, 'C')
    }

    fn move_cursor_left(&self, by: usize) -> io::Result<()> {
        self.move_cursor(by, 'D')
    }

    fn write_line(&self, text: &str) -> io::Result<()> {
        self.add(text)?;
        self.add("\n")
    }

    fn write_str(&self, text: &str) -> io::Result<()> {
        self.add(text)
    }

    fn clear_line(&self) -> io::Result<()> {
        self.add("\r\x1b[2K")
    }

    fn flush(&self) -> io::Result<()> {
        self.add("\r")?;
        let drawn = std::mem::take(&mut *self.0.lock().expect("no thread panics while it is locked"));
        log::write_unless_stuck(drawn.as_bytes());
        Ok(())
    }
}

fn shown() -> MutexGuard<'static, Option<ProgressBar>> {
    SHOWN.lock().expect("no thread panics while the lines are locked")
}

/// Standard error, for log lines. It ignores errors: podfs goes on when the reader of its standard error has ended.
pub(crate) struct LogOutput;

impl Write for LogOutput {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        match &*shown() {
            Some(bar) => bar.suspend(|| log::StandardError.write(bytes)),
            None => log::StandardError.write(bytes),
        }
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn lines(up: usize, waiting: usize, size: (usize, usize)) -> Vec<String> {
        let names: Vec<_> = (0..up + waiting).map(|number| format!("v{number}")).collect();
        let upcoming = VolumeProgress {
            pod: None,
            expected: 500,
            up: names[..up].iter().map(String::as_str).collect(),
            waiting: names[up..].iter().map(|name| (name.as_str(), "configmap \"a\"\nnot found")).collect(),
        };
        upcoming.lines(size)
    }

    #[test]
    fn volumes_that_are_up_and_that_wait_are_shown() {
        let expected = ["podfs: 2 of 500 volumes are up: v0, v1", "  v2  waits: configmap \"a\" not found"];
        assert_eq!(lines(2, 1, (80, 24)), expected);
        assert_eq!(lines(0, 0, (80, 24)), ["podfs: 0 of 500 volumes are up"]);
    }

    #[test]
    fn many_volumes_do_not_fill_a_terminal_nor_long_lines_a_narrow_one() {
        for (width, height) in [(80, 24), (20, 6), (10, 4), (2, 2), (1, 1)] {
            let lines = lines(250, 250, (width, height));
            assert!(lines.len() <= (MOST_ROWS + 2).min(height.max(1)), "{lines:?}");
            assert!(lines.iter().all(|line| line.chars().count() <= width.saturating_sub(1).max(1)), "{lines:?}");
        }
        assert_eq!(lines(0, 20, (80, 24)).last().map(String::as_str), Some("  … and 12 more wait"));
    }
}
