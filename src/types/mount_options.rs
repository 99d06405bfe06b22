//! Lists of mount options, as mount(8) reads them.

/// The options of a list, which are separated by commas. A comma between quotation marks belongs to the option: an SELinux context with
/// categories has one. The marks stay in the option. Without a second mark, the rest of the list is one option ([`has_open_quote`]).
pub fn mount_options(list: &str) -> impl Iterator<Item = &str> {
    let mut is_quoted = false;
    let options = list.split(move |letter| {
        is_quoted ^= letter == '"';
        letter == ',' && !is_quoted
    });
    options.map(str::trim)
}

/// Whether a mount option has a quotation mark without a second one.
pub fn has_open_quote(option: &str) -> bool {
    option.matches('"').count() % 2 == 1
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_comma_between_quotation_marks_belongs_to_the_option() {
        let of = |list: &str| mount_options(list).map(str::to_owned).collect::<Vec<_>>();
        assert_eq!(of("ro, noatime,,x=1"), ["ro", "noatime", "", "x=1"]);
        let context = r#"context="system_u:object_r:t:s0:c1,c2""#;
        assert_eq!(of(&format!("ro,{context},hard")), ["ro", context, "hard"]);
        assert_eq!(of(r#"ro,context="s0:c1,c2"#), ["ro", r#"context="s0:c1,c2"#]);
        assert!(has_open_quote(r#"context="s0:c1,c2"#) && !has_open_quote(context));
    }
}
