//! Which of a container's mounts show volumes that podfs can serve: those whose sources are directories of the kubelet. Plain
//! data.

use std::path::{Path, PathBuf};

use super::messages::nri::Mount;

/// The directories of volumes that podfs serves, as the kubelet names them.
const PLUGINS: [&str; 4] =
    ["kubernetes.io~configmap", "kubernetes.io~secret", "kubernetes.io~downward-api", "kubernetes.io~projected"];
/// Options of mounts that follow later mounts of the node: these need a source with propagation, which podfs does not
/// promise for its volumes.
const PROPAGATED: [&str; 4] = ["slave", "rslave", "shared", "rshared"];

/// The kubelet's root directory: as it names the directory, and without symbolic links.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Roots(Vec<PathBuf>);

/// The volume that a path of the kubelet belongs to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PodVolumePath {
    /// The uid of the pod.
    pub pod: String,
    /// The name of the volume.
    pub volume: String,
    /// Whether it is a part of the volume (subPath), which the kubelet prepares for one container.
    pub is_part: bool,
}

impl Roots {
    /// The directories of a kubelet with this root. Resolves symbolic links.
    pub fn of(kubelet_root: &Path) -> Roots {
        let real = kubelet_root.canonicalize().ok().filter(|real| real != kubelet_root);
        Roots([Some(kubelet_root.to_owned()), real].into_iter().flatten().collect())
    }

    /// The volume of a source, if podfs may serve its kind, or if the source is a part of any volume.
    pub fn place(&self, source: &str) -> Option<PodVolumePath> {
        let below = self.0.iter().find_map(|root| Path::new(source).strip_prefix(root.join("pods")).ok())?;
        let names: Vec<&str> = below.iter().map(|name| name.to_str()).collect::<Option<_>>()?;
        let place = |pod: &str, volume: &str, is_part| PodVolumePath {
            pod: pod.to_owned(),
            volume: volume.to_owned(),
            is_part,
        };
        match names[..] {
            [pod, "volumes", plugin, volume] if PLUGINS.contains(&plugin) => Some(place(pod, volume, false)),
            [pod, "volume-subpaths", volume, _container, _index] => Some(place(pod, volume, true)),
            _ => None,
        }
    }
}

/// Whether a mount cannot have another source: the container wants later mounts of the node, or maps ids in a way that
/// only the runtime knows.
pub fn is_bound_to_its_source(mount: &Mount) -> bool {
    let is_such = |option: &String| PROPAGATED.contains(&option.as_str()) || option.contains("idmap");
    mount.options.iter().any(is_such)
}

/// The mount with another source.
pub fn with_source(mount: &Mount, source: String) -> Mount {
    let mut replaced = Mount { source, ..mount.clone() };
    // runc 1.1 removes a restriction of the source's mount that is missing among the options.
    for option in ["nosuid", "nodev"] {
        if !replaced.options.iter().any(|one| one == option) {
            replaced.options.push(option.to_owned());
        }
    }
    replaced
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sources_of_the_four_kinds_are_found_below_the_literal_and_the_real_root() {
        let directory = tempfile::tempdir().expect("a directory");
        let (real, literal) = (directory.path().join("disk"), directory.path().join("kubelet"));
        std::fs::create_dir(&real).expect("a directory");
        std::os::unix::fs::symlink(&real, &literal).expect("a link");
        let roots = Roots::of(&literal);
        let place = |root: &Path, rest: &str| roots.place(&format!("{}/pods/{rest}", root.display()));
        let config = Some(PodVolumePath { pod: "u".to_owned(), volume: "app".to_owned(), is_part: false });
        for root in [&real.canonicalize().expect("a path"), &literal] {
            for kind in ["configmap", "secret", "downward-api", "projected"] {
                assert_eq!(place(root, &format!("u/volumes/kubernetes.io~{kind}/app")), config, "{kind}");
            }
            let part = Some(PodVolumePath { is_part: true, ..config.clone().expect("a place") });
            assert_eq!(place(root, "u/volume-subpaths/app/c/0"), part);
            for other in [
                "u/volumes/kubernetes.io~empty-dir/app",
                "u/volumes/kubernetes.io~csi/app/mount",
                "u/volumes/kubernetes.io~configmap/app/below",
                "u/volumes/kubernetes.io~configmap",
                "u/etc-hosts",
                "u/containers/c/0",
            ] {
                assert_eq!(place(root, other), None, "{other}");
            }
        }
        assert_eq!(roots.place("/var/lib/other/pods/u/volumes/kubernetes.io~configmap/app"), None);
    }

    #[test]
    fn a_replaced_mount_keeps_its_destination_and_options() {
        let text = |words: &[&str]| words.iter().map(|word| (*word).to_owned()).collect::<Vec<_>>();
        let options = text(&["rbind", "rprivate", "ro"]);
        let mount = Mount { destination: "/etc/app".into(), r#type: "bind".into(), source: "/old".into(), options };
        let replaced = with_source(&mount, "/new".to_owned());
        assert_eq!(replaced.options, text(&["rbind", "rprivate", "ro", "nosuid", "nodev"]));
        assert_eq!((replaced.destination.as_str(), replaced.source.as_str()), ("/etc/app", "/new"));
        assert!(!is_bound_to_its_source(&replaced));
        for option in ["rslave", "rshared", "idmap", "ridmap"] {
            let bound = Mount { options: text(&["rbind", option]), ..mount.clone() };
            assert!(is_bound_to_its_source(&bound), "{option}");
        }
    }
}
