//! A block device that podfs holds open. Meanwhile the kernel gives its number to no other device, even if an operator unplugs the
//! device.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Seek, SeekFrom};
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use rustix::fs::{FileType, fstat, major, minor, stat};

use crate::host::{FileKind, HostError, HostSource};

/// A block device that podfs holds open for reading.
#[derive(Debug)]
pub struct BlockDevice {
    file: File,
    path: PathBuf,
    number: (u32, u32),
}

impl BlockDevice {
    /// Opens the block device `source` for reading. From here on, the path of the device is the path without symbolic links.
    ///
    /// # Errors
    /// When `source` is no block device, the device is gone, or its path leads to another device by now.
    pub fn open(source: &HostSource) -> Result<BlockDevice, HostError> {
        let unusable = |path: &Path| format!("block device {} cannot be used", path.display());
        let refused = |path: &Path, cause: &str| HostError::Refused(format!("{}: {cause}", unusable(path)));
        let failed = |path: &Path, cause: io::Error| HostError::failed(unusable(path), cause);
        let path = source.real_path().map_err(|cause| failed(Path::new("?"), cause))?;
        if source.kind() != FileKind::BlockDevice {
            return Err(refused(&path, "it is no block device"));
        }
        let number = |found: &rustix::fs::Stat| (major(found.st_rdev), minor(found.st_rdev));
        let before = fstat(source).map_err(|errno| failed(&path, errno.into()))?;
        let file = OpenOptions::new().read(true).open(&path).map_err(|cause| failed(&path, cause))?;
        let opened = fstat(&file).map_err(|errno| failed(&path, errno.into()))?;
        let is_device = FileType::from_raw_mode(opened.st_mode) == FileType::BlockDevice;
        if !is_device || number(&opened) != number(&before) {
            return Err(refused(&path, "the path leads to another device by now; podfs tries again"));
        }
        Ok(BlockDevice { file, path, number: number(&opened) })
    }

    /// The path of the device, without symbolic links.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The device number: major and minor.
    pub fn number(&self) -> (u32, u32) {
        self.number
    }

    /// The size of the device, in bytes.
    ///
    /// # Errors
    /// When the device does not answer.
    pub fn size(&self) -> io::Result<u64> {
        (&self.file).seek(SeekFrom::End(0))
    }

    /// Reads from an offset until `buffer` is full.
    pub(super) fn read(&self, buffer: &mut [u8], offset: u64) -> io::Result<()> {
        self.file.read_exact_at(buffer, offset)
    }

    /// Whether the kernel refuses writes to the device.
    pub fn is_read_only(&self) -> bool {
        self.attribute("ro").is_some_and(|text| text == "1")
    }

    /// The kernel's sequence number for this disk, which no other disk has until the next boot (Linux 5.15). A partition has the
    /// number of its disk.
    pub fn sequence(&self) -> Option<u64> {
        self.attribute("diskseq").or_else(|| self.attribute("../diskseq"))?.parse().ok()
    }

    /// The identity of the device, which is the same after each boot: the world-wide name or the serial number of the disk, and the
    /// number of the partition if this is one. Many virtual disks have none.
    pub fn serial(&self) -> Option<String> {
        let text_of = |name: &str| self.attribute(name).filter(|text| !text.is_empty());
        let partition = text_of("partition");
        let above = if partition.is_some() { "../" } else { "" };
        let names = ["wwid", "device/wwid", "serial", "device/serial", "dm/uuid"];
        let disk = names.into_iter().find_map(|name| text_of(&format!("{above}{name}")))?;
        Some(partition.map_or(disk.clone(), |number| format!("{disk} partition {number}")))
    }

    /// Opens the device for writing, and for this process alone: while the file is open, the kernel mounts no file system of it.
    ///
    /// # Errors
    /// `EBUSY` if the kernel uses the device, for example for a mounted file system. Another error if the path leads to another
    /// device by now.
    pub fn exclusive(&self) -> io::Result<File> {
        let file = OpenOptions::new().read(true).write(true).custom_flags(libc::O_EXCL).open(&self.path)?;
        let opened = fstat(&file)?;
        match (major(opened.st_rdev), minor(opened.st_rdev)) == self.number {
            true => Ok(file),
            false => Err(io::Error::other("the path leads to another device by now")),
        }
    }

    /// Whether the path of the device still leads to it.
    pub fn is_at_path(&self) -> bool {
        stat(&self.path).is_ok_and(|found| (major(found.st_rdev), minor(found.st_rdev)) == self.number)
    }

    /// Whether the kernel uses the device: for a mounted file system, a RAID, the device mapper, or swap.
    ///
    /// # Errors
    /// When the device cannot be opened.
    pub fn is_in_use(&self) -> io::Result<bool> {
        match OpenOptions::new().read(true).custom_flags(libc::O_EXCL).open(&self.path) {
            Ok(_) => Ok(false),
            Err(cause) if cause.raw_os_error() == Some(libc::EBUSY) => Ok(true),
            Err(cause) => Err(cause),
        }
    }

    /// An attribute of the device in sysfs.
    fn attribute(&self, name: &str) -> Option<String> {
        let (major, minor) = self.number;
        let text = fs::read_to_string(format!("/sys/dev/block/{major}:{minor}/{name}")).ok()?;
        Some(text.trim().to_owned())
    }
}
