//! The volumes of a server: those that it serves, and those of a dead server that it will serve.
//!
//! Each kind of volume has a module here, with its requests. [`restore`] lists the kinds.
//!
//! | module | owns |
//! |---|---|
//! | `projection` | generations of files |
//! | `live` | live parts of a projection |
//! | `passthrough` | sources of the host |
//! | `nfs` | exports of NFS servers |

mod live;
mod nfs;
mod passthrough;
mod projection;

use std::any::Any;
use std::collections::BTreeMap;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;

use serde_json::Value;

pub(super) use live::LiveParts;
pub(super) use nfs::NfsExport;
pub(super) use passthrough::Passthrough;
pub(super) use projection::ServedProjection;

use crate::label::VolumeLabel;
use crate::log::standard_error::LineOutput;
use crate::nfs::thread::NfsThread;
use crate::projection::Image;
use crate::protocol::{ServerReply, VolumeBody, VolumeDescription, VolumeNumber};
use crate::region::{Region, VolumeKind};
use crate::shortage::is_shortage;
use crate::trace::Trace;

/// The behaviour of a kind of volume in the server.
///
/// A new volume is [begun](ServedKind::begin). The volume of a dead server is [restored](restore) from its description, then
/// [loaded](ServedKind::load) without an effect outside of this process, then [resumed](ServedKind::resume).
pub(super) trait ServedKind: Any {
    /// The kind that its region must have.
    fn region_kind(&self) -> VolumeKind;

    /// Whether the server reports each request on standard output from the start.
    fn is_traced(&self) -> bool;

    /// Serves a new volume. Returns the answer for the supervisor.
    ///
    /// # Errors
    /// When the kernel's handshake fails, or the source cannot be read.
    fn begin(&mut self, volume: &ServedParts, shared: &mut ServerResources) -> io::Result<ServerReply>;

    /// Reads the state of a dead server from the region, without changing it.
    ///
    /// # Errors
    /// When the state is inconsistent.
    fn load(&mut self, volume: &ServedParts) -> io::Result<()>;

    /// Serves the loaded volume of a dead server.
    ///
    /// # Errors
    /// When the device is no FUSE device, or the kernel starts no thread.
    fn resume(&mut self, volume: &ServedParts, shared: &mut ServerResources) -> io::Result<()>;

    /// The state with which a supervisor adopts the volume, and its descriptors.
    ///
    /// # Errors
    /// When there are no descriptors left.
    fn describe(&self) -> io::Result<(VolumeBody, Vec<OwnedFd>)>;
}

/// Makes the volume of a dead server from its description. Each kind needs a line here.
fn restore(body: VolumeBody, descriptors: Vec<OwnedFd>) -> io::Result<Box<dyn ServedKind>> {
    Ok(match body {
        VolumeBody::Projection { tree, reporting } => {
            Box::new(ServedProjection::restore(*tree, reporting, descriptors)?)
        }
        VolumeBody::Passthrough { options } => Box::new(Passthrough::restore(options, descriptors)?),
        VolumeBody::Nfs { options } => Box::new(NfsExport::new(options, descriptors)),
        VolumeBody::Live { of, tree } => Box::new(LiveParts::restore(of, *tree, descriptors)?),
    })
}

/// The descriptors of every volume.
pub(super) struct VolumeDescriptors {
    pub(super) device: OwnedFd,
    pub(super) mount: OwnedFd,
    pub(super) region: OwnedFd,
}

/// The parts of a volume of any kind in the server.
pub(super) struct ServedParts {
    /// The record for the supervisor that adopts the volume.
    about: Value,
    device: OwnedFd,
    mount: OwnedFd,
    region: Arc<Region>,
    trace: Arc<Trace>,
}

impl ServedParts {
    fn of(about: Value, held: VolumeDescriptors, kind: &dyn ServedKind) -> io::Result<ServedParts> {
        let VolumeDescriptors { device, mount, region } = held;
        let region = Arc::new(Region::adopt(region)?);
        if region.kind() != kind.region_kind() {
            return Err(inconsistent_state());
        }
        Ok(ServedParts { about, device, mount, region, trace: start_trace(kind.is_traced())? })
    }

    /// The name of the volume, for log lines.
    fn label(&self) -> VolumeLabel {
        VolumeLabel::in_record(&self.about)
    }
}

