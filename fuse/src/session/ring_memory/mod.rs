//! The memory of a volume's rings: requests and answers of the kernel and a server, and the journal that a successor needs.
//!
//! It is one memory file for each volume, which the supervisor makes and holds:
//!
//! ```text
//! RingHeader │ Journal of each entry │ entries: Head (1 page), payload (18 pages)
//! ```
//!
//! 1. The kernel keeps the addresses of an entry for as long as the connection lives, and uses them in whichever process
//!    commits. So each server maps the file where the first one did ([`RingMemory::map`]).
//! 2. The file has holes. An entry gets its memory before the kernel learns of it: all of it, or the two pages that most requests
//!    need. So a page is rarely missing when a thread that is being killed copies a request.
//! 3. A request stays whole in its entry until its answer is whole: a short answer is kept beside it until it is committed, and
//!    a request whose answer is long leaves nothing behind that must not be done twice.
//!
//! The states of an entry, as a successor reads them; `commit` is the number that the kernel wrote last:
//!
//! | journal | meaning |
//! |---|---|
//! | no queue | not in use |
//! | `unique` is not `commit` | a request came, and no thread has looked at it |
//! | taken | a thread has begun to answer; the journal's slot says how far it came |
//! | answered | the answer stands in the entry; the kernel may have it already |

mod layout;

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::Ordering::{Acquire, Relaxed, Release};
use std::sync::atomic::{AtomicU32, AtomicU64};

use rustix::fs::{
    FallocateFlags, MemfdFlags, SealFlags, fallocate, fcntl_add_seals, fcntl_get_seals, fstat, ftruncate, memfd_create,
};
use rustix::io::Errno;
use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mmap, munmap};
use zerocopy::IntoBytes;

use crate::label::VolumeLabel;
use crate::region::BegunRequest;
use crate::region::in_flight::InFlightSlot;
use crate::region::shared::shared;
use crate::session::abi::{InHeader, OutHeader};
use layout::{
    ADDRESS, ANSWER, ANSWERED, APART, COMMIT_ID, ENTRY, KERNELS, LAYOUT, MAGIC, MOST_QUEUES, MOST_VOLUMES, OPERATION,
    PAGE, PAYLOAD_SIZE, REQUEST, SHORT_ANSWER, SHORT_REQUEST, SPARE, TAKEN,
};

pub(super) use layout::PAYLOAD;

shared! {
    /// The header of the file.
    pub(crate) struct RingHeader {
        magic: AtomicU64,
        layout: AtomicU32,
        queues: AtomicU32,
        /// The address at which every server maps the file; 0 if none has mapped it yet.
        address: AtomicU64,
        /// A [`RingState`].
        state: AtomicU32,
        /// The first entry that was never in use.
        used: AtomicU32,
    }
    /// The journal of one entry.
    #[repr(align(64))]
    pub(crate) struct EntryJournal {
        /// The number of the entry's queue plus 1; 0 if the entry is not in use.
        queue: AtomicU32,
        state: AtomicU32,
        /// The request that the state is about.
        unique: AtomicU64,
        /// The length of that request as one piece.
        request: AtomicU32,
        /// 1 if the payload stayed where the kernel put it.
        in_place: AtomicU32,
        /// The errno of the answer, negative, or 0.
        error: AtomicU32,
        /// The length of the answer.
        answer: AtomicU32,
        /// 1 if the answer is in the payload already.
        answer_in_place: AtomicU32,
        slot: InFlightSlot,
    }
}

/// The state of a volume's rings.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum RingState {
    /// The kernel does not know all rings yet.
    Beginning = 0,
    /// Requests come through the rings.
    InUse = 1,
    /// The kernel did not accept the rings, and requests never come through them.
    Refused = 2,
}

/// The number of an entry.
pub(super) type EntryId = u32;

/// The state in which a dead server has left an entry.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum EntryState {
    /// No request.
    Nothing,
    /// A request, with the record of the thread that had begun to execute it, if any.
    Request(Option<BegunRequest>),
    /// An answer, which the kernel may have already.
    Answer,
}

/// The memory file of a volume's rings, mapped.
pub struct RingMemory {
    file: OwnedFd,
    start: *mut u8,
    length: usize,
    queues: usize,
    /// The volume, for its server's log lines.
    volume: VolumeLabel,
}

// SAFETY: what several threads use are atomics; the bytes of an entry belong to the thread that answers its request.
unsafe impl Send for RingMemory {}
// SAFETY: as above.
unsafe impl Sync for RingMemory {}

