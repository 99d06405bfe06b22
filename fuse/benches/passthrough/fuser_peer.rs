//! A directory shown by a file system of the crate `fuser`, written like the examples of the crate: nodes are paths, the kernel may
//! cache answers for a second, and data goes through the server.

use std::collections::HashMap;
use std::ffi::OsStr;
use std::fs::{self, DirBuilder, File, FileTimes, OpenOptions, Permissions};
use std::io;
use std::os::unix::fs::{
    DirBuilderExt, DirEntryExt, FileExt, FileTypeExt, MetadataExt, OpenOptionsExt, PermissionsExt, chown, symlink,
};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, SystemTime};

use fuser::{
    BsdFileFlags, Config, Errno, FileAttr, FileHandle, FileType, Filesystem, FopenFlags, Generation, INodeNo,
    LockOwner, OpenFlags, RenameFlags, ReplyAttr, ReplyCreate, ReplyData, ReplyDirectory, ReplyEmpty, ReplyEntry,
    ReplyOpen, ReplyWrite, Request, TimeOrNow, WriteFlags,
};

/// How long the kernel may cache an answer.
const VALIDITY: Duration = Duration::from_secs(1);

/// The argument that makes this program serve such a file system.
pub const SERVE: &str = "--serve-by-fuser";

/// Shows `source` at `shown` until it is unmounted.
pub fn serve(source: &Path, shown: &Path) {
    let root = (INodeNo::ROOT.0, source.to_owned());
    let filesystem = PathFs { paths: Mutex::new([root].into()), files: Mutex::default(), next: AtomicU64::new(1) };
    fuser::mount(filesystem, shown, &Config::default()).expect("a mount");
}

struct PathFs {
    /// The paths of the nodes, by inode number.
    paths: Mutex<HashMap<u64, PathBuf>>,
    files: Mutex<HashMap<u64, Arc<File>>>,
    next: AtomicU64,
}

impl PathFs {
    fn path(&self, node: INodeNo) -> io::Result<PathBuf> {
        let paths = self.paths.lock().expect("no thread panics with it");
        paths.get(&node.0).cloned().ok_or_else(|| io::Error::from_raw_os_error(libc::ESTALE))
    }

    fn below(&self, parent: INodeNo, name: &OsStr) -> io::Result<PathBuf> {
        Ok(self.path(parent)?.join(name))
    }

    fn file(&self, handle: FileHandle) -> io::Result<Arc<File>> {
        let files = self.files.lock().expect("no thread panics with it");
        files.get(&handle.0).cloned().ok_or_else(|| io::Error::from_raw_os_error(libc::EBADF))
    }

    fn keep(&self, file: File) -> FileHandle {
        let handle = self.next.fetch_add(1, Ordering::Relaxed);
        self.files.lock().expect("no thread panics with it").insert(handle, Arc::new(file));
        FileHandle(handle)
    }

    fn enter(&self, path: PathBuf) -> io::Result<FileAttr> {
        let found = attributes(&fs::symlink_metadata(&path)?);
        self.paths.lock().expect("no thread panics with it").insert(found.ino.0, path);
        Ok(found)
    }

    fn change(
        &self,
        node: INodeNo,
        mode: Option<u32>,
        owner: (Option<u32>, Option<u32>),
        size: Option<u64>,
        times: (Option<TimeOrNow>, Option<TimeOrNow>),
    ) -> io::Result<FileAttr> {
        let path = self.path(node)?;
        if let Some(mode) = mode {
            fs::set_permissions(&path, Permissions::from_mode(mode))?;
        }
        if owner != (None, None) {
            chown(&path, owner.0, owner.1)?;
        }
        if let Some(size) = size {
            File::options().write(true).open(&path)?.set_len(size)?;
        }
        if times.0.is_some() || times.1.is_some() {
            let mut set = FileTimes::new();
            set = times.0.map_or(set, |accessed| set.set_accessed(moment(accessed)));
            set = times.1.map_or(set, |modified| set.set_modified(moment(modified)));
            File::open(&path)?.set_times(set)?;
        }
        Ok(attributes(&fs::symlink_metadata(&path)?))
    }

    fn rename_to(&self, from: PathBuf, to: PathBuf) -> io::Result<()> {
        fs::rename(&from, &to)?;
        for path in self.paths.lock().expect("no thread panics with it").values_mut() {
            if let Ok(below) = path.strip_prefix(&from) {
                *path = if below.as_os_str().is_empty() { to.clone() } else { to.join(below) };
            }
        }
        Ok(())
    }