/// Resources that all volumes of a server share.
pub(super) struct ServerResources {
    /// The output for the lines of audited volumes.
    output: Arc<LineOutput>,
    /// The thread of all NFS volumes, if there is one.
    nfs: Option<NfsThread>,
}

/// A volume of any kind.
struct ServedVolume {
    common: ServedParts,
    kind: Box<dyn ServedKind>,
}

impl ServedVolume {
    /// Its state as a volume of kind `K`, if it is one.
    fn kind<K: ServedKind>(&self) -> Option<&K> {
        let kind: &dyn Any = &*self.kind;
        kind.downcast_ref()
    }

    /// Like [`Self::kind`].
    fn kind_mut<K: ServedKind>(&mut self) -> Option<&mut K> {
        let kind: &mut dyn Any = &mut *self.kind;
        kind.downcast_mut()
    }
}

/// All volumes, by their numbers.
pub(super) struct ServedVolumes {
    volumes: BTreeMap<VolumeNumber, ServedVolume>,
    /// The loaded volumes, until [`Self::start`].
    loaded: BTreeMap<VolumeNumber, ServedVolume>,
    shared: ServerResources,
}

impl ServedVolumes {
    /// No volumes yet. The lines of audited ones will go to `output`.
    pub(super) fn new(output: Arc<LineOutput>) -> Self {
        let shared = ServerResources { output, nfs: None };
        Self { volumes: BTreeMap::new(), loaded: BTreeMap::new(), shared }
    }

    pub(super) fn is_empty(&self) -> bool {
        self.volumes.is_empty()
    }

    /// The numbers of the volumes; for a supervisor of an earlier version, without live parts.
    pub(super) fn numbers(&self, with_live: bool) -> Vec<VolumeNumber> {
        let is_listed = |volume: &ServedVolume| with_live || volume.kind::<LiveParts>().is_none();
        self.volumes.iter().filter(|(_, volume)| is_listed(volume)).map(|(number, _)| *number).collect()
    }

    /// Serves a new volume.
    pub(super) fn begin(
        &mut self,
        number: VolumeNumber,
        about: Value,
        held: VolumeDescriptors,
        mut kind: impl ServedKind,
    ) -> io::Result<ServerReply> {
        let common = ServedParts::of(about, held, &kind)?;
        let reply = kind.begin(&common, &mut self.shared)?;
        self.volumes.insert(number, ServedVolume { common, kind: Box::new(kind) });
        Ok(reply)
    }

    /// Loads a volume of a dead server.
    pub(super) fn load(
        &mut self,
        description: VolumeDescription,
        held: VolumeDescriptors,
        descriptors: Vec<OwnedFd>,
    ) -> io::Result<()> {
        let VolumeDescription { volume: number, about, body } = description;
        let mut kind = restore(body, descriptors)?;
        let common = ServedParts::of(about, held, &*kind)?;
        kind.load(&common)?;
        self.loaded.insert(number, ServedVolume { common, kind });
        Ok(())
    }

    /// Serves the loaded volumes. Calls `failed_by` with the volume and the error of each failure. Returns the volumes that it cannot serve, with the reasons: no
    /// volume depends on another one.
    pub(super) fn start(&mut self, failed_by: impl Fn(&VolumeLabel, &io::Error)) -> Vec<(VolumeNumber, String)> {
        let mut failed = Vec::new();
        for (number, mut volume) in std::mem::take(&mut self.loaded) {
            match volume.kind.resume(&volume.common, &mut self.shared) {
                Ok(()) => drop(self.volumes.insert(number, volume)),
                Err(error) => {
                    failed_by(&volume.common.label(), &error);
                    failed.push((number, error.to_string()));
                }
            }
        }
        failed
    }

    /// Describes a volume to a supervisor that adopts it.
    pub(super) fn describe(&self, number: VolumeNumber) -> io::Result<(VolumeDescription, Vec<OwnedFd>)> {
        let ServedVolume { common, kind } = self.volume(number)?;
        let ServedParts { about, device, mount, region, .. } = common;
        let (body, of_kind) = kind.describe()?;
        let mut descriptors = vec![device.try_clone()?, mount.try_clone()?, region.as_fd().try_clone_to_owned()?];
        descriptors.extend(of_kind);
        Ok((VolumeDescription { volume: number, about: about.clone(), body }, descriptors))
    }

    pub(super) fn remove(&mut self, number: VolumeNumber) {
        if let Some(volume) = self.volumes.remove(&number) {
            // Its session may continue for processes that still use the mount.
            volume.common.trace.detach();
        }
    }

