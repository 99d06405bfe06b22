//! A volume that shows something as it is, of the host or of an NFS server: its source found and opened, then mounted
//! once.
//!
//! What is mounted stays as it is. A later change of the manifests or of the source's path concerns the next pod.

use std::os::fd::AsFd;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use podfs_fuse::caller::credentials::ActAs;
use podfs_fuse::client::NfsVolume;
use podfs_fuse::client::Passthrough;
use podfs_fuse::client::{Adopted, Watch};
use podfs_fuse::mount::MountError;
use podfs_fuse::mount::bind::bind;
use podfs_fuse::mount::private::{Access, MountOptions, Shape};
use podfs_fuse::mount::visible::{MountPoint, VisibleMount};
use podfs_fuse::passthrough::{Cache, DataPath, Options};
use serde_json::Value;
use tracing::warn;

use super::driver::expand_csi;
use super::growth::{Expansion, Growth};
use super::host_path::forget_disk;
use super::local;
use super::nfs::{self, Export};
use super::{End, Refresh, Setting, Shown, Trouble};
use crate::binding::{self, Bound, BoundSource};
use crate::host::device::BlockDevice;
use crate::host::empty_dir::{Backing, Content, Plan};
use crate::host::neighbours::{self, Turn};
use crate::host::{HostError, Source, fs_group, serve};
use crate::supervisor::run::adoption::About;
use crate::supervisor::run_dir::site::Site;
use crate::volume::nfs_options::Backend;
use crate::volume::{Claim, EmptyDir, Nfs, NfsOptions, ServedBy, Volume, VolumeSource};

/// The text of the kubelet for the pod that has to wait.
const IN_USE: &str = "volume uses the ReadWriteOncePod access mode and is already in use by another pod";
/// The file in the run directory whose locks are the turns of pods.
const EXCLUSIVE: &str = "exclusive.lock";
/// How often a CSI driver is called again that wants to (the kubelet: each 63 to 84 s).
const REPUBLISH: Duration = Duration::from_secs(75);

/// The mount of a passthrough, once its source was found.
pub(super) struct PassthroughVolume {
    setting: Setting,
    path: Option<PathBuf>,
    group: Option<u32>,
    mounted: Option<Mounted>,
    /// A mount whose source or server is gone, until a new one covers it.
    outdated: Option<Mounted>,
    content: Option<Content>,
    warned: Vec<String>,
    growth: Growth,
    /// The CSI driver wants to be called again.
    republishes: bool,
    /// The device that the volume shows, if it shows one. While it is open, the kernel gives its number to no other device.
    device: Option<BlockDevice>,
}

/// Fields are dropped in this order: the volume is no longer visible when its server is released.
struct Mounted {
    visible: VisibleMount,
    access: Access,
    served: Served,
}

/// What answers for a mount.
enum Served {
    /// The kernel alone: it is a bind mount.
    Bind,
    /// The server of the pod, from a source on this node.
    Passthrough(Passthrough),
    /// The server of the pod, from an NFS server.
    Nfs(NfsVolume),
}

impl Mounted {
    fn shown(&self) -> Shown {
        match &self.served {
            Served::Passthrough(passthrough) if passthrough.is_remote() => Shown::Nfs(Backend::Kernel),
            Served::Passthrough(passthrough) => match passthrough.data_path() {
                DataPath::Kernel => Shown::Passthrough,
                DataPath::Server => Shown::ReadWrite,
            },
            Served::Nfs(_) => Shown::Nfs(Backend::User),
            Served::Bind => Shown::Bind,
        }
    }

    fn watch(&self) -> Option<Watch> {
        match &self.served {
            Served::Passthrough(passthrough) => Some(passthrough.watch()),
            Served::Nfs(volume) => Some(volume.watch()),
            Served::Bind => None,
        }
    }

    /// Whether it is mounted on a directory or a file.
    fn shape(&self) -> Shape {
        match &self.served {
            Served::Passthrough(passthrough) => passthrough.shape(),
            Served::Nfs(_) | Served::Bind => Shape::Directory,
        }
    }