    fn list(&self, node: INodeNo, offset: u64, reply: &mut ReplyDirectory) -> io::Result<()> {
        let skipped = usize::try_from(offset).unwrap_or(usize::MAX);
        for (place, entry) in fs::read_dir(self.path(node)?)?.enumerate().skip(skipped) {
            let entry = entry?;
            let kind = kind(entry.file_type()?);
            if reply.add(INodeNo(entry.ino()), place as u64 + 1, kind, entry.file_name()) {
                break;
            }
        }
        Ok(())
    }
}

fn moment(time: TimeOrNow) -> SystemTime {
    match time {
        TimeOrNow::SpecificTime(time) => time,
        TimeOrNow::Now => SystemTime::now(),
    }
}

fn kind(kind: fs::FileType) -> FileType {
    match kind {
        kind if kind.is_dir() => FileType::Directory,
        kind if kind.is_symlink() => FileType::Symlink,
        kind if kind.is_fifo() => FileType::NamedPipe,
        _ => FileType::RegularFile,
    }
}

fn attributes(found: &fs::Metadata) -> FileAttr {
    let time = |time: io::Result<SystemTime>| time.unwrap_or(SystemTime::UNIX_EPOCH);
    FileAttr {
        ino: INodeNo(found.ino()),
        size: found.size(),
        blocks: found.blocks(),
        atime: time(found.accessed()),
        mtime: time(found.modified()),
        ctime: time(found.modified()),
        crtime: SystemTime::UNIX_EPOCH,
        kind: kind(found.file_type()),
        perm: (found.mode() & 0o7777) as u16,
        nlink: found.nlink() as u32,
        uid: found.uid(),
        gid: found.gid(),
        rdev: 0,
        blksize: 4096,
        flags: 0,
    }
}

fn errno(error: io::Error) -> Errno {
    Errno::from_i32(error.raw_os_error().unwrap_or(libc::EIO))
}

fn options(flags: OpenFlags) -> OpenOptions {
    let mut options = OpenOptions::new();
    let access = flags.0 & libc::O_ACCMODE;
    options.read(access != libc::O_WRONLY).write(access != libc::O_RDONLY);
    options.custom_flags(flags.0 & libc::O_TRUNC);
    options
}

/// Passes the result of `$act` to `$send`, or answers with the error.
macro_rules! answer {
    ($reply:ident, $act:expr, $send:expr) => {
        match $act {
            Ok(found) => $send($reply, found),
            Err(error) => $reply.error(errno(error)),
        }
    };
}

fn send_entry(reply: ReplyEntry, found: FileAttr) {
    reply.entry(&VALIDITY, &found, Generation(0));
}

impl Filesystem for PathFs {
    fn lookup(&self, _: &Request, parent: INodeNo, name: &OsStr, reply: ReplyEntry) {
        answer!(reply, self.below(parent, name).and_then(|path| self.enter(path)), send_entry);
    }

    fn getattr(&self, _: &Request, node: INodeNo, _: Option<FileHandle>, reply: ReplyAttr) {
        let found = self.path(node).and_then(|path| Ok(attributes(&fs::symlink_metadata(path)?)));
        answer!(reply, found, |reply: ReplyAttr, found| reply.attr(&VALIDITY, &found));
    }

    fn setattr(
        &self,
        _: &Request,
        node: INodeNo,
        mode: Option<u32>,
        uid: Option<u32>,
        gid: Option<u32>,
        size: Option<u64>,
        accessed: Option<TimeOrNow>,
        modified: Option<TimeOrNow>,
        _: Option<SystemTime>,
        _: Option<FileHandle>,
        _: Option<SystemTime>,
        _: Option<SystemTime>,
        _: Option<SystemTime>,
        _: Option<BsdFileFlags>,
        reply: ReplyAttr,
    ) {
        let found = self.change(node, mode, (uid, gid), size, (accessed, modified));
        answer!(reply, found, |reply: ReplyAttr, found| reply.attr(&VALIDITY, &found));
    }

    fn readlink(&self, _: &Request, node: INodeNo, reply: ReplyData) {
        let target = self.path(node).and_then(fs::read_link);
        answer!(reply, target, |reply: ReplyData, target: PathBuf| reply.data(target.as_os_str().as_encoded_bytes()));
    }

    fn mkdir(&self, _: &Request, parent: INodeNo, name: &OsStr, mode: u32, _: u32, reply: ReplyEntry) {
        let made = self.below(parent, name).and_then(|path| {
            DirBuilder::new().mode(mode).create(&path)?;
            self.enter(path)
        });
        answer!(reply, made, send_entry);
    }

