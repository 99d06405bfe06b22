//! Values that manifests, volumes and payloads share. They are parsed once, and valid from then on.
//!
//! | module | owns |
//! |---|---|
//! | `payload_path` | where a file lies inside a volume |
//! | `field_path` | fields of the pod that a downwardAPI file shows |
//! | `pod_name` | the namespace and name of a pod |
//! | `names` | Kubernetes' rules for names |
//! | `quantity` | amounts of resources: `250m`, `1.5Gi` |
//! | `allocatable` | the allocatable resources of a node |
//! | `base64` | base64 as Go decodes it |
//! | `mount_options` | lists of mount options |
//! | `golden` | golden files, in tests |
//! | `record_version` | records of other versions of podfs, which are refused |
//! | `invalid_field` | the error about a field of a manifest, and checks that several fields share |

mod allocatable;
mod base64;
mod field_path;
#[cfg(test)]
pub(crate) mod golden;
mod invalid_field;
mod mount_options;
mod names;
mod payload_path;
mod pod_name;
mod quantity;
mod record_version;

pub use allocatable::Allocatable;
pub(crate) use base64::decode_base64;
pub use field_path::{InvalidFieldPath, PodField};
pub use invalid_field::InvalidField;
pub(crate) use invalid_field::{mode, numeric_id, payload_path, required};
pub use mount_options::{has_open_quote, mount_options};
pub(crate) use names::{DNS_LABEL_RULE, DNS_NAME_RULE, check_qualified, is_dns_label, is_domain};
pub use payload_path::{InvalidPath, PayloadPath};
pub use pod_name::{InvalidPodName, PodName};
pub use quantity::{InvalidQuantity, Quantity};
pub use record_version::{RECORD_VERSION, UnusableRecord, check_version, is_blank, parse_record};