impl RingMemory {
    /// The memory of a new volume, on a machine that may have so many CPUs. It is for the supervisor, which does not use the
    /// entries.
    ///
    /// # Errors
    /// When there is no memory.
    pub fn create(queues: usize) -> io::Result<Self> {
        if !(1..=MOST_QUEUES).contains(&queues) {
            return Err(io::ErrorKind::InvalidInput.into());
        }
        let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
        let file = match memfd_create("podfs-rings", flags | MemfdFlags::NOEXEC_SEAL) {
            Err(Errno::INVAL) => memfd_create("podfs-rings", flags)?,
            made => made?,
        };
        ftruncate(&file, (entries_begin(queues) + (queues + SPARE) * ENTRY) as u64)?;
        fcntl_add_seals(&file, SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL)?;
        fallocate(&file, FallocateFlags::empty(), 0, entries_begin(queues) as u64)?;
        let memory = Self::map_part(file, queues, None)?;
        let header = memory.header();
        header.layout.store(LAYOUT, Relaxed);
        header.queues.store(queues as u32, Relaxed);
        header.magic.store(MAGIC, Release);
        Ok(memory)
    }

    /// The memory of a volume that a server serves, for the supervisor.
    ///
    /// # Errors
    /// When this program cannot read it.
    pub fn adopt(file: OwnedFd) -> io::Result<Self> {
        let queues = Self::parse(&file)?;
        Self::map_part(file, queues, None)
    }

    /// The memory of `volume`, for its server: at the address where the servers before had it.
    ///
    /// # Errors
    /// As [`adopt`](Self::adopt), and when the address is not free.
    pub fn map(file: OwnedFd, volume: &VolumeLabel) -> io::Result<Self> {
        let mut memory = Self::map_where_it_was(file)?;
        memory.volume = volume.clone();
        Ok(memory)
    }

    fn map_where_it_was(file: OwnedFd) -> io::Result<Self> {
        let queues = Self::parse(&file)?;
        let first = Self::map_part(file.try_clone()?, queues, None)?;
        let address = &first.header().address;
        match address.load(Acquire) {
            0 => {
                let mut places = (0..MOST_VOLUMES).map(|place| ADDRESS + place * APART);
                let mapped =
                    places.find_map(|place| match Self::map_part(file.try_clone().ok()?, queues, Some(place)) {
                        Err(error) if error.raw_os_error() == Some(libc::EEXIST) => None,
                        mapped => Some(mapped),
                    });
                let mapped = mapped.unwrap_or_else(|| Err(io::ErrorKind::OutOfMemory.into()))?;
                address.store(mapped.start as u64, Release);
                Ok(mapped)
            }
            place => Self::map_part(file, queues, Some(usize::try_from(place).map_err(io::Error::other)?)),
        }
    }

    /// Checks the header of the file. Returns the number of its queues.
    fn parse(file: &OwnedFd) -> io::Result<usize> {
        let damaged = || io::Error::new(io::ErrorKind::InvalidData, "the memory of the volume's rings is damaged");
        let sealed = fcntl_get_seals(file).is_ok_and(|seals| seals.contains(SealFlags::SHRINK));
        let length = usize::try_from(fstat(file)?.st_size).map_err(io::Error::other)?;
        if !sealed || length < entries_begin(1) {
            return Err(damaged());
        }
        let first = Self::map_part(file.try_clone()?, 1, None)?;
        let header = first.header();
        let (magic, layout) = (header.magic.load(Acquire), header.layout.load(Relaxed));
        let queues = header.queues.load(Relaxed) as usize;
        let fits = (1..=MOST_QUEUES).contains(&queues) && length == entries_begin(queues) + (queues + SPARE) * ENTRY;
        if magic == MAGIC && layout != LAYOUT {
            let sentence = format!(
                "the memory of the volume's rings has layout {layout}, and this podfs reads layout {LAYOUT}; serve the volume with the \
                 podfs that made it, or start the volume anew"
            );
            return Err(io::Error::new(io::ErrorKind::Unsupported, sentence));
        }
        if magic == MAGIC && fits { Ok(queues) } else { Err(damaged()) }
    }

