//! Directories that other volumes are mounted on.
//!
//! A container may mount a volume below the mount path of another. If the outer one is read-only, only podfs can make the
//! directory for the inner one, so the volume has it from the start.

use k8s_openapi::api::core::v1::VolumeMount;

use crate::types::PayloadPath;

/// The directories to make in the root of the volume `name`, given the mounts of every container of the pod. If one
/// directory is below another, only the outer one is returned, as by the kubelet: the volume that is mounted on the outer one
/// has the inner one.
///
/// # Errors
/// A mount path that leaves the container's root, or one that would hide an entry of the volume such as `..data`; with
/// the kubelet's text.
pub(super) fn directories(name: &str, containers: &[&[VolumeMount]]) -> Result<Vec<PayloadPath>, InvalidMountPoint> {
    let mut directories = Vec::new();
    for mounts in containers {
        let mut all: Vec<String> = mounts.iter().map(|mount| clean(&mount.mount_path)).collect();
        all.sort();
        for mount in mounts.iter().filter(|mount| mount.name == name) {
            let own = clean(&mount.mount_path);
            if own == ".." || own.starts_with("../") {
                return Err(InvalidMountPoint(own));
            }
            directories.extend(outermost_below(&own, &all)?);
        }
    }
    directories.sort();
    directories.dedup();
    Ok(directories)
}

/// A mount path for which podfs can make no directory.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("invalid container mount point {0}")]
pub(super) struct InvalidMountPoint(String);

/// The paths below `own`, relative to `own`, without those that are below another of them.
fn outermost_below(own: &str, sorted: &[String]) -> Result<Vec<PayloadPath>, InvalidMountPoint> {
    let mut outermost: Vec<(&str, PayloadPath)> = Vec::new();
    for path in sorted {
        let Some(relative) = below(own, path) else {
            continue;
        };
        if outermost.iter().any(|(outer, _)| *outer == path || below(outer, path).is_some()) {
            continue;
        }
        let directory = PayloadPath::parse(relative).map_err(|_| InvalidMountPoint(path.clone()))?;
        outermost.push((path, directory));
    }
    Ok(outermost.into_iter().map(|(_, directory)| directory).collect())
}

/// The part of `path` below `directory`.
fn below<'a>(directory: &str, path: &'a str) -> Option<&'a str> {
    let directory = directory.strip_suffix('/').unwrap_or(directory);
    path.strip_prefix(directory)?.strip_prefix('/').filter(|rest| !rest.is_empty())
}

/// The shortest path that means the same, by its text alone: Go's `path.Clean`.
fn clean(path: &str) -> String {
    let root = if path.starts_with('/') { "/" } else { "" };
    let mut names: Vec<&str> = Vec::new();
    for name in path.split('/') {
        match name {
            "" | "." => {}
            ".." if names.last().is_some_and(|last| *last != "..") => {
                names.pop();
            }
            // The parent of the root is the root.
            ".." if !root.is_empty() => {}
            name => names.push(name),
        }
    }
    match (root, names.is_empty()) {
        ("", true) => ".".to_owned(),
        _ => format!("{root}{}", names.join("/")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn mounts(mounts: &[(&str, &str)]) -> Vec<VolumeMount> {
        let mount = |(name, path): &(&str, &str)| VolumeMount {
            name: (*name).to_owned(),
            mount_path: (*path).to_owned(),
            ..VolumeMount::default()
        };
        mounts.iter().map(mount).collect()
    }

    fn nested(containers: &[&[(&str, &str)]]) -> Result<Vec<String>, String> {
        let containers: Vec<Vec<VolumeMount>> = containers.iter().map(|one| mounts(one)).collect();
        let containers: Vec<&[VolumeMount]> = containers.iter().map(Vec::as_slice).collect();
        match directories("vol1", &containers) {
            Ok(directories) => Ok(directories.iter().map(ToString::to_string).collect()),
            Err(error) => Err(error.to_string()),
        }
    }

    fn paths(names: &[&str]) -> Result<Vec<String>, String> {
        Ok(names.iter().map(ToString::to_string).collect())
    }

    #[test]
    fn nm_01_simple() {
        assert_eq!(nested(&[&[("vol1", "/dir")]]), paths(&[]));
        assert_eq!(nested(&[&[("vol1", "/dir"), ("vol2", "/directory"), ("vol3", "/")]]), paths(&[]));
    }

    #[test]
    fn nm_01_simple_nested() {
        assert_eq!(nested(&[&[("vol1", "/dir"), ("vol2", "/dir/nested")]]), paths(&["nested"]));
    }

    #[test]
    fn nm_01_unsorted() {
        let container = [
            ("vol3", "/dir/nested/double"),
            ("vol4", "/dir/nested2"),
            ("vol5", "/dir/nested.vol"),
            ("vol2", "/dir/nested"),
            ("vol6", "/dir/nested-vol/"),
            ("vol1", "/dir"),
        ];
        assert_eq!(nested(&[&container]), paths(&["nested", "nested-vol", "nested.vol", "nested2"]));
    }

    #[test]
    fn nm_01_several_mounts_of_the_volume() {
        let container = [("vol1", "/dir"), ("vol1", "/other"), ("vol2", "/dir/nested"), ("vol3", "/other/nested2")];
        assert_eq!(nested(&[&container]), paths(&["nested", "nested2"]));
    }

    #[test]
    fn nm_01_big_pod() {
        let init = [("vol1", "/mnt"), ("vol2", "/mnt/sub1/sub2/sub3"), ("vol3", "/mnt/sub1/sub2/sub4")];
        let regular = [("vol1", "/mnt/"), ("vol2", "/mnt//sub1/./sub2/sub6"), ("vol3", "/mnt/sub1/sub2/sub6/deeper")];
        let ephemeral = [("vol1", "/a"), ("vol2", "/a/sub")];
        let unrelated = [("vol2", "/mnt/sub9"), ("vol3", "/mnt")];
        assert_eq!(
            nested(&[&init, &regular, &ephemeral, &unrelated]),
            paths(&["sub", "sub1/sub2/sub3", "sub1/sub2/sub4", "sub1/sub2/sub6"])
        );
    }

    #[test]
    fn nm_01_naughty_path() {
        assert_eq!(nested(&[&[("vol1", "foo/../../dir")]]), Err("invalid container mount point ../dir".into()));
        assert_eq!(nested(&[&[("vol1", "..")]]), Err("invalid container mount point ..".into()));
    }

    #[test]
    fn nm_01_no_mount_takes_the_place_of_the_writers_entries() {
        assert_eq!(
            nested(&[&[("vol1", "/dir"), ("vol2", "/dir/..data")]]),
            Err("invalid container mount point /dir/..data".into())
        );
    }

    #[test]
    fn nm_01_paths_are_cleaned() {
        for (path, expected) in
            [("/a//b/./c/..", "/a/b"), ("/../..", "/"), ("a/..", "."), ("../a/../..", "../.."), ("", ".")]
        {
            assert_eq!(clean(path), expected, "{path}");
        }
        assert_eq!(nested(&[&[("vol1", "/"), ("vol2", "/nested")]]), paths(&["nested"]));
    }
}
