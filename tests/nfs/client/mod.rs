//! podfs' NFS client, with a real server and with faulty servers.

mod bad_servers;
mod faults;
mod mounting;
mod procedures;

use std::future::Future;
use std::rc::Rc;
use std::time::Duration;

use crate::nfs_rig::Ganesha;
use podfs_nfs::mount::{MountRequest, NfsMountError, mount};
use podfs_nfs::rpc::Credential;
use podfs_nfs::server::Servers;
use podfs_nfs::{CallOptions, Export, ExportAddress};

/// The time limit of a mount.
const BUDGET: Duration = Duration::from_secs(20);

static ROOT: Credential = Credential::User { uid: 0, gid: 0, groups: Vec::new() };

/// The options of a call by root, with the policy of the mount.
fn as_root() -> CallOptions<'static> {
    CallOptions::new(&ROOT)
}

/// Runs `test` on one thread, as the server of a pod runs the client.
fn run<T>(test: impl Future<Output = T>) -> T {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
    tokio::task::LocalSet::new().block_on(&runtime, test)
}

/// A mount request for the first export of `server`.
fn request(server: &Ganesha) -> MountRequest {
    let export = ExportAddress::parse("the-server", "/export").expect("an address");
    MountRequest {
        port: Some(server.address().port()),
        mount_port: Some(server.mount_address().port()),
        ..MountRequest::new(export, server.address().ip(), BUDGET)
    }
}

/// The first export of `server`, mounted with a request that `change` has changed.
async fn export_with(server: &Ganesha, change: impl FnOnce(&mut MountRequest)) -> Result<Rc<Export>, NfsMountError> {
    let mut request = request(server);
    change(&mut request);
    mount(&Servers::default(), &request).await.map(Rc::new)
}

/// The first export of `server`.
async fn export(server: &Ganesha) -> Rc<Export> {
    export_with(server, |_| {}).await.expect("the export is mounted")
}
