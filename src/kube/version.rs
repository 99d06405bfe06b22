//! Resource versions. Those of an API server are numbers that grow (KEP-5504); other versions can only be compared for
//! equality.

/// Whether version `old` is older than version `new`, or the same. False where the versions cannot be compared.
pub(crate) fn is_not_newer(old: &str, new: &str) -> bool {
    match (number(old), number(new)) {
        (Some(old), Some(new)) => old <= new,
        _ => old == new,
    }
}

fn number(version: &str) -> Option<u128> {
    let plain = !version.is_empty() && !version.starts_with('0') && version.bytes().all(|digit| digit.is_ascii_digit());
    plain.then(|| version.parse().ok()).flatten()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn mg_05_versions_are_compared_as_numbers() {
        assert!(is_not_newer("9", "10"));
        assert!(is_not_newer("10", "10"));
        assert!(!is_not_newer("10", "9"));
        assert!(!is_not_newer("18446744073709551617", "18446744073709551616"), "longer than 64 bits");
    }

    #[test]
    fn versions_that_are_no_numbers_are_never_older() {
        assert!(!is_not_newer("abc", "b"));
        assert!(!is_not_newer("09", "10"));
        assert!(is_not_newer("abc", "abc"));
    }
}
