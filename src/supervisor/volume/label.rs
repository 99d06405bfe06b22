//! The SELinux label of a volume that podfs shows through FUSE.
//!
//! The kubelet makes the container runtime relabel the files of most volumes. Files behind a FUSE mount cannot be relabelled, so podfs
//! gives all files of the mount one label (`context=`), with which containers may use them. Without it, the kernel would give them
//! the label of FUSE file systems, which containers may use only if the administrator has allowed that.
//!
//! hostPath and nfs volumes have no label of podfs, because the kubelet does not have their files relabelled.

use std::fs::OpenOptions;
use std::io::Write;
use std::path::Path;

use podfs_fuse::mount::private::SELINUX;

use crate::manifest::PodView;
use crate::supervisor::run_dir::site::Site;

/// The label of the files of a pod without `seLinuxOptions`. It has no categories, so the containers may use the files whichever
/// categories the runtime gives them.
const SHARED: &str = "system_u:object_r:container_file_t:s0";
/// The file to which a process writes a label that the kernel checks.
const CHECK: &str = "/sys/fs/selinux/context";

/// The label of a volume at the site; `None` where SELinux is not in use.
pub(super) fn label(pod: &PodView, site: &Site) -> Option<String> {
    let is_in_use = Path::new(SELINUX).exists();
    is_in_use.then(|| choose(pod.facts.selinux_label.as_deref(), site, is_in_policy))?
}

/// The label where SELinux is in use: that of the pod, or [`SHARED`] if the node's policy has it. A volume without a pod (`podfs
/// mount`) is not for containers.
fn choose(of_pod: Option<&str>, site: &Site, is_in_policy: impl FnOnce(&str) -> bool) -> Option<String> {
    let shared = || Some(SHARED).filter(|label| matches!(site, Site::Pod(_)) && is_in_policy(label));
    of_pod.or_else(shared).map(str::to_owned)
}

/// Whether the node's policy has the label. The kernel refuses a mount with any other label.
fn is_in_policy(label: &str) -> bool {
    let file = OpenOptions::new().write(true).open(CHECK);
    file.and_then(|mut file| file.write_all(label.as_bytes())).is_ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fu_05_a_volume_of_a_pod_without_a_label_of_its_own_has_the_label_of_all_containers() {
        let pod = Site::Pod("/var/lib/podfs/pods/u".into());
        let own = "system_u:object_r:container_file_t:s0:c1,c2";
        let of_pod = |of_pod, is_known| choose(of_pod, &pod, |_| is_known);
        assert_eq!(of_pod(None, true).as_deref(), Some("system_u:object_r:container_file_t:s0"));
        assert_eq!(of_pod(Some(own), true).as_deref(), Some(own));
        assert_eq!(of_pod(Some(own), false).as_deref(), Some(own), "the mount fails, and podfs reports the label");
        assert_eq!(of_pod(None, false), None, "the kernel would refuse the mount");
        let without_pod = Site::Exactly("/mnt/config".into());
        assert_eq!(choose(None, &without_pod, |_| true), None);
    }
}
