//! The position of a document, as errors about the document name it.

use std::fmt::{self, Display};
use std::num::NonZero;
use std::path::Path;
use std::sync::Arc;

/// The position of a document. Displayed as `objects.yaml`; as `objects.yaml, document 2` if the file has several documents; as
/// `objects.yaml, item 3` for an entry of a list.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Origin {
    file: Arc<Path>,
    document: Option<NonZero<u32>>,
    item: Option<NonZero<u32>>,
    /// The workload whose pod template the document is, such as `Deployment web`.
    part_of: Option<Arc<str>>,
}

impl Origin {
    /// The file as a whole.
    pub fn file(file: &Path) -> Self {
        Self { file: file.into(), document: None, item: None, part_of: None }
    }

    pub(super) fn document(&self, number: u32) -> Self {
        Self { document: NonZero::new(number), ..self.clone() }
    }

    /// The entry of this number, counted from 1, of the list at this position.
    pub fn item(&self, number: u32) -> Self {
        Self { item: NonZero::new(number), ..self.clone() }
    }

    /// The pod template of the object at this position. `object` is a name such as `Deployment web`.
    pub(super) fn template_of(&self, object: &str) -> Self {
        Self { part_of: Some(object.into()), ..self.clone() }
    }
}

impl Display for Origin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.file.display())?;
        if let Some(number) = self.document {
            write!(f, ", document {number}")?;
        }
        if let Some(number) = self.item {
            write!(f, ", item {number}")?;
        }
        if let Some(object) = &self.part_of {
            write!(f, ", pod template of {object}")?;
        }
        Ok(())
    }
}
