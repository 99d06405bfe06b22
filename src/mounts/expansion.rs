//! `$(VAR)` in a `subPathExpr`, as the kubelet expands it.

use std::collections::{BTreeMap, BTreeSet};

/// Variables of an expression that are unset or empty.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
#[error("missing value for {}", .0.iter().map(String::as_str).collect::<Vec<_>>().join(", "))]
pub struct MissingValues(BTreeSet<String>);

/// The text with each `$(NAME)` replaced by the variable's value. `$$` becomes one `$`. Any other `$` stays as it is, and so does
/// a `$(` without `)`.
///
/// # Errors
/// The variables that are unset or empty.
pub(super) fn expand(text: &str, environment: &BTreeMap<String, String>) -> Result<String, MissingValues> {
    let (mut expanded, mut missing) = (String::new(), BTreeSet::new());
    let mut rest = text;
    while let Some((before, after)) = rest.split_once('$') {
        expanded.push_str(before);
        rest = if let Some(escaped) = after.strip_prefix('$') {
            expanded.push('$');
            escaped
        } else if let Some((name, after)) = after.strip_prefix('(').and_then(|reference| reference.split_once(')')) {
            match environment.get(name).filter(|value| !value.is_empty()) {
                Some(value) => expanded.push_str(value),
                None => drop(missing.insert(name.to_owned())),
            }
            after
        } else {
            // The text up to the next `$` stays as it is, also after a `$(` without `)`.
            expanded.push('$');
            after
        };
    }
    expanded.push_str(rest);
    if missing.is_empty() { Ok(expanded) } else { Err(MissingValues(missing)) }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn expanded(text: &str) -> Result<String, String> {
        let environment = [("POD", "web-0"), ("A", "a"), ("EMPTY", "")];
        let environment = environment.map(|(name, value)| (name.to_owned(), value.to_owned())).into();
        expand(text, &environment).map_err(|error| error.to_string())
    }

    #[test]
    fn mt_09_variables_are_replaced_and_everything_else_stays() {
        let rows = [
            ("$(POD)", "web-0"),
            ("logs/$(POD)/$(A)", "logs/web-0/a"),
            ("$$(POD)", "$(POD)"),
            ("$$$(POD)", "$web-0"),
            ("$$$$(POD)", "$$(POD)"),
            ("$(POD", "$(POD"),
            ("$(POD$(A)", "missing value for POD$(A"),
            ("a$", "a$"),
            ("$A-$ü", "$A-$ü"),
            ("plain", "plain"),
            ("$(A)$(A)", "aa"),
        ];
        for (text, expected) in rows {
            assert_eq!(expanded(text).unwrap_or_else(|error| error), expected, "{text}");
        }
    }

    #[test]
    fn mt_09_unset_and_empty_variables_are_named_in_order() {
        assert_eq!(expanded("$(ZZ)/$(EMPTY)/$(POD)/$(ZZ)"), Err("missing value for EMPTY, ZZ".to_owned()));
        assert_eq!(expanded("$()"), Err("missing value for ".to_owned()));
    }
}
