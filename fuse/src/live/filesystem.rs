//! The FUSE side of live parts, and the swap, at which files get other bytes.
//!
//! A warm file causes no requests, like a file of a [projection](crate::projection::filesystem): the kernel remembers `ENOSYS` to
//! OPEN and FLUSH, and caches entries, attributes and pages without a time limit. Names change by the supervisor's system calls.
//! Bytes change by `SharedLiveTree::swap`:
//!
//! 1. The server marks the nodes that change. From here on, a request for their bytes or attributes waits, at most `SWAP_TIMEOUT`.
//! 2. The server makes the kernel forget their attributes, and then drop their pages. The kernel waits for pages that a process
//!    is reading.
//! 3. If the server has answered no request about the marked nodes since step 1, the tree shows the new bytes, and the server
//!    answers the waiting requests from them. So no page of the kernel has old bytes with the new size, or new bytes with the
//!    old size.
//! 4. If the kernel waits in step 2 for an answer that waits in step 1, the server gives that answer from the old bytes after
//!    `SWAP_TIMEOUT`, and all steps begin again. After `ATTEMPTS` attempts, the server swaps the bytes anyway, and makes the kernel
//!    drop the pages once more.
//!
//! No signal ends a wait in step 2. So a child process makes that call: a killed server can end while the child waits
//! ([`page_invalidator`](crate::session::drop_content_of)).
//!
//! Threads lock the tree only for short times, and never while the kernel drops pages.

use std::ffi::OsStr;
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::time::Duration;

use nix::errno::Errno;

use super::step::LiveStep;
use super::tree::LiveTree;
use crate::projection;
use crate::projection::filesystem::{FOREVER, attributes_answer, entry, file_system, push_if_it_fits, requested_part};
use crate::projection::tree::NodeAttributes;
use crate::projection::undo::Undo;
use crate::region::Region;
use crate::session::abi::{EntryOut, ReadIn, SetattrIn, fattr, init};
use crate::session::{
    Answer, Exchange, Filesystem, FuseOperation, NodeId, Notifier, Request, WantedFeatures, drop_content_of,
};
use crate::trace::Trace;

/// The longest time that an answer about a file waits for the end of a swap. The kernel drops the file's pages within
/// microseconds, unless it waits for this answer.
const SWAP_TIMEOUT: Duration = Duration::from_millis(5);
/// The most attempts to change the bytes of files without an answer about them meanwhile. Only many readers of pages that are not
/// cached can disturb all attempts.
const ATTEMPTS: u32 = 8;

/// A tree that the session thread reads, and the control thread changes.
#[derive(Clone)]
pub struct SharedLiveTree(Arc<SharedState>);

struct SharedState {
    tree: Mutex<LiveTree>,
    swapped: Condvar,
}

impl SharedLiveTree {
    /// Shares `tree`.
    pub fn new(tree: LiveTree) -> Self {
        Self(Arc::new(SharedState { tree: Mutex::new(tree), swapped: Condvar::new() }))
    }

    /// Locks the tree. The session answers no request meanwhile, so unlock it soon.
    pub fn lock(&self) -> MutexGuard<'_, LiveTree> {
        self.0.tree.lock().expect("a thread that panics ends the process")
    }

    /// Locks the tree when no swap of the node that `find` returns is in progress; at the latest after `SWAP_TIMEOUT`.
    fn settled(&self, find: impl Fn(&LiveTree) -> Option<NodeId>) -> MutexGuard<'_, LiveTree> {
        let is_changing = |tree: &mut LiveTree| {
            !tree.changing.is_empty() && find(tree).is_some_and(|node| tree.changing.contains(&node))
        };
        let waited = self.0.swapped.wait_timeout_while(self.lock(), SWAP_TIMEOUT, is_changing);
        let (mut tree, waited) = waited.expect("a thread that panics ends the process");
        tree.disturbed |= waited.timed_out();
        tree
    }

    /// Applies the step after `applied` steps, for which the supervisor makes no system call. Does nothing if the step is applied
    /// already.
    ///
    /// # Errors
    /// `EROFS` when another step is the next one.
    pub fn take(&self, applied: u64, region: &Region, notifier: Option<&Notifier>) -> Result<(), Errno> {
        let step = {
            let mut tree = self.lock();
            if tree.applied() == applied + 1 {
                return Ok(());
            }
            let next = tree.announced().into_iter().next();
            let step = next.filter(|step| step.is_message() && tree.applied() == applied).ok_or(Errno::EROFS)?;
            if step == LiveStep::Settle {
                return take_and_count(&mut tree, &step, region);
            }
            step
        };
        self.swap(&step, region, notifier)
    }

    /// Swaps the bytes of files, as the header of this module describes.
    fn swap(&self, step: &LiveStep, region: &Region, notifier: Option<&Notifier>) -> Result<(), Errno> {
        let LiveStep::Swap { paths } = step else { return Err(Errno::EROFS) };
        let nodes: Vec<NodeId> = {
            let tree = self.lock();
            paths.iter().filter_map(|path| tree.find(path)).collect()
        };
        let drop_pages = || {
            if let Some(notifier) = notifier {
                drop_content_of(notifier, &nodes);
            }
        };
        for attempt in 1..=ATTEMPTS {
            {
                let mut tree = self.lock();
                (tree.changing, tree.disturbed) = (nodes.iter().copied().collect(), false);
            }
            drop_pages();
            let mut tree = self.lock();
            let disturbed = tree.disturbed;
            if !disturbed || attempt == ATTEMPTS {
                let taken = take_and_count(&mut tree, step, region);
                tree.changing.clear();
                drop(tree);
                self.0.swapped.notify_all();
                if disturbed {
                    drop_pages();
                }
                return taken;
            }
        }
        Ok(())
    }
}