    /// Whether no successor could take it over when its server died.
    fn is_given_up(&self) -> bool {
        match &self.served {
            Served::Passthrough(passthrough) => passthrough.is_given_up(),
            Served::Nfs(volume) => volume.is_given_up(),
            Served::Bind => false,
        }
    }
}

/// What is to be mounted, and how.
pub(super) struct MountPlan {
    pub(super) path: PathBuf,
    pub(super) content: Planned,
    pub(super) access: Access,
    pub(super) selinux_context: Option<String>,
    /// Kept until the mount is in the mount table, where one pod alone may use the volume.
    pub(super) turn: Option<Turn>,
}

/// What is to be seen.
pub(super) enum Planned {
    /// A source on this node, or an export that the kernel has mounted: then calls are made as `remote` says.
    Source { source: Source, served_by: ServedBy, limit: Option<u64>, remote: Option<ActAs> },
    /// An export, by podfs's own client.
    Export(Box<Export>),
}

impl From<HostError> for Trouble {
    fn from(error: HostError) -> Trouble {
        Trouble::Passing(error.to_string())
    }
}

impl PassthroughVolume {
    pub(super) fn new(setting: Setting) -> Self {
        Self {
            setting,
            path: None,
            group: None,
            mounted: None,
            outdated: None,
            content: None,
            warned: Vec::new(),
            growth: Growth::default(),
            republishes: false,
            device: None,
        }
    }

    pub(super) fn adopted(setting: Setting, about: About, visible: VisibleMount, served: Adopted) -> Self {
        let served = match served {
            Adopted::Passthrough(passthrough) => Served::Passthrough(passthrough),
            Adopted::Nfs(volume) => Served::Nfs(volume),
            Adopted::Projection(_) => unreachable!("a projection is no passthrough"),
        };
        let access = access(visible.is_read_only().or(about.read_only).unwrap_or_default());
        let mounted = Mounted { visible, access, served };
        Self { path: Some(about.path), group: about.group, mounted: Some(mounted), ..Self::new(setting) }
    }

    /// Its mount, once it is mounted.
    pub(super) fn visible(&mut self) -> Option<&mut VisibleMount> {
        self.mounted.as_mut().map(|mounted| &mut mounted.visible)
    }

    /// Shows the volume again, whose mount another process has unmounted. Those that still use the old mount and those
    /// that come now share one file system, and its server. A bind mount has neither: it is to be [mounted](Self::show) anew.
    pub(super) fn show_again(&mut self) -> Result<(), Trouble> {
        if let Some(bind) = self.mounted.take_if(|mounted| matches!(mounted.served, Served::Bind)) {
            drop(bind);
        }
        let Some(mounted) = self.mounted.as_mut().filter(|mounted| !mounted.is_given_up()) else { return Ok(()) };
        let point = self.setting.prepare(mounted.visible.path(), mounted.shape())?;
        let again = match &mounted.served {
            Served::Passthrough(passthrough) => passthrough.show(&point, mounted.access),
            Served::Nfs(volume) => volume.show(&point, mounted.access),
            Served::Bind => return Ok(()),
        };
        mounted.visible.replace(again.map_err(Trouble::of_mount)?);
        Ok(())
    }

    pub(super) fn set_republishes(&mut self, republishes: bool) {
        self.republishes = republishes;
    }

    /// When the driver of the volume is to be called again, if it wants to.
    pub(super) fn republish_in(&self) -> Option<Duration> {
        self.republishes.then_some(REPUBLISH)
    }

    pub(super) fn set_path(&mut self, path: PathBuf) {
        self.path = Some(path);
    }

    /// Holds a device open that the volume shows.
    pub(super) fn hold(&mut self, device: BlockDevice) {
        self.device = Some(device);
    }

    pub(super) fn setting(&self) -> &Setting {
        &self.setting
    }

    /// Where the volume is, or was tried to be.
    pub(super) fn path(&self) -> Option<&Path> {
        self.path.as_deref()
    }

    /// Whether containers can only read it; not known before it is mounted.
    pub(super) fn is_read_only(&self) -> bool {
        self.mounted.as_ref().is_some_and(|mounted| mounted.access == Access::ReadOnly)
    }

