//! A file in memory of limited size, for the output of a program that podfs does not trust to be brief.
//!
//! The file is the only one of a tmpfs that is mounted nowhere. A program that writes more gets ENOSPC, also if it opens its standard
//! output anew (`/dev/stdout`), and also after podfs has read what it needs: a daemon may keep the file for years. With a sealed
//! file of a fixed size, a shell could not redirect to `/dev/stdout`; with a pipe, a daemon would end at its next line (`SIGPIPE`).

use std::fs::File;
use std::io::{self, Read, Seek};

use rustix::fs::{Mode, OFlags, openat};
use rustix::mount::{
    FsMountFlags, FsOpenFlags, MountAttrFlags, fsconfig_create, fsconfig_set_flag, fsconfig_set_string, fsmount, fsopen,
};

/// A file for at most `most` bytes, which are rounded up to whole pages.
///
/// # Errors
/// The kernel's error: only a privileged process can make a file system.
pub fn bounded_file(most: u64) -> io::Result<File> {
    let context = fsopen("tmpfs", FsOpenFlags::FSOPEN_CLOEXEC)?;
    fsconfig_set_string(&context, "size", most.to_string())?;
    // The output may hold secrets. Linux has the option since 6.4.
    let _ = fsconfig_set_flag(&context, "noswap");
    fsconfig_create(&context)?;
    let attributes =
        MountAttrFlags::MOUNT_ATTR_NOSUID | MountAttrFlags::MOUNT_ATTR_NODEV | MountAttrFlags::MOUNT_ATTR_NOEXEC;
    let mounted = fsmount(&context, FsMountFlags::FSMOUNT_CLOEXEC, attributes)?;
    let flags = OFlags::RDWR | OFlags::CREATE | OFlags::EXCL | OFlags::CLOEXEC;
    Ok(openat(&mounted, "output", flags, Mode::RUSR | Mode::WUSR)?.into())
}

/// The content of a file from its beginning, at most `most` bytes.
///
/// # Errors
/// The kernel's error.
pub fn content(file: &mut File, most: u64) -> io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    file.rewind()?;
    file.take(most).read_to_end(&mut bytes)?;
    Ok(bytes)
}

#[cfg(test)]
mod tests {
    use std::io::Write;
    use std::process::{Command, Stdio};

    use super::*;

    const MOST: u64 = 64 << 10;

    #[test]
    fn a_file_takes_no_more_than_its_limit_whoever_writes_and_however() {
        if !rustix::process::geteuid().is_root() {
            return;
        }
        for script in ["yes", "yes > /dev/stdout", "yes >> /dev/stdout", "truncate -s 1G /dev/stdout; yes"] {
            let mut file = bounded_file(MOST).expect("a file");
            let mut shell = Command::new("sh");
            shell.args(["-c", script]).stdout(file.try_clone().expect("a descriptor")).stderr(Stdio::null());
            assert!(!shell.status().expect("started").success(), "{script}: it gets an error");
            let taken =
                file.metadata().map(|file| std::os::unix::fs::MetadataExt::blocks(&file) * 512).expect("a file");
            assert!(taken <= MOST, "{script}: {taken}");
            assert_eq!(content(&mut file, MOST).expect("read").len() as u64, MOST, "{script}");
        }
        let mut file = bounded_file(MOST).expect("a file");
        file.write_all(b"brief").expect("written");
        assert_eq!(content(&mut file, MOST).expect("read"), b"brief");
    }
}
