//! Manifests: from a user's text to the types that the rest of podfs uses.
//!
//! Text becomes [`Document`]s ([`parse_documents`]), documents become the pod ([`pod`]) and the objects its volumes
//! show ([`objects`]); [`References`] names those objects. The results are valid; no later code has to check them again. This
//! module does no I/O: the caller passes the bytes and their name for errors.
//!
//! Manifests hold secrets. An error names the file, the document and the field, never a value.

mod document;
mod error;
mod go_yaml;
mod known_fields;
mod null;
pub mod objects;
mod origin;
pub mod pod;
mod pod_view;
mod references;
mod spelling;
mod syntax;
#[cfg(test)]
mod tests;
pub(crate) mod tokens;

pub use document::{Document, parse_bare, parse_documents, read_documents};
pub use error::ManifestError;
pub use origin::Origin;
pub use pod_view::{KnownObjects, PodView};
pub use references::{References, references};
pub use spelling::{check_kind, check_spelling, check_volume_spelling};
pub use tokens::Tokens;
