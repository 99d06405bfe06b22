//! Open files, and their data.

use std::rc::Rc;
use std::time::{Duration, Instant};

use podfs_nfs::export::CallOptions;
use podfs_nfs::rpc::Credential;
use podfs_nfs::v3::{AttributeChanges, Attributes, access};
use rustix::io::Errno;
use tokio::task::spawn_local;
use tokio::time::sleep;

use super::look::CountedLookup;
use super::nfs_request::NfsRequest;
use super::rights::permits;
use super::{NfsAnswer, NfsFilesystem};
use crate::caller::ending::is_exiting;
use crate::nfs::client_state::node::NfsNode;
use crate::nfs::client_state::open_files::NfsOpenFile;
use crate::nfs::writeback::FileKey;
use crate::session::abi::{CreateIn, FlushIn, FsyncIn, OpenOut, ReadIn, WriteIn, fopen};
use crate::session::{Answer, HandleId};

/// The kernel opens a file to execute it (`FMODE_EXEC`).
const EXECUTE: u32 = 0x20;
/// The interval at which podfs checks whether the caller of close(2) is being killed, while the server does not answer.
const CHECK_INTERVAL: Duration = Duration::from_millis(200);

impl NfsFilesystem {
    pub(super) async fn open(
        self: &Rc<Self>,
        node: &Rc<NfsNode>,
        flags: u32,
        nfs_request: &NfsRequest,
    ) -> Result<NfsAnswer, Errno> {
        let writes = flags & libc::O_ACCMODE as u32 != libc::O_RDONLY as u32;
        if writes {
            self.refuse_if_read_only()?;
        }
        let credential = self.credential(nfs_request);
        let _opening = self.begin_open(node).await;
        let before = node.freshness.borrow().attributes().copied();
        let found = self.admit(node, flags, &credential).await?;
        let is_same = node.freshness.borrow_mut().opened(&found);
        if before
            .is_none_or(|before| (before.size, before.mtime, before.ctime) != (found.size, found.mtime, found.ctime))
        {
            // The size that the kernel has cached may be older than this one.
            let _ = self.notifier.drop_attributes(node.id);
        }
        let open = self.state.files.add(nfs_request.unique, node, credential, false)?;
        nfs_request.set_opened(&open);
        let mut open_flags = if is_same { fopen::KEEP_CACHE } else { 0 };
        if !writes {
            // When the file is closed, there is no data to write.
            open_flags |= fopen::NOFLUSH;
        }
        Ok(Answer::Open(OpenOut { fh: open.handle, open_flags, backing_id: 0 }).into())
    }

    /// The attributes of a file that is opened, if the server permits the open.
    async fn admit(&self, node: &Rc<NfsNode>, flags: u32, credential: &Credential) -> Result<Attributes, Errno> {
        let wanted = if flags & EXECUTE != 0 {
            access::EXECUTE
        } else {
            match (flags & libc::O_ACCMODE as u32).cast_signed() {
                libc::O_RDONLY => access::READ,
                libc::O_WRONLY => access::MODIFY | access::EXTEND,
                _ => access::READ | access::MODIFY | access::EXTEND,
            }
        };
        let caching = &self.options.caching;
        let known = node.freshness.borrow().right(credential, wanted, Instant::now(), caching);
        let (found, granted) = match known {
            Some(granted) => {
                let fresh = {
                    let freshness = node.freshness.borrow();
                    let holds = !caching.close_to_open && !freshness.remaining(Instant::now()).is_zero();
                    freshness.attributes().copied().filter(|_| holds)
                };
                match fresh {
                    Some(found) => (found, granted),
                    None => (self.fetch_attributes(node).await?, granted),
                }
            }
            None => self.ask_for_rights(node, credential).await?,
        };
        if permits(granted, wanted) { Ok(found) } else { Err(Errno::ACCESS) }
    }

    pub(super) async fn create(
        &self,
        parent: &Rc<NfsNode>,
        name: &[u8],
        arguments: &CreateIn,
        nfs_request: &NfsRequest,
    ) -> Result<NfsAnswer, Errno> {
        self.refuse_if_read_only()?;
        let credential = self.credential(nfs_request);
        let exclusive = arguments.flags & libc::O_EXCL as u32 != 0;
        let made = self.make_file(parent, name, arguments.mode, exclusive, &credential, nfs_request).await;
        let (node, mut entry) = made?;
        let lookup = CountedLookup::new(self, node.id);
        let opened = async {
            if arguments.flags & libc::O_TRUNC as u32 != 0 && entry.attr.size > 0 {
                // Another process has created the file first.
                let nothing = AttributeChanges { size: Some(0), ..AttributeChanges::default() };
                let found = self.set(&node, &nothing, &credential).await?;
                entry.attr = self.converter.attr(&found, node.is_silly());
            }
            let found = node.freshness.borrow().attributes().copied();
            // Without O_EXCL, this may be a file that another client has changed.
            let has_content = found.is_some_and(|found| node.freshness.borrow_mut().opened(&found));
            let open = self.state.files.add(nfs_request.unique, &node, credential.clone(), false)?;
            Ok::<_, Errno>((open, has_content))
        };
        let (open, has_content) = opened.await?;
        nfs_request.set_opened(&open);
        lookup.keep();
        let open_flags = if has_content { fopen::KEEP_CACHE } else { 0 };
        let open = OpenOut { fh: open.handle, open_flags, backing_id: 0 };
        Ok(Answer::Created(entry, open).into())
    }