    /// A group that containers need to use the volume.
    pub(super) fn group(&self) -> Option<u32> {
        self.group
    }

    /// How its last growth came out.
    pub(super) fn expansion(&self) -> Option<&Expansion> {
        self.growth.outcome()
    }

    /// How the volume is served, if it is.
    pub(super) fn shown(&self) -> Option<Shown> {
        self.mounted.as_ref().map(Mounted::shown)
    }

    /// A way to look at it, once it is mounted and served.
    pub(super) fn watch(&self) -> Option<Watch> {
        self.mounted.as_ref()?.watch()
    }

    /// Mounts the volume, unless it is mounted.
    pub(super) fn show(&mut self, spec: &Volume, refresh: &Refresh) -> Result<Shown, Trouble> {
        if let Some(mounted) = self.mounted.take_if(|mounted| mounted.is_given_up()) {
            self.outdated = Some(mounted);
        }
        if let (Some(_), None, VolumeSource::EmptyDir(source)) = (&self.mounted, &self.content, &spec.source) {
            // Another supervisor has made it; it is this one's to delete.
            let content = self.set_up_content(spec, &empty_dir_plan(source, refresh)?)?;
            if content.is_new() {
                // What is served was deleted.
                self.outdated = self.mounted.take();
            }
            self.content = Some(content);
        }
        if let Some(mounted) = &self.mounted {
            let shown = mounted.shown();
            let grown = self.follow_capacity(spec, refresh);
            self.publish_again(spec, refresh)?;
            return grown.map(|()| shown);
        }
        let mount_plan = match &spec.source {
            VolumeSource::HostPath(source) => self.host_path(spec, source)?,
            VolumeSource::EmptyDir(source) => self.empty_dir(spec, source, refresh)?,
            VolumeSource::Claim(claim) => self.claim(spec, claim, refresh)?,
            VolumeSource::Nfs(source) => self.nfs(spec, source, refresh)?,
            VolumeSource::Flex(source) => self.flex(spec, source, refresh)?,
            VolumeSource::Csi(source) => self.csi(spec, source, refresh)?,
            VolumeSource::Unsupported(_) => {
                return Err(Trouble::Manifests(spec.unsupported_reason().unwrap_or_default()));
            }
            VolumeSource::Projection(_) => unreachable!("a projection is no passthrough"),
        };
        let mut mounted = self.mount(spec, mount_plan)?;
        let shown = mounted.shown();
        if let Some(outdated) = self.outdated.take() {
            mounted.visible.cover(outdated.visible);
        }
        self.mounted = Some(mounted);
        self.follow_capacity(spec, refresh)?;
        Ok(shown)
    }

    /// Unmounts the volume, and deletes what goes with the pod.
    pub(super) fn take_down(self, volume: &str, end: End) -> Result<(), MountError> {
        let Self { setting, path, mounted, outdated, content, device, .. } = self;
        let unmounted = mounted.or(outdated).map_or(Ok(()), |mounted| match &mounted.served {
            // The NFS server that it waits for may be unreachable, and after the pod's end no supervisor goes on with the
            // unmount.
            Served::Passthrough(passthrough) if passthrough.is_remote() && end == End::Clean => {
                mounted.visible.unmount_and_abort()
            }
            _ => mounted.visible.unmount(),
        });
        if let Some(Err(error)) = path.as_deref().map(|path| local::leave(&setting, path)) {
            warn!("volume {volume:?}: {error}");
        }
        if device.is_some() && end == End::Clean {
            forget_disk(&setting, volume);
        }
        // Without a pod, no later podfs would find the content again.
        let goes = end == End::Clean && !setting.keep_empty_dirs || matches!(setting.site, Site::Exactly(_));
        if let Some(content) = content.filter(|_| goes) {
            match content.delete() {
                Ok(left) if left.is_empty() => {}
                Ok(left) => warn!("volume {volume:?}: what is left of its content are {left}"),
                Err(error) => warn!("volume {volume:?}: {error}"),
            }
        }
        unmounted
    }

