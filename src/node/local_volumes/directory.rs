//! A StorageClass, and the directory whose entries are its volumes.

use std::path::{Path, PathBuf};
use std::str::FromStr;

use crate::types::is_domain;

/// A directory whose entries podfs offers in a StorageClass. Parsed from `CLASS=DIR`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ClassDirectory {
    /// The name of the StorageClass.
    pub class: String,
    /// The directory.
    pub directory: PathBuf,
}

/// Why a text is no [`ClassDirectory`], or why several of them overlap.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct InvalidClassDirectory(String);

impl FromStr for ClassDirectory {
    type Err = InvalidClassDirectory;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let invalid = |sentence: String| Err(InvalidClassDirectory(sentence));
        let Some((class, directory)) = text.split_once('=') else {
            return invalid("give a StorageClass and a directory, such as fast=/mnt/fast".to_owned());
        };
        if !is_domain(class) {
            return invalid(format!("{class:?} is not the name of a StorageClass, which is a lower-case DNS name"));
        }
        if !Path::new(directory).is_absolute() {
            return invalid(format!("{directory:?} is not an absolute path"));
        }
        Ok(ClassDirectory { class: class.to_owned(), directory: PathBuf::from(directory) })
    }
}

impl ClassDirectory {
    /// Checks that no entry could be offered twice.
    ///
    /// # Errors
    /// When two directories are the same, or one is in another.
    pub fn check(all: &[ClassDirectory]) -> Result<(), InvalidClassDirectory> {
        for (index, one) in all.iter().enumerate() {
            let others = all.iter().enumerate().filter(|(other, _)| *other != index).map(|(_, other)| other);
            for other in others {
                if one.directory.starts_with(&other.directory) {
                    return Err(InvalidClassDirectory(format!(
                        "{} of StorageClass {} is or is in {} of StorageClass {}, so its entries would be offered twice; give each \
                         class a directory of its own",
                        one.directory.display(),
                        one.class,
                        other.directory.display(),
                        other.class
                    )));
                }
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_class_and_a_directory_are_read() {
        let parsed: ClassDirectory = "fast=/mnt/a=b".parse().expect("both");
        assert_eq!((parsed.class.as_str(), parsed.directory.as_path()), ("fast", Path::new("/mnt/a=b")));
        for text in ["", "fast", "=/mnt", "fast=", "fast=mnt", "Fast=/mnt"] {
            assert!(text.parse::<ClassDirectory>().is_err(), "{text}");
        }
    }

    #[test]
    fn no_directory_is_in_another_one() {
        let of = |texts: &[&str]| texts.iter().map(|text| text.parse().expect("both")).collect::<Vec<ClassDirectory>>();
        assert!(ClassDirectory::check(&of(&["a=/mnt/a", "b=/mnt/ab", "a=/mnt/c"])).is_ok());
        for texts in [["a=/mnt/a", "b=/mnt/a"], ["a=/mnt/a/b", "b=/mnt/a"], ["a=/mnt", "b=/mnt/a/b"]] {
            assert!(ClassDirectory::check(&of(&texts)).is_err(), "{texts:?}");
        }
    }
}
