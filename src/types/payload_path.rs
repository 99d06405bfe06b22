//! The path of a file inside a volume, checked once by the kubelet's rules.
//!
//! The rules and their messages are those of the kubelet's AtomicWriter, because people and tools search logs for them.
//! A parsed path is relative and clean, and cannot name an entry that podfs itself makes in a volume, such as `..data`.

use std::borrow::Borrow;
use std::fmt;

/// Longest path that the AtomicWriter accepts, in bytes.
const MAX_PATH: usize = 4096;
/// Longest single name, in bytes: the limit of Linux file systems.
const MAX_NAME: usize = 255;

/// A clean relative path inside a volume, such as `certs/tls.crt`.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PayloadPath(String);

impl PayloadPath {
    /// Checks a path in the kubelet's order, then normalises it: `foo////bar` and `./foo/bar` are `foo/bar`.
    ///
    /// # Errors
    /// The first rule that the path breaks, with the kubelet's text.
    pub fn parse(text: &str) -> Result<PayloadPath, InvalidPath> {
        let shown = || text.to_owned();
        if text.is_empty() {
            return Err(InvalidPath::Empty(shown()));
        }
        if text.starts_with('/') {
            return Err(InvalidPath::Absolute(shown()));
        }
        if text.len() > MAX_PATH {
            return Err(InvalidPath::TooLong);
        }
        if text.split('/').any(|name| name == "..") {
            return Err(InvalidPath::DotDot(shown()));
        }
        if text.split('/').any(|name| name.len() > MAX_NAME) {
            return Err(InvalidPath::NameTooLong);
        }
        if text.starts_with("..") {
            return Err(InvalidPath::Reserved(shown()));
        }
        if text.contains('\0') {
            return Err(InvalidPath::Nul(shown()));
        }
        let clean: Vec<&str> = text.split('/').filter(|name| !matches!(*name, "" | ".")).collect();
        match clean.first() {
            None => Err(InvalidPath::Empty(shown())),
            // `./..data` is reserved only once it is clean.
            Some(first) if first.starts_with("..") => Err(InvalidPath::Reserved(shown())),
            Some(_) => Ok(PayloadPath(clean.join("/"))),
        }
    }

    /// The path as text, `/` between names.
    pub fn as_str(&self) -> &str {
        &self.0
    }

    /// The first name of the path. The volume's root has a link of this name.
    pub fn top_level(&self) -> &str {
        self.0.split('/').next().unwrap_or(&self.0)
    }

    /// The directories that the path lies in, outermost first.
    pub fn ancestors(&self) -> impl Iterator<Item = &str> {
        self.0.match_indices('/').map(|(end, _)| &self.0[..end])
    }
}

impl fmt::Display for PayloadPath {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// Maps find a path by its text, because the derived order is that of the text.
impl Borrow<str> for PayloadPath {
    fn borrow(&self) -> &str {
        &self.0
    }
}

/// Why a path cannot lie in a volume. The texts are the kubelet's, except [`InvalidPath::Nul`]: there the kubelet
/// fails with the kernel's error.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum InvalidPath {
    /// It names no file: it is empty, or consists of `.` and `/`.
    #[error("invalid path: must not be empty: {0:?}")]
    Empty(String),
    /// It starts with `/`.
    #[error("invalid path: must be relative path: {0}")]
    Absolute(String),
    /// It is longer than 4096 bytes.
    #[error("invalid path: must be less than or equal to {MAX_PATH} characters")]
    TooLong,
    /// It has a name `..`.
    #[error("invalid path: must not contain '..': {0}")]
    DotDot(String),
    /// It has a name that is longer than 255 bytes.
    #[error("invalid path: filenames must be less than or equal to {MAX_NAME} characters")]
    NameTooLong,
    /// Its first name starts with `..`, as the entries that the AtomicWriter makes for itself do.
    #[error("invalid path: must not start with '..': {0}")]
    Reserved(String),
    /// It holds a NUL byte, which no file name can.
    #[error("invalid path: must not contain NUL: {0:?}")]
    Nul(String),
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn error(text: &str) -> String {
        PayloadPath::parse(text).expect_err(text).to_string()
    }

    fn clean(text: &str) -> String {
        PayloadPath::parse(text).expect(text).to_string()
    }