    fn claim(&mut self, spec: &Volume, claim: &Claim, refresh: &Refresh) -> Result<MountPlan, Trouble> {
        let name = spec.name.as_str();
        let bound = binding::resolve(name, claim, &refresh.identity, &refresh.facts, &refresh.objects);
        let bound = bound.map_err(|error| Trouble::Manifests(error.to_string()))?;
        let path = self.setting.site.volume(&bound.source.directory(), &bound.name);
        self.path = Some(path.clone());
        self.group = bound.gid;
        let turn = self.turn(&path, bound.exclusive)?;
        let shared = neighbours::use_volume_of(&path);
        if bound.exclusive && shared {
            return Err(Trouble::Passing(IN_USE.to_owned()));
        }
        let mut access = access(bound.read_only);
        let mut warnings = bound.warnings.clone();
        let source = match &bound.source {
            BoundSource::HostPath(source) => self.open_host_path(spec, source, &path)?,
            BoundSource::Nfs(source, options) => {
                return Ok(MountPlan { turn, ..self.export(spec, path, source, options, access, refresh)? });
            }
            BoundSource::Csi(csi) => {
                let plan = self.csi_at(spec, path, csi, Some(&bound), refresh)?;
                return Ok(MountPlan { turn, ..plan });
            }
            BoundSource::Flex(flex) => {
                let plan = self.flex_at(spec, path, flex, &bound.name, bound.read_only, refresh)?;
                return Ok(MountPlan { turn, ..plan });
            }
            BoundSource::Local(local) => {
                let opened = local::open(&self.setting, &bound, local, &path, refresh)?;
                let source = opened.source;
                warnings.extend(opened.warnings);
                if opened.read_only {
                    access = Access::ReadOnly;
                }
                if let (Some(group), Access::ReadWrite) = (refresh.facts.fs_group, access) {
                    give(&source, group, shared, &bound, refresh)?;
                }
                source
            }
        };
        for warning in warnings.iter().filter(|warning| !self.warned.contains(warning)) {
            warn!("volume {name:?}: {warning}");
        }
        self.warned = warnings;
        Ok(MountPlan { turn, ..self.mount_plan(spec, path, source, access)? })
    }

    /// The turn to mount a volume that one pod alone may use.
    fn turn(&self, path: &Path, is_exclusive: bool) -> Result<Option<Turn>, Trouble> {
        let run_directory = self.setting.mount_points().run_directory().and_then(Path::parent).map(Path::to_owned);
        // A volume that is mounted without a pod has no neighbours.
        let Some(run_directory) = run_directory.filter(|_| is_exclusive) else { return Ok(None) };
        let file = run_directory.join(EXCLUSIVE);
        match Turn::take(&file, path) {
            Ok(Some(turn)) => Ok(Some(turn)),
            Ok(None) => Err(Trouble::Passing(IN_USE.to_owned())),
            Err(error) => Err(Trouble::Passing(format!("cannot lock {}: {error}", file.display()))),
        }
    }

    /// Grows the file system of a block device, or has a CSI driver do so, when the PersistentVolume has grown.
    fn follow_capacity(&mut self, spec: &Volume, refresh: &Refresh) -> Result<(), Trouble> {
        let VolumeSource::Claim(claim) = &spec.source else { return Ok(()) };
        let bound = binding::resolve(spec.name.as_str(), claim, &refresh.identity, &refresh.facts, &refresh.objects);
        let Some(bound) = bound.ok().filter(|bound| self.growth.is_due(bound)) else { return Ok(()) };
        match &bound.source {
            BoundSource::Local(_) => local::grow(&self.setting, &bound, refresh, &mut self.growth),
            BoundSource::Csi(csi) => expand_csi(&self.setting, spec, csi, &bound, refresh, &mut self.growth)?,
            _ => self.growth.succeed(&bound, false),
        }
        Ok(())
    }

