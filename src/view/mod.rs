//! A live, read-only view of a pod's volumes, as an ordinary user: `podfs view`.
//!
//! | module | owns |
//! |---|---|
//! | [`entries`] | the entries of each volume |
//! | `changes` | a change as text, a line for each file |
//! | `tree` | the nodes of the file system, and their changes |
//! | `filesystem` | the FUSE requests, answered from the tree |
//! | `fusermount` | the program `fusermount3`, which mounts for ordinary users |
//! | `mount_point` | the directory: checked, made, cleaned, removed |
//!
//! Why no reader sees half of a change, and nothing hangs:
//!
//! 1. A thread of the session answers requests. It locks the tree for each of them, and never waits for anything else.
//! 2. [`MountedView::show`] changes the tree under the same lock, all volumes at once. It tells the kernel which names are stale
//!    after it has unlocked the tree: the kernel may wait for a request to be answered before it drops a name.
//! 3. The entries below the directory of a generation never change, so the kernel may cache them. The kernel does not cache names
//!    that may change, and looks them up each time.
//! 4. The generation before the current one can still be entered, so a reader that resolved `..data` just before the change
//!    finds its file.

mod changes;
pub mod entries;
mod filesystem;
mod fusermount;
mod mount_point;
mod tree;

use std::ffi::OsStr;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard};
use std::thread;
use std::time::SystemTime;

use fuser::{Config, INodeNo, Notifier, Session, SessionACL};
use tokio::sync::oneshot;

use crate::render::directory::DirectoryError;
pub use fusermount::FusermountError;

use entries::ViewVolumes;
use filesystem::TreeFs;
use mount_point::ViewMountPoint;
use tree::ViewTree;

/// Why there is no view. Its text is one sentence for the user.
#[derive(Debug, thiserror::Error)]
pub enum ViewError {
    /// The directory cannot be used.
    #[error(transparent)]
    Directory(#[from] DirectoryError),
    /// The directory belongs to another user.
    #[error("{}: belongs to the user with the id {owner}, and not to you; give a directory of your own", path.display())]
    NotOwned {
        /// The directory.
        path: PathBuf,
        /// Its owner.
        owner: u32,
    },
    /// Another view is mounted there.
    #[error("{}: podfs view shows a pod there already; end it with fusermount3 -u, or give another directory", .0.display())]
    Occupied(PathBuf),
    /// A file system of another program is mounted there, and the program has ended.
    #[error("{}: the program that mounted a file system there has ended; unmount it with fusermount3 -u", .0.display())]
    Dead(PathBuf),
    /// fusermount3 is not installed.
    #[error("there is no program fusermount3, which mounts for users; install the package fuse3")]
    NoProgram,
    /// fusermount3 cannot be run.
    #[error("fusermount3 cannot be run: {0}")]
    Program(#[source] io::Error),
    /// The configuration of FUSE does not allow access for other users.
    #[error(
        "--allow-other needs the line user_allow_other in /etc/fuse.conf, which only root can write; leave the option out, or have it added"
    )]
    AllowOther,
    /// The FUSE device cannot be used.
    #[error(
        "/dev/fuse cannot be used ({0}); load the module (modprobe fuse), give the device to this container, or let this user open it"
    )]
    Device(String),
    /// fusermount3 refuses to mount.
    #[error("{}: fusermount3 cannot mount there: {reason}", path.display())]
    Refused {
        /// The directory.
        path: PathBuf,
        /// The message of fusermount3.
        reason: String,
    },
    /// The FUSE session between the kernel and podfs does not begin.
    #[error("{}: the kernel does not begin a FUSE session: {reason}", path.display())]
    Session {
        /// The directory.
        path: PathBuf,
        /// The cause.
        #[source]
        reason: io::Error,
    },
    /// The view cannot be unmounted.
    #[error("{}: cannot be unmounted: {reason}; end the processes that use it, and run fusermount3 -u", path.display())]
    Unmount {
        /// The directory.
        path: PathBuf,
        /// The message of fusermount3.
        #[source]
        reason: FusermountError,
    },
}