    /// Handles READ.
    ///
    /// The server may not have all accepted data when it answers: it restarts meanwhile, or the data is behind a hole and still on its
    /// way. Then its answer has old bytes, or ends too early, and podfs reads again.
    pub(super) async fn read(&self, arguments: &ReadIn) -> Result<NfsAnswer, Errno> {
        const ATTEMPTS: usize = 3;
        let open = self.state.files.get(arguments.fh)?;
        let (node, offset, wanted) = (&open.node, arguments.offset, arguments.size);
        let is_on_its_way = |end| self.writeback().overlaps(node.id, offset..end);
        if is_on_its_way(offset.saturating_add(wanted.into())) || self.may_be_lost(node) {
            self.settle(node).await;
        }
        let mut attempts = 1;
        loop {
            let was_behind = is_on_its_way(u64::MAX);
            let answer = self.read_from_server(arguments, &open).await?;
            let length = match &answer {
                NfsAnswer::Data(data) => data.len(),
                NfsAnswer::Bytes(bytes) => bytes.len(),
                _ => return Ok(answer),
            };
            let ends_early = length < wanted as usize && (was_behind || is_on_its_way(u64::MAX));
            if attempts == ATTEMPTS || !(ends_early || self.may_be_lost(node)) {
                return Ok(answer);
            }
            attempts += 1;
            self.settle(node).await;
        }
    }

    async fn read_from_server(&self, arguments: &ReadIn, open: &NfsOpenFile) -> Result<NfsAnswer, Errno> {
        let (node, offset, wanted) = (&open.node, arguments.offset, arguments.size);
        let options = CallOptions::new(&open.credential);
        let mut gathered = Vec::new();
        let mut received = 0;
        loop {
            let (at, query) = (offset + u64::from(received), self.order.next());
            let count = (wanted - received).min(self.export.limits().read);
            let read = async |handle| self.export.read(options, &handle, at, count).await;
            let read = self.with_handle(node, &open.credential, read).await.map_err(|error| error.errno())?;
            if let Some(found) = &read.attributes {
                self.learn(node, found, query);
            }
            let length = read.data.len() as u32;
            if received == 0 && (length == wanted || read.is_end) {
                return Ok(NfsAnswer::Data(read.data));
            }
            gathered.extend_from_slice(&read.data);
            received += length;
            // A server may return fewer bytes than requested. The kernel would take a short answer for the end of the file.
            if received >= wanted || read.is_end || length == 0 {
                return Ok(NfsAnswer::Bytes(gathered));
            }
        }
    }

    pub(super) async fn write(&self, arguments: &WriteIn, data: &[u8]) -> Result<NfsAnswer, Errno> {
        self.refuse_if_read_only()?;
        let open = self.state.files.get(arguments.fh)?;
        let end = arguments.offset.checked_add(data.len() as u64).ok_or(Errno::FBIG)?;
        if end > self.export.limits().file {
            return Err(Errno::FBIG);
        }
        let key = FileKey { node: open.node.id, open: open.handle };
        self.writeback().write(key, arguments.offset, data).await?;
        Ok(Answer::Written(data.len() as u32).into())
    }

    pub(super) async fn sync(&self, arguments: &FsyncIn) -> Result<NfsAnswer, Errno> {
        let open = self.state.files.get(arguments.fh)?;
        self.writeback().flush(open.node.id).await?;
        Ok(Answer::Done.into())
    }

    /// Handles FLUSH: close(2) waits until the written data is on the server's disk, and returns errors. Only a process that is
    /// being killed does not wait for a server that does not answer, because the process could not be interrupted again. podfs
    /// keeps the data, and sends it when the server answers again.
    pub(super) async fn flush(&self, arguments: &FlushIn, nfs_request: &NfsRequest) -> Result<NfsAnswer, Errno> {
        let open = self.state.files.get(arguments.fh)?;
        let flushed = self.writeback().flush_for_close(FileKey { node: open.node.id, open: open.handle });
        let caller_exits = async {
            loop {
                sleep(CHECK_INTERVAL).await;
                if self.export.server().silent() >= CHECK_INTERVAL && is_exiting(nfs_request.caller.pid) {
                    return;
                }
            }
        };
        tokio::select! {
            biased;
            flushed = flushed => flushed?,
            () = caller_exits => {}
        }
        Ok(Answer::Done.into())
    }

    /// Handles RELEASE. Does not wait for data that is still to be written.
    pub(super) fn release(self: &Rc<Self>, handle: HandleId) -> NfsAnswer {
        let (has_data, is_dirty) = (|node| self.writeback().has_data(node), |node| self.writeback().is_dirty(node));
        if let Some(open) = self.state.close(handle, has_data, is_dirty) {
            let (filesystem, node) = (Rc::clone(self), Rc::clone(&open.node));
            self.writeback().close(FileKey { node: node.id, open: handle });
            if is_dirty(node.id) {
                spawn_local(async move { filesystem.tidy_up(&node).await });
            } else if node.is_silly() && !node.is_open() {
                spawn_local(filesystem.remove_silly(node));
            }
        }
        Answer::Done.into()
    }

    /// Completes the close of a file, after all its data is on the server's disk or has failed.
    async fn tidy_up(self: Rc<Self>, node: &Rc<NfsNode>) {
        self.writeback().settle_on_disk(node.id).await;
        if !node.is_open() {
            // No process can get the error any more. If the kernel has sent more data of a mapping meanwhile, podfs keeps it.
            self.writeback().forget_failure(node.id);
        }
        self.drop_unneeded();
        self.remove_silly(Rc::clone(node)).await;
    }
}