    /// Whether FUSE or the kernel alone serves a source of the host.
    pub(super) fn mount_plan(
        &self,
        spec: &Volume,
        path: PathBuf,
        source: Source,
        access: Access,
    ) -> Result<MountPlan, Trouble> {
        let served_by = serve::choose(&source, spec.preferences.served_by, &path)?;
        let content = Planned::Source { source, served_by, limit: None, remote: None };
        Ok(MountPlan { path, content, access, selinux_context: None, turn: None })
    }

    fn empty_dir(&mut self, spec: &Volume, source: &EmptyDir, refresh: &Refresh) -> Result<MountPlan, Trouble> {
        let plan = empty_dir_plan(source, refresh)?;
        let (name, site) = (spec.name.as_str(), &self.setting.site);
        let path = site.volume(spec.kind.directory.unwrap_or_default(), name);
        self.path = Some(path.clone());
        let content = match self.content.take() {
            Some(content) => content,
            None => self.set_up_content(spec, &plan)?,
        };
        let opened = content.source().try_clone();
        self.content = Some(content);
        let (served_by, limit) = match plan.backing {
            Backing::Disk => (ServedBy::Fuse, source.size_limit),
            // The tmpfs itself has no more room than it should.
            Backing::Memory { .. } => (ServedBy::Fuse, None),
            // Huge pages cannot be mapped through another file system.
            Backing::HugePages { .. } => (ServedBy::Bind, None),
        };
        let selinux_context = refresh.selinux_context();
        let content = Planned::Source { source: opened?, served_by, limit, remote: None };
        Ok(MountPlan { path, content, access: Access::ReadWrite, selinux_context, turn: None })
    }

    fn set_up_content(&self, spec: &Volume, plan: &Plan) -> Result<Content, Trouble> {
        let home = self.setting.mount_points().make_home(self.setting.site.home(spec.name.as_str()));
        let content = Content::set_up(&home.map_err(|error| Trouble::Passing(error.to_string()))?, plan)?;
        if self.setting.keep_empty_dirs {
            content.leave_to_agent()?;
        }
        Ok(content)
    }

    fn nfs(&mut self, spec: &Volume, source: &Nfs, refresh: &Refresh) -> Result<MountPlan, Trouble> {
        let path = self.setting.site.volume(Nfs::DIRECTORY, spec.name.as_str());
        self.path = Some(path.clone());
        self.export(spec, path, source, &NfsOptions::default(), access(source.read_only), refresh)
    }

    fn export(
        &self,
        spec: &Volume,
        path: PathBuf,
        source: &Nfs,
        options: &NfsOptions,
        access: Access,
        refresh: &Refresh,
    ) -> Result<MountPlan, Trouble> {
        let selinux_context = options.selinux_context.clone();
        let content = match nfs::backend(spec, source, options)? {
            Backend::User => {
                let export = Export::find(spec, source, options, access, &self.setting, refresh)?;
                Planned::Export(Box::new(export))
            }
            Backend::Kernel => {
                let remote = Some(nfs::callers(Backend::Kernel, options, refresh));
                let source = nfs::mount_by_kernel(source, options, access)?;
                Planned::Source { source, served_by: ServedBy::Fuse, limit: None, remote }
            }
        };
        Ok(MountPlan { path, content, access, selinux_context, turn: None })
    }