    /// Attaches a reader to the trace of the volume; without one, detaches all readers.
    pub(super) fn trace(&self, number: VolumeNumber, reader: Option<OwnedFd>) -> io::Result<()> {
        let trace = &self.volume(number)?.common.trace;
        match reader {
            Some(pipe) => trace.attach(pipe),
            None => {
                trace.detach();
                Ok(())
            }
        }
    }

    fn volume(&self, number: VolumeNumber) -> io::Result<&ServedVolume> {
        self.volumes.get(&number).ok_or_else(|| io::Error::other(format!("volume {} is not served", number.0)))
    }

    /// The volume, which must be of kind `K`.
    fn of_kind<K: ServedKind>(&self, number: VolumeNumber) -> io::Result<(&ServedParts, &K)> {
        let volume = self.volume(number)?;
        let other_kind = || {
            let kind = volume.kind.region_kind();
            io::Error::other(format!("volume {} is of kind {kind:?}, which has no such request", number.0))
        };
        Ok((&volume.common, volume.kind::<K>().ok_or_else(other_kind)?))
    }
}

/// Ends this process if it lacks a resource at this moment: the supervisor then tries again with another server. The images of the
/// volumes keep their content.
pub(super) fn end_without_resources(volume: &VolumeLabel, error: &io::Error) {
    if is_shortage(error) {
        let volume = volume.as_str();
        tracing::error!(
            volume,
            "this server cannot take over now: {error}; it ends, and the supervisor starts another one"
        );
        std::process::abort();
    }
}

/// Makes the trace of a volume, which writes to standard output if `wanted`.
fn start_trace(wanted: bool) -> io::Result<Arc<Trace>> {
    let trace = if wanted { Trace::to(rustix::io::dup(rustix::stdio::stdout())?) } else { Trace::default() };
    Ok(Arc::new(trace))
}

/// The images of a dead server. This process does not zero them before it serves, because another successor may need them.
fn images(descriptors: Vec<OwnedFd>) -> io::Result<Vec<Image>> {
    // At once: an error about one of them drops the others.
    descriptors.into_iter().map(|file| Image::adopt(file).inspect(Image::disown)).collect()
}

/// Copies of the images' descriptors, for another process.
fn copies(images: Vec<Arc<Image>>) -> io::Result<Vec<OwnedFd>> {
    images.into_iter().map(|image| image.as_fd().try_clone_to_owned()).collect()
}

fn inconsistent_state() -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, "the state of the last server is inconsistent")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::log::standard_error::standard_error;

    /// A kind whose volumes a server can serve or not.
    struct Fake {
        fails: bool,
    }

    impl ServedKind for Fake {
        fn region_kind(&self) -> VolumeKind {
            VolumeKind::Projection
        }

        fn is_traced(&self) -> bool {
            false
        }

        fn begin(&mut self, _: &ServedParts, _: &mut ServerResources) -> io::Result<ServerReply> {
            Ok(ServerReply::Done)
        }

        fn load(&mut self, _: &ServedParts) -> io::Result<()> {
            Ok(())
        }

        fn resume(&mut self, _: &ServedParts, _: &mut ServerResources) -> io::Result<()> {
            if self.fails { Err(io::Error::other("no rings")) } else { Ok(()) }
        }

        fn describe(&self) -> io::Result<(VolumeBody, Vec<OwnedFd>)> {
            Err(inconsistent_state())
        }
    }

    #[test]
    fn a_volume_that_cannot_be_served_delays_no_other_one() {
        let mut volumes = ServedVolumes::new(standard_error());
        for number in 0..3 {
            let any = || OwnedFd::from(io::pipe().expect("a pipe").0);
            let region = Region::create(VolumeKind::Projection).expect("a region");
            let region = region.as_fd().try_clone_to_owned().expect("a descriptor");
            let kind = Fake { fails: number == 1 };
            let held = VolumeDescriptors { device: any(), mount: any(), region };
            let common = ServedParts::of(Value::Null, held, &kind).expect("a volume");
            volumes.loaded.insert(VolumeNumber(number), ServedVolume { common, kind: Box::new(kind) });
        }
        assert_eq!(volumes.start(|_, _| {}), [(VolumeNumber(1), "no rings".to_owned())]);
        assert_eq!(volumes.numbers(true), [VolumeNumber(0), VolumeNumber(2)]);
    }
}
