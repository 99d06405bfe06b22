//! `fsck -a` before a file system is mounted, with the kubelet's treatment of its exit codes (fsck(8)).

use std::ffi::OsStr;

use tracing::{info, warn};

use super::BlockDevice;
use super::program::{NoOutcome, run};
use crate::host::HostError;
use crate::host::global_mount::LockedGlobalMount;

/// The exit code of fsck when it has corrected errors.
const CORRECTED: i32 = 1;
/// The bit in the exit code of fsck when it has left errors uncorrected.
const UNCORRECTED: i32 = 4;

/// Checks the file system of a device. fsck repairs it as far as that is safe. Does not check a file system that is
/// mounted elsewhere.
///
/// # Errors
/// When the file system has errors that fsck does not repair by itself.
pub(super) fn check(device: &BlockDevice, held: &LockedGlobalMount<'_>) -> Result<(), HostError> {
    let path = device.path().display();
    if device.is_in_use().unwrap_or(false) {
        info!("{path} is not checked, because the node uses it already");
        return Ok(());
    }
    let outcome = match run("fsck", &[OsStr::new("-a"), device.path().as_os_str()], Some(held)) {
        Ok(outcome) => outcome,
        Err(NoOutcome::Missing) => {
            warn!("fsck is not installed, so {path} is mounted without a check");
            return Ok(());
        }
        Err(NoOutcome::Failed(error)) => return Err(error),
    };
    match outcome.code {
        Some(0) => Ok(()),
        Some(CORRECTED) => {
            info!("fsck has corrected errors on {path}: {}", outcome.words);
            Ok(())
        }
        Some(code) if code & UNCORRECTED != 0 => Err(HostError::Refused(format!(
            "'fsck' found errors on device {path} but could not correct them: {}; repair it by hand, podfs does not mount it",
            outcome.words
        ))),
        _ => {
            warn!("fsck of {path} {}; podfs tries to mount it: {}", outcome.end(), outcome.words);
            Ok(())
        }
    }
}