    /// Maps the whole file at the address `place`. Without `place`, maps only the part before the entries, at any address. The
    /// crate memmap2 cannot map at a given address.
    fn map_part(file: OwnedFd, queues: usize, place: Option<usize>) -> io::Result<Self> {
        let journals = entries_begin(queues);
        let (length, address, flags) = match place {
            Some(place) => (journals + (queues + SPARE) * ENTRY, place, MapFlags::FIXED_NOREPLACE),
            None => (journals, 0, MapFlags::empty()),
        };
        let (prot, flags) = (ProtFlags::READ | ProtFlags::WRITE, MapFlags::SHARED | MapFlags::NORESERVE | flags);
        // SAFETY: the kernel maps it where nothing is.
        let start = unsafe { mmap(address as *mut _, length, prot, flags, &file, 0) }?;
        let mapped = Self { file, start: start.cast(), length, queues, volume: VolumeLabel::default() };
        // A kernel that does not know the flag takes the address as a wish.
        if place.is_some_and(|place| place != mapped.start as usize) {
            return Err(Errno::EXIST.into());
        }
        Ok(mapped)
    }

    /// The name of the volume, for log lines of its server.
    pub(in crate::session) fn volume(&self) -> &str {
        self.volume.as_str()
    }

    /// Returns the number of queues.
    pub(super) fn queues(&self) -> usize {
        self.queues
    }

    /// Returns the state of the rings.
    pub(super) fn state(&self) -> RingState {
        match self.header().state.load(Acquire) {
            0 => RingState::Beginning,
            1 => RingState::InUse,
            _ => RingState::Refused,
        }
    }

    /// Whether requests come through the rings, for status messages.
    pub fn is_in_use(&self) -> bool {
        self.state() == RingState::InUse
    }

    pub(super) fn set_state(&self, state: RingState) {
        self.header().state.store(state as u32, Release);
    }

    /// The threads that answer a request at this moment, each with the request's number.
    pub fn busy(&self) -> impl Iterator<Item = (i32, u64)> {
        self.journals().filter_map(|journal| journal.slot.busy())
    }

    /// The entries that are in use, each with its queue.
    pub(super) fn in_use(&self) -> impl Iterator<Item = (EntryId, usize)> {
        let queue = |journal: &EntryJournal| (journal.queue.load(Acquire) as usize).checked_sub(1);
        let queues = self.journals().zip(0..).filter_map(move |(journal, entry)| Some((entry, queue(journal)?)));
        queues.filter(|(_, queue)| *queue < self.queues)
    }

    /// The requests that a dead server has not answered, of memory that is [mapped](Self::map).
    pub(crate) fn unanswered(&self) -> impl Iterator<Item = u64> {
        let waits = |entry| !matches!(self.entry_state(entry), EntryState::Nothing | EntryState::Answer);
        self.in_use().map(|(entry, _)| entry).filter(move |entry| waits(*entry)).map(|entry| self.commit_id(entry))
    }

    /// Gives a queue another entry, with memory behind it.
    ///
    /// # Errors
    /// When there is no memory, or no free entry.
    pub(super) fn add(&self, queue: usize, whole: bool) -> io::Result<EntryId> {
        let taken = |journal: &EntryJournal| {
            journal.queue.compare_exchange(0, queue as u32 + 1, Release, Relaxed).is_ok().then_some(())
        };
        let count = (self.queues + SPARE) as u32;
        let entry = (0..count).find(|entry| taken(self.journal(*entry)).is_some()).ok_or(io::ErrorKind::OutOfMemory)?;
        self.header().used.fetch_max(entry + 1, Release);
        self.back(entry, whole).inspect_err(|_| self.journal(entry).queue.store(0, Release))?;
        Ok(entry)
    }

    /// Gives an entry its memory: all of it, or what most requests need.
    pub(super) fn back(&self, entry: EntryId, whole: bool) -> io::Result<()> {
        let (offset, length) = (self.offset(entry), if whole { ENTRY } else { 2 * PAGE });
        fallocate(&self.file, FallocateFlags::empty(), offset as u64, length as u64)?;
        // SAFETY: the pages are within the mapping, and keep their content. If the kernel cannot do that, it maps each page when a
        // process first uses it.
        let _faults = unsafe { madvise(self.start.add(offset).cast(), length, Advice::LinuxPopulateWrite) };
        Ok(())
    }

    /// Returns the buffers of the entry: the kernel writes a request's headers and payload there, and reads the answer from them.
    pub(super) fn buffers(&self, entry: EntryId) -> [libc::iovec; 2] {
        let start = self.bytes(entry);
        // SAFETY: the payload is behind the first page, within the entry.
        let payload = unsafe { start.add(PAGE) };
        [
            libc::iovec { iov_base: start.cast(), iov_len: KERNELS },
            libc::iovec { iov_base: payload.cast(), iov_len: PAYLOAD },
        ]
    }

