//! The free cells of a region, and the pages of cells that have memory.
//!
//! 1. The next cell is one of the first page that has a free cell, so the cells in use stay together.
//! 2. A page without a cell in use gives its memory back to the kernel: it becomes a hole of the file. The file keeps its
//!    length. A few such pages keep their memory for the next cells.
//! 3. A page that is a hole gets memory before one of its cells is filled. So on a host without free memory, the call that needs
//!    the cell fails, and no store causes SIGBUS.
//! 4. A process that adopts a region learns which cells are in use ([`FreeCells::keep_only`]) before it takes a cell, and gives no
//!    memory back until it has taken over the region.

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
    /// Whether this process may change the region: it made the region, or has taken it over.
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
    /// Whether the table says which cells are in use. Until then, no cell can be taken.
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

    /// The cells of an adopted region. [`keep_only`](Self::keep_only) says later which of them are free.
    pub(super) fn of_adopted() -> Self {
        Self { table: Mutex::default(), ours: AtomicBool::new(false) }
    }

    /// Allows this process to change the region from here on.
    pub(super) fn take_over(&self) {
        self.ours.store(true, Relaxed);
    }

    /// Whether this process may change the region.
    pub(super) fn is_ours(&self) -> bool {
        self.ours.load(Relaxed)
    }

    /// Takes a free cell, which is in use from here on.
    ///
    /// # Errors
    /// When there is no memory, or before [`keep_only`](Self::keep_only) in an adopted region.
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

    /// Makes a cell free again. The caller has erased its tag.
    pub(super) fn free(&self, memory: &Memory, id: CellId) {
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

    /// Counts all cells as free from here on, except those of `kept`, which are in ascending order. Writes nothing to the region.
    pub(super) fn keep_only(&self, memory: &Memory, kept: &[CellId]) {
        let mut table = FreeTable { is_known: true, ..FreeTable::default() };
        let end = kept.last().map_or(0, |last| last.index() + 1).max(count(memory.length()));
        table.extend_to(end.div_ceil(CELLS));
        for data in memory.data_from(header::SIZE) {
            // A page that only partly has memory gets the other part when one of its cells is needed.
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

    /// Allocates memory for a page that has none. The same system call allocates memory for holes behind it.
    fn give_memory(&mut self, memory: &Memory, index: usize) -> io::Result<()> {
        if self.pages.get(index).is_some_and(|page| page.has_memory) {
            return Ok(());
        }
        let is_hole = |page: &&Page| page.used == 0 && !page.has_memory;
        let following = self.pages.iter().skip(index + 1);
        let end = match following.clone().take(CHUNK - 1).take_while(is_hole).count() {
            // The holes reach the end of the file, so the file grows.
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

    /// Gives the memory of a page without a cell in use back to the kernel: the page becomes a hole.
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
