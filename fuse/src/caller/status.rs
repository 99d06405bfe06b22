//! `/proc/<thread>/status` (`proc_pid_status(5)`): lines of a name, a colon and values.

use std::fs::File;
use std::io::{self, ErrorKind};
use std::os::unix::fs::FileExt;

/// Most bytes to read. A line with 65,536 groups, the most that Linux allows, has 704 KiB, and other lines come after it.
const LONGEST: usize = 1 << 20;

/// The text of the status of a thread.
pub(crate) struct ThreadStatus(String);

impl ThreadStatus {
    /// Reads the status of a thread; `None` if there is no such thread.
    pub(crate) fn of(thread: u32) -> Option<Self> {
        Self::read(&open(thread)?).ok()
    }

    /// Reads the open status file of a thread.
    ///
    /// # Errors
    /// When the thread has ended.
    pub(crate) fn read(file: &File) -> io::Result<Self> {
        let mut bytes = vec![0; 4096];
        let mut length = 0;
        loop {
            match file.read_at(&mut bytes[length..], length as u64) {
                Ok(0) => break,
                Ok(more) => length += more,
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
            if length == bytes.len() {
                if length >= LONGEST {
                    break;
                }
                bytes.resize(length * 2, 0);
            }
        }
        Ok(Self(String::from_utf8_lossy(&bytes[..length]).into_owned()))
    }

    /// The values of a line. No process can forge a line with its own name, because the kernel escapes line breaks in it.
    pub(crate) fn values(&self, name: &str) -> Option<&str> {
        self.0.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':'))
    }

    /// The numbers of a line.
    pub(crate) fn numbers<'a>(&'a self, name: &str) -> impl Iterator<Item = u32> + use<'a> {
        let values = self.values(name).unwrap_or_default();
        values.split_whitespace().map_while(|word| word.parse().ok())
    }

    /// The bits of a line with a set of signals or capabilities.
    pub(crate) fn bits(&self, name: &str) -> u64 {
        self.values(name).and_then(|set| u64::from_str_radix(set.trim(), 16).ok()).unwrap_or(0)
    }
}

/// Opens the status file of a thread. It belongs to that thread: read(2) fails after the thread has ended.
pub(crate) fn open(thread: u32) -> Option<File> {
    File::open(format!("/proc/{thread}/status")).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_is_found_by_its_name_and_not_by_the_name_of_the_process() {
        let status = ThreadStatus(
            "Name:\tUid: 7\nTgid:\t12\nUid:\t0\t1\t2\t3\nGid:\t4\t5\t6\t7\nSigPnd:\t0000000000000100\n".to_owned(),
        );
        assert_eq!(status.numbers("Tgid").next(), Some(12));
        assert_eq!(status.numbers("Uid").nth(3), Some(3));
        assert_eq!(status.numbers("Gid").collect::<Vec<_>>(), [4, 5, 6, 7]);
        assert_eq!((status.bits("SigPnd"), status.bits("ShdPnd")), (0x100, 0));
        assert_eq!(ThreadStatus(String::new()).numbers("Tgid").next(), None);
    }

    #[test]
    fn lines_after_the_most_groups_that_a_thread_can_have_are_found() {
        if !rustix::process::geteuid().is_root() {
            return;
        }
        let thread = std::thread::spawn(|| {
            let groups: Vec<u32> = (4_000_000_000..4_000_065_536).collect();
            // SAFETY: the call reads the ids, and changes this thread only.
            let set = unsafe { libc::syscall(libc::SYS_setgroups, groups.len(), groups.as_ptr()) };
            assert_eq!(set, 0, "{}", io::Error::last_os_error());
            let own = rustix::thread::gettid().as_raw_nonzero().get().cast_unsigned();
            let status = ThreadStatus::of(own).expect("a status");
            assert_eq!(status.numbers("Groups").count(), groups.len());
            assert!(status.values("VmSize").is_some() && status.values("SigPnd").is_some());
        });
        thread.join().expect("no failure");
    }

    #[test]
    fn there_is_no_status_of_a_thread_that_does_not_exist() {
        let own = rustix::thread::gettid().as_raw_nonzero().get().cast_unsigned();
        assert!(ThreadStatus::of(own).is_some());
        assert!(ThreadStatus::of(0).is_none() && ThreadStatus::of(u32::MAX >> 1).is_none());
    }
}