    #[test]
    fn aw_08_the_rules_have_the_kubelets_texts() {
        assert_eq!(error(""), r#"invalid path: must not be empty: """#);
        assert_eq!(error("/dev/null"), "invalid path: must be relative path: /dev/null");
        assert_eq!(error(&"a".repeat(4097)), "invalid path: must be less than or equal to 4096 characters");
        assert_eq!(error("a/../b"), "invalid path: must not contain '..': a/../b");
        assert_eq!(error(&"a".repeat(256)), "invalid path: filenames must be less than or equal to 255 characters");
        assert_eq!(error("..sneaky.txt"), "invalid path: must not start with '..': ..sneaky.txt");
    }

    #[test]
    fn aw_08_the_first_broken_rule_is_reported() {
        let everything = format!("/../{}", "a".repeat(5000));
        assert!(error(&everything).starts_with("invalid path: must be relative path"));
        assert!(error(&everything[1..]).contains("4096"));
        assert!(error(&format!("../{}", "a".repeat(256))).contains("must not contain '..'"));
        assert!(error(&format!("..{}", "a".repeat(256))).contains("255"));
    }

    #[test]
    fn aw_08_limits_are_inclusive() {
        assert!(PayloadPath::parse(&"a".repeat(255)).is_ok());
        let longest = "a/".repeat(2047) + "ab";
        assert_eq!(longest.len(), 4096);
        assert!(PayloadPath::parse(&longest).is_ok());
    }

    #[test]
    fn aw_08_rows_of_test_validate_path() {
        for valid in ["i/am/well/behaved.txt", "keepyourheaddownandfollowtherules.txt"] {
            assert!(PayloadPath::parse(valid).is_ok(), "{valid}");
        }
        let long = ["a".repeat(4097), "a".repeat(256)];
        let invalid = [
            &long[0],
            &long[1],
            "/dev/null",
            "..sneaky.txt",
            "hello/there/../../../../../../etc/passwd",
            "hello/../etc/somethingbad",
            "",
        ];
        for invalid in invalid {
            assert!(PayloadPath::parse(invalid).is_err(), "{invalid}");
        }
    }

    #[test]
    fn aw_06_rows_of_test_validate_payload_are_cleaned() {
        assert_eq!(clean("foo"), "foo");
        assert_eq!(clean("foo////bar"), "foo/bar");
        assert_eq!(clean("./bar"), "bar");
        assert_eq!(clean("foo///bar"), "foo/bar");
        assert!(PayloadPath::parse("foo/../etc/password").is_err());
    }

    #[test]
    fn aw_09_dots_are_fine_where_they_cannot_hide_the_writers_entries() {
        for valid in ["a/..b", ".dotfile", ".dotfile.file", "a b", "a/..."] {
            assert!(PayloadPath::parse(valid).is_ok(), "{valid}");
        }
        assert_eq!(error("..x/y"), "invalid path: must not start with '..': ..x/y");
        assert_eq!(error("./..data"), "invalid path: must not start with '..': ./..data");
    }

    #[test]
    fn a_path_without_a_name_or_with_nul_is_refused() {
        assert_eq!(error("."), r#"invalid path: must not be empty: ".""#);
        assert_eq!(error("a\0b"), r#"invalid path: must not contain NUL: "a\0b""#);
    }

    #[test]
    fn aw_05_the_top_level_name_is_the_first() {
        let path = PayloadPath::parse("a/b/c").expect("valid");
        assert_eq!(path.top_level(), "a");
        assert_eq!(path.ancestors().collect::<Vec<_>>(), ["a", "a/b"]);
    }

    proptest! {
        #[test]
        fn aw_06_normalising_is_stable_and_leaves_only_plain_names(text in "[a./ ]{0,20}") {
            if let Ok(path) = PayloadPath::parse(&text) {
                prop_assert!(path.as_str().split('/').all(|name| !matches!(name, "" | "." | "..")));
                prop_assert!(!path.as_str().starts_with(".."));
                prop_assert_eq!(PayloadPath::parse(path.as_str()), Ok(path.clone()));
            }
        }

        #[test]
        fn aw_08_no_text_makes_the_parser_panic(text in any::<String>()) {
            let _ = PayloadPath::parse(&text);
        }
    }
}
