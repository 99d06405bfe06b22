//! Go's `strconv.Quote`, with which the kubelet writes the values of labels and annotations.
//!
//! Rust's `{:?}` escapes differently (`\u{7f}`, no `\a`), and programs parse these files.

use std::fmt::Write as _;

use unicode_properties::{GeneralCategoryGroup, UnicodeGeneralCategory};

/// A Go string literal that means `bytes`, double quotes included.
pub(super) fn quote(bytes: &[u8]) -> String {
    let mut quoted = String::with_capacity(bytes.len() + 2);
    quoted.push('"');
    for chunk in bytes.utf8_chunks() {
        chunk.valid().chars().for_each(|c| push_escaped(&mut quoted, c));
        chunk.invalid().iter().for_each(|byte| push_byte(&mut quoted, *byte));
    }
    quoted.push('"');
    quoted
}

fn push_escaped(quoted: &mut String, c: char) {
    match c {
        '"' => quoted.push_str("\\\""),
        '\\' => quoted.push_str("\\\\"),
        '\x07' => quoted.push_str("\\a"),
        '\x08' => quoted.push_str("\\b"),
        '\x0c' => quoted.push_str("\\f"),
        '\n' => quoted.push_str("\\n"),
        '\r' => quoted.push_str("\\r"),
        '\t' => quoted.push_str("\\t"),
        '\x0b' => quoted.push_str("\\v"),
        _ if is_print(c) => quoted.push(c),
        '\0'..='\x7f' => push_byte(quoted, c as u8),
        _ => {
            let code = u32::from(c);
            // Writing into a String cannot fail.
            let _ = if code < 0x1_0000 { write!(quoted, "\\u{code:04x}") } else { write!(quoted, "\\U{code:08x}") };
        }
    }
}

fn push_byte(quoted: &mut String, byte: u8) {
    // Writing into a String cannot fail.
    let _ = write!(quoted, "\\x{byte:02x}");
}

/// Go's `unicode.IsPrint`: letters, marks, numbers, punctuation, symbols, and of the spaces only the ASCII one.
fn is_print(c: char) -> bool {
    use GeneralCategoryGroup::{Letter, Mark, Number, Punctuation, Symbol};
    c == ' ' || matches!(c.general_category_group(), Letter | Mark | Number | Punctuation | Symbol)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn da_03_named_escapes() {
        assert_eq!(quote(b"\x07\x08\x0c\n\r\t\x0b\\\""), r#""\a\b\f\n\r\t\v\\\"""#);
    }

    #[test]
    fn da_03_unprintable_characters_are_escaped_by_number() {
        assert_eq!(quote(b"\0\x1b\x7f"), r#""\x00\x1b\x7f""#);
        assert_eq!(quote("\u{a0}\u{85}\u{200b}\u{feff}".as_bytes()), r#""\u00a0\u0085\u200b\ufeff""#);
        assert_eq!(quote("\u{10ffff}\u{e0001}".as_bytes()), r#""\U0010ffff\U000e0001""#);
    }

    #[test]
    fn da_03_printable_text_stays() {
        let text = "Grüße, 世界 ☃ 😀 e\u{301} '`$ \u{fffd}";
        assert_eq!(quote(text.as_bytes()), format!("\"{text}\""));
    }

    #[test]
    fn da_03_each_invalid_byte_is_shown() {
        assert_eq!(quote(b"a\xff\xe2\x82b\xc0\x80"), r#""a\xff\xe2\x82b\xc0\x80""#);
        assert_eq!(quote(b"\xed\xa0\x80"), r#""\xed\xa0\x80""#);
    }

    /// The meaning of a Go string literal, from the language's definition.
    fn unquote(literal: &str) -> Option<Vec<u8>> {
        let mut rest = literal.strip_prefix('"')?.strip_suffix('"')?.chars();
        let mut bytes = Vec::new();
        while let Some(c) = rest.next() {
            let meant = if c == '\\' { rest.next()? } else { c };
            let mut number = |digits| u32::from_str_radix(&rest.by_ref().take(digits).collect::<String>(), 16).ok();
            let meant = match (c, meant) {
                ('\\', 'x') => {
                    bytes.push(u8::try_from(number(2)?).ok()?);
                    continue;
                }
                ('\\', 'u') => char::from_u32(number(4)?)?,
                ('\\', 'U') => char::from_u32(number(8)?)?,
                ('\\', 'a') => '\x07',
                ('\\', 'b') => '\x08',
                ('\\', 'f') => '\x0c',
                ('\\', 'n') => '\n',
                ('\\', 'r') => '\r',
                ('\\', 't') => '\t',
                ('\\', 'v') => '\x0b',
                (_, plain) => plain,
            };
            bytes.extend_from_slice(meant.encode_utf8(&mut [0; 4]).as_bytes());
        }
        Some(bytes)
    }

    proptest! {
        #[test]
        fn da_03_unquoting_gives_back_the_bytes(bytes in any::<Vec<u8>>()) {
            prop_assert_eq!(unquote(&quote(&bytes)), Some(bytes));
        }

        #[test]
        fn da_03_unquoting_gives_back_the_text(text in any::<String>()) {
            prop_assert_eq!(unquote(&quote(text.as_bytes())), Some(text.into_bytes()));
        }
    }
}
