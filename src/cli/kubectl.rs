//! `kubectl podfs view` and `kubectl podfs render`: podfs as a plugin of kubectl. It understands kubectl's kubeconfig, the
//! namespace of the current context, and pods as `pod/NAME`.

use std::env;
use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::str::FromStr;

use anyhow::anyhow;

use super::exit::Failure;

/// Names of links to podfs, and their commands. For `kubectl podfs view`, kubectl looks for the program `kubectl-podfs-view`; for
/// `kubectl podfs-view`, it looks for `kubectl-podfs_view`.
const LINKS: [(&str, &str); 4] = [
    ("kubectl-podfs-render", "render"),
    ("kubectl-podfs-view", "view"),
    ("kubectl-podfs_render", "render"),
    ("kubectl-podfs_view", "view"),
];

/// The words of the command line. In place of the name of a link, they have `podfs` and the link's command.
pub(super) fn words() -> Vec<OsString> {
    let mut words: Vec<OsString> = env::args_os().collect();
    let name = words.first().and_then(|program| Path::new(program).file_name());
    if let Some((_, command)) = LINKS.iter().find(|(link, _)| name.is_some_and(|name| name == *link)) {
        words.splice(..1, ["podfs".into(), (*command).into()]);
    }
    words
}

/// The name of a pod in the form of kubectl: `pod/web`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct PodReference(pub(super) String);

/// The text does not have the form `pod/NAME`.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
#[error("give pod/NAME; a workload is shown from its manifest, with --pod")]
pub(super) struct InvalidPodReference;

impl FromStr for PodReference {
    type Err = InvalidPodReference;

    fn from_str(text: &str) -> Result<PodReference, InvalidPodReference> {
        match text.split_once('/') {
            Some(("pod" | "pods" | "po", name)) if !name.is_empty() && !name.contains('/') => {
                Ok(PodReference(name.to_owned()))
            }
            _ => Err(InvalidPodReference),
        }
    }
}

/// The kubeconfig that kubectl uses.
///
/// # Errors
/// When `KUBECONFIG` names several files, or there is neither `KUBECONFIG` nor a home directory.
pub(super) fn kubeconfig() -> Result<PathBuf, Failure> {
    let list = env::var_os("KUBECONFIG").unwrap_or_default();
    let mut named = env::split_paths(&list).filter(|path| !path.as_os_str().is_empty());
    match (named.next(), named.next(), env::home_dir()) {
        (Some(_), Some(_), _) => Err(Failure::input(anyhow!(
            "KUBECONFIG names several files, of which podfs reads one; give it with --kubeconfig"
        ))),
        (Some(path), None, _) => Ok(path),
        (None, _, Some(home)) => Ok(home.join(".kube/config")),
        (None, _, None) => Err(Failure::input(anyhow!("there is no kubeconfig of yours; give one with --kubeconfig"))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_pod_is_named_by_kind_and_name() {
        for text in ["pod/web", "pods/web", "po/web"] {
            assert_eq!(text.parse(), Ok(PodReference("web".to_owned())));
        }
        for text in ["web", "pod/", "deployment/web", "pod/a/b", ""] {
            assert!(text.parse::<PodReference>().is_err(), "{text}");
        }
    }
}
