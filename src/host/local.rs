//! Local PersistentVolumes: a directory of this node.

use std::path::{Component, Path};

use super::{FileKind, HostError, Source};

/// Opens the directory.
///
/// # Errors
/// When the path is no path, or leads to something else (LP-01).
pub fn open(path: &str) -> Result<Source, HostError> {
    if path.is_empty() {
        return Err(HostError::Refused("local volume source is nil or local path is not set".to_owned()));
    }
    let path = Path::new(path);
    if path.components().any(|part| part == Component::ParentDir) {
        return Err(HostError::Refused(format!("invalid path: {} must not contain '..'", path.display())));
    }
    let source = Source::open(path).map_err(|obstacle| HostError::Open {
        what: "local volume",
        path: path.to_owned(),
        obstacle,
    })?;
    match source.kind() {
        FileKind::Directory => Ok(source),
        FileKind::BlockDevice => Err(HostError::Refused(format!(
            "local volume {} is a block device; podfs does not mount those: mount it, and give its directory",
            path.display()
        ))),
        _ => Err(HostError::Refused(format!(
            "only directory and block device are supported: {} is neither",
            path.display()
        ))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn error(path: &str) -> String {
        open(path).expect_err(path).to_string()
    }

    #[test]
    fn lp_01_only_a_directory_will_do() {
        let base = tempfile::tempdir().expect("a directory");
        let file = base.path().join("file");
        std::fs::write(&file, "").expect("a file");
        assert!(open(base.path().to_str().expect("text")).is_ok());
        assert_eq!(error(""), "local volume source is nil or local path is not set");
        assert_eq!(error("/a/../b"), "invalid path: /a/../b must not contain '..'");
        let file = file.to_str().expect("text");
        assert_eq!(error(file), format!("only directory and block device are supported: {file} is neither"));
        assert!(error("/nowhere/at/all").ends_with("cannot be used: it does not exist"));
    }
}
