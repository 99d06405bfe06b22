//! A YAML or JSON value as Kubernetes' decoder for Go makes it (sigs.k8s.io/yaml, which turns YAML into JSON).
//!
//! A key that is a number or a boolean becomes a text: `on` is `true`, `1.50` is `1.5`, and `0123` is `83`. A merge key (`<<`) acts
//! at its place: it sets keys that come before it in the mapping, and keys behind it set what it has set. Only a key that is
//! written twice is refused.

use std::collections::HashSet;
use std::fmt;

use serde::de::{Deserialize, DeserializeSeed, Deserializer, Error, MapAccess, SeqAccess, Visitor};
use serde_json::{Map, Value};

/// A value read in this way. `MERGES` is whether the text has merge keys: YAML has, and JSON has not.
pub(super) struct GoValue<const MERGES: bool>(pub(super) Value);

impl<'de, const MERGES: bool> Deserialize<'de> for GoValue<MERGES> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(ValueVisitor::<MERGES>).map(Self)
    }
}

struct ValueVisitor<const MERGES: bool>;

impl<'de, const MERGES: bool> Visitor<'de> for ValueVisitor<MERGES> {
    type Value = Value;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a value")
    }

    fn visit_unit<E>(self) -> Result<Value, E> {
        Ok(Value::Null)
    }

    fn visit_none<E>(self) -> Result<Value, E> {
        Ok(Value::Null)
    }

    fn visit_bool<E>(self, value: bool) -> Result<Value, E> {
        Ok(value.into())
    }

    fn visit_i64<E>(self, value: i64) -> Result<Value, E> {
        Ok(value.into())
    }

    fn visit_u64<E>(self, value: u64) -> Result<Value, E> {
        Ok(value.into())
    }

    fn visit_f64<E>(self, value: f64) -> Result<Value, E> {
        Ok(value.into())
    }

    fn visit_str<E>(self, value: &str) -> Result<Value, E> {
        Ok(value.into())
    }

    fn visit_string<E>(self, value: String) -> Result<Value, E> {
        Ok(value.into())
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut items: A) -> Result<Value, A::Error> {
        let mut values = Vec::new();
        while let Some(GoValue::<MERGES>(value)) = items.next_element()? {
            values.push(value);
        }
        Ok(Value::Array(values))
    }

    fn visit_map<A: MapAccess<'de>>(self, mut entries: A) -> Result<Value, A::Error> {
        let mut values = Map::new();
        let mut written = HashSet::new();
        while let Some(key) = entries.next_key_seed(KeySeed)? {
            let is_merge = MERGES && key == MERGE;
            // An error before the value has the place of the key.
            if !is_merge && !written.insert(key.clone()) {
                return Err(A::Error::custom(format!("the key `{key}` {TWICE}")));
            }
            let GoValue::<MERGES>(value) = entries.next_value()?;
            match is_merge {
                true => merge(&mut values, value).map_err(A::Error::custom)?,
                false => drop(values.insert(key, value)),
            }
        }
        Ok(Value::Object(values))
    }
}

const MERGE: &str = "<<";

// The ends of this module's errors.
const TWICE: &str = "appears twice in one mapping; remove one";
const MERGED: &str = "a merge key (<<) takes a mapping or a list of mappings";
const NO_TEXT: &str = "a key must be a text, a number or a boolean";

/// Whether an error is of this module. Other errors of the decoder may quote a value.
pub(super) fn is_own_error(message: &str) -> bool {
    [TWICE, MERGED, NO_TEXT].iter().any(|end| message.ends_with(end))
}

/// Sets the entries of a merged mapping, or of several, of which the first one counts most.
fn merge(values: &mut Map<String, Value>, merged: Value) -> Result<(), &'static str> {
    let mappings = match merged {
        Value::Array(mappings) => mappings,
        one => vec![one],
    };
    for mapping in mappings.into_iter().rev() {
        let Value::Object(entries) = mapping else {
            return Err(MERGED);
        };
        values.extend(entries);
    }
    Ok(())
}

/// A key as text.
struct KeySeed;

impl<'de> DeserializeSeed<'de> for KeySeed {
    type Value = String;

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<String, D::Error> {
        deserializer.deserialize_any(self)
    }
}

impl<'de> Visitor<'de> for KeySeed {
    type Value = String;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a key that is a text, a number or a boolean")
    }

    fn visit_unit<E: Error>(self) -> Result<String, E> {
        Err(E::custom(NO_TEXT))
    }

    fn visit_seq<A: SeqAccess<'de>>(self, _: A) -> Result<String, A::Error> {
        Err(A::Error::custom(NO_TEXT))
    }

    fn visit_map<A: MapAccess<'de>>(self, _: A) -> Result<String, A::Error> {
        Err(A::Error::custom(NO_TEXT))
    }

    fn visit_bool<E>(self, value: bool) -> Result<String, E> {
        Ok(value.to_string())
    }

    fn visit_i64<E>(self, value: i64) -> Result<String, E> {
        Ok(value.to_string())
    }

    fn visit_u64<E>(self, value: u64) -> Result<String, E> {
        Ok(value.to_string())
    }

    fn visit_f64<E>(self, value: f64) -> Result<String, E> {
        Ok(go_float(value))
    }

    fn visit_str<E>(self, value: &str) -> Result<String, E> {
        Ok(value.to_owned())
    }

    fn visit_string<E>(self, value: String) -> Result<String, E> {
        Ok(value)
    }
}

/// A number as Go's `strconv.FormatFloat(value, 'g', -1, 32)` writes it, which is what the decoder makes of keys.
fn go_float(value: f64) -> String {
    let value = value as f32;
    if !value.is_finite() {
        return if value.is_nan() {
            ".nan"
        } else if value > 0.0 {
            ".inf"
        } else {
            "-.inf"
        }
        .to_owned();
    }
    let shortest = format!("{value:e}");
    let (digits, exponent) = shortest.split_once('e').expect("this format has an exponent");
    let exponent: i32 = exponent.parse().expect("a number");
    if (-4..6).contains(&exponent) {
        return value.to_string();
    }
    let sign = if exponent < 0 { '-' } else { '+' };
    format!("{digits}e{sign}{:02}", exponent.abs())
}

#[test]
fn numbers_in_keys_are_written_as_go_writes_them() {
    for (number, text) in [
        (1.5, "1.5"),
        (1.0, "1"),
        (0.1, "0.1"),
        (100_000.0, "100000"),
        (1_000_000.0, "1e+06"),
        (1e20, "1e+20"),
        (1e-4, "0.0001"),
        (1e-5, "1e-05"),
        (123_456_792.0, "1.2345679e+08"),
        (-2.5, "-2.5"),
        (16_777_217.0, "1.6777216e+07"),
        (f64::NEG_INFINITY, "-.inf"),
    ] {
        assert_eq!(go_float(number), text);
    }
}