    /// The request that the kernel put there last; 0 for none.
    pub(super) fn commit_id(&self, entry: EntryId) -> u64 {
        self.word(entry, COMMIT_ID)
    }

    /// The queue of an entry that is in use.
    pub(super) fn queue(&self, entry: EntryId) -> usize {
        (self.journal(entry).queue.load(Relaxed) as usize).saturating_sub(1).min(self.queues - 1)
    }

    /// The slot of the thread that answers the entry's request.
    pub(super) fn slot(&self, entry: EntryId) -> &InFlightSlot {
        &self.journal(entry).slot
    }

    /// The state in which a dead server has left an entry.
    pub(super) fn entry_state(&self, entry: EntryId) -> EntryState {
        let (journal, commit) = (self.journal(entry), self.commit_id(entry));
        match journal.state.load(Acquire) {
            _ if commit == 0 => EntryState::Nothing,
            TAKEN if journal.unique.load(Relaxed) == commit => EntryState::Request(journal.slot.begun()),
            ANSWERED if journal.unique.load(Relaxed) == commit => EntryState::Answer,
            _ => EntryState::Request(None),
        }
    }

    /// Takes the request that came into the entry: from here on, a successor reads its state from the entry's slot. Returns
    /// `false` if the kernel broke its own protocol.
    ///
    /// The calling thread alone uses the entry.
    pub(super) fn take(&self, entry: EntryId) -> bool {
        let (journal, commit) = (self.journal(entry), self.commit_id(entry));
        if journal.state.load(Acquire) == TAKEN && journal.unique.load(Relaxed) == commit {
            // The request of a dead server: its slot stays as it is.
            journal.slot.take_again(commit);
            return true;
        }
        journal.slot.take(commit);
        journal.state.store(0, Release);
        journal.unique.store(commit, Release);
        let arranged = self.arrange(entry);
        let (length, in_place) = arranged.unwrap_or_default();
        journal.request.store(length as u32, Relaxed);
        journal.in_place.store(in_place.into(), Relaxed);
        journal.state.store(TAKEN, Release);
        arranged.is_some()
    }

    /// Puts the headers and the payload of a request together as one piece. Returns its length, and whether the payload stayed
    /// where the kernel put it.
    fn arrange(&self, entry: EntryId) -> Option<(usize, bool)> {
        const HEADER: usize = size_of::<InHeader>();
        let start = self.bytes(entry);
        let payload = self.word(entry, PAYLOAD_SIZE) as u32 as usize;
        let length = self.word(entry, 0) as u32 as usize;
        let operation = length.checked_sub(HEADER + payload).filter(|operation| *operation <= OPERATION)?;
        if payload > PAYLOAD || !operation.is_multiple_of(8) {
            return None;
        }
        let in_place = length > SHORT_REQUEST;
        let place = if in_place { PAGE - HEADER - operation } else { REQUEST };
        // SAFETY: source and target are within the entry, and do not overlap: the kernel's headers are before both places, and
        // what is put before the payload ends where that begins.
        unsafe {
            start.add(place).copy_from_nonoverlapping(start, HEADER);
            start.add(place + HEADER).copy_from_nonoverlapping(start.add(OPERATION), operation);
            if !in_place {
                start.add(place + HEADER + operation).copy_from_nonoverlapping(start.add(PAGE), payload);
            }
        }
        Some((length, in_place))
    }

    /// The request that was [taken](Self::take), as one piece.
    ///
    /// # Safety
    /// The caller must not use the result any more when the request is answered.
    pub(super) unsafe fn request(&self, entry: EntryId) -> &[u8] {
        let journal = self.journal(entry);
        let length = (journal.request.load(Relaxed) as usize).min(SHORT_REQUEST + PAYLOAD);
        let in_place = journal.in_place.load(Relaxed) == 1;
        // The headers end where the payload begins, so their length gives the place at which the request begins.
        let place = if in_place { PAGE - length.saturating_sub(self.payload_of(entry)).min(PAGE) } else { REQUEST };
        let length = if in_place { length } else { length.min(SHORT_REQUEST) };
        // SAFETY: the bytes are within the entry; the caller promises that no thread writes them before the answer.
        unsafe { std::slice::from_raw_parts(self.bytes(entry).add(place), length.min(ENTRY - place)) }
    }

    fn payload_of(&self, entry: EntryId) -> usize {
        (self.word(entry, PAYLOAD_SIZE) as u32 as usize).min(PAYLOAD)
    }