/// Applies a step, and records it in the region before the answer to its request.
fn take_and_count(tree: &mut LiveTree, step: &LiveStep, region: &Region) -> Result<(), Errno> {
    tree.take(step)?;
    while region.applied() < tree.applied() {
        region.apply();
    }
    Ok(())
}

/// The file system of the live parts of one projection.
pub struct LiveFilesystem {
    tree: SharedLiveTree,
    region: Arc<Region>,
    undo: Undo,
    trace: Arc<Trace>,
}

/// The features that a session with live parts negotiates: those of a projection without `EXPLICIT_INVAL_DATA`.
///
/// The kernel records another size, and then truncates the pages to it (`fuse_change_attributes_i`, up to Linux 6.18 at
/// least). If it suspends a thread between the two for the whole of the next swap, the thread truncates a page of the next
/// version: the page ends in zeros. Without the flag, the thread drops the pages next, and the kernel reads the file again.
pub(crate) fn wanted(traced: bool) -> WantedFeatures {
    let wanted = projection::filesystem::wanted(traced);
    WantedFeatures { flags: wanted.flags & !init::EXPLICIT_INVAL_DATA, ..wanted }
}

impl LiveFilesystem {
    /// Serves `tree`. It records applied steps in `region`, and reports requests to the readers of `trace`.
    pub(crate) fn new(tree: SharedLiveTree, region: Arc<Region>, undo: Undo, trace: Arc<Trace>) -> Self {
        Self { tree, region, undo, trace }
    }

    /// Answers one request, and reports it.
    fn serve(&self, request: &Request<'_>, node: NodeId, exchange: &mut Exchange<'_>) -> Result<Answer, Errno> {
        let path = || {
            let directory = self.tree.lock().path(node);
            let name = request.operation.entry().map(|name| format!("/{}", name.to_string_lossy()));
            format!("/{directory}{}", name.unwrap_or_default())
        };
        let Some(line) = self.trace.begin(path) else { return self.dispatch(request, node, exchange) };
        let outcome = self.dispatch(request, node, exchange);
        line.end(request.name(), request.caller, outcome.as_ref().err().copied());
        outcome
    }

    fn dispatch(&self, request: &Request<'_>, node: NodeId, exchange: &mut Exchange<'_>) -> Result<Answer, Errno> {
        match request.operation {
            FuseOperation::Lookup { name } => self.look_up(node, name).map(entry),
            FuseOperation::Forget { lookups } => {
                self.tree.lock().forget(node, lookups);
                Ok(Answer::Silence)
            }
            FuseOperation::GetAttr { .. } => self.tree.settled(|_| Some(node)).attributes(node).map(attributes_answer),
            FuseOperation::Read(arguments) => self.read(node, arguments, exchange),
            FuseOperation::ReadDir(arguments) => self.list(node, arguments, exchange.buffer),
            FuseOperation::Release(_) => Ok(Answer::Done),
            FuseOperation::StatFs => {
                let (bytes, nodes) = self.tree.lock().usage();
                Ok(file_system(bytes, nodes))
            }

            // The steps of an update.
            FuseOperation::MkDir { name, .. } => {
                self.make(node, name, |path| LiveStep::MakeDirectory { path }).map(entry)
            }
            FuseOperation::MkNod { name, .. } => self.make(node, name, |path| LiveStep::MakeFile { path }).map(entry),
            FuseOperation::SetAttr(arguments) => self.set_attributes(node, arguments).map(attributes_answer),
            FuseOperation::Unlink { name } => self.change(node, name, |path| LiveStep::RemoveFile { path }),
            FuseOperation::RmDir { name } => self.change(node, name, |path| LiveStep::RemoveDirectory { path }),

            // Changes that are never steps.
            FuseOperation::Write { .. } => {
                self.undo.file(node);
                Err(Errno::EROFS)
            }
            FuseOperation::ReadLink => Err(Errno::EINVAL),
            FuseOperation::Rename { .. }
            | FuseOperation::Symlink { .. }
            | FuseOperation::Create { .. }
            | FuseOperation::TmpFile { .. }
            | FuseOperation::Link { .. }
            | FuseOperation::FAllocate(_) => Err(Errno::EROFS),

            // Each isatty(3) sends this request, because the kernel caches no answer.
            FuseOperation::IoCtl => Err(Errno::ENOTTY),
            // The kernel caches this answer for the whole connection, and does not send the request again.
            _ => Err(Errno::ENOSYS),
        }
    }

