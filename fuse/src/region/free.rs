//! The free cells of a region, and the pages of cells that have memory.
//!
//! 1. The first page that has a free cell gives the next one, so the cells in use stay together.
//! 2. A page without a cell in use gives its memory back to the kernel: it becomes a hole of the file. The file keeps its
//!    length. A few such pages keep their memory for the next cells.
//! 3. A page has memory of its own again before one of its cells is filled, so a host without memory fails the call that needs
//!    the cell, not the store.
//! 4. A process that adopts a region learns which cells are in use ([`FreeCells::keep_only`]) before it takes one, and gives nothing
//!    back until the region is its own.

use std::io;
use std::ops::Range;
use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::{Mutex, MutexGuard};

use super::cell_id::{CELL, CellId, count};
use super::header;
use super::memory::Memory;

/// The unit in which a region gives memory back to the kernel, in bytes.
const PAGE: usize = 4096;
/// Cells of a page; the bits of [`Page::used`].
const CELLS: usize = PAGE / CELL;
/// Pages that get memory at once.
const CHUNK: usize = 16;
/// Pages without a cell in use that keep their memory.
const SPARE: usize = 16;
/// Bits of a word of [`FreeTable::open`].
const WORD: usize = u64::BITS as usize;

/// The free cells of a region.
pub(super) struct FreeCells {
    table: Mutex<FreeTable>,
    /// Whether the region may be changed.
    ours: AtomicBool,
}

#[derive(Default)]
struct FreeTable {
    pages: Vec<Page>,
    /// A bit for each page that has a free cell.
    open: Vec<u64>,
    /// All words of `open` before this one are 0.
    first: usize,
    /// Pages that have memory and no cell in use.
    spare: usize,
    /// Whether the table has the cells in use.
    is_known: bool,
}

/// The cells of one page.
#[derive(Clone, Copy, Default)]
struct Page {
    /// A bit for each cell in use.
    used: u32,
    has_memory: bool,
}

impl FreeCells {
    /// The cells of a new region: all are free.
    pub(super) fn of_new() -> Self {
        Self { table: Mutex::new(FreeTable { is_known: true, ..FreeTable::default() }), ours: AtomicBool::new(true) }
    }

    /// No cell is known to be free until [`keep_only`](Self::keep_only).
    pub(super) fn of_adopted() -> Self {
        Self { table: Mutex::default(), ours: AtomicBool::new(false) }
    }

    /// The region may be changed from here on.
    pub(super) fn take_over(&self) {
        self.ours.store(true, Relaxed);
    }

    /// Whether the region may be changed.
    pub(super) fn is_ours(&self) -> bool {
        self.ours.load(Relaxed)
    }

    /// A cell that is free no longer.
    ///
    /// # Errors
    /// When there is no memory.
    pub(super) fn take(&self, memory: &Memory) -> io::Result<CellId> {
        let mut table = self.lock();
        if !table.is_known {
            return Err(io::ErrorKind::OutOfMemory.into());
        }
        let index = match table.first_open() {
            Some(index) => index,
            None => table.pages.len(),
        };
        table.give_memory(memory, index)?;
        let page = &mut table.pages[index];
        let bit = page.used.trailing_ones();
        let was_empty = page.used == 0;
        page.used |= 1 << bit;
        let is_full = page.used == u32::MAX;
        table.spare -= usize::from(was_empty);
        if is_full {
            table.open[index / WORD] &= !(1 << (index % WORD));
        }
        CellId::of(index * CELLS + bit as usize).ok_or_else(|| io::ErrorKind::OutOfMemory.into())
    }

    /// The cell is free again, and erased.
    pub(super) fn give(&self, memory: &Memory, id: CellId) {
        let (index, bit) = (id.index() / CELLS, id.index() % CELLS);
        let mut table = self.lock();
        let Some(page) = table.pages.get_mut(index) else { return };
        let was_used = page.used & (1 << bit) != 0;
        page.used &= !(1 << bit);
        let is_empty = page.used == 0;
        table.open_page(index);
        if was_used && is_empty {
            table.spare += 1;
            if table.spare > SPARE {
                table.take_memory(memory, index);
            }
        }
    }

