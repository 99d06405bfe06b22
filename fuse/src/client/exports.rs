//! The supervisor's end of the control socket, as far as it concerns NFS volumes: their exports, and where their servers are.

use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::Duration;

use serde_json::Value;

use super::held::{Content, Held};
use super::server_client::ServerClient;
use crate::mount::private::PrivateMount;
use crate::nfs::options::{Options, Place};
use crate::nfs::sockets::Sockets;
use crate::protocol::{Request, VolumeId};
use crate::region::{Kind, Region};

impl ServerClient {
    /// Lets the server show an export. `log` is the file of its log.
    ///
    /// # Errors
    /// When the server is gone, the kernel's handshake fails, or the NFS server does not answer.
    pub(crate) fn export(
        &self,
        device: OwnedFd,
        mount: PrivateMount,
        log: OwnedFd,
        sockets: Sockets,
        options: &Options,
        about: Value,
    ) -> io::Result<(VolumeId, Arc<Held>)> {
        let region = Region::create(Kind::Nfs)?;
        let content = Content::Nfs { log, sockets: sockets.clone(), options: Box::new(options.clone()) };
        let held = Held::new(about, device, mount, region, content);
        let about = held.about.clone();
        // Until here, the NFS server may have moved.
        let request = |volume| Request::Export { volume, about, options: Box::new(sockets.current(options)) };
        self.join(held, request).map(|(volume, held, _)| (volume, held))
    }

    /// NFS servers that were asked something and have said nothing for `patience`: of each, one of the volumes that share
    /// it, and how that is served.
    pub fn silent_exports(&self, patience: Duration) -> Vec<(VolumeId, Options)> {
        let mut found: Vec<(VolumeId, &Sockets, &Options)> = Vec::new();
        let volumes = self.volumes();
        for (volume, held) in volumes.iter() {
            let Content::Nfs { sockets, options, .. } = &held.content else { continue };
            let is_silent = held.region.silent_since().is_some_and(|since| since.elapsed() >= patience);
            if is_silent && !found.iter().any(|(_, other, _)| sockets.is_shared_with(other)) {
                found.push((*volume, sockets, options));
            }
        }
        found.into_iter().map(|(volume, sockets, options)| (volume, sockets.current(options))).collect()
    }

    /// Tells the server the new place of a volume's NFS server, for all volumes that share it now or later.
    ///
    /// # Errors
    /// When there is no such volume any more, or no server.
    pub fn move_nfs(&self, volume: VolumeId, place: Place) -> io::Result<()> {
        {
            // A volume that is just starting is in the map already, or its request will carry the new place.
            let _joining = self.joining.lock().expect("a thread that panics ends the process");
            let volumes = self.volumes();
            match volumes.get(&volume).map(|held| &held.content) {
                Some(Content::Nfs { sockets, .. }) => sockets.move_to(place),
                _ => return Err(io::ErrorKind::NotFound.into()),
            }
        }
        // A successor that is resumed meanwhile may have got the old place for some of them.
        self.done(&Request::Move { volume, place }, &[])
    }
}