    fn look_up(&self, node: NodeId, name: &OsStr) -> Result<NodeAttributes, Errno> {
        let name = name.to_str().ok_or(Errno::ENOENT)?;
        let mut tree = self.tree.settled(|tree| tree.entry(node, name).ok());
        let found = tree.entry(node, name)?;
        tree.count(found);
        tree.attributes(found)
    }

    /// Sends bytes to the kernel directly from the image.
    fn read(&self, node: NodeId, arguments: &ReadIn, exchange: &Exchange<'_>) -> Result<Answer, Errno> {
        let (image, content) = self.tree.settled(|_| Some(node)).content(node)?;
        Ok(exchange.send(requested_part(image.served(content), arguments)))
    }

    fn list(&self, node: NodeId, arguments: &ReadIn, buffer: &mut Vec<u8>) -> Result<Answer, Errno> {
        self.tree.lock().list(node, arguments.offset, |listed| !push_if_it_fits(buffer, arguments, listed))?;
        Ok(Answer::Buffer)
    }

    fn make(
        &self,
        parent: NodeId,
        name: &OsStr,
        step: impl FnOnce(String) -> LiveStep,
    ) -> Result<NodeAttributes, Errno> {
        let mut tree = self.tree.lock();
        let step = step(path_of(&tree, parent, name)?);
        take_and_count(&mut tree, &step, &self.region)?;
        let made = tree.entry(parent, name.to_str().ok_or(Errno::EROFS)?)?;
        tree.count(made);
        tree.attributes(made)
    }

    fn change(&self, parent: NodeId, name: &OsStr, step: impl FnOnce(String) -> LiveStep) -> Result<Answer, Errno> {
        let mut tree = self.tree.lock();
        let step = step(path_of(&tree, parent, name)?);
        take_and_count(&mut tree, &step, &self.region)?;
        Ok(Answer::Done)
    }

    /// The supervisor makes this request to raise an event. The attributes stay those of the payload.
    fn set_attributes(&self, node: NodeId, arguments: &SetattrIn) -> Result<NodeAttributes, Errno> {
        let mut tree = self.tree.lock();
        let path = tree.path(node);
        let changes = [fattr::MODE, fattr::UID, fattr::GID, fattr::SIZE, fattr::ATIME, fattr::MTIME];
        let step = match changes.into_iter().filter(|change| arguments.valid & change != 0).collect::<Vec<_>>()[..] {
            [fattr::MODE] => LiveStep::Touch { path },
            [fattr::MTIME] => LiveStep::Modify { path },
            _ => return Err(Errno::EROFS),
        };
        take_and_count(&mut tree, &step, &self.region)?;
        tree.attributes(node)
    }
}

/// The path of an entry. The name of an announced step is UTF-8, so any other name is refused.
fn path_of(tree: &LiveTree, parent: NodeId, name: &OsStr) -> Result<String, Errno> {
    let (directory, name) = (tree.path(parent), name.to_str().ok_or(Errno::EROFS)?);
    Ok(if directory.is_empty() { name.to_owned() } else { format!("{directory}/{name}") })
}

impl Filesystem for LiveFilesystem {
    fn answer(&self, request: &Request<'_>, exchange: &mut Exchange<'_>) -> Result<Answer, rustix::io::Errno> {
        let served = match request.operation {
            FuseOperation::BatchForget { nodes } => {
                let mut tree = self.tree.lock();
                nodes.iter().for_each(|one| tree.forget(one.nodeid, one.nlookup));
                Ok(Answer::Silence)
            }
            _ => self.serve(request, request.node, exchange),
        };
        match (&request.operation, served) {
            // Node id 0: the name is absent, and the kernel may remember that.
            (FuseOperation::Lookup { .. }, Err(Errno::ENOENT)) => {
                Ok(Answer::Entry(EntryOut { entry_valid: FOREVER, ..Default::default() }))
            }
            (_, served) => served.map_err(|errno| rustix::io::Errno::from_raw_os_error(errno as i32)),
        }
    }

    fn begin_thread(&self) {}

    fn may_wait(&self, _: &FuseOperation<'_>) -> bool {
        false
    }

    /// Enough for two names with their structs. The server refuses WRITE anyway.
    fn longest_request(&self) -> usize {
        8192
    }

    /// Ignores interrupts: no request waits longer than `SWAP_TIMEOUT`.
    fn interrupt(&self, _: u64) {}
}
