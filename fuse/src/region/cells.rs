//! The cells of a region: records of one size, each for one node, open file or lock that a successor needs.
//!
//! A cell begins with a tag that names its type, 0 for a free cell. The server writes the tag last when it fills a cell, and
//! erases it first when it frees the cell, so a kill in between leaves a cell without a tag, which counts as free.
//!
//! To drop an [`OwnedCell`] frees the cell. To drop a [`CellRef`] does not: its holder calls `Cells::free`. A process only reads
//! an adopted region until it [takes the region over](super::Region::take_over), so a successor that gives up leaves the region
//! unchanged.

use std::io;
use std::marker::PhantomData;
use std::ops::Deref;
use std::sync::Arc;
use std::sync::atomic::AtomicU32;
use std::sync::atomic::Ordering::{Acquire, Release};

use super::cell_id::{CELL, CellId, count};
use super::free::FreeCells;
use super::memory::Memory;
use super::shared::{SharedMemory, shared};
use super::{Region, header};

/// The content of a cell. Its first field is the tag.
pub(crate) trait CellContent: SharedMemory + Sized {
    /// The tag of cells with this content; not 0. Each type of content has another tag.
    const TAG: u32;
    /// The compiler refuses a content that does not fit into a cell.
    const FITS: () = assert!(size_of::<Self>() <= CELL && Self::TAG != 0);
}

shared! {
    /// The first field of all cells.
    pub(crate) struct Tag { tag: AtomicU32 }
}

/// The cells of a region.
#[derive(Clone, Copy)]
pub(crate) struct Cells<'a> {
    pub(super) memory: &'a Memory,
    pub(super) free: &'a FreeCells,
}

impl<'a> Cells<'a> {
    /// The content of a cell that is known to be a `T`.
    pub(crate) fn content<T: CellContent>(self, id: CellId) -> &'a T {
        const { T::FITS }
        self.memory.at(id.offset()).expect("a cell that was allocated stays")
    }

    /// Writes the tag of a filled cell: from here on, a successor finds the cell.
    fn publish<T: CellContent>(self, id: CellId) {
        self.tag(id).store(T::TAG, Release);
    }

    /// Frees a cell. Does nothing in an adopted region that this process has not [taken over](Region::take_over).
    pub(crate) fn free(self, id: CellId) {
        if self.free.is_ours() {
            self.tag(id).store(0, Release);
            self.free.free(self.memory, id);
        }
    }

    /// Erases cells that no process uses any more, and gives pages that have only free cells back to the kernel, except a few.
    pub(crate) fn erase(self, unused: &[CellId]) {
        unused.iter().for_each(|id| self.tag(*id).store(0, Release));
        self.free.trim(self.memory);
    }

    /// Every cell that has a tag, with its tag. Skips the holes of the file: the kernel would allocate memory for a hole that podfs
    /// reads.
    pub(crate) fn tagged(self) -> impl Iterator<Item = (CellId, u32)> {
        let cells = self.memory.data_from(header::SIZE).into_iter().flat_map(|data| {
            let first = (data.start - header::SIZE) / CELL;
            (first..count(data.end)).filter_map(CellId::of)
        });
        cells.map(move |id| (id, self.tag(id).load(Acquire))).filter(|(_, tag)| *tag != 0)
    }

    /// The content of a cell, if the cell exists and is a `T`.
    pub(crate) fn find<T: CellContent>(self, id: CellId) -> Option<&'a T> {
        let tag: &Tag = self.memory.at(id.offset())?;
        (tag.tag.load(Acquire) == T::TAG).then(|| self.content(id))
    }

    /// Counts all cells as free from here on, except those of `kept`, which are in ascending order. Writes nothing to the region.
    pub(crate) fn keep_only(self, kept: &[CellId]) {
        self.free.keep_only(self.memory, kept);
    }

    fn tag(self, id: CellId) -> &'a AtomicU32 {
        let tag: &Tag = self.memory.at(id.offset()).expect("a cell that was allocated stays");
        &tag.tag
    }
}

/// A cell in use. To drop a `CellRef` does not free the cell.
pub(crate) struct CellRef<T: CellContent> {
    region: Arc<Region>,
    id: CellId,
    content: PhantomData<fn() -> T>,
}

impl<T: CellContent> CellRef<T> {
    /// Takes a free cell, and fills it with `fill`. A successor finds the whole content or no cell.
    ///
    /// # Errors
    /// When there is no memory.
    pub(crate) fn new(region: &Arc<Region>, fill: impl FnOnce(&T)) -> io::Result<Self> {
        let cells = region.cells();
        let id = cells.free.take(cells.memory)?;
        fill(cells.content(id));
        cells.publish::<T>(id);
        Ok(Self::of(region, id))
    }

    /// Refers to a cell that already contains a `T`.
    pub(crate) fn of(region: &Arc<Region>, id: CellId) -> Self {
        Self { region: Arc::clone(region), id, content: PhantomData }
    }

    /// The region of the cell.
    pub(crate) fn region(&self) -> &Arc<Region> {
        &self.region
    }

    /// The id of the cell.
    pub(crate) fn id(&self) -> CellId {
        self.id
    }
}

impl<T: CellContent> Deref for CellRef<T> {
    type Target = T;

    fn deref(&self) -> &T {
        self.region.cells().content(self.id)
    }
}

impl<T: CellContent> std::fmt::Debug for CellRef<T> {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.id.fmt(formatter)
    }
}

/// A cell in use. To drop an `OwnedCell` frees the cell.
pub(crate) struct OwnedCell<T: CellContent>(CellRef<T>);

impl<T: CellContent> OwnedCell<T> {
    /// Like [`CellRef::new`].
    ///
    /// # Errors
    /// When there is no memory.
    pub(crate) fn new(region: &Arc<Region>, fill: impl FnOnce(&T)) -> io::Result<Self> {
        CellRef::new(region, fill).map(Self)
    }

    /// The region of the cell.
    pub(crate) fn region(&self) -> &Arc<Region> {
        &self.0.region
    }

    /// Owns a cell that already contains a `T`. No other value may own the cell.
    pub(crate) fn of(region: &Arc<Region>, id: CellId) -> Self {
        Self(CellRef::of(region, id))
    }

    /// The id of the cell.
    pub(crate) fn id(&self) -> CellId {
        self.0.id
    }
}

impl<T: CellContent> Deref for OwnedCell<T> {
    type Target = T;

    fn deref(&self) -> &T {
        &self.0
    }
}

impl<T: CellContent> std::fmt::Debug for OwnedCell<T> {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.0.fmt(formatter)
    }
}

impl<T: CellContent> Drop for OwnedCell<T> {
    fn drop(&mut self) {
        self.0.region.cells().free(self.0.id);
    }
}