    fn mount(&self, spec: &Volume, mount_plan: MountPlan) -> Result<Mounted, Trouble> {
        let MountPlan { path, content, access, selinux_context, turn: _until_it_is_mounted } = mount_plan;
        let passing = |error: &dyn std::fmt::Display| Trouble::Passing(error.to_string());
        if let Planned::Source { served_by: ServedBy::Bind, .. } = &content
            && let Some((_, visible)) = self.setting.mount_points().keep(&path).map_err(|error| passing(&error))?
        {
            // A supervisor before this one mounted it, and it needs no server.
            return Ok(Mounted { visible, access, served: Served::Bind });
        }
        let shape = match &content {
            Planned::Source { source, .. } => source.shape(),
            Planned::Export(_) => Shape::Directory,
        };
        let point = match &self.outdated {
            Some(outdated) if !outdated.visible.is_lost() => MountPoint::of_mount(outdated.visible.path()),
            _ => {
                let mut mount_points = self.setting.mount_points();
                mount_points.expect(&path, shape).map_err(|error| passing(&error))?;
                let point = mount_points.prepare(&path, shape);
                mount_points.record().map_err(|error| passing(&error))?;
                point
            }
        };
        let point = point.map_err(|error| passing(&error))?;
        let mount = MountOptions { selinux_context, shape };
        match content {
            Planned::Source { source, served_by: ServedBy::Bind, .. } => {
                let attached = bind(source.as_fd(), access).and_then(|clone| point.attach(&clone));
                Ok(Mounted { visible: attached.map_err(|error| passing(&error))?, access, served: Served::Bind })
            }
            Planned::Source { source, served_by: ServedBy::Fuse, limit, remote } => {
                let options = self.passthrough_options(spec, limit, remote);
                let (server, about) = (Arc::clone(&self.setting.server), self.about(spec, &point, access));
                let passthrough = Passthrough::start(server, source.as_fd(), &options, &mount, about);
                let passthrough = passthrough.map_err(Trouble::of_mount)?;
                let visible = passthrough.show(&point, access).map_err(Trouble::of_mount)?;
                Ok(Mounted { visible, access, served: Served::Passthrough(passthrough) })
            }
            Planned::Export(export) => {
                let Export { options, sockets, attributes, .. } = *export;
                let (server, about) = (Arc::clone(&self.setting.server), self.about(spec, &point, access));
                let volume = NfsVolume::start(server, sockets, &options, attributes, &mount, about);
                let volume = volume.map_err(Trouble::of_mount)?;
                let visible = volume.show(&point, access).map_err(Trouble::of_mount)?;
                Ok(Mounted { visible, access, served: Served::Nfs(volume) })
            }
        }
    }

    fn about(&self, spec: &Volume, point: &MountPoint, access: Access) -> Value {
        Setting::about(spec, point.path(), self.group, access)
    }

    /// Whether all changes of the source go through the mount that is about to be made. Of content that was there before,
    /// containers may still have files open through an earlier mount.
    fn nothing_else_changes(&self, spec: &Volume) -> bool {
        let is_new = self.content.as_ref().is_some_and(Content::is_new);
        matches!(spec.source, VolumeSource::EmptyDir(_)) && is_new && self.outdated.is_none()
    }

    fn passthrough_options(&self, spec: &Volume, limit: Option<u64>, remote: Option<ActAs>) -> Options {
        let name = spec.name.to_string();
        // Sockets in an emptyDir were made through it, and the listeners at sockets of an export are on other machines.
        let advice = (!matches!(spec.source, VolumeSource::EmptyDir(_)) && remote.is_none())
            .then(|| format!("to reach it, give the pod the annotation podfs.io/host-path.{name}: bind"));
        Options {
            name,
            cache: match spec.preferences.cache {
                Cache::Auto if self.nothing_else_changes(spec) && limit.is_none() => Cache::Always,
                chosen => chosen,
            },
            exclusive: matches!(spec.source, VolumeSource::EmptyDir(_)),
            limit,
            trace: self.setting.trace,
            socket_advice: advice,
            threads: None,
            remote,
        }
    }
}

pub(super) fn access(read_only: bool) -> Access {
    if read_only { Access::ReadOnly } else { Access::ReadWrite }
}

fn empty_dir_plan(source: &EmptyDir, refresh: &Refresh) -> Result<Plan, Trouble> {
    let plan = Plan::new(source, &refresh.facts, refresh.node());
    plan.map_err(|error| Trouble::Manifests(error.to_string()))
}

/// The first pod on the node gives a PersistentVolume to its group; for the others it stays as it is (LP-03).
fn give(source: &Source, group: u32, shared: bool, bound: &Bound, refresh: &Refresh) -> Result<(), HostError> {
    let name = &bound.name;
    if !shared {
        return fs_group::give(source, group, refresh.facts.fs_group_policy, name);
    }
    if let Some(other) = fs_group::group_of(source).filter(|other| *other != group) {
        warn!(
            "The requested fsGroup is {group}, but the volume {name} has GID {other}. The volume may not be shareable."
        );
    }
    Ok(())
}