    /// From here on all cells are free but those of `kept`, which are in ascending order. Nothing is written.
    pub(super) fn keep_only(&self, memory: &Memory, kept: &[CellId]) {
        let mut table = FreeTable { is_known: true, ..FreeTable::default() };
        let end = kept.last().map_or(0, |last| last.index() + 1).max(count(memory.length()));
        table.extend_to(end.div_ceil(CELLS));
        for data in memory.data_from(header::SIZE) {
            // A page with a part of its bytes gets the rest when it is needed.
            let whole = (data.start - header::SIZE).div_ceil(PAGE)..(data.end - header::SIZE) / PAGE;
            let pages = table.pages.get_mut(whole).into_iter().flatten();
            pages.for_each(|page| page.has_memory = true);
        }
        kept.iter().for_each(|id| table.pages[id.index() / CELLS].used |= 1 << (id.index() % CELLS));
        for index in 0..table.pages.len() {
            let Page { used, has_memory } = table.pages[index];
            if used == u32::MAX {
                table.open[index / WORD] &= !(1 << (index % WORD));
            }
            table.spare += usize::from(used == 0 && has_memory);
        }
        *self.lock() = table;
    }

    /// Gives back the memory of all pages without a cell in use, except a few.
    pub(super) fn trim(&self, memory: &Memory) {
        let mut table = self.lock();
        for index in 0..table.pages.len() {
            if table.spare <= SPARE {
                break;
            }
            if let Page { used: 0, has_memory: true } = table.pages[index] {
                table.take_memory(memory, index);
            }
        }
    }

    fn lock(&self) -> MutexGuard<'_, FreeTable> {
        self.table.lock().expect("a thread that panics ends the process")
    }
}

impl FreeTable {
    /// The first page that has a free cell.
    fn first_open(&mut self) -> Option<usize> {
        let found = self.open[self.first..].iter().position(|word| *word != 0);
        self.first += found.unwrap_or(self.open.len() - self.first);
        let word = self.open.get(self.first)?;
        Some(self.first * WORD + word.trailing_zeros() as usize)
    }

    fn open_page(&mut self, index: usize) {
        self.open[index / WORD] |= 1 << (index % WORD);
        self.first = self.first.min(index / WORD);
    }

    /// Extends the table to `pages` pages. The new pages are holes.
    fn extend_to(&mut self, pages: usize) {
        let before = self.pages.len();
        if pages > before {
            self.pages.resize(pages, Page::default());
            self.open.resize(pages.div_ceil(WORD), 0);
            (before..pages).for_each(|index| self.open_page(index));
        }
    }

    /// Sees to it that a page has memory; holes behind it get some with the same call.
    fn give_memory(&mut self, memory: &Memory, index: usize) -> io::Result<()> {
        if self.pages.get(index).is_some_and(|page| page.has_memory) {
            return Ok(());
        }
        let is_hole = |page: &&Page| page.used == 0 && !page.has_memory;
        let following = self.pages.iter().skip(index + 1);
        let end = match following.clone().take(CHUNK - 1).take_while(is_hole).count() {
            // The last pages of the file: it grows.
            holes if index + 1 + holes >= self.pages.len() => index + CHUNK,
            holes => index + 1 + holes,
        };
        let Range { start, end: bytes_end } = bytes(index..end);
        memory.back(start, bytes_end - start)?;
        self.extend_to(end);
        for page in &mut self.pages[index..end] {
            self.spare += usize::from(page.used == 0);
            page.has_memory = true;
        }
        Ok(())
    }

    /// A page without a cell in use becomes a hole.
    fn take_memory(&mut self, memory: &Memory, index: usize) {
        let Range { start, end } = bytes(index..index + 1);
        if memory.give_back(start, end - start).is_ok() {
            self.pages[index].has_memory = false;
            self.spare -= 1;
        }
    }
}

/// The bytes of these pages in the file.
fn bytes(pages: Range<usize>) -> Range<usize> {
    header::SIZE + pages.start * PAGE..header::SIZE + pages.end * PAGE
}

const _: () = assert!(CELLS == u32::BITS as usize && header::SIZE.is_multiple_of(PAGE));
