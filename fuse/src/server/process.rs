//! The server's own loop: control messages in, sessions started, trees told what comes next.

use std::collections::HashMap;
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::time::SystemTime;

use super::activity::Activity;
use super::protocol::{Reply, Request, VolumeId, receive, send};
use super::trace::Trace;
use crate::passthrough::{self, Options};
use crate::projection::filesystem::{self, ProjectionFilesystem, SharedTree};
use crate::projection::tree::{Root, Staged, Tree};
use crate::projection::undo::Undo;
use crate::projection::{GenerationName, Image};
use crate::session::Session;

/// Serves until the supervisor closes `control`.
///
/// # Errors
/// When the control socket fails.
pub fn serve(control: &UnixStream) -> io::Result<()> {
    let mut volumes = Volumes::default();
    while let Some((request, descriptors)) = receive(control)? {
        let reply = volumes.answer(request, descriptors).unwrap_or_else(|error| Reply::Failed(error.to_string()));
        send(control, &reply, &[])?;
    }
    Ok(())
}

#[derive(Default)]
struct Volumes {
    volumes: HashMap<VolumeId, Volume>,
    trace: Option<Trace>,
}

struct Volume {
    activity: Arc<Activity>,
    /// What changes are announced to; none for a passthrough volume.
    tree: Option<SharedTree>,
}

impl Volumes {
    fn answer(&mut self, request: Request, descriptors: Vec<OwnedFd>) -> io::Result<Reply> {
        let mut descriptors = descriptors.into_iter();
        let mut descriptor = || descriptors.next().ok_or_else(without_descriptor);
        match request {
            Request::Serve { volume, root, trace } => self.project(volume, root, trace, descriptor()?),
            Request::Pass { volume, options } => {
                let (device, source) = (descriptor()?, descriptor()?);
                self.pass(volume, options, device, source)
            }
            Request::Announce { volume, steps, staged, time } => {
                let staged = staged.map(|name| stage(name, descriptor()?)).transpose()?;
                self.tree(volume)?.lock().announce(steps, staged, time);
                let volume = self.volume(volume)?;
                let control = rustix::thread::gettid().as_raw_nonzero().get();
                Ok(Reply::Announced { session: volume.activity.thread(), control })
            }
            Request::Close { volume, generation } => {
                let known = self.tree(volume)?.lock().close_generation(generation.as_str());
                Ok(Reply::Known(known.map_err(io::Error::from)?))
            }
            Request::Requests { volume } => Ok(Reply::Requests(self.volume(volume)?.activity.requests())),
            Request::Remove { volume } => {
                self.volumes.remove(&volume);
                Ok(Reply::Done)
            }
        }
    }

    fn project(&mut self, volume: VolumeId, root: Root, trace: bool, device: OwnedFd) -> io::Result<Reply> {
        let tree = SharedTree::new(Tree::new(root, SystemTime::now()));
        let activity = Arc::new(Activity::default());
        let trace = self.trace(trace);
        let session = Session::open(device, filesystem::wanted(trace.is_some()))?;
        let undo = Undo::new(session.notifier());
        let filesystem = ProjectionFilesystem::new(tree.clone(), Arc::clone(&activity), undo, trace);
        // One thread: a projection's requests are short, and waking a second CPU costs more than it gives.
        session.run(Arc::new(filesystem), 1)?;
        self.volumes.insert(volume, Volume { activity, tree: Some(tree) });
        Ok(Reply::Done)
    }

    fn pass(&mut self, volume: VolumeId, options: Options, device: OwnedFd, source: OwnedFd) -> io::Result<Reply> {
        let activity = Arc::new(Activity::default());
        let trace = self.trace(options.trace);
        let data_path = passthrough::serve(device, source, options, Arc::clone(&activity), trace)?;
        self.volumes.insert(volume, Volume { activity, tree: None });
        Ok(Reply::Passing(data_path))
    }

    fn trace(&mut self, wanted: bool) -> Option<Trace> {
        wanted.then(|| self.trace.get_or_insert_with(|| Trace::new(io::stdout())).clone())
    }

    fn tree(&self, volume: VolumeId) -> io::Result<&SharedTree> {
        let not_one = || io::Error::other(format!("volume {} is no projection", volume.0));
        self.volume(volume)?.tree.as_ref().ok_or_else(not_one)
    }

    fn volume(&self, volume: VolumeId) -> io::Result<&Volume> {
        self.volumes.get(&volume).ok_or_else(|| io::Error::other(format!("volume {} is not served", volume.0)))
    }
}

fn stage(name: GenerationName, image: OwnedFd) -> io::Result<Staged> {
    Ok(Staged { name, image: Image::adopt(image)? })
}

fn without_descriptor() -> io::Error {
    io::Error::new(io::ErrorKind::InvalidInput, "the message came without its descriptor")
}
