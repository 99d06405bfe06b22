//! Kubernetes' rules for the names that volumes use.

/// Longest DNS label and longest name of a label key.
const MAX_LABEL: usize = 63;
/// Longest DNS name.
const MAX_DOMAIN: usize = 253;

/// The rule of [`is_dns_label`], as the end of a sentence.
pub(crate) const DNS_LABEL_RULE: &str = "must be a DNS label: lower-case letters, digits and '-', with a letter or digit at both \
                                         ends, and at most 63 characters";
/// The rule of [`is_domain`], as the end of a sentence.
pub(crate) const DNS_NAME_RULE: &str = "must be a DNS name: lower-case letters, digits, '-' and '.', with a letter or digit at \
                                        both ends of each part, and at most 253 characters";

/// Whether a text is a DNS label (RFC 1123), the form of volume names: `app-config`.
pub(crate) fn is_dns_label(text: &str) -> bool {
    text.len() <= MAX_LABEL && is_domain_part(text)
}

/// Checks the key of a label or an annotation: a name, before which a DNS name and a slash may stand.
///
/// # Errors
/// The rule that the key breaks.
pub(crate) fn check_qualified(key: &str) -> Result<(), &'static str> {
    let (prefix, name) = match key.split_once('/') {
        Some((prefix, name)) => (Some(prefix), name),
        None => (None, key),
    };
    if !prefix.is_none_or(is_domain) {
        return Err("the part before '/' must be a lower-case DNS name of at most 253 characters");
    }
    let inner = |c: u8| c.is_ascii_alphanumeric() || b"-_.".contains(&c);
    if name.len() <= MAX_LABEL && is_framed(name, |c| c.is_ascii_alphanumeric(), inner) {
        return Ok(());
    }
    Err("a name is 1 to 63 letters, digits, '-', '_' and '.', with a letter or digit at both ends")
}

/// Whether a text is a DNS name (RFC 1123), the form of most objects' names: `web.example`.
pub(crate) fn is_domain(text: &str) -> bool {
    text.len() <= MAX_DOMAIN && text.split('.').all(is_domain_part)
}

fn is_domain_part(text: &str) -> bool {
    let outer = |c: u8| c.is_ascii_lowercase() || c.is_ascii_digit();
    is_framed(text, outer, |c| outer(c) || c == b'-')
}

/// Whether a text is not empty, has `outer` characters at both ends, and `inner` ones throughout.
fn is_framed(text: &str, outer: impl Fn(u8) -> bool, inner: impl Fn(u8) -> bool) -> bool {
    let bytes = text.as_bytes();
    let framed = bytes.first().is_some_and(|c| outer(*c)) && bytes.last().is_some_and(|c| outer(*c));
    framed && bytes.iter().all(|c| inner(*c))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn da_05_keys_of_labels_and_annotations() {
        let long = "a".repeat(64);
        for key in ["", " ", "-a", "a-", "a/", "/a", "a/b/c", "a_b/c", "a..b/c", "A/b", &long] {
            assert!(check_qualified(key).is_err(), "{key}");
        }
        for key in ["a", "A.b_c-9", "example.com/Key", &long[1..]] {
            assert!(check_qualified(key).is_ok(), "{key}");
        }
    }

    #[test]
    fn dns_labels() {
        let long = "a".repeat(64);
        for text in ["", "-a", "a-", "A", "a.b", "a_b", "ä", "..", "a/b", &long] {
            assert!(!is_dns_label(text), "{text}");
        }
        for text in ["a", "0", "a-b", "a--b", &long[1..]] {
            assert!(is_dns_label(text), "{text}");
        }
    }
}
