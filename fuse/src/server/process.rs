//! The server's own loop: control messages in, sessions started, trees told what comes next.

use std::collections::HashMap;
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::time::SystemTime;

use fuser::{Config, Session, SessionACL};

use super::protocol::{Reply, Request, VolumeId, receive, send};
use super::trace::Trace;
use crate::projection::filesystem::{Activity, ProjectionFilesystem, SharedTree};
use crate::projection::tree::{Root, Staged, Tree};
use crate::projection::undo::Undo;
use crate::projection::{GenerationName, Image};

/// Serves until the supervisor closes `control`.
///
/// # Errors
/// When the control socket fails.
pub fn serve(control: &UnixStream) -> io::Result<()> {
    let mut volumes = Volumes::default();
    while let Some((request, descriptor)) = receive(control)? {
        let reply = volumes.answer(request, descriptor).unwrap_or_else(|error| Reply::Failed(error.to_string()));
        send(control, &reply, None)?;
    }
    Ok(())
}

#[derive(Default)]
struct Volumes {
    volumes: HashMap<VolumeId, Volume>,
    trace: Option<Trace>,
}

struct Volume {
    tree: SharedTree,
    activity: Arc<Activity>,
}

impl Volumes {
    fn answer(&mut self, request: Request, descriptor: Option<OwnedFd>) -> io::Result<Reply> {
        match request {
            Request::Serve { volume, root, trace } => self.start(volume, root, trace, needed(descriptor)?),
            Request::Announce { volume, steps, staged, time } => {
                let staged = staged.map(|name| stage(name, descriptor)).transpose()?;
                let volume = self.volume(volume)?;
                volume.tree.lock().announce(steps, staged, time);
                let control = rustix::thread::gettid().as_raw_nonzero().get();
                Ok(Reply::Announced { session: volume.activity.thread(), control })
            }
            Request::Close { volume, generation } => {
                let known = self.volume(volume)?.tree.lock().close_generation(generation.as_str());
                Ok(Reply::Known(known.map_err(io::Error::from)?))
            }
            Request::Requests { volume } => Ok(Reply::Requests(self.volume(volume)?.activity.requests())),
            Request::Remove { volume } => {
                self.volumes.remove(&volume);
                Ok(Reply::Done)
            }
        }
    }

    fn start(&mut self, volume: VolumeId, root: Root, trace: bool, device: OwnedFd) -> io::Result<Reply> {
        let tree = SharedTree::new(Tree::new(root, SystemTime::now()));
        let activity = Arc::new(Activity::default());
        let undo = Arc::new(Undo::default());
        let trace = trace.then(|| self.trace.get_or_insert_with(|| Trace::new(io::stdout())).clone());
        let filesystem = ProjectionFilesystem::new(tree.clone(), Arc::clone(&activity), Arc::clone(&undo), trace);
        // One thread: a projection's requests are short, and waking a second CPU costs more than it gives.
        let session = Session::from_fd(filesystem, device, SessionACL::All, Config::default())?;
        undo.enable(session.notifier());
        // The session ends when the file system is unmounted everywhere; nobody waits for that.
        drop(session.spawn()?);
        self.volumes.insert(volume, Volume { tree, activity });
        Ok(Reply::Done)
    }

    fn volume(&self, volume: VolumeId) -> io::Result<&Volume> {
        self.volumes.get(&volume).ok_or_else(|| io::Error::other(format!("volume {} is not served", volume.0)))
    }
}

fn stage(name: GenerationName, descriptor: Option<OwnedFd>) -> io::Result<Staged> {
    Ok(Staged { name, image: Image::adopt(needed(descriptor)?)? })
}

fn needed(descriptor: Option<OwnedFd>) -> io::Result<OwnedFd> {
    descriptor.ok_or_else(|| io::Error::new(io::ErrorKind::InvalidInput, "the message came without its descriptor"))
}
