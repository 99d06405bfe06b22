//! The directory entries that decide to which files the configured paths lead.
//!
//! A path changes its meaning when any component of it, or of a symbolic link on the way, is replaced: a ConfigMap
//! volume switches `..data`, a deployment switches a parent directory. So this module resolves the path as the kernel would,
//! and notes every entry that it looks up. Where a path ends early, the missing entry is the last one.

use std::collections::{BTreeMap, BTreeSet};
use std::ffi::{OsStr, OsString};
use std::fs;
use std::io::ErrorKind;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

/// As many links as the kernel follows, see path_resolution(7).
const MAX_LINKS: usize = 40;

/// The directory entries that decide to which files the configured paths lead, by the real path of their directory.
#[derive(Default)]
pub(super) struct Route {
    directories: BTreeMap<PathBuf, Names>,
}

#[derive(Default)]
struct Names {
    single: BTreeSet<OsString>,
    every_manifest: bool,
}

impl Route {
    /// Follows `path` to its real path. `None` when it leads nowhere.
    pub(super) fn follow(&mut self, path: &Path) -> Option<PathBuf> {
        // Fails only when the working directory is gone.
        let path = std::path::absolute(path).ok()?;
        self.walk(PathBuf::from("/"), &path)
    }

    /// Follows one entry of a directory whose real path is known.
    pub(super) fn enter(&mut self, directory: &Path, name: &OsStr) -> Option<PathBuf> {
        self.walk(directory.to_owned(), Path::new(name))
    }

    /// Makes every manifest in `directory` relevant, also later ones.
    pub(super) fn every_manifest(&mut self, directory: &Path) {
        self.directories.entry(directory.to_owned()).or_default().every_manifest = true;
    }

    /// The directories to watch.
    pub(super) fn directories(&self) -> impl Iterator<Item = &Path> {
        self.directories.keys().map(PathBuf::as_path)
    }

    /// Whether an event at `path` can change what podfs reads: it is a noted entry, or a watched directory itself.
    pub(super) fn passes(&self, path: &Path) -> bool {
        let entry = || {
            let (directory, name) = (path.parent()?, path.file_name()?);
            let names = self.directories.get(directory)?;
            Some(names.single.contains(name) || names.every_manifest && is_manifest(name))
        };
        self.directories.contains_key(path) || entry().unwrap_or(false)
    }

    fn walk(&mut self, mut at: PathBuf, path: &Path) -> Option<PathBuf> {
        let mut ahead = Vec::new();
        push(&mut ahead, path);
        let mut links = 0;
        while let Some(name) = ahead.pop() {
            match name.as_bytes() {
                b"/" => at = PathBuf::from("/"),
                b"." => {}
                b".." => {
                    at.pop();
                }
                _ => {
                    let entry = at.join(&name);
                    self.directories.entry(at.clone()).or_default().single.insert(name);
                    match fs::read_link(&entry) {
                        Ok(target) if links < MAX_LINKS => {
                            links += 1;
                            push(&mut ahead, &target);
                        }
                        Err(error) if error.kind() == ErrorKind::InvalidInput => at = entry,
                        _ => return None,
                    }
                }
            }
        }
        Some(at)
    }
}

/// Pushes the components of `path` on a stack, with the first one on top.
fn push(ahead: &mut Vec<OsString>, path: &Path) {
    ahead.extend(path.components().rev().map(|component| component.as_os_str().to_owned()));
}

/// Whether podfs reads a directory entry as a manifest: `.yaml`, `.yml`, `.json`, and no dotfile.
pub(super) fn is_manifest(name: &OsStr) -> bool {
    let ending = Path::new(name).extension().and_then(OsStr::to_str);
    !name.as_bytes().starts_with(b".") && matches!(ending, Some("yaml" | "yml" | "json"))
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;

    use super::*;

    #[test]
    fn a_path_through_links_notes_every_entry() {
        let home = tempfile::tempdir().expect("a directory");
        let home = home.path().canonicalize().expect("a real path");
        fs::create_dir_all(home.join("real/..gen")).expect("directories");
        fs::write(home.join("real/..gen/app.yaml"), "").expect("a file");
        symlink("..gen", home.join("real/..data")).expect("a link");
        symlink("..data/app.yaml", home.join("real/app.yaml")).expect("a link");
        symlink(home.join("real"), home.join("alias")).expect("a link");

        let mut route = Route::default();
        let end = route.follow(&home.join("./alias/../alias/app.yaml"));
        assert_eq!(end, Some(home.join("real/..gen/app.yaml")));
        for entry in ["alias", "real", "real/app.yaml", "real/..data", "real/..gen", "real/..gen/app.yaml"] {
            assert!(route.passes(&home.join(entry)), "{entry}");
        }
        assert!(!route.passes(&home.join("real/other.yaml")));
        route.every_manifest(&home.join("real"));
        assert!(route.passes(&home.join("real/other.yaml")));
        assert!(!route.passes(&home.join("real/.hidden.yaml")));
        assert!(!route.passes(&home.join("real/other.yaml~")));
    }

    #[test]
    fn a_path_that_ends_early_notes_the_missing_entry() {
        let home = tempfile::tempdir().expect("a directory");
        let home = home.path().canonicalize().expect("a real path");
        symlink("loop", home.join("loop")).expect("a link");
        let mut route = Route::default();
        assert_eq!(route.follow(&home.join("missing/deep/app.yaml")), None);
        assert!(route.passes(&home.join("missing")));
        assert_eq!(route.follow(&home.join("loop")), None);
    }
}
