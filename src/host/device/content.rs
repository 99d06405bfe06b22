//! The content of a device, according to the program `blkid -p` of util-linux, which uses libblkid. The kubelet runs it, too, so
//! both recognise the same content. The program knows some hundred signatures, and has documented exit codes. Code of podfs itself
//! would know fewer signatures, and podfs would format each disk whose signature it does not know.

use std::ffi::OsStr;

use super::program::run;
use super::{BlockDevice, grow};
use crate::host::HostError;

/// The exit code of blkid when it finds nothing, or cannot read the device.
const NOTHING: i32 = 2;
/// The exit code of blkid when it finds several signatures that exclude each other.
const AMBIVALENT: i32 = 8;
/// How many bytes at the beginning of a blank device are zero.
const HEAD: u64 = 1 << 20;
/// How many bytes at the end of a blank device are zero.
const TAIL: u64 = 64 << 10;

/// The content of a device.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum DeviceContent {
    /// No signature, and zeros where file systems and partition tables begin.
    Blank,
    /// Data without a known signature.
    Remains,
    /// The superblock of a file system that blkid does not find. If blkid cannot read a part of the disk, it finds nothing.
    Hidden,
    /// A file system.
    FileSystem {
        /// Its type, as the kernel calls it.
        kind: String,
        /// Its id, if it has one.
        uuid: Option<String>,
    },
    /// A partition table of this type.
    Partitions(String),
    /// Something else with a signature: a part of a RAID, an encrypted container, swap.
    Other(String),
    /// Signatures that exclude each other.
    Ambiguous,
}

/// Detects the content of a device.
///
/// # Errors
/// When it cannot be read, or blkid is not installed or fails.
pub(super) fn probe(device: &BlockDevice) -> Result<DeviceContent, HostError> {
    // blkid has the same exit code for a device that it cannot read and for an empty device. So podfs reads the device first.
    let is_zero = is_zero(device).map_err(|cause| HostError::Failed {
        what: format!("{} cannot be read", device.path().display()),
        cause,
        advice: "; replace or repair the disk",
    })?;
    let arguments = ["-p", "-o", "export"].map(OsStr::new);
    let arguments = [&arguments[..], &[device.path().as_os_str()]].concat();
    let outcome = run("blkid", &arguments, None).map_err(|obstacle| obstacle.needed("blkid", "util-linux"))?;
    match outcome.code {
        Some(0) => Ok(DeviceContent::of(&outcome.output)),
        Some(NOTHING) if is_zero => Ok(DeviceContent::Blank),
        Some(NOTHING) if grow::has_superblock(device).unwrap_or(true) => Ok(DeviceContent::Hidden),
        Some(NOTHING) => Ok(DeviceContent::Remains),
        Some(AMBIVALENT) => Ok(DeviceContent::Ambiguous),
        _ => Err(HostError::Refused(format!(
            "blkid {}, so podfs does not know the content of {}: {}",
            outcome.end(),
            device.path().display(),
            outcome.words
        ))),
    }
}

impl DeviceContent {
    /// The content according to the output of blkid: lines `KEY=VALUE`.
    fn of(output: &str) -> DeviceContent {
        let value =
            |key: &str| output.lines().find_map(|line| line.strip_prefix(key)?.strip_prefix('=')).map(str::to_owned);
        match (value("PTTYPE"), value("TYPE"), value("USAGE").as_deref()) {
            (Some(table), _, _) => DeviceContent::Partitions(table),
            (None, Some(kind), Some("filesystem")) => DeviceContent::FileSystem { kind, uuid: value("UUID") },
            (None, Some(kind), _) => DeviceContent::Other(kind),
            (None, None, _) => DeviceContent::Other("data that blkid does not name".to_owned()),
        }
    }
}

/// Whether the beginning and the end of the device are zero.
fn is_zero(device: &BlockDevice) -> std::io::Result<bool> {
    let size = device.size()?;
    let ranges = [(0, HEAD.min(size)), (size.saturating_sub(TAIL), TAIL.min(size))];
    for (offset, length) in ranges {
        // `length` is at most 1 MiB, so the conversion does not fail.
        let mut bytes = vec![0; usize::try_from(length).unwrap_or_default()];
        device.read(&mut bytes, offset)?;
        if bytes.iter().any(|byte| *byte != 0) {
            return Ok(false);
        }
    }
    Ok(true)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_output_of_blkid_is_classified() {
        let ext4 = DeviceContent::FileSystem { kind: "ext4".to_owned(), uuid: Some("u-1".to_owned()) };
        for (output, expected) in [
            ("DEVNAME=/dev/loop0\nUUID=u-1\nVERSION=1.0\nTYPE=ext4\nUSAGE=filesystem\n", ext4),
            ("DEVNAME=/dev/loop0\nPTUUID=p-1\nPTTYPE=gpt\n", DeviceContent::Partitions("gpt".to_owned())),
            ("TYPE=crypto_LUKS\nUSAGE=crypto\n", DeviceContent::Other("crypto_LUKS".to_owned())),
            ("TYPE=vfat\nUSAGE=filesystem\nPTTYPE=dos\n", DeviceContent::Partitions("dos".to_owned())),
        ] {
            assert_eq!(DeviceContent::of(output), expected, "{output}");
        }
        assert!(matches!(DeviceContent::of("DEVNAME=/dev/loop0\n"), DeviceContent::Other(_)));
    }
}