    fn symlink(&self, _: &Request, parent: INodeNo, name: &OsStr, target: &Path, reply: ReplyEntry) {
        let made = self.below(parent, name).and_then(|path| {
            symlink(target, &path)?;
            self.enter(path)
        });
        answer!(reply, made, send_entry);
    }

    fn unlink(&self, _: &Request, parent: INodeNo, name: &OsStr, reply: ReplyEmpty) {
        answer!(reply, self.below(parent, name).and_then(fs::remove_file), |reply: ReplyEmpty, ()| reply.ok());
    }

    fn rmdir(&self, _: &Request, parent: INodeNo, name: &OsStr, reply: ReplyEmpty) {
        answer!(reply, self.below(parent, name).and_then(fs::remove_dir), |reply: ReplyEmpty, ()| reply.ok());
    }

    fn rename(
        &self,
        _: &Request,
        parent: INodeNo,
        name: &OsStr,
        new_parent: INodeNo,
        new_name: &OsStr,
        _: RenameFlags,
        reply: ReplyEmpty,
    ) {
        let from = self.below(parent, name);
        let moved = from.and_then(|from| self.rename_to(from, self.below(new_parent, new_name)?));
        answer!(reply, moved, |reply: ReplyEmpty, ()| reply.ok());
    }

    fn link(&self, _: &Request, node: INodeNo, parent: INodeNo, name: &OsStr, reply: ReplyEntry) {
        let made = self.path(node).and_then(|from| {
            let to = self.below(parent, name)?;
            fs::hard_link(from, &to)?;
            self.enter(to)
        });
        answer!(reply, made, send_entry);
    }

    fn open(&self, _: &Request, node: INodeNo, flags: OpenFlags, reply: ReplyOpen) {
        let file = self.path(node).and_then(|path| options(flags).open(path));
        answer!(reply, file, |reply: ReplyOpen, file| reply.opened(self.keep(file), FopenFlags::empty()));
    }

    fn create(&self, _: &Request, parent: INodeNo, name: &OsStr, mode: u32, _: u32, flags: i32, reply: ReplyCreate) {
        let made = self.below(parent, name).and_then(|path| {
            let file = options(OpenFlags(flags)).write(true).create(true).mode(mode).open(&path)?;
            Ok((self.enter(path)?, self.keep(file)))
        });
        answer!(reply, made, |reply: ReplyCreate, (found, handle)| {
            reply.created(&VALIDITY, &found, Generation(0), handle, FopenFlags::empty());
        });
    }

    fn read(
        &self,
        _: &Request,
        _: INodeNo,
        handle: FileHandle,
        offset: u64,
        size: u32,
        _: OpenFlags,
        _: Option<LockOwner>,
        reply: ReplyData,
    ) {
        let read = self.file(handle).and_then(|file| {
            let mut bytes = vec![0; size as usize];
            let length = file.read_at(&mut bytes, offset)?;
            bytes.truncate(length);
            Ok(bytes)
        });
        answer!(reply, read, |reply: ReplyData, bytes: Vec<u8>| reply.data(&bytes));
    }

    fn write(
        &self,
        _: &Request,
        _: INodeNo,
        handle: FileHandle,
        offset: u64,
        bytes: &[u8],
        _: WriteFlags,
        _: OpenFlags,
        _: Option<LockOwner>,
        reply: ReplyWrite,
    ) {
        let written = self.file(handle).and_then(|file| file.write_at(bytes, offset));
        answer!(reply, written, |reply: ReplyWrite, length| reply.written(length as u32));
    }

    fn flush(&self, _: &Request, _: INodeNo, _: FileHandle, _: LockOwner, reply: ReplyEmpty) {
        reply.ok();
    }

    fn release(
        &self,
        _: &Request,
        _: INodeNo,
        handle: FileHandle,
        _: OpenFlags,
        _: Option<LockOwner>,
        _: bool,
        reply: ReplyEmpty,
    ) {
        self.files.lock().expect("no thread panics with it").remove(&handle.0);
        reply.ok();
    }

    fn fsync(&self, _: &Request, _: INodeNo, handle: FileHandle, _: bool, reply: ReplyEmpty) {
        answer!(reply, self.file(handle).and_then(|file| file.sync_all()), |reply: ReplyEmpty, ()| reply.ok());
    }

    fn readdir(&self, _: &Request, node: INodeNo, _: FileHandle, offset: u64, mut reply: ReplyDirectory) {
        answer!(reply, self.list(node, offset, &mut reply), |reply: ReplyDirectory, ()| reply.ok());
    }
}
