//! The cells of a region: places of one size, each for one thing that a successor has to know.
//!
//! A cell begins with a tag that says what is in it, 0 for nothing. The tag is written last when something is
//! recorded and first when it is erased, so a kill in between leaves a cell without a tag, which is nobody's.
//!
//! Who has made something holds its [`Record`]; when that is dropped, the cell is free. What was adopted is only read
//! until it is [taken over](super::Region::take_over), so a successor that gives up leaves it as it was.

use std::io;
use std::marker::PhantomData;
use std::ops::Deref;
use std::sync::atomic::Ordering::{Acquire, Relaxed, Release};
use std::sync::atomic::{AtomicBool, AtomicU32};
use std::sync::{Arc, Mutex, MutexGuard};

use super::memory::Memory;
use super::shared::{Shared, shared};
use super::{Region, header};

/// Bytes of a cell.
pub(super) const CELL: usize = 128;
/// Cells that a region grows by.
const CHUNK: usize = 512;
/// Most cells of a region.
pub(super) const MOST: usize = 32 << 20;

/// The number of a cell.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) struct CellId(u32);

/// What fills a cell. Its first field is the tag.
pub(crate) trait Content: Shared + Sized {
    /// Tells it from other contents; not 0.
    const TAG: u32;
    /// A content that does not fit is not compiled.
    const FITS: () = assert!(size_of::<Self>() <= CELL && Self::TAG != 0);
}

shared! {
    /// What all cells begin with.
    pub(crate) struct Tag { tag: AtomicU32 }
}

/// Which cells of a region are free.
pub(super) struct Free {
    table: Mutex<Table>,
    /// Whether cells may be erased.
    ours: AtomicBool,
}

struct Table {
    /// Free cells below `fresh`.
    returned: Vec<CellId>,
    /// The first cell that was never given.
    fresh: usize,
}

/// The cells of a region.
#[derive(Clone, Copy)]
pub(crate) struct Cells<'a> {
    pub(super) memory: &'a Memory,
    pub(super) free: &'a Free,
}

impl Free {
    /// All of them.
    pub(super) fn of_new() -> Self {
        Self { table: Mutex::new(Table { returned: Vec::new(), fresh: 0 }), ours: AtomicBool::new(true) }
    }

    /// None, until somebody has looked which ones are.
    pub(super) fn of_adopted() -> Self {
        Self { table: Mutex::new(Table { returned: Vec::new(), fresh: MOST }), ours: AtomicBool::new(false) }
    }

    pub(super) fn take_over(&self) {
        self.ours.store(true, Relaxed);
    }

    fn lock(&self) -> MutexGuard<'_, Table> {
        self.table.lock().expect("a thread that panics ends the process")
    }
}

impl<'a> Cells<'a> {
    /// A cell that is to be filled and then published.
    fn allocate(self) -> io::Result<CellId> {
        let mut table = self.free.lock();
        if let Some(returned) = table.returned.pop() {
            return Ok(returned);
        }
        if table.fresh >= count(self.memory.length()) {
            self.memory.grow(header::SIZE + (table.fresh + CHUNK) * CELL)?;
        }
        let id = CellId(u32::try_from(table.fresh).map_err(io::Error::other)?);
        table.fresh += 1;
        Ok(id)
    }

    fn content<T: Content>(self, id: CellId) -> &'a T {
        const { T::FITS }
        self.memory.at(offset(id)).expect("a cell that was allocated stays")
    }

    /// The cell is filled: from here on a successor finds it.
    fn publish<T: Content>(self, id: CellId) {
        self.tag(id).store(T::TAG, Release);
    }

    /// Nobody needs the cell any more.
    fn free(self, id: CellId) {
        if !self.free.ours.load(Relaxed) {
            return;
        }
        self.tag(id).store(0, Release);
        self.free.lock().returned.push(id);
    }

    /// Cells that nobody can use are empty from here on.
    pub(crate) fn erase(self, lost: &[CellId]) {
        lost.iter().for_each(|id| self.tag(*id).store(0, Release));
    }

    /// Every cell that has a tag, with its tag.
    pub(crate) fn tagged(self) -> impl Iterator<Item = (CellId, u32)> {
        let cells = (0..count(self.memory.length())).map(|index| CellId(index as u32));
        cells.map(move |id| (id, self.tag(id).load(Acquire))).filter(|(_, tag)| *tag != 0)
    }

    /// What a cell is filled with, if there is one and it is a `T`.
    pub(crate) fn find<T: Content>(self, id: CellId) -> Option<&'a T> {
        let tag: &Tag = self.memory.at(offset(id))?;
        (tag.tag.load(Acquire) == T::TAG).then(|| self.content(id))
    }

    /// From here on all cells are free but those of `kept`, which are in order. Nothing is written.
    pub(crate) fn keep_only(self, kept: &[CellId]) {
        let end = kept.last().map_or(0, |last| last.0 + 1);
        let mut kept = kept.iter().copied().peekable();
        let free = (0..end).map(CellId).filter(|id| kept.next_if_eq(id).is_none());
        let mut returned: Vec<_> = free.collect();
        // The first ones are given first, so that what is in use stays together.
        returned.reverse();
        *self.free.lock() = Table { returned, fresh: end as usize };
    }

    fn tag(self, id: CellId) -> &'a AtomicU32 {
        let tag: &Tag = self.memory.at(offset(id)).expect("a cell that was allocated stays");
        &tag.tag
    }
}

/// A cell that is in use. Whoever drops this has no more use for it.
pub(crate) struct Record<T: Content> {
    region: Arc<Region>,
    id: CellId,
    content: PhantomData<fn() -> T>,
}

impl<T: Content> Record<T> {
    /// A new one, as `fill` fills it. A successor finds all of it or nothing.
    ///
    /// # Errors
    /// When there is no memory.
    pub(crate) fn new(region: &Arc<Region>, fill: impl FnOnce(&T)) -> io::Result<Self> {
        let cells = region.cells();
        let id = cells.allocate()?;
        fill(cells.content(id));
        cells.publish::<T>(id);
        Ok(Self::of(region, id))
    }

    /// The one of a cell that is filled with a `T` already, and that nobody else has.
    pub(crate) fn of(region: &Arc<Region>, id: CellId) -> Self {
        Self { region: Arc::clone(region), id, content: PhantomData }
    }

    /// The cell.
    pub(crate) fn id(&self) -> CellId {
        self.id
    }
}

impl<T: Content> Deref for Record<T> {
    type Target = T;

    fn deref(&self) -> &T {
        self.region.cells().content(self.id)
    }
}

impl<T: Content> Drop for Record<T> {
    fn drop(&mut self) {
        self.region.cells().free(self.id);
    }
}

impl<T: Content> std::fmt::Debug for Record<T> {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.id.fmt(formatter)
    }
}

impl CellId {
    /// As a header names it: 0 stands for none.
    pub(crate) fn to_word(self) -> u64 {
        u64::from(self.0) + 1
    }

    /// What [`to_word`](Self::to_word) gave.
    pub(crate) fn from_word(word: u64) -> Option<CellId> {
        u32::try_from(word.checked_sub(1)?).ok().map(CellId)
    }
}

/// How many cells fit into a region of that length.
fn count(length: usize) -> usize {
    length.saturating_sub(header::SIZE) / CELL
}

fn offset(id: CellId) -> usize {
    header::SIZE + id.0 as usize * CELL
}
