//! Bytes with a common owner: the data of replies and requests, without a copy.

use std::fmt;
use std::ops::{Deref, Range};
use std::rc::Rc;

/// A part of the bytes of an owner. The owner lives as long as any of its slices.
#[derive(Clone)]
pub struct Slice {
    owner: Rc<dyn AsRef<[u8]>>,
    range: Range<usize>,
}

impl Slice {
    /// All bytes of `owner`, whose number must never change.
    pub fn new(owner: Rc<dyn AsRef<[u8]>>) -> Self {
        let range = 0..(*owner).as_ref().len();
        Self { owner, range }
    }

    /// The part of this slice at `range`.
    ///
    /// # Panics
    /// When `range` is not within this slice.
    pub fn part(&self, range: Range<usize>) -> Self {
        assert!(range.start <= range.end && range.end <= self.range.len(), "a part lies within the whole");
        let start = self.range.start;
        Self { owner: Rc::clone(&self.owner), range: start + range.start..start + range.end }
    }
}

impl Deref for Slice {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        &(*self.owner).as_ref()[self.range.clone()]
    }
}

impl From<Vec<u8>> for Slice {
    fn from(bytes: Vec<u8>) -> Self {
        Self::new(Rc::new(bytes))
    }
}

/// Shows the length alone, because the content may be secret.
impl fmt::Debug for Slice {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "{} bytes", self.range.len())
    }
}
