//! Base64 as Go decodes it (`base64.StdEncoding`): line breaks are skipped, because YAML's block scalars have them, and so are the
//! bits of the last character that belong to no byte.

use k8s_openapi::ByteString;
use serde::Deserialize;
use serde::de::IntoDeserializer;
use serde::de::value::{Error, StrDeserializer};

/// The characters by their values.
const ALPHABET: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";

/// The bytes; `None` if this is not base64.
pub(crate) fn decode_base64(text: &str) -> Option<Vec<u8>> {
    let joined: String = text.chars().filter(|c| !matches!(c, '\n' | '\r')).collect();
    let whole = without_stray_bits(joined)?;
    let deserializer: StrDeserializer<'_, Error> = whole.as_str().into_deserializer();
    // The decoder's own error quotes a byte of the value.
    ByteString::deserialize(deserializer).ok().map(|bytes| bytes.0)
}

/// The text with zeros for the bits that belong to no byte, which the decoder refuses otherwise.
fn without_stray_bits(mut text: String) -> Option<String> {
    let mask = match text.len() - text.trim_end_matches('=').len() {
        1 => 0b11_1100,
        2 => 0b11_0000,
        _ => return Some(text),
    };
    let padding = text.split_off(text.trim_end_matches('=').len());
    let value = ALPHABET.iter().position(|letter| text.ends_with(char::from(*letter)))?;
    text.pop();
    text.push(char::from(ALPHABET[value & mask]));
    Some(text + &padding)
}

#[test]
fn what_go_accepts_is_accepted() {
    for (text, bytes) in [
        ("", Some(&b""[..])),
        ("Yg==", Some(b"b")),
        ("Yh==", Some(b"b")),
        ("Yv==", Some(b"b")),
        ("YmI=", Some(b"bb")),
        ("YmL=", Some(b"bb")),
        ("Ym\nL=\r\n", Some(b"bb")),
        ("YmJi", Some(b"bbb")),
        ("Yg", None),
        ("Yg=", None),
        ("=", None),
        ("==", None),
        ("Y===", None),
        ("Y*==", None),
        ("YmJi====", None),
        ("Y g==", None),
        ("é==", None),
    ] {
        assert_eq!(decode_base64(text).as_deref(), bytes, "{text:?}");
    }
}
