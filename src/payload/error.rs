//! Why a payload cannot be assembled, and warnings about one that can.

use std::fmt;

use super::ContainerNotFound;
use crate::types::{InvalidPath, PayloadPath};

/// Why a volume waits: every problem of every source, so that the user sees all of them at once.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PayloadError {
    /// At least one.
    pub problems: Vec<Problem>,
}

impl fmt::Display for PayloadError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let problems: Vec<String> = self.problems.iter().map(ToString::to_string).collect();
        f.write_str(&problems.join("; "))
    }
}

impl std::error::Error for PayloadError {}

/// An object or a value that a volume waits for. The texts are the kubelet's where the kubelet has one.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Problem {
    /// A ConfigMap that is not optional is missing.
    #[error("configmap {0:?} not found")]
    ConfigMapNotFound(String),
    /// A Secret that is not optional is missing.
    #[error("secret {0:?} not found")]
    SecretNotFound(String),
    /// An item names a key that its ConfigMap does not have.
    #[error("configmap references non-existent config key: {0}")]
    ConfigMapKeyNotFound(String),
    /// An item names a key that its Secret does not have.
    #[error("references non-existent secret key: {0}")]
    SecretKeyNotFound(String),
    /// A downwardAPI file names a container that the pod does not have.
    #[error(transparent)]
    Container(#[from] ContainerNotFound),
    /// podfs does not know whether an object exists. The text names the object and the reason.
    #[error("{0}")]
    Unknown(String),
    /// A ClusterTrustBundle that is not optional is missing.
    #[error("clustertrustbundle {0:?} not found")]
    TrustBundleNotFound(String),
    /// There is no ClusterTrustBundle with the labels, and it is not optional.
    #[error("combination of signerName and labelSelector matched zero ClusterTrustBundles")]
    NoTrustBundles,
    /// The volume needs a token or a certificate, and the source of objects cannot issue any.
    #[error("{0} needs an API server that issues it; give podfs --kubeconfig")]
    NeedsApiServer(String),
    /// The API server has not issued a token.
    #[error("failed to fetch token: {0}")]
    NoToken(String),
    /// No signer has issued a certificate.
    #[error("{0}")]
    NoCertificate(String),
    /// A key that cannot be the name of a file.
    #[error(transparent)]
    Path(#[from] InvalidPath),
    /// A path is a file, and another path is below it.
    #[error("{:?} of {claim} is a file, and {:?} of {below_claim} needs a directory in its place", file.as_str(), below.as_str())]
    FileAndDirectory {
        /// The path that is a file.
        file: PayloadPath,
        /// The source of the file, such as `key "app.conf" of configMap "app"`.
        claim: String,
        /// The path below it.
        below: PayloadPath,
        /// The source of the path below it.
        below_claim: String,
    },
}

/// Something in a volume's description that is valid, and hardly what its author wants. The kubelet does the same silently.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Warning {
    /// Two files claim one path; the later one wins.
    #[error("two files are called {:?}: {hidden} is hidden by {shown}", path.as_str())]
    HiddenFile {
        /// The path.
        path: PayloadPath,
        /// The source of the hidden file.
        hidden: String,
        /// The source of the file that the volume shows.
        shown: String,
    },
    /// A mode in decimal whose digits are those of a mode in octal.
    #[error("{field} {mode} is a decimal number, so the mode is {mode:04o}; write 0{mode} in YAML, or {} in JSON", octal(*.mode))]
    DecimalMode {
        /// `defaultMode`, or the `mode` of a file.
        field: String,
        /// The number in the manifest.
        mode: u16,
    },
}

/// The number whose octal digits are the decimal digits of this mode. All of them are octal digits.
fn octal(mode: u16) -> u16 {
    mode / 100 * 64 + mode / 10 % 10 * 8 + mode % 10
}
