//! The size and health of a volume, as its driver reports them (`NodeGetVolumeStats`).

use super::{DriverError, DriverHome, client_of, text};
use crate::csi::v1::volume_usage::Unit;
use crate::csi::v1::{NodeGetVolumeStatsRequest, NodeGetVolumeStatsResponse, VolumeUsage};
use crate::driver::{NodeMount, quoted};

/// The usage of a volume, as its driver reports it. Numbers that it does not report are `None`.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct DriverUsage {
    /// Bytes.
    pub bytes: Option<Amounts>,
    /// Files.
    pub inodes: Option<Amounts>,
    /// The abnormal condition of the volume, in the driver's words; empty if the volume is healthy. `None` if the driver does not
    /// report conditions.
    pub condition: Option<String>,
}

/// An amount of bytes or inodes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Amounts {
    /// The total amount.
    pub total: u64,
    /// The available amount for users of the volume.
    pub available: u64,
    /// The amount in use.
    pub used: u64,
}

/// Gets the usage from the driver of a home's volume. `None` if no CSI driver has published it, or the driver does not report
/// usage. Blocks until the driver answers.
///
/// # Errors
/// The driver's error.
pub fn usage(home: &DriverHome) -> Result<Option<DriverUsage>, DriverError> {
    // podfs sent the canonical path in NodePublishVolume, too.
    let home = &DriverHome::at(home.path().canonicalize().unwrap_or_else(|_| home.path().to_owned()));
    let Some(record) = home.read()?.filter(|record| record.published && record.executable.is_none()) else {
        return Ok(None);
    };
    let client = client_of(home, &record)?;
    if !client.capabilities()?.stats {
        return Ok(None);
    }
    let staging = record.node_mount.map(|directory| text(&NodeMount::at(directory).path())).transpose()?;
    let request = NodeGetVolumeStatsRequest {
        volume_id: record.volume_handle,
        volume_path: text(&home.target())?,
        staging_target_path: staging.unwrap_or_default(),
    };
    Ok(Some(client.stats(request)?.into()))
}

impl From<NodeGetVolumeStatsResponse> for DriverUsage {
    fn from(answer: NodeGetVolumeStatsResponse) -> DriverUsage {
        let of = |unit: Unit| answer.usage.iter().find(|usage| usage.unit() == unit).map(Amounts::from);
        let condition = answer.volume_condition.as_ref();
        DriverUsage {
            bytes: of(Unit::Bytes),
            inodes: of(Unit::Inodes),
            condition: condition.map(|condition| match (condition.abnormal, condition.message.as_str()) {
                (false, _) => String::new(),
                (true, "") => "the driver gives no reason".to_owned(),
                (true, message) => quoted(message),
            }),
        }
    }
}

impl From<&VolumeUsage> for Amounts {
    fn from(usage: &VolumeUsage) -> Amounts {
        let number = |number: i64| u64::try_from(number).unwrap_or_default();
        Amounts { total: number(usage.total), available: number(usage.available), used: number(usage.used) }
    }
}