    /// Keeps an answer: from here on, a successor commits it, and does nothing again. The request is not to be used any more.
    ///
    /// # Errors
    /// When it is longer than the kernel takes.
    pub(super) fn answer(&self, entry: EntryId, error: i32, parts: [&[u8]; 2]) -> io::Result<()> {
        let (journal, start) = (self.journal(entry), self.bytes(entry));
        let length = parts[0].len() + parts[1].len();
        if length > PAYLOAD {
            return Err(io::ErrorKind::InvalidInput.into());
        }
        let in_place = length > SHORT_ANSWER;
        let mut place = if in_place { PAGE } else { ANSWER };
        for part in parts {
            // SAFETY: the bytes are within the entry, where no slice is borrowed any more; the answer comes from elsewhere.
            unsafe { start.add(place).copy_from_nonoverlapping(part.as_ptr(), part.len()) };
            place += part.len();
        }
        journal.error.store(error.cast_unsigned(), Relaxed);
        journal.answer.store(length as u32, Relaxed);
        journal.answer_in_place.store(in_place.into(), Relaxed);
        journal.state.store(ANSWERED, Release);
        Ok(())
    }

    /// Puts an answer where the kernel takes it from; returns the number of its request. Doing it again changes nothing.
    pub(super) fn finish(&self, entry: EntryId) -> u64 {
        let (journal, start) = (self.journal(entry), self.bytes(entry));
        let unique = journal.unique.load(Relaxed);
        let length = (journal.answer.load(Relaxed) as usize).min(PAYLOAD);
        if journal.answer_in_place.load(Relaxed) == 0 {
            // SAFETY: both are within the entry, and apart.
            unsafe { start.add(PAGE).copy_from_nonoverlapping(start.add(ANSWER), length.min(SHORT_ANSWER)) };
        }
        let len = (size_of::<OutHeader>() + length) as u32;
        let header = OutHeader { len, error: journal.error.load(Relaxed).cast_signed(), unique };
        let size = length as u32;
        // SAFETY: within the entry.
        unsafe {
            start.copy_from_nonoverlapping(header.as_bytes().as_ptr(), size_of::<OutHeader>());
            start.add(PAYLOAD_SIZE).copy_from_nonoverlapping(size.as_bytes().as_ptr(), size_of::<u32>());
        }
        unique
    }

    fn word(&self, entry: EntryId, offset: usize) -> u64 {
        // SAFETY: it is within the entry's first page, at a multiple of 8.
        unsafe { self.bytes(entry).add(offset).cast::<u64>().read_volatile() }
    }

    fn bytes(&self, entry: EntryId) -> *mut u8 {
        let offset = self.offset(entry);
        assert!(offset + ENTRY <= self.length, "a server has all entries mapped");
        // SAFETY: it is within the mapping.
        unsafe { self.start.add(offset) }
    }

    fn offset(&self, entry: EntryId) -> usize {
        entries_begin(self.queues) + entry as usize * ENTRY
    }

    fn journals(&self) -> impl Iterator<Item = &EntryJournal> {
        let used = (self.header().used.load(Acquire)).min((self.queues + SPARE) as u32);
        (0..used).map(|entry| self.journal(entry))
    }

    fn journal(&self, entry: EntryId) -> &EntryJournal {
        assert!((entry as usize) < self.queues + SPARE, "there are no more entries");
        // SAFETY: it is within the mapping, which begins at a page, so it is aligned; any bytes are a value of it.
        unsafe { &*self.start.add(PAGE).cast::<EntryJournal>().add(entry as usize) }
    }

    fn header(&self) -> &RingHeader {
        // SAFETY: as above.
        unsafe { &*self.start.cast() }
    }
}

impl AsFd for RingMemory {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }
}

impl Drop for RingMemory {
    fn drop(&mut self) {
        // SAFETY: no reference to the mapping is left. If the kernel still wants to copy a request there, the copy fails.
        let _gone = unsafe { munmap(self.start.cast(), self.length) };
    }
}

/// Returns the offset of the first entry in the file.
fn entries_begin(queues: usize) -> usize {
    PAGE + ((queues + SPARE) * size_of::<EntryJournal>()).next_multiple_of(PAGE)
}

const _: () = assert!(size_of::<RingHeader>() <= PAGE && size_of::<EntryJournal>() == 128);
const _: () = assert!(KERNELS <= ANSWER && ANSWER + SHORT_ANSWER <= REQUEST);
const _: () = assert!(REQUEST + SHORT_REQUEST <= PAGE - size_of::<InHeader>() - OPERATION);

#[cfg(test)]
mod tests;
