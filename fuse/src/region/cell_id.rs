//! The numbers of a region's cells, and where the cells are: one after the other behind the header.

use super::header;

/// Bytes of a cell.
pub(super) const CELL: usize = 128;
/// Most cells of a region.
pub(super) const MOST: usize = 32 << 20;

/// The number of a cell.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) struct CellId(u32);

impl CellId {
    /// The cell with this index; `None` if the index does not fit into 32 bits.
    pub(super) fn of(index: usize) -> Option<CellId> {
        u32::try_from(index).ok().map(CellId)
    }

    /// The index of the cell. The first cell behind the header has index 0.
    pub(super) fn index(self) -> usize {
        self.0 as usize
    }

    /// The word for the cell in a header. 0 means no cell.
    pub(crate) fn to_word(self) -> u64 {
        u64::from(self.0) + 1
    }

    /// The id from which [`to_word`](Self::to_word) made the word.
    pub(crate) fn from_word(word: u64) -> Option<CellId> {
        u32::try_from(word.checked_sub(1)?).ok().map(CellId)
    }

    /// The offset of the cell in the region, in bytes.
    pub(super) fn offset(self) -> usize {
        header::SIZE + self.index() * CELL
    }
}

/// The number of cells in a region of `length` bytes.
pub(super) fn count(length: usize) -> usize {
    length.saturating_sub(header::SIZE) / CELL
}
