//! Escapes characters that would move a terminal's cursor, change its colours or reverse the direction of text. podfs prints names
//! from containers, and messages of a server process, which an attacker may control, only in this form.

use std::borrow::Cow;
use std::fmt::Write;

/// Escapes control characters, except line ends and tabs, and bidirectional controls. The escapes are those of JSON, such as
/// `\u001b`.
pub fn printable(text: &str) -> Cow<'_, str> {
    escaped(text, |sign| matches!(sign, '\n' | '\t'))
}

/// Like [`printable`], but escapes line ends and tabs, too, for a text that is one line.
pub fn printable_line(text: &str) -> Cow<'_, str> {
    escaped(text, |_| false)
}

/// Like [`printable`], but keeps ESC, for coloured text.
pub fn printable_with_colours(text: &str) -> Cow<'_, str> {
    escaped(text, |sign| matches!(sign, '\n' | '\t' | '\r' | '\x1b'))
}

fn escaped(text: &str, keep: impl Fn(char) -> bool) -> Cow<'_, str> {
    let is_unsafe = |sign: char| !keep(sign) && (sign.is_control() || changes_direction(sign));
    if !text.contains(is_unsafe) {
        return Cow::Borrowed(text);
    }
    let mut plain = String::with_capacity(text.len() + 8);
    for sign in text.chars() {
        if is_unsafe(sign) {
            let _always_fits = write!(plain, "\\u{:04x}", u32::from(sign));
        } else {
            plain.push(sign);
        }
    }
    Cow::Owned(plain)
}

/// Whether the character is a bidirectional control or a line end of Unicode.
fn changes_direction(sign: char) -> bool {
    matches!(sign, '\u{61c}' | '\u{200e}' | '\u{200f}' | '\u{2028}'..='\u{202e}' | '\u{2066}'..='\u{2069}')
}

/// Makes a stream of bytes printable. A part of the stream may end within a character.
#[derive(Default)]
pub struct Printer {
    /// The first bytes of a character whose last bytes are in the next part.
    pending: Vec<u8>,
}

impl Printer {
    /// The printable text of the next part, `bytes`, up to its last whole character.
    pub fn add(&mut self, bytes: &[u8]) -> String {
        self.pending.extend_from_slice(bytes);
        let whole = match str::from_utf8(&self.pending) {
            Err(error) if error.error_len().is_none() => error.valid_up_to(),
            _ => self.pending.len(),
        };
        let begun = self.pending.split_off(whole);
        let text = printable(&String::from_utf8_lossy(&self.pending)).into_owned();
        self.pending = begun;
        text
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn control_characters_are_escaped() {
        assert_eq!(printable("plain ü\n\tline"), "plain ü\n\tline");
        assert_eq!(printable("\x1b[2J\r\u{7f}\u{9b}31m"), "\\u001b[2J\\u000d\\u007f\\u009b31m");
        assert_eq!(printable("\u{202e}gpj.exe\u{2066}\u{2028}"), "\\u202egpj.exe\\u2066\\u2028");
        assert_eq!(printable_line("a\n\tb\x1b"), "a\\u000a\\u0009b\\u001b");
        assert_eq!(printable_with_colours("\x1b[32m\u{9b}"), "\x1b[32m\\u009b");
    }

    #[test]
    fn a_character_may_come_in_parts() {
        let mut printer = Printer::default();
        let bytes = "ü\u{202e}ö\x1b".as_bytes();
        let text: String = bytes.iter().map(|byte| printer.add(&[*byte])).collect();
        assert_eq!(text, "ü\\u202eö\\u001b");
        assert_eq!(printer.add(b"\xff!"), "\u{fffd}!");
    }
}
