//! `podfs node`: the volume manager of a node, and the commands for requests to it.

mod ask;
mod daemon;
mod table;

use std::path::PathBuf;

use clap::{Args, ValueHint};

use super::exit::Failure;
use crate::supervisor::program::options::{RUN_DIRECTORY, directory};

/// Mount and refresh the volumes of all pods of this node, until SIGTERM or SIGINT.
///
/// podfs node knows the pods of the node: static pods, whose manifests are files of a directory, and the pods that the API
/// server has for the node. Volumes that a container of a pod uses are mounted when the pod appears, and follow their objects.
/// Volumes that no container uses are not mounted. podfs node starts a supervisor for each pod, the program podfs-supervisor; podfs
/// status, podfs metrics and podfs upgrade work as for podfs run.
///
/// When a pod is deleted, or its phase is Succeeded or Failed, its volumes stay mounted until an agent has released the pod:
/// only the agent knows when the containers have stopped. Then podfs node unmounts the volumes, deletes the content of
/// emptyDirs and removes the directories. With --release-when-gone, it does so as soon as the pod is gone or has ended.
///
/// With --csi, podfs node is the CSI driver podfs.io of this node's kubelet. Then the kubelet decides when volumes are mounted and
/// unmounted, and podfs reads only the pods' descriptions from the sources.
///
/// With --nri, podfs node is a plugin of this node's container runtime. Containers of chosen pods then get podfs's volumes of the
/// kinds configMap, secret, downwardAPI and projected, or the kubelet's if podfs is not ready.
///
/// podfs node itself mounts only at the kubelet's directories; the pods' supervisors make all other mounts. When podfs node is
/// killed, no call of a container fails, and the content of volumes stays as it is. When it is started again, it finds all pods in
/// the run directory, and volumes follow their objects again. SIGTERM does not unmount anything, either.
///
/// The commands ask the daemon of the run directory, and so do agents, by gRPC on node.sock there: see podfs-agent(7). POD is
/// the uid of a pod, or NAMESPACE/NAME.
#[derive(Args)]
#[command(
    subcommand_negates_reqs = true,
    args_conflicts_with_subcommands = true,
    after_help = "\
EXIT STATUS:
  0  stopped by a signal; of a command: it succeeded
  1  failed; the last line on standard error says what, where and what to do
  2  bad arguments or settings
  3  a privilege, a kernel feature, podfs-fuse or podfs-supervisor is missing

EXAMPLES:
  podfs node --manifests /etc/podfs/manifests
  podfs node --kubeconfig /etc/kubernetes/kubelet.conf --node-name worker-1
  podfs node --nri --kubeconfig /etc/kubernetes/kubelet.conf --node-name worker-1
  podfs node wait default/web && podfs node volumes default/web --output json
  podfs node release default/web && podfs node wait default/web --unmounted"
)]
pub(super) struct NodeCommand {
    #[command(subcommand)]
    command: Option<ask::AskCommand>,
    #[command(flatten)]
    daemon: daemon::DaemonOptions,
    /// State that a reboot may erase: for each pod, the lock by which it has only one podfs, and its sockets; and node.sock, on
    /// which the daemon answers. Commands take the directory after their name.
    #[arg(long, value_name = "DIR", default_value = RUN_DIRECTORY, value_parser = directory(), value_hint = ValueHint::DirPath, global = true)]
    run_dir: PathBuf,
}

impl NodeCommand {
    pub(super) fn execute(self) -> Result<(), Failure> {
        match self.command {
            Some(command) => command.execute(&self.run_dir),
            None => self.daemon.execute(self.run_dir),
        }
    }
}
