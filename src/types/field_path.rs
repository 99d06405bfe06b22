//! `fieldRef.fieldPath`: which field of the pod a downwardAPI file shows.
//!
//! The syntax has one oddity: in `metadata.labels['KEY']` the first `['` and a final `']` delimit the key, which may
//! itself contain brackets and quotes.

use super::names;

/// A field of the pod that a volume can show. Kubernetes allows the other fields (`spec.nodeName`, `status.podIP` …) in
/// environment variables only, because volumes are not updated when they change.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum PodField {
    /// `metadata.name`
    Name,
    /// `metadata.namespace`
    Namespace,
    /// `metadata.uid`
    Uid,
    /// `metadata.labels`
    Labels,
    /// `metadata.annotations`
    Annotations,
    /// `metadata.labels['KEY']`
    Label(String),
    /// `metadata.annotations['KEY']`
    Annotation(String),
}

impl PodField {
    /// Parses a field path as the API server does for volumes.
    ///
    /// # Errors
    /// A field that a volume cannot show, a subscript of a field that has none, or a key that no label or annotation
    /// can have. The messages have the kubelet's words.
    pub fn parse(path: &str) -> Result<PodField, InvalidFieldPath> {
        match (path, subscript(path)) {
            ("metadata.name", _) => Ok(PodField::Name),
            ("metadata.namespace", _) => Ok(PodField::Namespace),
            ("metadata.uid", _) => Ok(PodField::Uid),
            ("metadata.labels", _) => Ok(PodField::Labels),
            ("metadata.annotations", _) => Ok(PodField::Annotations),
            (_, Some(("metadata.labels", key))) => match names::check_qualified(key) {
                Ok(()) => Ok(PodField::Label(key.to_owned())),
                Err(reason) => Err(InvalidFieldPath::Key(path.to_owned(), reason)),
            },
            // The API server checks an annotation's key in lower case; the kubelet looks it up as it is written.
            (_, Some(("metadata.annotations", key))) => match names::check_qualified(&key.to_lowercase()) {
                Ok(()) => Ok(PodField::Annotation(key.to_owned())),
                Err(reason) => Err(InvalidFieldPath::Key(path.to_owned(), reason)),
            },
            (_, Some(_)) => Err(InvalidFieldPath::Subscript(path.to_owned())),
            (_, None) => Err(InvalidFieldPath::Unsupported(path.to_owned())),
        }
    }
}

/// Why a field path cannot be shown in a volume.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum InvalidFieldPath {
    /// The pod has no such field, or volumes cannot show it.
    #[error(
        "unsupported fieldPath: {0}; a volume can show metadata.name, metadata.namespace, metadata.uid, \
         metadata.labels and metadata.annotations"
    )]
    Unsupported(String),
    /// A subscript on something other than labels and annotations.
    #[error("fieldPath {0:?} does not support subscript")]
    Subscript(String),
    /// A key that breaks the rules for names.
    #[error("invalid key subscript in {0}: {1}")]
    Key(String, &'static str),
}

/// Splits `path['key']`; none if the text does not have exactly this form.
fn subscript(text: &str) -> Option<(&str, &str)> {
    let (path, key) = text.strip_suffix("']")?.split_once("['")?;
    (!path.is_empty()).then_some((path, key))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn error(path: &str) -> String {
        PodField::parse(path).expect_err(path).to_string()
    }

    #[test]
    fn da_05_subscripts() {
        let rows = [
            ("metadata.annotations['key']", ("metadata.annotations", "key")),
            ("metadata.annotations['a[b']c']", ("metadata.annotations", "a[b']c")),
            ("metadata.annotations['a[b]c']", ("metadata.annotations", "a[b]c")),
            ("metadata.labels['['key']", ("metadata.labels", "['key")),
            ("metadata.labels['key']']", ("metadata.labels", "key']")),
            ("metadata.labels['']", ("metadata.labels", "")),
            ("metadata.labels[' ']", ("metadata.labels", " ")),
        ];
        for (text, expected) in rows {
            assert_eq!(subscript(text), Some(expected), "{text}");
        }
    }

    #[test]
    fn da_05_malformed_paths_have_no_subscript() {
        for text in [
            "metadata.labels[ 'key' ]",
            "metadata.labels[]",
            "metadata.labels[']",
            "metadata.labels['key']foo",
            "['key']",
            "metadata.labels",
        ] {
            assert_eq!(subscript(text), None, "{text}");
        }
    }

    #[test]
    fn da_05_fields_and_keys_of_section_3_3() {
        let rows = [
            ("metadata.namespace", PodField::Namespace),
            ("metadata.name", PodField::Name),
            ("metadata.uid", PodField::Uid),
            ("metadata.labels", PodField::Labels),
            ("metadata.annotations", PodField::Annotations),
            ("metadata.labels['something']", PodField::Label("something".into())),
            (
                "metadata.annotations['spec.pod.beta.kubernetes.io/statefulset-index']",
                PodField::Annotation("spec.pod.beta.kubernetes.io/statefulset-index".into()),
            ),
            ("metadata.annotations['Www.k8s.io/test']", PodField::Annotation("Www.k8s.io/test".into())),
        ];
        for (path, expected) in rows {
            assert_eq!(PodField::parse(path), Ok(expected), "{path}");
        }
    }

    #[test]
    fn da_05_errors_of_section_3_3() {
        assert!(
            error("metadata.labels['Www.k8s.io/test']")
                .starts_with("invalid key subscript in metadata.labels['Www.k8s.io/test']: ")
        );
        assert!(
            error("metadata.annotations['invalid~key']")
                .starts_with("invalid key subscript in metadata.annotations['invalid~key']: ")
        );
        assert_eq!(
            error("metadata.notexisting['something']"),
            r#"fieldPath "metadata.notexisting['something']" does not support subscript"#
        );
        assert!(error("metadata.whoops").starts_with("unsupported fieldPath: metadata.whoops"));
    }

    #[test]
    fn da_13_fields_for_environment_variables_only_are_refused() {
        for path in [
            "spec.nodeName",
            "spec.serviceAccountName",
            "status.hostIP",
            "status.hostIPs",
            "status.podIP",
            "status.podIPs",
        ] {
            assert!(error(path).starts_with(&format!("unsupported fieldPath: {path};")));
        }
    }
}