/// The users that may read a view.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Audience {
    /// Only the mounting user, who may read everything, whatever the modes of files are.
    Owner,
    /// All users, root included; modes and owners of files decide what each may read.
    Everyone,
}

/// A mounted view. Dropping it unmounts the view.
pub struct MountedView {
    point: Option<ViewMountPoint>,
    tree: Arc<Mutex<ViewTree>>,
    notifier: Notifier,
    ended: oneshot::Receiver<()>,
}

impl MountedView {
    /// Mounts a view of these volumes. The directory must be empty or absent. If a view whose process was killed is mounted there,
    /// podfs unmounts it first.
    ///
    /// # Errors
    /// When the directory cannot be used, or the user cannot mount.
    pub fn mount(directory: &Path, audience: Audience, volumes: ViewVolumes) -> Result<MountedView, ViewError> {
        let mut tree = ViewTree::new(SystemTime::now());
        tree.show(volumes, SystemTime::now());
        let tree = Arc::new(Mutex::new(tree));
        let point = ViewMountPoint::prepare(directory)?;
        let device = fusermount::mount(point.path(), audience)?;
        let acl = match audience {
            Audience::Owner => SessionACL::Owner,
            Audience::Everyone => SessionACL::All,
        };
        let broken = |reason| ViewError::Session { path: point.path().to_owned(), reason };
        let session = Session::from_fd(TreeFs::new(Arc::clone(&tree)), device, acl, Config::default());
        let session = session.inspect_err(|_| drop(fusermount::unmount(point.path()))).map_err(broken)?;
        let notifier = session.notifier();
        let (end_sender, ended) = oneshot::channel();
        let serve = move || {
            // The session ends when the view is unmounted. An error says no more than that.
            let _ended = session.run();
            let _gone = end_sender.send(());
        };
        let serving = thread::Builder::new().name("view".into()).spawn(serve);
        serving.inspect_err(|_| drop(fusermount::unmount(point.path()))).map_err(broken)?;
        Ok(MountedView { point: Some(point), tree, notifier, ended })
    }

    /// The mount point.
    pub fn path(&self) -> &Path {
        self.point.as_ref().map_or(Path::new(""), ViewMountPoint::path)
    }

    /// Shows these volumes from now on. Returns the differences, a line each.
    pub fn show(&self, volumes: ViewVolumes) -> Vec<String> {
        let (lines, stale) = {
            let mut tree = self.lock();
            let lines = changes::lines(tree.volumes(), &volumes);
            (lines, tree.show(volumes, SystemTime::now()))
        };
        for (directory, name) in stale {
            // An error means that the kernel does not have the name, or that the view is just being unmounted.
            let _unknown = self.notifier.inval_entry(INodeNo(directory.0), OsStr::new(&name));
        }
        lines
    }

    /// The volumes that are shown.
    pub fn volumes(&self) -> ViewVolumes {
        self.lock().volumes().clone()
    }

    /// Waits until another process unmounts the view. Cancel-safe.
    pub async fn ended(&mut self) {
        // A session that panicked has ended, too.
        let _ended = (&mut self.ended).await;
    }

    /// Unmounts the view, even if processes use it, and removes the directory if podfs has made it.
    ///
    /// # Errors
    /// When the view cannot be unmounted.
    pub fn finish(mut self) -> Result<(), ViewError> {
        self.point.take().map_or(Ok(()), ViewMountPoint::clear)
    }

    fn lock(&self) -> MutexGuard<'_, ViewTree> {
        self.tree.lock().expect("no thread panics with the tree")
    }
}

impl Drop for MountedView {
    fn drop(&mut self) {
        // The caller reports another error.
        let _cleared = self.point.take().map(ViewMountPoint::clear);
    }
}
